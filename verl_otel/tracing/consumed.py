"""What a step trains on: how many weight versions the trajectories are behind, and links to where they were made.

In the trainer process. Both only where verl says of each trajectory which weights generated it, or which step scheduled
it.
"""

from collections import Counter
from collections.abc import Iterable, Mapping
from typing import Any

from opentelemetry.sdk.trace.sampling import Sampler

from verl_otel.background import Background
from verl_otel.identity import Identity
from verl_otel.metrics.instruments import Instruments
from verl_otel.metrics.values import to_number
from verl_otel.semconv import attributes as attr
from verl_otel.semconv import metrics as names
from verl_otel.semconv.stages import ROLLOUT_TIMER
from verl_otel.tracing import ids
from verl_otel.tracing.steps import Steps

MAX_LINKS = 16
"""Links of a step to the rollouts of earlier steps, the newest; trajectories of others are counted."""

_LABELS = names.all_ranks(names.STALENESS)


class Consumed:
    """See the module. The methods are cheap and may raise; hooks catch."""

    def __init__(
        self,
        background: Background,
        instruments: Instruments,
        sampler: Sampler | None,
        identity: Identity,
        steps: Steps,
    ) -> None:
        self._background = background
        self._instruments = instruments
        self._sampler = sampler
        self._identity = identity
        self._steps = steps

    def tagged(self, tags: Iterable[Mapping[str, Any]]) -> None:
        """The trajectories of a step, as verl's V1 trainers tag them: `global_steps`, the step that scheduled each, and
        `max_global_steps`, the newest weights that it was generated with."""
        real = [tag for tag in tags if not tag.get("is_padding", False)]
        self.generated_with(tag.get("max_global_steps") for tag in real)
        self._link(Counter(step for tag in real if (step := _integer(tag.get("global_steps"))) is not None))

    def generated_with(self, versions: Iterable[Any]) -> None:
        """The weights that each trajectory of the step was generated with. The trainer has those of its last sync."""
        current = self._steps.policy_version
        if current is not None:
            behind = [current - version for found in versions if (version := _integer(found)) is not None]
            self._background.defer(self._record, behind)

    def _record(self, behind: list[int]) -> None:
        import numpy

        self._instruments.record_all(names.STALENESS, _LABELS, numpy.asarray(behind, dtype=float))

    def _link(self, scheduled: Counter[int]) -> None:
        step = self._steps.last
        if step is None or step.number is None or self._sampler is None:
            return
        earlier = sorted((number for number in scheduled if number < step.number), reverse=True)
        linked = [number for number in earlier if self._steps.has_run(number)][:MAX_LINKS]
        for number in linked:
            context = ids.remote_context(
                self._sampler, self._identity.run_id, self._identity.attempt, number, ROLLOUT_TIMER
            )
            step.span.add_link(context, {attr.STEP_NUMBER: number, attr.COUNT: scheduled[number]})
        omitted = sum(scheduled[number] for number in earlier if number not in linked)
        if omitted:
            step.span.set_attribute(attr.LINKS_OMITTED, omitted)


def _integer(value: Any) -> int | None:
    number = to_number(value)
    return number if isinstance(number, int) else None
