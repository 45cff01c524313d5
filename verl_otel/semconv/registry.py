"""The registry of telemetry names, `registry.yaml`, loaded: the one source of metrics, attributes, spans and events.

The format is described at the top of the data file. An entry with an alternation, `{mean|max|min}`, is one metric for
each alternative.
"""

import functools
import re
from collections.abc import Mapping
from dataclasses import dataclass
from importlib import resources
from typing import Any

import yaml

_ALTERNATION = re.compile(r"\{([^{}]*\|[^{}]*)\}")
_CAPTURE = re.compile(r"<([a-z0-9_.]+)(\*?)>")


@dataclass(frozen=True)
class Key:
    """A key of verl, or a pattern of keys, that feeds a metric.

    `reduction` is how verl has reduced the value over micro-batches, ranks or samples; `versions` are verl's; `set` are
    values of attributes that this key stands for.
    """

    pattern: str
    reduction: str
    versions: str
    set: Mapping[str, str]


@dataclass(frozen=True)
class Metric:
    """One instrument, as the registry describes it. `unit` is UCUM; `boundaries` are those of a histogram."""

    name: str
    brief: str
    instrument: str
    unit: str
    level: str
    module: str
    stage: str
    model_type: str
    attributes: tuple[str, ...] = ()
    boundaries: tuple[float, ...] = ()
    per_rank: bool = False
    keys: tuple[Key, ...] = ()

    def __hash__(self) -> int:
        return hash(self.name)

    @property
    def arguments(self) -> tuple[str, str, str]:
        """What the API's `create_*` methods take: name, unit, description."""
        return self.name, self.unit, self.brief

    def key_of(self, model_type: str) -> str:
        """verl's key for the reduced value of this metric of a model; empty if verl has none."""
        for key in self.keys:
            if key.set.get("model_type", self.model_type) == model_type and not _CAPTURE.search(key.pattern):
                return key.pattern
        return ""


class Registry:
    """Everything that `registry.yaml` lists; alternations are expanded."""

    def __init__(self, content: Mapping[str, Any]) -> None:
        self.attributes: dict[str, Mapping[str, Any]] = {entry["name"]: entry for entry in content["attributes"]}
        self.spans: dict[str, Mapping[str, Any]] = {entry["name"]: entry for entry in content["spans"]}
        self.events: dict[str, Mapping[str, Any]] = {entry["name"]: entry for entry in content["events"]}
        self.usual_names: list[Mapping[str, Any]] = content.get("usual_names", [])
        self.metrics: dict[str, Metric] = {}
        for entry in content["metrics"]:
            for expanded in _expand(entry):
                metric = _metric(expanded, content["boundaries"])
                self.metrics[metric.name] = metric
        self._exact: dict[str, list[tuple[Metric, Key]]] = {}
        self._patterns: list[tuple[re.Pattern[str], dict[str, str], Metric, Key]] = []
        for metric in self.metrics.values():
            for key in metric.keys:
                if _CAPTURE.search(key.pattern):
                    self._patterns.append((*_regex(key.pattern), metric, key))
                else:
                    self._exact.setdefault(key.pattern, []).append((metric, key))

    def match(self, key: str) -> list[tuple[Metric, dict[str, str]]]:
        """The metrics that verl's key `key` feeds, each with the attributes that the key says; empty if unknown.

        An entry for exactly this key wins over patterns.
        """
        exact = self._exact.get(key)
        if exact is not None:
            return [(metric, _labels(metric, found)) for metric, found in exact]
        matches = []
        for regex, groups, metric, found in self._patterns:
            match = regex.fullmatch(key)
            if match is not None:
                captured = {name: match[group] for group, name in groups.items()}
                matches.append((metric, {**_labels(metric, found), **captured}))
        return matches


@functools.cache
def load() -> Registry:
    """The registry of this package."""
    text = (resources.files("verl_otel.semconv") / "registry.yaml").read_text()
    return Registry(yaml.load(text, Loader=getattr(yaml, "CSafeLoader", yaml.SafeLoader)))


def _labels(metric: Metric, key: Key) -> dict[str, str]:
    return {"stage": metric.stage, "model_type": metric.model_type, **key.set}


def _metric(entry: Mapping[str, Any], boundaries: Mapping[str, list[float]]) -> Metric:
    fields = {**entry, "attributes": tuple(entry.get("attributes", ()))}
    if "boundaries" in fields:
        fields["boundaries"] = tuple(float(bound) for bound in boundaries[fields["boundaries"]])
    fields["keys"] = tuple(
        Key(key["key"], key["reduction"], key["versions"], key.get("set", {})) for key in entry.get("keys", ())
    )
    return Metric(**fields)


def _expand(entry: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    sizes = {len(found.split("|")) for found in _ALTERNATION.findall(str(entry))}
    if not sizes:
        return [entry]
    (size,) = sizes
    return [_chosen(entry, index) for index in range(size)]


def _chosen(node: Any, index: int) -> Any:
    if isinstance(node, str):
        return _ALTERNATION.sub(lambda match: match[1].split("|")[index], node)
    if isinstance(node, Mapping):
        return {key: _chosen(value, index) for key, value in node.items()}
    return [_chosen(value, index) for value in node] if isinstance(node, list) else node


def _regex(pattern: str) -> tuple[re.Pattern[str], dict[str, str]]:
    groups: dict[str, str] = {}
    parts, end = [], 0
    for number, match in enumerate(_CAPTURE.finditer(pattern)):
        group = f"g{number}"
        groups[group] = match[1]
        parts += [re.escape(pattern[end : match.start()]), f"(?P<{group}>{'.+' if match[2] else '[^/@]+'})"]
        end = match.end()
    return re.compile("".join([*parts, re.escape(pattern[end:])]), re.DOTALL), groups
