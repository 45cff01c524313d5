"""verl's metric keys -> OpenTelemetry instruments.

The names that dashboards hang on are listed; every other key gets a name derived from it, so that no key is lost,
raises or collides. All are gauges: verl prints the value of a step, already reduced over the ranks.
Source: `verl/trainer/ppo/metric_utils.py` and the call sites of `Tracking.log`, verl 0.6.1 to 0.9.1.
"""

import hashlib
import re
from dataclasses import dataclass, field

from verl_otel.semconv import attributes as attr
from verl_otel.semconv.stages import is_duration, stage_of

# Instruments recorded by verl-otel itself: name, unit, description.
STAGE_DURATION = ("verl.stage.duration", "s", "Duration of a stage on the trainer: the interval of verl's timer")
WORKER_DURATION = ("verl.worker.duration", "s", "Duration of a call on one rank of a worker group")
STAGE_ACTIVE = ("verl.stage.active", "s", "Unix time since which a stage is running; no point while it is not")
STEP_LAST_TIMESTAMP = ("verl.step.last_timestamp", "s", "Unix time of the last Tracking.log call")
PROCESS_START_TIME = ("verl.process.start_time", "s", "Unix time at which a process joined the run")
NON_FINITE = ("verl.metric.non_finite", "{value}", "NaN and infinite values that verl logged, by verl's key")
SKIPPED = ("verl.metric.skipped", "{value}", "Values that verl logged and that are not numbers, by kind")
FAILURES = ("verl.otel.failures", "{failure}", "Failures of verl-otel that were stopped at its border, by site")
DROPPED = ("verl.otel.dropped", "{item}", "Telemetry that was left out, by signal and reason")

DURATION_BUCKETS = (
    *(0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5),
    *(1.0, 2.5, 5.0, 10.0, 25.0, 50.0, 100.0, 250.0, 500.0, 1000.0, 3600.0, 14400.0),
)
"""Histogram boundaries in seconds, from a millisecond to four hours."""


@dataclass(frozen=True)
class Metric:
    """One instrument for one key of verl, with the attributes that every point of it carries."""

    name: str
    unit: str
    description: str
    attributes: dict[str, str] = field(hash=False)


@dataclass(frozen=True)
class _Known:
    name: str
    unit: str
    description: str
    stage: str
    model_type: str = "none"
    extra: tuple[tuple[str, str], ...] = ()


def _kl(kind: str, stage: str) -> _Known:
    description = (
        "KL divergence, by verl.kl.type: `penalty` (policy against reference, in the reward), `loss` (the same, as a "
        "loss), `update` (before against after the update), `rollout` (trainer against rollout engine)"
    )
    return _Known("verl.kl.divergence", "", description, stage, "actor", ((attr.KL_TYPE, kind),))


_KNOWN = {
    "training/global_step": _Known("verl.training.step", "", "Training step, as verl counts it", "step"),
    "training/epoch": _Known("verl.training.epoch", "", "Epoch of the training data", "step"),
    "critic/score/mean": _Known("verl.reward.mean", "", "Mean raw score of the step's sequences", "reward", "reward"),
    "actor/reward_kl_penalty": _kl("penalty", "advantage"),
    "actor/kl_loss": _kl("loss", "update"),
    "actor/ppo_kl": _kl("update", "update"),
    "rollout_corr/kl": _kl("rollout", "rollout"),
    "actor/grad_norm": _Known("verl.grad_norm", "", "Gradient norm before clipping", "update", "actor"),
    "critic/grad_norm": _Known("verl.grad_norm", "", "Gradient norm before clipping", "update", "critic"),
    "actor/lr": _Known("verl.learning_rate", "", "Learning rate", "update", "actor"),
    "critic/lr": _Known("verl.learning_rate", "", "Learning rate", "update", "critic"),
    "perf/throughput": _Known(
        "verl.throughput", "{token}/s", "Prompt and response tokens per second and GPU over the whole step", "step"
    ),
    "perf/total_num_tokens": _Known("verl.step.tokens", "{token}", "Prompt and response tokens of the step", "step"),
    "perf/time_per_step": _Known("verl.step.time", "s", "Duration of the step", "step"),
}

# Prefix of a key -> (stage, model_type); the first that fits. What verl calls critic/{score,rewards,advantages,returns}
# exists without a critic: statistics of the rewards.
_BY_PREFIX = (
    (("critic/score/", "critic/rewards/"), ("reward", "reward")),
    (("critic/advantages/", "critic/returns/"), ("advantage", "none")),
    (("critic/values/", "critic/vf_explained_var"), ("values", "critic")),
    (("actor/entropy",), ("log_prob", "actor")),
    (("actor/", "perf/mfu/actor"), ("update", "actor")),
    (("critic/", "perf/mfu/critic"), ("update", "critic")),
    (("val-core/", "val-aux/", "val/", "validation/"), ("validation", "rollout")),
    (
        ("response", "prompt_length", "num_turns", "tool_call", "rollout", "agent_loop/", "global_seqlen/"),
        ("rollout", "rollout"),
    ),
    (("training/rollout_", "training/num_turns", "training/off_policy", "fully_async/"), ("rollout", "rollout")),
    (("checkpoint_engine/",), ("weight_sync", "rollout")),
    (("train/",), ("update", "actor")),
    (("perf/", "training/"), ("step", "none")),
)

_TIMING, _PER_TOKEN = "timing_s/", "timing_per_token_ms/"
_PLAIN_KEY = re.compile(r"[a-z0-9_]+(/[a-z0-9_]+)*\Z")
_MAX_NAME = 200


_OURS = (STAGE_DURATION, WORKER_DURATION, STAGE_ACTIVE, STEP_LAST_TIMESTAMP, PROCESS_START_TIME)
_TAKEN = {name for name, _, _ in (*_OURS, NON_FINITE, SKIPPED, DROPPED, FAILURES)} | {
    known.name for known in _KNOWN.values()
}
_TAKEN |= {"verl.timing", "verl.timing.per_token"}


def derived_name(key: str) -> str:
    """A legal instrument name for any key: deterministic, and different for different keys.

    A key of lower-case letters, digits, `_` and `/` keeps its words (`actor/pg_loss` -> `verl.actor.pg_loss`); where
    more has to be changed, eight hex digits of the key's hash keep the name apart from others.
    """
    name = "verl." + re.sub(r"[^a-z0-9_.]+", "_", key.lower().replace("/", ".")).strip("._")
    unchanged = _PLAIN_KEY.match(key) and name == "verl." + key.replace("/", ".") and len(name) <= _MAX_NAME
    if unchanged and name not in _TAKEN:
        return name
    return f"{name[:_MAX_NAME].rstrip('._')}_{key_digest(key)}"


def key_digest(key: str) -> str:
    """Eight hex digits that keep names apart which are made of different keys."""
    return hashlib.sha256(key.encode(errors="replace")).hexdigest()[:8]


def metric_of(key: str) -> Metric:
    """The instrument and the attributes for verl's key `key`. Never fails, whatever the key."""
    known = _KNOWN.get(key)
    if known is not None:
        extra = dict(known.extra)
        return _metric(known.name, known.unit, known.description, known.stage, known.model_type, key, extra)
    if key.startswith(_TIMING) and is_duration(key[len(_TIMING) :]):
        timer = key[len(_TIMING) :]
        stage = stage_of(timer)
        description = "Seconds that verl measured for a timer in the step"
        return _metric("verl.timing", "s", description, stage.stage, stage.model_type, key, {attr.TIMER: timer})
    if key.startswith(_PER_TOKEN):
        timer = key[len(_PER_TOKEN) :]
        stage = stage_of(timer)
        description = "Milliseconds per token that verl measured for a timer in the step"
        extra = {attr.TIMER: timer}
        return _metric("verl.timing.per_token", "ms", description, stage.stage, stage.model_type, key, extra)
    stage_name, model_type = next((where for keys, where in _BY_PREFIX if key.startswith(keys)), ("other", "none"))
    return _metric(derived_name(key), "", f"verl's {key[:120]}", stage_name, model_type, key, {})


def _metric(
    name: str, unit: str, description: str, stage: str, model_type: str, key: str, extra: dict[str, str]
) -> Metric:
    attributes = {attr.RANK: attr.ALL_RANKS, attr.STAGE: stage, attr.MODEL_TYPE: model_type, attr.VERL_KEY: key}
    return Metric(name, unit, description, {**attributes, **extra})
