"""Texts on spans (`tracing/content.py`): only if asked for, cut, without secrets."""

import json

import pytest
from agent_runs import dropped, make, output, request, run_of, tool, trajectory
from hypothesis import example, given
from hypothesis import strategies as st
from opentelemetry.trace import StatusCode

from verl_otel import border
from verl_otel.config import MESSAGE_CONTENT, Settings
from verl_otel.tracing import content, keeping


def decode(tokens):
    """Token 1 is `a1 `, and so on."""
    return "".join(f"a{token} " for token in tokens)


@pytest.fixture
def asked_for(monkeypatch):
    monkeypatch.setenv(MESSAGE_CONTENT, "true")


def texts(span):
    """Role, text and finish reason of the messages on a span."""
    found = []
    for name in ("gen_ai.input.messages", "gen_ai.output.messages"):
        for message in json.loads(span.attributes[name]):
            (part,) = message["parts"]
            assert part["type"] == "text"
            found.append((message["role"], part["content"], message.get("finish_reason")))
    return found


def one_of_each(t):
    with trajectory(t, decode=decode):
        with request(t, output(2), prompt=(1, 2)):
            pass
        with tool(t, arguments='{"query": "weather"}', answer="sunny"):
            pass


CONTENT = {"gen_ai.input.messages", "gen_ai.output.messages", "gen_ai.tool.call.arguments", "gen_ai.tool.call.result"}


@pytest.mark.parametrize("value", ["", "false", "no_content", "event_only", "yes please"])
def test_by_default_there_is_no_text_anywhere(memory, monkeypatch, value):
    monkeypatch.setenv(MESSAGE_CONTENT, value)
    one_of_each(make(memory))
    assert not CONTENT & {name for span in memory.spans for name in span.attributes}
    assert "weather" not in "".join(span.to_json() for span in memory.spans)


@pytest.mark.parametrize("value", ["true", " TRUE ", "span_only", "SPAN_AND_EVENT"])
def test_with_opentelemetrys_variable_texts_are_on_the_spans(memory, monkeypatch, value):
    monkeypatch.setenv(MESSAGE_CONTENT, value)
    one_of_each(make(memory))
    assert texts(memory.span("verl.generate")) == [("user", "a1 a2 ", None), ("assistant", "a7 a7 ", "completed")]
    said = memory.span("verl.tool").attributes
    assert (said["gen_ai.tool.call.arguments"], said["gen_ai.tool.call.result"]) == ('{"query": "weather"}', "sunny")
    assert Settings.from_environ().effective()[MESSAGE_CONTENT] == value


def test_the_span_ends_when_the_request_ends_though_its_text_is_decoded_later(memory, asked_for):
    t = make(memory)
    with trajectory(t, decode=decode):
        with request(t):
            pass
        with tool(t):
            pass
    assert memory.span("verl.generate").end_time <= memory.span("verl.tool").start_time


def test_what_is_held_has_its_text_if_it_is_kept_and_is_not_decoded_otherwise(memory, asked_for, clock):
    t = make(memory, per_step=1)
    decoded = []

    def noting(tokens):
        decoded.append(list(tokens))
        return decode(tokens)

    run_of(t, clock, 5, 0, 9)
    for sample, error in enumerate((None, RuntimeError())):
        try:
            with trajectory(t, sample=sample, decode=noting), request(t, prompt=(sample, sample)):
                if error is not None:
                    raise error
        except RuntimeError:
            pass
    with pytest.raises(RuntimeError), trajectory(t, sample=3, decode=noting):
        with request(t, prompt=(3, 3)):
            pass
        raise RuntimeError
    memory.settle()
    shown = [texts(span)[0] for span in memory.spans if "gen_ai.input.messages" in span.attributes]
    assert shown == [("user", "a3 a3 ", None)]
    assert [tokens for tokens in decoded if tokens[:1] != [7]] == [[3, 3]]


def test_texts_that_are_held_are_bounded_and_counted(memory, asked_for, clock, monkeypatch):
    monkeypatch.setattr(keeping, "MAX_HELD", 2 * content.WEIGHT + 9)
    t = make(memory, per_step=1)
    run_of(t, clock, 5, 0, 9)
    with pytest.raises(RuntimeError), trajectory(t, sample=1, decode=decode):
        for _ in range(2):
            with request(t):
                pass
            with tool(t):
                pass
        raise RuntimeError
    memory.settle()
    assert [span.name for span in memory.spans if CONTENT & set(span.attributes)] == ["verl.generate", "verl.tool"]
    assert dropped(memory) == {("content_cap",): 2}
    assert t._keeping._weight == 0


def test_a_tokenizer_that_fails_costs_the_text_and_nothing_else(memory, asked_for):
    def broken(tokens):
        raise ValueError("no such token")

    t = make(memory)
    with trajectory(t, decode=broken), request(t):
        pass
    span = memory.span("verl.generate")
    assert span.status.status_code is StatusCode.UNSET
    assert span.attributes["gen_ai.usage.input_tokens"] == 4
    assert not CONTENT & set(span.attributes)
    assert border.failures() == {"recording in the background": 1}


def test_of_a_long_text_the_beginning_and_the_end_are_kept(memory, asked_for):
    t = make(memory)
    with trajectory(t, decode=decode), request(t, prompt=range(100_000)):
        pass
    attribute = memory.span("verl.generate").attributes["gen_ai.input.messages"]
    ((_, text, _), _) = texts(memory.span("verl.generate"))
    assert len(attribute) <= 4096, "the SDK would cut more, and leave no JSON"
    assert text.startswith("a0 a1 ") and text.endswith("a99998 a99999 ") and " [...] " in text
    assert len(text) > 3000


@given(st.text(max_size=6000))
@example('"\n' * 3000)
@example("\x00" * 3000)
def test_whatever_the_text_it_is_json_that_fits(text):
    said = content.of_request([1], output(), lambda _: text)()
    assert len(said) == 2
    for value in said.values():
        assert len(value) <= 4096
        json.loads(value)


def test_only_tokens_that_can_be_shown_are_kept():
    kept = content.Tokens(range(10**6), decode)
    assert len(kept._first) + len(kept._last) <= content.MAX_CHARACTERS


@pytest.mark.parametrize(
    ("text", "wanted"),
    [
        ("git clone https://me:hunter22@git.example/x", "git clone https://[redacted]@git.example/x"),
        ("Authorization: Bearer abc.def.ghi", "Authorization: Bearer [redacted]"),
        ("use Bearer abcdef123456 now", "use Bearer [redacted] now"),
        ('{"api_key": "0123456789"}', '{"api_key": "[redacted]"}'),
        ("password=hunter22 and so on", "password=[redacted] and so on"),
        ("export HF_TOKEN=hf_abcdefghijklmnopqrstuv", "export HF_TOKEN=[redacted]"),
        ("hf_abcdefghijklmnopqrstuv", "[redacted]"),
        ("my key is sk-proj-abcdefghijklmnop1234", "my key is [redacted]"),
        ("ghp_abcdefghijklmnopqrstuvwxyz0123456789", "[redacted]"),
        ("AKIAIOSFODNN7EXAMPLE", "[redacted]"),
        ("-----BEGIN RSA PRIVATE KEY-----\nMIIE\n-----END RSA PRIVATE KEY-----.", "[redacted]."),
        ("The token is the smallest unit. 3 + 4 = 7", "The token is the smallest unit. 3 + 4 = 7"),
        ("What is the secret of a good password?", "What is the secret of a good password?"),
    ],
)
def test_what_looks_like_a_secret_is_left_out(text, wanted):
    assert content.clean(text) == wanted


def test_a_secret_at_the_cut_is_left_out_too():
    secret = "sk-" + "a1b2" * 20
    for before in range(content.MAX_CHARACTERS // 2 - 120, content.MAX_CHARACTERS // 2 + 20, 7):
        text = "x " * (before // 2) + secret + " y" * 20_000
        assert "a1b2" not in content.clean(text)
