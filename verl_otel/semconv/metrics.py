"""verl's metric keys -> the registry's metrics, and names for what the registry does not know.

Every key becomes a series: a name that is legal everywhere, the three attributes of the contract, and verl's own key in
`verl.key`. verl prints the value of a step, already reduced over the ranks: `rank="all"`.
"""

import hashlib
import re
from dataclasses import dataclass

from verl_otel.semconv import attributes as attr
from verl_otel.semconv import registry
from verl_otel.semconv.registry import Metric
from verl_otel.semconv.stages import stage_of

_metrics = registry.load().metrics

# What verl-otel measures itself.
STAGE_DURATION = _metrics["verl.stage.duration"]
WORKER_DURATION = _metrics["verl.worker.duration"]
STAGE_ACTIVE = _metrics["verl.stage.active"]
STEP_LAST_TIMESTAMP = _metrics["verl.step.last_timestamp"]
RUN_END_TIME = _metrics["verl.run.end_time"]
PROCESS_START_TIME = _metrics["verl.process.start_time"]
NON_FINITE = _metrics["verl.metric.non_finite"]
SKIPPED = _metrics["verl.metric.skipped"]
FAILURES = _metrics["verl.otel.failures"]
DROPPED = _metrics["verl.otel.dropped"]
EXPORTED = _metrics["verl.otel.exported"]
CONTROL_REQUESTS = _metrics["verl.control.requests"]
DOCTOR_TIMESTAMP = _metrics["verl.doctor.timestamp"]

LOSS = _metrics["verl.loss"]
GRAD_NORM = _metrics["verl.grad_norm"]
LEARNING_RATE = _metrics["verl.learning_rate"]
MEMORY_ALLOCATED = _metrics["verl.worker.memory.allocated"]
MEMORY_RESERVED = _metrics["verl.worker.memory.reserved"]
MEMORY_USED = _metrics["verl.worker.memory.used"]
MEMORY_TOTAL = _metrics["verl.worker.memory.total"]
STRAGGLER = _metrics["verl.worker.straggler"]

STAGE_SHARE = _metrics["verl.step.stage_share"]
UNACCOUNTED = _metrics["verl.step.unaccounted"]
STEP_RATE = _metrics["verl.step.rate"]
ROLLOUT_THROUGHPUT = _metrics["verl.rollout.throughput"]
ROLLOUT_TOKENS = _metrics["verl.rollout.tokens"]
GENERATED_TOKENS = _metrics["verl.rollout.generated_tokens"]

TRAINER_IDLE = _metrics["verl.trainer.idle_ratio"]
ROLLOUTER_IDLE = _metrics["verl.rollouter.idle_ratio"]
STALENESS = _metrics["verl.rollout.staleness"]

REWARD_SCORE = _metrics["verl.reward.score"]
REWARD_VALUE = _metrics["verl.reward.value"]
ADVANTAGE_VALUE = _metrics["verl.advantage.value"]
RETURN_VALUE = _metrics["verl.return.value"]
RESPONSE_TOKENS = _metrics["verl.response.tokens"]
PROMPT_TOKENS = _metrics["verl.prompt.tokens"]
TURNS = _metrics["verl.turns.count"]
GENERATE_DURATION = _metrics["verl.generate.duration"]
GENERATE_THROUGHPUT = _metrics["verl.generate.throughput"]
GROUP_COUNT = _metrics["verl.group.count"]
GROUP_MEAN = _metrics["verl.group.reward.mean"]
GROUP_STD = _metrics["verl.group.reward.std"]
ZERO_VARIANCE = _metrics["verl.group.zero_variance"]
ALL_RIGHT = _metrics["verl.group.all_right"]
ALL_WRONG = _metrics["verl.group.all_wrong"]

SERVER_DURATION = _metrics["gen_ai.server.request.duration"]
SERVER_TOKEN_DURATION = _metrics["verl.server.token.duration"]
SERVER_REQUESTS = _metrics["verl.server.requests"]
SERVER_TOKENS = _metrics["verl.server.tokens"]
SERVER_CACHED_TOKENS = _metrics["verl.server.cached_tokens"]
SERVER_PREEMPTIONS = _metrics["verl.server.preemptions"]
SERVER_ACTIVE = _metrics["verl.server.active_requests"]
SERVER_POLICY_VERSION = _metrics["verl.server.policy_version"]
TRAJECTORY_FAILURES = _metrics["verl.trajectory.failures"]
TOOL_DURATION = _metrics["verl.tool.duration"]
TOOL_ERRORS = _metrics["verl.tool.errors"]
SCORE_DURATION = _metrics["verl.compute_score.duration"]
SCORE_ERRORS = _metrics["verl.compute_score.errors"]
SANDBOX_CASES = _metrics["verl.sandbox.cases"]

USER_PREFIX = "verl.user."
"""Of the metrics that users declare or log themselves."""

_BY_TIMER = {"verl.timing", "verl.timing.per_token"}

# Prefix of a key that the registry does not know -> (module, stage, model_type); the first that fits.
_BY_PREFIX = (
    (("critic/score", "critic/rewards", "reward"), ("reward", "reward", "reward")),
    (("critic/advantages", "critic/returns"), ("advantage", "advantage", "none")),
    (("actor/", "perf/mfu/actor", "train/"), ("actor", "update", "actor")),
    (("critic/", "perf/mfu/critic"), ("critic", "update", "critic")),
    (("val-core/", "val-aux/", "val/", "validation/"), ("validation", "validation", "rollout")),
    (
        ("response", "prompt_length", "num_turns", "tool_call", "rollout", "agent_loop/", "global_seqlen/"),
        ("rollout", "rollout", "rollout"),
    ),
    (("training/rollout_", "training/off_policy", "fully_async/"), ("rollout", "rollout", "rollout")),
    (("checkpoint_engine/",), ("weight_sync", "weight_sync", "rollout")),
    (("perf/", "training/", "timing"), ("trainer", "step", "none")),
)

_PLAIN_KEY = re.compile(r"[a-z0-9_]+(/[a-z0-9_]+)*\Z")
_MAX_NAME = 200


def all_ranks(metric: Metric) -> dict[str, str]:
    """The attributes of a point of a metric for all ranks together, with the registry's stage and model type."""
    return {attr.RANK: attr.ALL_RANKS, attr.STAGE: metric.stage, attr.MODEL_TYPE: metric.model_type}


@dataclass(frozen=True)
class Series:
    """A metric and the attributes that every point of it carries for one key."""

    metric: Metric
    attributes: dict[str, str]
    known: bool = True


def series_of(key: str) -> list[Series]:
    """What verl's key `key` feeds: one gauge, and a counter where the value is an amount. Never fails."""
    found = []
    for metric, labels in registry.load().match(key):
        if metric.name in _BY_TIMER:
            stage = stage_of(labels[attr.TIMER])
            labels = {**labels, attr.STAGE: stage.stage, attr.MODEL_TYPE: stage.model_type}
        found.append(Series(metric, {attr.RANK: attr.ALL_RANKS, **labels, attr.VERL_KEY: key}))
    return found or [_unknown(key)]


def _unknown(key: str) -> Series:
    fits = (where for prefixes, where in _BY_PREFIX if key.startswith(prefixes))
    module, stage, model_type = next(fits, ("trainer", "other", "none"))
    metric = Metric(
        name=derived_name(key),
        brief=f"verl's {key[:120]}",
        instrument="gauge",
        unit="",
        level="detailed",
        module=module,
        stage=stage,
        model_type=model_type,
    )
    labels = {attr.RANK: attr.ALL_RANKS, attr.STAGE: stage, attr.MODEL_TYPE: model_type, attr.VERL_KEY: key}
    return Series(metric, labels, known=False)


def user_metric(name: str, instrument: str = "gauge", unit: str = "", brief: str = "") -> Metric:
    """The metric of a user's own `name`, `module/name`."""
    module = name.partition("/")[0]
    return Metric(
        name=(USER_PREFIX + re.sub(r"[^a-z0-9_.]+", "_", name.lower().replace("/", ".")))[:_MAX_NAME],
        brief=brief or f"The user's {name}",
        instrument=instrument,
        unit=unit,
        level="basic",
        module=module,
        stage="other",
        model_type="none",
        boundaries=_metrics["verl.reward.score"].boundaries if instrument == "histogram" else (),
    )


def derived_name(key: str) -> str:
    """A legal instrument name for any key: deterministic, and different for different keys.

    A key of lower-case letters, digits, `_` and `/` keeps its words (`actor/new` -> `verl.actor.new`); where more has
    to be changed, or the name would look like one of the registry, eight hex digits of the key's hash keep it apart.
    """
    words = re.sub(r"[^a-z0-9_.]+", "_", key.lower().replace("/", ".")).strip("._")
    name = f"verl.{words or 'key'}"
    unchanged = _PLAIN_KEY.match(key) and name == "verl." + key.replace("/", ".") and len(name) <= _MAX_NAME
    if unchanged and _flat(name) not in _taken and not name.startswith(USER_PREFIX):
        return name
    return f"{name[:_MAX_NAME].rstrip('._')}_{key_digest(key)}"


def key_digest(key: str) -> str:
    """Eight hex digits that keep names apart which are made of different keys."""
    return hashlib.sha256(key.encode(errors="replace")).hexdigest()[:8]


def _flat(name: str) -> str:
    """As Prometheus would show it, but for its suffixes."""
    return re.sub(r"[^a-z0-9]+", "_", name)


_taken = {_flat(name) for name in _metrics}
