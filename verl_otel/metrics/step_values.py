"""What verl-otel and its users have measured for a step, until the step's event is emitted.

Keys of verl-otel's own begin with `verl.`; those of users are `module/name`. A value belongs to the step in which it
was made, also if it arrives later, from another process.
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

MAX_STEPS = 64
"""Steps for which values may wait; those of the oldest are given up."""

MAX_SUMMARIES = 10_000
"""Values of users' own that may wait; the oldest are given up."""

EPOCH = "epoch"


class Answers(Protocol):
    """What other processes were asked for."""

    def ready(self) -> bool:
        """Whether all have answered. Does not block."""
        ...

    def get(self) -> list[Any]:
        """The answers that have come since the last time. Does not block."""
        ...

    def dead(self) -> bool:
        """Whether a process has died before it answered. Does not block."""
        ...


@dataclass
class Summary:
    """Several values of one metric in one step: what is known of them after they were added up."""

    count: int
    sum: float
    min: float
    max: float

    def add(self, other: "Summary") -> None:
        self.count += other.count
        self.sum += other.sum
        self.min, self.max = min(self.min, other.min), max(self.max, other.max)

    def values(self, key: str) -> dict[str, float]:
        """The mean under the metric's own name; of several values also count, minimum and maximum."""
        if self.count == 1:
            return {key: self.sum}
        return {
            key: self.sum / self.count,
            f"{key}/min": self.min,
            f"{key}/max": self.max,
            f"{key}/count": self.count,
        }


Reported = tuple[str, int | None, str, int, float, float, float]
"""(key, step, update frequency, count, sum, min, max): a `Summary` on its way between processes."""


class StepValues:
    """See the module. Used by the background thread of the trainer only, except for `ask` at the start.

    Args:
        own: gives what users have logged in this process since it was last asked.
    """

    def __init__(self, own: Callable[[], list[Reported]]) -> None:
        self._own = own
        self._values: dict[int | None, dict[str, float]] = {}
        self._summaries: dict[tuple[int | None, str], Summary] = {}
        self._of_epoch: dict[str, Summary] = {}
        self._new_of_epoch: list[Reported] = []
        self._epoch: Any = None
        self._last: int | None = None
        self._waiting: list[Callable[[], bool]] = []
        self._asked: list[Answers] = []
        self._late: list[Answers] = []
        self.ask: Callable[[], Answers | None] = lambda: None
        """Asks the other processes of the run for what users have logged there."""
        self.by_number = True
        """Whether verl logs under the numbers of its steps; if not, values belong to the event that comes next."""

    def add(self, step: int | None, values: Mapping[str, float]) -> None:
        """Keep values for the event of `step`; None: the next one."""
        step = step if self.by_number else None
        self._values.setdefault(step, {}).update(values)
        while len(self._values) > MAX_STEPS:
            del self._values[next(iter(self._values))]

    def peek(self, step: int | None, key: str) -> float | None:
        """A value that was added for `step`, which stays."""
        return self._values.get(step, {}).get(key)

    def absorb(self, reported: Iterable[Reported]) -> None:
        """Keep what users have logged, here or in another process."""
        for one in reported:
            key, step, frequency = one[:3]
            if frequency == EPOCH:
                self._new_of_epoch.append(one)
            else:
                _add(self._summaries, (step if self.by_number else None, key), one)
        del self._new_of_epoch[:-MAX_SUMMARIES]
        while len(self._summaries) > MAX_SUMMARIES:
            del self._summaries[next(iter(self._summaries))]

    def wait_for(self, arrived: Callable[[], bool]) -> None:
        """Let the next event wait until `arrived()`."""
        self._waiting = [*(waiting for waiting in self._waiting if not waiting()), arrived]

    def collect(self) -> None:
        """Ask the other processes, for an event that is about to be emitted."""
        answers = self.ask()
        if answers is not None:
            self._asked.append(answers)

    def complete(self) -> bool:
        """Whether everything that was asked for is there."""
        self._waiting = [arrived for arrived in self._waiting if not arrived()]
        return not self._waiting and all(answers.ready() for answers in self._asked)

    def take(self, step: int | None, epoch: Any) -> dict[int | None, dict[str, float]]:
        """The values for the event of `step`, and those that came too late for the events of earlier steps, by step.

        Values of later steps stay. Values per epoch come when `epoch` is another than before.
        """
        self._receive()
        taken: dict[int | None, dict[str, float]] = {step: {}}

        def due(found: int | None) -> bool:
            return found is None or step is None or found <= step

        new_of_epoch, self._new_of_epoch = self._new_of_epoch, []
        if epoch is not None and epoch != self._epoch:
            # What was made in this step belongs to the new epoch already.
            self._add_of_epoch(one for one in new_of_epoch if step is None or (one[1] or 0) < step)
            new_of_epoch = [one for one in new_of_epoch if step is not None and (one[1] or 0) >= step]
            if self._epoch is not None:
                taken[step].update(self._take_of_epoch())
            self._epoch = epoch
        self._add_of_epoch(new_of_epoch)
        self._last = self._last if step is None else step
        for found in [found for found in self._values if due(found)]:
            taken.setdefault(step if found is None else found, {}).update(self._values.pop(found))
        summaries: dict[tuple[int | None, str], Summary] = {}
        for found, key in [which for which in self._summaries if due(which[0])]:
            summary = self._summaries.pop((found, key))
            where = (step if found is None else found, key)
            if where in summaries:
                summaries[where].add(summary)
            else:
                summaries[where] = summary
        for (found, key), summary in summaries.items():
            taken.setdefault(found, {}).update(summary.values(key))
        return taken

    def take_rest(self) -> dict[int | None, dict[str, float]]:
        """All that is left, by step, at the end of training; values per epoch with the last step."""
        self._receive()
        left = [*self._values, *(step for step, _ in self._summaries), *(one[1] for one in self._new_of_epoch)]
        last = max((step for step in [self._last, *left] if step is not None), default=None)
        taken = self.take(last, None)
        taken[last] = {**self._take_of_epoch(), **taken[last]}
        return taken

    def _receive(self) -> None:
        unanswered = []
        for answers in [*self._late, *self._asked]:
            if not answers.ready():
                unanswered.append(answers)  # a process that is busy: its answer will come
            for reported in answers.get():
                self.absorb(reported)
        self._asked.clear()
        self._late = unanswered[-MAX_STEPS:]
        self.absorb(self._own())

    def _add_of_epoch(self, reported: Iterable[Reported]) -> None:
        for one in reported:
            _add(self._of_epoch, one[0], one)

    def _take_of_epoch(self) -> dict[str, float]:
        of_epoch, self._of_epoch = self._of_epoch, {}
        return {name: value for key, summary in of_epoch.items() for name, value in summary.values(key).items()}


def _add(to: dict[Any, Summary], key: Any, reported: Reported) -> None:
    _, _, _, count, total, low, high = reported
    new, kept = Summary(count, total, low, high), to.get(key)
    if kept is None:
        to[key] = new
    else:
        kept.add(new)
