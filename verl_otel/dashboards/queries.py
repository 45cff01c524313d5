"""PromQL for panels, with names from the registry: a metric or an attribute that is renamed or gone cannot be built.

Every query keeps run and attempt apart (`RUN`), and says what it does with the rest: two attempts, two processes or two
runs on one node are never added up by accident.
"""

from collections.abc import Mapping, Sequence

from opentelemetry.semconv._incubating.attributes.k8s_attributes import K8S_CLUSTER_NAME

from verl_otel.semconv import attributes as attr
from verl_otel.semconv import registry
from verl_otel.semconv.prometheus import prometheus_label, prometheus_name
from verl_otel.semconv.registry import Metric

RUN = (attr.RUN_ID, attr.RUN_ATTEMPT)
CHOSEN = {K8S_CLUSTER_NAME: "cluster", attr.PROJECT_NAME: "project", attr.EXPERIMENT_NAME: "experiment"}
"""Attribute -> the dashboards' variable, besides those of `RUN`. The cluster's name is not ours: it is said in
OTEL_RESOURCE_ATTRIBUTES or by the cluster's Collector; without it, only `All` is offered."""
CHOSEN_RUN = {**CHOSEN, attr.RUN_ID: "run", attr.RUN_ATTEMPT: "attempt"}

PRESENCE = "verl.process.start_time"
"""The metric by which runs and processes are found: a process has it from its first second to its last."""

WINDOW = "$window"
"""Over which rates are taken: a variable, since a step takes from a second to half an hour."""
FRESH = 60
"""Seconds after which a series that is not sent any more is history: six exports. Prometheus itself shows it for five
minutes."""

Matchers = Mapping[str, str]
"""Attribute -> operator and value, such as `{"rank": '="all"'}`."""


def equal(value: str) -> str:
    """A test for `Matchers`: the label has this value."""
    return f'="{value}"'


def other_than(value: str) -> str:
    """A test for `Matchers`: the label has another value, or none."""
    return f'!="{value}"'


def none_of(pattern: str) -> str:
    """A test for `Matchers`: the label does not match this regular expression."""
    return f'!~"{pattern}"'


REDUCED: Matchers = {attr.RANK: equal(attr.ALL_RANKS)}
"""What verl has reduced over the ranks, as it prints it."""
PER_RANK: Matchers = {attr.RANK: '=~"$rank"'}
BY_ROLE: Matchers = {attr.PROCESS_ROLE: '=~"$role"'}


def known(metric: str) -> Metric:
    """The registry's entry. Raises KeyError for a name that it does not have."""
    return registry.load().metrics[metric]


def select(name: str, where: Matchers | None = None, chosen: Mapping[str, str] = CHOSEN_RUN) -> str:
    """A selector for a Prometheus name, of the runs that the variables choose."""
    matchers = [f'{prometheus_label(attribute)}=~"${variable}"' for attribute, variable in chosen.items()]
    matchers += [f"{prometheus_label(attribute)}{test}" for attribute, test in (where or {}).items()]
    return f"{name}{{{','.join(matchers)}}}"


def name_of(metric: str, part: str = "") -> str:
    """The Prometheus name of a metric of the registry.

    Args:
        part: of a histogram: `bucket`, `sum` or `count`.
    """
    entry = known(metric)
    if (entry.instrument == "histogram") != bool(part):
        raise ValueError(f"{metric} is a {entry.instrument}: part={part!r} does not fit")
    name = prometheus_name(metric, entry.unit, entry.instrument)
    return f"{name}_{part}" if part else name


def series(metric: str, where: Matchers | None = None, part: str = "") -> str:
    """A selector for a metric of the registry, or for a part of a histogram."""
    return select(name_of(metric, part), where)


def by(attributes: Sequence[str]) -> str:
    """`by (...)` for attributes, as labels."""
    return f"by ({_labels(attributes)})"


def value(metric: str, where: Matchers | None = None, keep: Sequence[str] = ()) -> str:
    """A gauge as verl has it, one line for each run and attempt and each value of `keep`."""
    return f"max {by((*RUN, *keep))} ({series(metric, where)})"


def last(metric: str, where: Matchers | None = None, keep: Sequence[str] = ()) -> str:
    """The last value within the time range, also of a run that has ended."""
    return f"max {by((*RUN, *keep))} (last_over_time({series(metric, where)}[$__range]))"


def total(metric: str, where: Matchers | None = None, keep: Sequence[str] = ()) -> str:
    """What a counter has counted, in all processes, by the end of the time range.

    Not an increase: a counter whose first value is 1 has none.
    """
    return f"sum {by((*RUN, *keep))} (last_over_time({series(metric, where)}[$__range]))"


def rate(metric: str, where: Matchers | None = None, keep: Sequence[str] = (), part: str = "") -> str:
    """Of a counter, or a part of a histogram: per second, over `$window`, of all processes of a run."""
    return f"sum {by((*RUN, *keep))} (rate({series(metric, where, part)}[{WINDOW}]))"


def mean(metric: str, where: Matchers | None = None, keep: Sequence[str] = ()) -> str:
    """Mean of what a histogram has taken in; nothing while it takes nothing in."""
    return f"{rate(metric, where, keep, 'sum')} / ({rate(metric, where, keep, 'count')} > 0)"


def quantile(share: float, metric: str, where: Matchers | None = None, keep: Sequence[str] = ()) -> str:
    """A quantile of what a histogram has taken in over `$window`."""
    return f"histogram_quantile({share}, {rate(metric, where, (*keep, 'le'), 'bucket')})"


def since(metric: str, where: Matchers, keep: Sequence[str] = ()) -> str:
    """Seconds since the Unix time that a gauge has, of those that are still sent.

    A stage that has ended is not sent any more, but Prometheus may show its last point for minutes, as it does where
    it is not told of the end: those count that are as new as the newest of their process.
    """
    process = (*RUN, "instance")
    newest = f"max {by(process)} (timestamp({series(PRESENCE)}) > time() - {FRESH})"
    found = series(metric, where)
    sent = f"timestamp({found}) >= on ({_labels(process)}) group_left () {newest}"
    return f"time() - max {by((*RUN, *keep))} ({found} and {sent})"


def silent_for() -> str:
    """Seconds since a run has last sent anything; 300, after which Prometheus forgets the time, if it is longer."""
    return f"time() - max {by(RUN)} (timestamp({series(PRESENCE)})) or {last(PRESENCE)} * 0 + 300"


ALERTS = "ALERTS"
"""Prometheus' own series of alerts that are pending or firing."""


def firing(where: Matchers | None = None) -> str:
    """Alerts that fire for the chosen runs. They need not say attempt and cluster."""
    chosen = {attribute: CHOSEN_RUN[attribute] for attribute in (attr.PROJECT_NAME, attr.EXPERIMENT_NAME, attr.RUN_ID)}
    return select(ALERTS, {"alertstate": equal("firing"), **(where or {})}, chosen)


def _labels(attributes: Sequence[str]) -> str:
    return ", ".join(prometheus_label(attribute) for attribute in attributes)
