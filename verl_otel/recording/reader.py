"""OTLP/JSON lines -> spans and events.

Reads what `verl_otel.export.files` and the Collector's `file` exporter write. A line that cannot be read (a torn
tail, a foreign file) is counted and left out; the rest is not lost.
"""

import json
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from verl_otel.semconv import attributes as attr


class NoRecording(Exception):
    """The folder holds no recorded telemetry. The message says what to do."""


@dataclass(frozen=True)
class SpanEvent:
    """Something that happened at one moment of a span. Time is Unix nanoseconds."""

    name: str
    time: int
    attributes: dict[str, Any]


@dataclass(frozen=True)
class Span:
    """One ended span. Times are Unix nanoseconds."""

    trace_id: str
    span_id: str
    parent_id: str
    name: str
    start: int
    end: int
    attributes: dict[str, Any]
    resource: dict[str, Any]
    error: str | None
    links: tuple[str, ...] = ()
    """Trace ids of the links."""
    events: tuple[SpanEvent, ...] = ()

    @property
    def seconds(self) -> float:
        return (self.end - self.start) / 1e9


@dataclass(frozen=True)
class Event:
    """One log record with an event name. Time is Unix nanoseconds."""

    name: str
    time: int
    body: dict[str, Any]
    attributes: dict[str, Any]
    resource: dict[str, Any]
    trace_id: str = ""


@dataclass
class Recording:
    """What one folder holds."""

    folder: Path
    spans: list[Span] = field(default_factory=list)
    events: list[Event] = field(default_factory=list)
    unreadable_lines: int = 0

    def events_named(self, name: str) -> list[Event]:
        """The events of that name, in order of time."""
        return sorted((e for e in self.events if e.name == name), key=lambda e: e.time)

    def step_values(self) -> dict[int, dict[str, Any]]:
        """Step number -> the values of its events, of which there may be several: what came late has one of its own."""
        values: dict[int, dict[str, Any]] = {}
        for event in self.events_named(attr.EVENT_STEP):
            if attr.STEP_NUMBER in event.attributes:
                values.setdefault(event.attributes[attr.STEP_NUMBER], {}).update(event.body)
        return values

    def runs(self) -> list[str]:
        """Run ids, in order of their first record."""
        first: dict[str, int] = {}
        for item, time in [(s, s.start) for s in self.spans] + [(e, e.time) for e in self.events]:
            run = str(item.resource.get(attr.RUN_ID, ""))
            first[run] = min(time, first.get(run, time))
        return sorted(filter(None, first), key=lambda run: first[run])


def newest(root: str | Path) -> Path:
    """The folder of the run in `root` that was recorded last.

    Raises:
        NoRecording: there is none.
    """
    found = (path for signal in ("traces", "logs") for path in Path(root).glob(f"*/*.{signal}*.jsonl"))
    files = {path: path.stat().st_mtime for path in found}
    if not files:
        raise NoRecording(f"no run is recorded in {root}: give the folder of one, such as verl-otel/<run id>")
    return max(files, key=lambda path: files[path]).parent


def load(folder: str | Path) -> Recording:
    """Read every `*.jsonl` under `folder`.

    Raises:
        NoRecording: there is no such folder, or nothing recorded in it.
    """
    root = Path(folder)
    if not root.is_dir():
        raise NoRecording(
            f"{root} is not a folder: give the one that the run has said at its beginning, such as verl-otel/<run id>"
        )
    recording = Recording(root)
    seen: set[tuple[Any, ...]] = set()

    def new(*identity: Any) -> bool:
        """Recorded and spooled, the same is there twice."""
        if identity in seen:
            return False
        seen.add(identity)
        return True

    for path in sorted(root.rglob("*.jsonl")):
        with path.open("rb") as lines:
            for line in lines:
                try:
                    request = json.loads(line)
                    recording.spans.extend(span for span in _spans(request) if new(span.trace_id, span.span_id))
                    recording.events.extend(
                        event
                        for event in _events(request)
                        if new(event.name, event.time, event.resource.get(attr.SERVICE_INSTANCE_ID), str(event.body))
                    )
                except (ValueError, KeyError, TypeError, AttributeError, OverflowError, RecursionError):
                    recording.unreadable_lines += 1
    if not recording.spans and not recording.events:
        raise NoRecording(f"no recorded spans or events under {root}: it needs files such as trainer-*.traces.jsonl")
    return recording


def _spans(request: dict[str, Any]) -> Iterator[Span]:
    for group in request.get("resourceSpans", ()):
        resource = attributes_of(group.get("resource", {}).get("attributes", ()))
        for scope in group.get("scopeSpans", ()):
            for span in scope.get("spans", ()):
                status = span.get("status", {})
                failed = status.get("code") in (2, "STATUS_CODE_ERROR")
                yield Span(
                    trace_id=span["traceId"],
                    span_id=span["spanId"],
                    parent_id=span.get("parentSpanId", ""),
                    name=span.get("name", ""),
                    start=int(span["startTimeUnixNano"]),
                    end=int(span["endTimeUnixNano"]),
                    attributes=attributes_of(span.get("attributes", ())),
                    resource=resource,
                    error=(status.get("message") or "error") if failed else None,
                    links=tuple(link["traceId"] for link in span.get("links", ())),
                    events=tuple(
                        SpanEvent(
                            event.get("name", ""),
                            int(event.get("timeUnixNano") or 0),
                            attributes_of(event.get("attributes", ())),
                        )
                        for event in span.get("events", ())
                    ),
                )


def _events(request: dict[str, Any]) -> Iterator[Event]:
    for group in request.get("resourceLogs", ()):
        resource = attributes_of(group.get("resource", {}).get("attributes", ()))
        for scope in group.get("scopeLogs", ()):
            for record in scope.get("logRecords", ()):
                if record.get("eventName"):
                    body = value_of(record.get("body", {}))
                    yield Event(
                        name=record["eventName"],
                        time=int(record.get("timeUnixNano") or record.get("observedTimeUnixNano") or 0),
                        body=body if isinstance(body, dict) else {"": body},
                        attributes=attributes_of(record.get("attributes", ())),
                        resource=resource,
                        trace_id=record.get("traceId", ""),
                    )


def attributes_of(pairs: Any) -> dict[str, Any]:
    """OTLP/JSON key-value list -> dict."""
    return {pair.get("key", ""): value_of(pair.get("value", {})) for pair in pairs}


def value_of(value: dict[str, Any]) -> Any:
    """OTLP/JSON AnyValue -> Python value; doubles may be `"NaN"`, `"Infinity"`, integers are strings."""
    for kind, content in value.items():
        if kind == "intValue":
            return int(content)
        if kind == "doubleValue":
            return float(content)
        if kind == "kvlistValue":
            return attributes_of(content.get("values", ()))
        if kind == "arrayValue":
            return [value_of(item) for item in content.get("values", ())]
        return content
    return None
