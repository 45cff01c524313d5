"""verl's timer names -> stages. Source: the `marked_timer` sites of verl 0.6.1 to 0.9.1."""

import re
from dataclasses import dataclass


@dataclass(frozen=True)
class Stage:
    """What a timer of verl stands for: a span name and the values of `stage` and `model_type`."""

    span: str
    stage: str
    model_type: str = "none"


STAGES = frozenset(
    (
        *("rollout", "reward", "log_prob", "values", "advantage", "update"),
        *("weight_sync", "checkpoint", "validation", "step", "other"),
    )
)
"""The values of the attribute `stage`."""

STEP_TIMER = "step"
GENERATE_TIMER = "generate_sequences"
TOOL_TIMER = "tool_calls"
SCORE_TIMER = "compute_score"
ROLLOUT_TIMER = "gen"
ROLLOUT_AHEAD_TIMER = "generate_async"
"""one_step_off: generation of the next batch, beside the step; `gen` is the wait for this one."""
VALIDATION_TIMER = "testing"
CHECKPOINT_TIMER = "save_checkpoint"
WEIGHT_SYNC_TIMER = "update_weights"
PAUSE_TIMER = "pause"
"""Not verl's: ours, while a run is paused (`verl_otel.control`)."""
SFT_TRAIN_TIMER, SFT_VALIDATION_TIMER = "train_batch", "infer_batch"
"""SFT has no timers: the calls of the engine that are its stages."""

SETUP = Stage("verl.setup", "other")

_ROLLOUT = Stage("verl.rollout", "rollout", "rollout")
WEIGHT_SYNC = Stage("verl.weight_sync", "weight_sync", "rollout")
_VALIDATION = Stage("verl.validation", "validation", "rollout")

_BY_TIMER = {
    STEP_TIMER: Stage("verl.step", "step"),
    ROLLOUT_TIMER: _ROLLOUT,
    "gen_max": _ROLLOUT,
    ROLLOUT_AHEAD_TIMER: _ROLLOUT,
    "wait_for_enough_samples": _ROLLOUT,
    "switch_wait": _ROLLOUT,
    "reward": Stage("verl.reward", "reward", "reward"),
    "old_log_prob": Stage("verl.log_prob", "log_prob", "actor"),
    "ref": Stage("verl.ref_log_prob", "log_prob", "ref"),
    "values": Stage("verl.values", "values", "critic"),
    "adv": Stage("verl.advantage", "advantage"),
    "update_actor": Stage("verl.update_actor", "update", "actor"),
    "update_critic": Stage("verl.update_critic", "update", "critic"),
    WEIGHT_SYNC_TIMER: WEIGHT_SYNC,
    "sync_rollout_weights": WEIGHT_SYNC,
    "timing_s/param_sync": WEIGHT_SYNC,
    "switch_to_trainer": WEIGHT_SYNC,
    "switch_to_rollout": WEIGHT_SYNC,
    CHECKPOINT_TIMER: Stage("verl.checkpoint", "checkpoint"),
    VALIDATION_TIMER: _VALIDATION,
    "rollouter/validate_time": _VALIDATION,
    SFT_TRAIN_TIMER: Stage("verl.update_actor", "update", "actor"),
    SFT_VALIDATION_TIMER: Stage("verl.validation", "validation", "actor"),
}

# Around, after or beside the stages of a step.
_NOT_NEXT_TO_OTHERS = frozenset(
    {STEP_TIMER, VALIDATION_TIMER, "rollouter/validate_time", "sync_rollout_weights", ROLLOUT_AHEAD_TIMER}
)

# Timers of the agent-loop workers: parts of a trajectory, not stages of a step.
TRAJECTORY_TIMERS = {
    GENERATE_TIMER: Stage("verl.generate", "rollout", "rollout"),
    TOOL_TIMER: Stage("verl.tool", "rollout", "none"),
    SCORE_TIMER: Stage("verl.compute_score", "reward", "reward"),
}

WAIT_TIMERS = frozenset({"wait_for_enough_samples", "switch_wait", PAUSE_TIMER})


def stage_of(timer: str) -> Stage:
    """The stage of verl's timer `timer`; a timer that is not known becomes `verl.<timer>` with `stage="other"`."""
    known = _BY_TIMER.get(timer)
    if known is not None:
        return known
    return Stage("verl." + re.sub(r"[^a-z0-9_.]+", "_", timer.lower().replace("/", ".")).strip("._"), "other")


def in_step(timer: str) -> bool:
    """Whether a timer is a stage that verl times inside its step, next to the others."""
    return timer in _BY_TIMER and timer not in _NOT_NEXT_TO_OTHERS
