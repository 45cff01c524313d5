"""verl runs -> InfluxDB, and what else takes its line protocol by HTTP.

A point for each step event in `verl_step`, with verl's own keys as fields; one for the start and one for the end of a
run in `verl_run`. A point has the time of its event, so that one delivered again takes its own place.
"""

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import requests

from verl_otel.bridges.events import RunEvent, RunIdentity
from verl_otel.bridges.sink import Refused, TryLater
from verl_otel.semconv import attributes as attr

MAX_BODY = 1 << 20
"""Bytes of a request, if no point alone has more."""

TIMEOUT = 30.0
_TAGS = ("verl_run_id", "verl_run_attempt", "verl_project_name", "verl_experiment_name")
_OURS = frozenset({"time", "state", attr.STEP_NUMBER, *_TAGS})
"""Names of which a key of verl gets an underscore: InfluxDB drops a field called time without a word."""

MAX_STRING = 60_000
"""Characters of a string field; InfluxDB takes 64 KB."""


class InfluxSink:
    """The InfluxDB behind a write URL: `http://host:8086/write?db=verl`, or `.../api/v2/write?org=...&bucket=...`.

    Args:
        authorization: the header of that name, such as `Token ...` or `Basic ...`; empty for none.
    """

    name = "InfluxDB"

    def __init__(self, url: str, authorization: str = "") -> None:
        self._url = url
        self._headers = {"Content-Type": "text/plain; charset=utf-8"}
        if authorization:
            self._headers["Authorization"] = authorization

    def handle(self, events: Sequence[RunEvent]) -> int:
        """See `Sink`."""
        ignored = 0
        lines: list[str] = []
        for event in events:
            identity = event.identity()
            line = None if identity is None else _line(identity, event)
            if line is None:
                ignored += 1
            else:
                lines.append(line)
        for body in _bodies(lines):
            self._post(body)
        return ignored

    def _post(self, body: bytes) -> None:
        try:
            response = requests.post(
                self._url, data=body, headers=self._headers, params={"precision": "ns"}, timeout=TIMEOUT
            )
        except requests.RequestException as error:
            raise TryLater(f"InfluxDB cannot be reached: {type(error).__name__}") from error
        if response.status_code < 300:
            return
        # Its address and its rights can be put right while the data waits.
        later = response.status_code in (401, 403, 404, 408, 429) or response.status_code >= 500
        message = f"InfluxDB answered {response.status_code}: {response.text.strip()[:200]}"
        raise (TryLater if later else Refused)(message)


def _line(identity: RunIdentity, event: RunEvent) -> str | None:
    """The event as a line; None if it is not for InfluxDB."""
    tags = (identity.run_id, event.attempt(), identity.project, identity.experiment)
    if event.name == attr.EVENT_STEP and event.step() is not None:
        measurement, fields = "verl_step", [f"{attr.STEP_NUMBER}={event.step()}i", *_numbers(event.numbers())]
    elif event.name == attr.EVENT_RUN_STARTED:
        measurement, fields = "verl_run", ['state="running"', *_strings(event.body)]
    elif event.name == attr.EVENT_RUN_FINISHED:
        state = event.attributes.get(attr.RUN_STATE) or "finished"
        measurement, fields = "verl_run", [f"state={_string(state)}", *_strings(event.body)]
    else:
        return None
    run = ",".join(f"{tag}={_name(str(value))}" for tag, value in zip(_TAGS, tags, strict=True))
    return f"{measurement},{run} {','.join(fields)} {event.time_ns}"


def _numbers(numbers: Mapping[str, float]) -> Iterator[str]:
    """Always floats: a field has one type for ever. InfluxDB takes no NaN: its name is in a field of its own."""
    for key, value in numbers.items():
        if math.isfinite(value):
            yield f"{_field(key)}={value!r}"
        else:
            yield f'{_field(key + ".non_finite")}="{value}"'


def _strings(body: Mapping[str, Any]) -> Iterator[str]:
    return (f"{_field(key)}={_string(value)}" for key, value in body.items())


def _string(value: Any) -> str:
    text = str(value)[:MAX_STRING].replace("\\", "\\\\").replace('"', '\\"')
    return f'"{text}"'


def _field(key: str) -> str:
    return _name(key + "_" if key in _OURS else key)


def _name(text: str) -> str:
    """A tag or a field's name: what ends one is escaped, and what cannot be is a blank."""
    text = " ".join(text.split("\n")).replace("\r", " ").rstrip("\\") or "_"
    for special in ",= ":
        text = text.replace(special, "\\" + special)
    return text


def _bodies(lines: Iterable[str]) -> Iterator[bytes]:
    body = bytearray()
    for line in lines:
        content = line.encode("utf-8", "replace") + b"\n"
        if body and len(body) + len(content) > MAX_BODY:
            yield bytes(body)
            body.clear()
        body += content
    if body:
        yield bytes(body)
