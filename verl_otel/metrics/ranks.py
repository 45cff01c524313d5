"""The ranks' own values, before verl reduces them: what each rank reports, and statistics over a stage's ranks.

A rank keeps the values of its calls (`verl_otel.tracing.workers`). The trainer asks each rank right behind the call
(in the background, as a small call of Ray's), and puts the statistics on the stage's span and into the step's event.
No collective, no device synchronisation.
"""

import math
import statistics
from collections import OrderedDict
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from verl_otel.background import Background
from verl_otel.config import RankDetail
from verl_otel.metrics.instruments import Instruments
from verl_otel.metrics.step_values import Answers, Reported, StepValues
from verl_otel.semconv import attributes as attr
from verl_otel.semconv import metrics as names
from verl_otel.semconv.registry import Metric

WAIT_FOR_RANKS = 2.0
"""Seconds that a stage's span waits for the reports of its ranks."""

MAX_STAGES = 64

DURATION = "duration"
QUANTITIES: dict[str, Metric] = {
    "loss": names.LOSS,
    "grad_norm": names.GRAD_NORM,
    "learning_rate": names.LEARNING_RATE,
    "memory_allocated": names.MEMORY_ALLOCATED,
    "memory_reserved": names.MEMORY_RESERVED,
    "memory_used": names.MEMORY_USED,
    "memory_total": names.MEMORY_TOTAL,
}
"""What a rank reports of a call, besides its duration in seconds, and the metric that shows it."""

OUTLIER = 3.0
"""A value is an outlier from this many (robust) standard deviations off the median."""


@dataclass(frozen=True)
class Report:
    """One rank's values of its calls in a stage. `values`: quantity -> value; a call's duration is in seconds."""

    rank: str
    labels: Mapping[str, str]
    values: Mapping[str, float]
    non_finite: int = 0


@dataclass
class Statistics:
    """Of one quantity over the ranks of a stage. Ranks without a finite value are left out."""

    mean: float
    std: float
    min: float
    max: float
    min_rank: int
    max_rank: int

    @classmethod
    def of(cls, by_rank: Mapping[int, float]) -> "Statistics | None":
        finite = {rank: value for rank, value in by_rank.items() if math.isfinite(value)}
        if not finite:
            return None
        low, high = min(finite, key=lambda rank: finite[rank]), max(finite, key=lambda rank: finite[rank])
        values = list(finite.values())
        return cls(statistics.fmean(values), statistics.pstdev(values), finite[low], finite[high], low, high)


def over_ranks(reports: list[Report]) -> dict[str, dict[int, float]]:
    """quantity -> rank -> value. Several calls of a rank in one stage: durations are added up, of others the last."""
    found: dict[str, dict[int, float]] = {}
    for report in reports:
        for quantity, value in report.values.items():
            by_rank = found.setdefault(quantity, {})
            rank = int(report.rank)
            by_rank[rank] = by_rank.get(rank, 0.0) + value if quantity == DURATION else value
    return found


def straggler(seconds: Mapping[int, float]) -> float | None:
    """Slowest over median duration; None for fewer than two ranks."""
    if len(seconds) < 2:
        return None
    median = statistics.median(seconds.values())
    return max(seconds.values()) / median if median > 0 else None


def outliers(by_rank: Mapping[int, float]) -> set[int]:
    """Ranks whose value is far from the others' (median absolute deviation), or not finite."""
    finite = [value for value in by_rank.values() if math.isfinite(value)]
    bad = {rank for rank, value in by_rank.items() if not math.isfinite(value)}
    if len(finite) < 3:
        return bad
    median = statistics.median(finite)
    distances = [abs(value - median) for value in finite]
    # Where most values are equal the median of the distances is 0, and their mean says how far is far.
    spread = 1.4826 * statistics.median(distances) or 1.2533 * statistics.fmean(distances)
    return bad | {
        rank for rank, value in by_rank.items() if math.isfinite(value) and abs(value - median) > OUTLIER * spread > 0
    }


@dataclass(frozen=True)
class Called:
    """A call of a rank, as the trainer knows it. `since` is Unix time in nanoseconds."""

    rank: str
    method: str
    since: int


@dataclass(frozen=True)
class Unfinished:
    """A call of which the rank has not told that it has ended."""

    call: Called
    dead: bool
    """Whether the rank's process has died."""


class _Actor:
    """A rank that was called for a stage: asked behind the call, and again until it has told of all its calls.

    (Ray may run what an actor is asked before a call whose arguments have still to arrive.)
    """

    def __init__(self, call: Called, ask: Callable[[], Answers]) -> None:
        self._calls = [call]
        self._ask = ask
        self._answers = ask()
        self._dead = False
        self.reports: list[Report] = []
        self.logged: list[Reported] = []

    def called_again(self, call: Called) -> None:
        self._calls.append(call)

    @property
    def unfinished(self) -> list[Unfinished]:
        """The calls of which the rank has not told: those after as many as it has told of."""
        return [Unfinished(call, self._dead) for call in self._calls[len(self.reports) :]]

    def complete(self) -> bool:
        """Whether the rank has told of all its calls, or is dead; asks again if it has not."""
        if len(self.reports) < len(self._calls) and not self._dead and self._answers.ready():
            for calls, logged in self._answers.get():
                self.reports += [Report(*call) for call in calls]
                self.logged += logged
            self._dead = self._answers.dead()
            if len(self.reports) < len(self._calls) and not self._dead:
                self._answers = self._ask()
        return self._dead or len(self.reports) >= len(self._calls)


class Ranks:
    """In the trainer: the ranks that work for each stage. See the module."""

    def __init__(
        self, background: Background, instruments: Instruments, step_values: StepValues, detail: RankDetail
    ) -> None:
        self._background = background
        self._instruments = instruments
        self._step_values = step_values
        self._detail = detail
        self._stages: OrderedDict[int, dict[Any, _Actor]] = OrderedDict()
        self._shown: dict[str, list[tuple[Metric, dict[str, str]]]] = {}

    def called(self, stage: int, actor: Any, call: Called, ask: Callable[[], Answers]) -> None:
        """A rank was called for a stage (the id of its span): ask it behind the call. Cheap."""
        self._background.defer(self._called, stage, actor, call, ask)

    def _called(self, stage: int, actor: Any, call: Called, ask: Callable[[], Answers]) -> None:
        actors = self._stages.setdefault(stage, {})
        while len(self._stages) > MAX_STAGES:
            self._stages.popitem(last=False)
        if actor in actors:
            actors[actor].called_again(call)
        else:
            actors[actor] = _Actor(call, ask)

    def leave(self, stage: int, timer: str, labels: dict[str, str], step: int | None, end: Callable[..., None]) -> None:
        """A stage is over: call `end(attributes, unfinished)` with the statistics over its ranks when they are there,
        and the calls that have not ended. In the background."""
        actors = self._stages.pop(stage, None)
        if actors is None:
            end({}, [])
            return
        done = [False]

        def ready() -> bool:
            return all([actor.complete() for actor in actors.values()])

        def finish() -> None:
            done[0] = True
            attributes: dict[str, Any] = {}
            unfinished = [call for actor in actors.values() for call in actor.unfinished]
            try:
                attributes = self._statistics(list(actors.values()), timer, labels, step)
            finally:
                end(attributes, unfinished)

        self._step_values.wait_for(lambda: done[0])
        self._background.hold(ready, WAIT_FOR_RANKS, finish)

    def _statistics(self, actors: list[_Actor], timer: str, labels: dict[str, str], step: int | None) -> dict[str, Any]:
        reports = [report for actor in actors for report in actor.reports]
        for actor in actors:
            self._step_values.absorb(actor.logged)
        attributes: dict[str, Any] = {}
        if reports:
            attributes[attr.RANKS_PREFIX + "count"] = len({report.rank for report in reports})
        missing = sum(bool(actor.unfinished) for actor in actors)
        if missing:
            attributes[attr.RANKS_PREFIX + "missing"] = missing
        dead = {call.call.rank for actor in actors for call in actor.unfinished if call.dead}
        if dead:
            attributes[attr.RANKS_PREFIX + "dead"] = len(dead)
            known = sorted(int(rank) for rank in dead if rank.isdecimal())
            if known:
                attributes[attr.RANKS_PREFIX + "dead_rank"] = known[0]
        non_finite = sum(report.non_finite for report in reports)
        if non_finite:
            attributes[attr.RANKS_PREFIX + "non_finite"] = non_finite
        found = over_ranks(reports)
        for quantity, by_rank in found.items():
            of_quantity = Statistics.of(by_rank)
            if of_quantity is not None:
                for statistic, value in vars(of_quantity).items():
                    attributes[f"{attr.RANKS_PREFIX}{quantity}.{statistic}"] = value
        slow = straggler(found.get(DURATION, {}))
        if slow is not None:
            attributes[attr.RANKS_PREFIX + "straggler"] = slow
            self._instruments.set(names.STRAGGLER, labels, slow)
        if self._detail.outliers:
            self._show_outliers(timer, reports, found)
        values = {f"verl.ranks/{timer}/{name[len(attr.RANKS_PREFIX) :].replace('.', '/')}": value
                  for name, value in attributes.items()}  # fmt: skip
        self._step_values.add(step, values)
        return attributes

    def _show_outliers(self, timer: str, reports: list[Report], found: dict[str, dict[int, float]]) -> None:
        labels_of = {int(report.rank): report.labels for report in reports}
        for metric, labels in self._shown.pop(timer, ()):
            self._instruments.withdraw(metric, labels)
        shown = self._shown[timer] = []
        for quantity, metric in QUANTITIES.items():
            by_rank = found.get(quantity, {})
            for rank in outliers(by_rank):
                if math.isfinite(by_rank[rank]):
                    labels = series_of_rank(metric, labels_of[rank])
                    self._instruments.set(metric, labels, by_rank[rank])
                    shown.append((metric, labels))


def series_of_rank(metric: Metric, call_labels: Mapping[str, str]) -> dict[str, str]:
    """The labels of a rank's own value of a metric, from those of its call."""
    labels = {key: call_labels[key] for key in (attr.RANK, attr.STAGE, attr.MODEL_TYPE)}
    if metric.keys:
        labels[attr.VERL_KEY] = metric.key_of(call_labels[attr.MODEL_TYPE])
    if attr.WORKER_METHOD in metric.attributes:
        labels[attr.WORKER_METHOD] = call_labels[attr.WORKER_METHOD]
    return labels


ReportOfRank = tuple[list[tuple[str, dict[str, str], dict[str, float], int]], list[Reported]]
"""What a rank answers: its calls in the stage, and what users have logged there."""
