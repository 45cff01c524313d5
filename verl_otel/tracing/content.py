"""Prompts, responses and tool calls on spans: only if the user asks for it, cut to a limit, without what looks like a
secret.

In OpenTelemetry's own way: `OTEL_INSTRUMENTATION_GENAI_CAPTURE_MESSAGE_CONTENT`, and `gen_ai.input.messages`,
`gen_ai.output.messages` as JSON.
"""

import json
import re
from array import array
from collections.abc import Callable, Sequence
from typing import Any

from opentelemetry.semconv._incubating.attributes import gen_ai_attributes as gen_ai

MAX_CHARACTERS = 3600
"""Of a text; of a longer one the beginning and the end are kept."""

MAX_JSON = 4096
"""What an attribute of a span may have: more would be cut, and be no JSON any longer."""

WEIGHT = 30
"""As how many held spans the tokens of a request count: up to 30 KB."""

_GAP = " [...] "

_SECRETS = re.compile(
    r"""
    (?P<before>[a-zA-Z][a-zA-Z0-9+.-]*://)[^/@\s]+(?=@)                   # user and password in a URL
    | (?P<name>(?i:
        (?:api[_-]?key|token|secret|passw(?:or)?d|authorization)["']?\s*[:=]\s*["']?(?:(?:bearer|basic)\s+)? | bearer\s+
      ))[^\s"',;]{6,}
    | \b(?:sk|pk|rk)-[A-Za-z0-9_-]{16,} | \bhf_[A-Za-z0-9]{16,} | \bgh[pousr]_[A-Za-z0-9]{16,}
    | \bxox[abprs]-[A-Za-z0-9-]{10,} | \bAKIA[A-Z0-9]{16}\b | \bAIza[A-Za-z0-9_-]{20,}
    | -----BEGIN[ ][A-Z ]*PRIVATE[ ]KEY-----.*?(?:-----END[ ][A-Z ]*PRIVATE[ ]KEY-----|\Z)
    """,
    re.VERBOSE | re.DOTALL,
)

Decode = Callable[[Sequence[int]], str]


def clean(text: str) -> str:
    """A text without what looks like a secret, cut to `MAX_CHARACTERS`."""
    if len(text) > 4 * MAX_CHARACTERS:  # patterns look only at what may be kept, and a little around it
        text = text[: 2 * MAX_CHARACTERS] + _GAP + text[-2 * MAX_CHARACTERS :]
    text = _SECRETS.sub(lambda match: f"{match['before'] or match['name'] or ''}[redacted]", text)
    return _cut(text, MAX_CHARACTERS)


def _cut(text: str, size: int) -> str:
    half = (size - len(_GAP)) // 2
    return text if len(text) <= size else text[:half] + _GAP + text[-half:]


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
        return clean(text + _GAP + self._decode(self._last.tolist()) if self._cut else text)


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
    cut = {name: _cut(str(value), 2 * MAX_CHARACTERS) for name, value in said.items() if value is not None}
    return lambda: {name: clean(text) for name, text in cut.items()}


def _messages(role: str, text: str, **more: str) -> str:
    size = MAX_CHARACTERS
    while True:
        content = {"role": role, "parts": [{"type": "text", "content": _cut(text, size)}], **more}
        made = json.dumps([content], ensure_ascii=False)
        if len(made) <= MAX_JSON or size < 100:
            return made
        size = size * 3 // 4
