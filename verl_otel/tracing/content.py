"""Prompts, responses and tool calls on spans: only if the user asks for it, cut to a limit, without what looks like a
secret.

In OpenTelemetry's own way: `OTEL_INSTRUMENTATION_GENAI_CAPTURE_MESSAGE_CONTENT`, and `gen_ai.input.messages`,
`gen_ai.output.messages` as JSON.
"""

import json
from array import array
from collections.abc import Callable, Sequence
from typing import Any

from opentelemetry.semconv._incubating.attributes import gen_ai_attributes as gen_ai

from verl_otel.redaction import GAP, redacted, shortened

MAX_CHARACTERS = 3600
"""Of a text; of a longer one the beginning and the end are kept."""

MAX_JSON = 4096
"""What an attribute of a span may have: more would be cut, and be no JSON any longer."""

WEIGHT = 30
"""As how many held spans the tokens of a request count: up to 30 KB."""

Decode = Callable[[Sequence[int]], str]


def clean(text: str) -> str:
    """A text without what looks like a secret, cut to `MAX_CHARACTERS`."""
    return shortened(redacted(text, MAX_CHARACTERS), MAX_CHARACTERS)


class Tokens:
    """Token ids whose text may be wanted later: as many as can be in what is shown of it.

    Args:
        decode: of the tokenizer that made them.
    """

    def __init__(self, tokens: Sequence[int], decode: Decode) -> None:
        half = MAX_CHARACTERS // 2
        self._cut = len(tokens) > 2 * half
        self._first = array("i", tokens[:half] if self._cut else tokens)
        self._last = array("i", tokens[-half:] if self._cut else ())
        self._decode = decode

    def text(self) -> str:
        text = self._decode(self._first.tolist())
        return clean(text + GAP + self._decode(self._last.tolist()) if self._cut else text)


def of_request(prompt: Sequence[int], output: Any, decode: Decode) -> Callable[[], dict[str, str]]:
    """What gives the attributes for what was asked and answered. verl's prompt is one text, with all messages in it.

    Args:
        output: verl's `TokenOutput`.
    """
    asked, tokens = Tokens(prompt, decode), getattr(output, "token_ids", None)
    answered = None if tokens is None else Tokens(tokens, decode)
    reason = getattr(output, "stop_reason", None)
    more = {"finish_reason": str(reason)} if reason else {}

    def attributes() -> dict[str, str]:
        found = {gen_ai.GEN_AI_INPUT_MESSAGES: _messages("user", asked.text())}
        if answered is not None:
            found[gen_ai.GEN_AI_OUTPUT_MESSAGES] = _messages("assistant", answered.text(), **more)
        return found

    return attributes


def of_tool(arguments: Any, result: Any) -> Callable[[], dict[str, str]]:
    """What gives the attributes for what a tool was called with and what it answered."""
    said = {gen_ai.GEN_AI_TOOL_CALL_ARGUMENTS: arguments, gen_ai.GEN_AI_TOOL_CALL_RESULT: result}
    cut = {name: shortened(str(value), 2 * MAX_CHARACTERS) for name, value in said.items() if value is not None}
    return lambda: {name: clean(text) for name, text in cut.items()}


def _messages(role: str, text: str, **more: str) -> str:
    size = MAX_CHARACTERS
    while True:
        content = {"role": role, "parts": [{"type": "text", "content": shortened(text, size)}], **more}
        made = json.dumps([content], ensure_ascii=False)
        if len(made) <= MAX_JSON or size < 100:
            return made
        size = size * 3 // 4
