"""Figures that verl does not print, computed from those of a step that it does. Nothing is computed from a guess."""

import math
from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise

from verl_otel.semconv import attributes as attr
from verl_otel.semconv import metrics as names
from verl_otel.semconv.metrics import Series
from verl_otel.semconv.stages import ROLLOUT_TIMER, STEP_TIMER, in_step, stage_of

_TIMING = "timing_s/"
STEP_TIME = _TIMING + STEP_TIMER


def of_step(values: Mapping[str, float], generated: float | None = None) -> Iterator[tuple[Series, float]]:
    """From the values of one `Tracking.log` call: the rate of steps, each stage's share of the step, and the rest.

    Needs `timing_s/step`; timers that verl starts outside its step (validation, profiling) have no share of it.

    Args:
        generated: response tokens that verl's timer `gen` was spent on; None where that timer is only a wait.
    """
    generation = values.get(_TIMING + ROLLOUT_TIMER)
    if generated is not None and generation is not None and math.isfinite(generation) and generation > 0:
        where = {attr.RANK: attr.ALL_RANKS, attr.STAGE: "rollout", attr.MODEL_TYPE: "rollout"}
        yield Series(names.ROLLOUT_THROUGHPUT, where), generated / generation
    step_time = values.get(STEP_TIME)
    if step_time is None or not math.isfinite(step_time) or step_time <= 0:
        return
    labels = {attr.RANK: attr.ALL_RANKS, attr.STAGE: "step", attr.MODEL_TYPE: "none"}
    yield Series(names.STEP_RATE, labels), 1 / step_time
    unaccounted = step_time
    for key, seconds in values.items():
        timer = key[len(_TIMING) :]
        if not key.startswith(_TIMING) or not in_step(timer) or not math.isfinite(seconds):
            continue
        stage = stage_of(timer)
        where = {
            attr.RANK: attr.ALL_RANKS,
            attr.STAGE: stage.stage,
            attr.MODEL_TYPE: stage.model_type,
            attr.TIMER: timer,
        }
        yield Series(names.STAGE_SHARE, where), seconds / step_time
        unaccounted -= seconds
    yield Series(names.UNACCOUNTED, labels), max(0.0, unaccounted)


def times_a_step(values: Mapping[str, float]) -> bool:
    """Whether one `Tracking.log` call has the time of the step, or of a stage in it."""
    return STEP_TIME in values or any(key.startswith(_TIMING) and in_step(key[len(_TIMING) :]) for key in values)


def idle_ratio(history: Sequence[tuple[float, int]], now: float) -> float | None:
    """The share of the time from the first entry until now in which nothing was in work; None if no time has passed.

    Args:
        history: Unix time of each change, and how much was in work from then on.
        now: Unix time.
    """
    idle = total = 0.0
    for (start, active), (end, _) in pairwise([*history, (now, 0)]):
        total += max(0.0, end - start)
        idle += max(0.0, end - start) if active == 0 else 0.0
    return idle / total if total > 0 else None
