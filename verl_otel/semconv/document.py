"""The registry as a document: `python -m verl_otel.semconv.document > docs/metrics.md`."""

import re
from collections.abc import Iterable, Mapping
from typing import Any

from verl_otel.semconv import registry
from verl_otel.semconv.prometheus import prometheus_name

_MODULES = {
    "trainer": "Trainer: progress and time",
    "actor": "Actor: update of the policy",
    "critic": "Critic: update of the value function",
    "ref": "Reference policy",
    "rollout": "Rollout",
    "server": "Rollout servers",
    "reward": "Reward",
    "advantage": "Advantages and returns",
    "validation": "Validation",
    "weight_sync": "Weight sync",
    "hardware": "Hardware",
    "telemetry": "About the telemetry itself",
}
"""The modules of metrics, in the order of the document."""

_INTRODUCTION = """\
# Metrics, spans, events

Made from [registry.yaml](../verl_otel/semconv/registry.yaml) by `python -m verl_otel.semconv.document`; do not edit.

A point of a value of verl has the attributes `rank`, `stage`, `model_type` and `verl.key`, verl's own name of it, and
those that its description ends with. `rank="all"` is the value that verl has already reduced over the ranks, the one
that it prints. In Prometheus the dots of attributes are underscores, and a histogram `x` is `x_bucket`, `x_sum`,
`x_count`.

Level `basic` is what one looks at first, `detailed` the rest. In keys, `<...>` is the part that becomes the attribute
of that name. Where verl says "not available" by a value, such as -1, that value is shown, and the description says so.
NaN and infinite values are not shown: `verl.metric.non_finite` counts them. What has no key is measured by verl-otel,
or computed from what the description says. A key that is not listed is a gauge under a name derived from it; metrics
of your own are `verl.user.<module>.<name>`.
"""


def document(found: registry.Registry) -> str:
    """The whole document in Markdown."""
    parts = [_INTRODUCTION, _usual_names(found)]
    for module, title in _MODULES.items():
        metrics = [metric for metric in found.metrics.values() if metric.module == module]
        if metrics:
            parts.append(f"## {title}\n\n" + _metrics(metrics))
    parts.append("## Attributes\n\n" + _attributes(found.attributes.values()))
    parts.append("## Spans\n\n" + _described(found.spans.values()))
    parts.append("## Events\n\nLog records with an event name.\n\n" + _described(found.events.values()))
    return "\n".join(parts)


def _usual_names(found: registry.Registry) -> str:
    rows = []
    for usual in found.usual_names:
        metrics = [found.metrics[name] for name in usual["metrics"]]
        rows.append(
            (
                _code([usual["name"]]),
                _code(metric.name for metric in metrics) or "none",
                _code(map(_in_prometheus, metrics)) or "none",
                usual["note"],
            )
        )
    header = ("looked for", "metric", "Prometheus", "note")
    return "## The names that people look for first\n\n" + _table(header, rows)


def _metrics(metrics: Iterable[registry.Metric]) -> str:
    rows = [
        (
            _code([metric.name]),
            _code([_in_prometheus(metric)]),
            metric.instrument,
            _code([metric.unit]) if metric.unit else "",
            metric.level,
            _code(_short(key.pattern for key in metric.keys)),
            metric.brief + (f" ({_code(metric.attributes)})" if metric.attributes else ""),
        )
        for metric in metrics
    ]
    return _table(("metric", "Prometheus", "instrument", "unit", "level", "verl's keys", "description"), rows)


def _short(keys: Iterable[str]) -> list[str]:
    """Keys; those that differ only in the option of `rollout_rs` are one line."""
    option = re.compile(r"rollout_rs_(token|seq_sum|seq_mean|seq_max)_k[123]_")
    return list(dict.fromkeys(option.sub("rollout_rs_<option>_", key) for key in keys))


def _attributes(attributes: Iterable[Mapping[str, Any]]) -> str:
    rows = [
        (_code([a["name"]]), a["type"], ", ".join(a["on"]), a["brief"], _code(map(_example, a["examples"])))
        for a in attributes
    ]
    return _table(("attribute", "type", "on", "description", "examples"), rows)


def _example(value: Any) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)


def _described(entries: Iterable[Mapping[str, Any]]) -> str:
    rows = [(_code([entry["name"]]), entry["brief"], _code(entry["attributes"])) for entry in entries]
    return _table(("name", "description", "attributes"), rows)


def _in_prometheus(metric: registry.Metric) -> str:
    return prometheus_name(metric.name, metric.unit, metric.instrument)


def _code(names: Iterable[str]) -> str:
    return ", ".join(f"`{name}`" for name in names)


def _table(header: tuple[str, ...], rows: Iterable[tuple[str, ...]]) -> str:
    lines = [header, ("---",) * len(header), *rows]
    return "".join("| " + " | ".join(line) + " |\n" for line in lines)


if __name__ == "__main__":
    print(document(registry.load()), end="")
