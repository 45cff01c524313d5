"""Attribute, span and event names. OpenTelemetry's semantic conventions where one exists, `verl.*` for the rest."""

from opentelemetry.semconv._incubating.attributes import (
    gen_ai_attributes,
    host_attributes,
    process_attributes,
    service_attributes,
)
from opentelemetry.semconv.attributes import error_attributes

SERVICE_NAME = "service.name"
SERVICE_NAMESPACE = service_attributes.SERVICE_NAMESPACE
SERVICE_INSTANCE_ID = service_attributes.SERVICE_INSTANCE_ID
HOST_NAME = host_attributes.HOST_NAME
PROCESS_PID = process_attributes.PROCESS_PID

# Resource
RUN_ID = "verl.run.id"
RUN_ATTEMPT = "verl.run.attempt"
PROJECT_NAME = "verl.project.name"
EXPERIMENT_NAME = "verl.experiment.name"
VERL_VERSION = "verl.version"
PROCESS_ROLE = "verl.process.role"
WORKER_GROUP = "verl.worker.group"

# On every metric point and every stage or worker span
RANK = "rank"
STAGE = "stage"
MODEL_TYPE = "model_type"

ALL_RANKS = "all"
"""Value of `rank` where verl has already reduced over the ranks."""

# Spans
STEP_NUMBER = "verl.step.number"
POLICY_VERSION = "verl.policy.version"
TIMER = "verl.timer"
STAGE_WAIT = "verl.stage.wait"
WORKER_METHOD = "verl.worker.method"
MEMORY_RSS = "verl.memory.rss"
MEMORY_ALLOCATED = "verl.memory.allocated"
MEMORY_RESERVED = "verl.memory.reserved"
MEMORY_USED = "verl.memory.used"
MEMORY_TOTAL = "verl.memory.total"
VALUE = "verl.value"
COUNT = "verl.count"
UNFINISHED = "verl.worker.unfinished"
"""On the span of a call whose rank has died, or had not ended it when the stage failed; made by the trainer."""
SAMPLE_INDEX = "verl.sample.index"
ROLLOUT_INDEX = "verl.rollout.index"
VALIDATE = "verl.validate"

# Rollout servers
REPLICA = "verl.replica"
ENGINE = gen_ai_attributes.GEN_AI_PROVIDER_NAME
OPERATION = gen_ai_attributes.GEN_AI_OPERATION_NAME
TOKEN_TYPE = gen_ai_attributes.GEN_AI_TOKEN_TYPE
INPUT_TOKENS = gen_ai_attributes.GEN_AI_USAGE_INPUT_TOKENS
OUTPUT_TOKENS = gen_ai_attributes.GEN_AI_USAGE_OUTPUT_TOKENS
CACHED_TOKENS = "gen_ai.usage.cache_read.input_tokens"
PREEMPTIONS = "verl.preemptions"
STOP_REASON = "verl.stop_reason"
SPAN_SERVER_GENERATE = "verl.server.generate"
# Spans: asynchronous trainers, weight sync, checkpoints
POLICY_VERSION_OLDEST = "verl.policy.version.oldest"
LINKS_OMITTED = "verl.rollout.links_omitted"
WEIGHT_SYNC_CALL = "verl.weight_sync.call"
WEIGHT_SYNC_REPLICAS = "verl.weight_sync.replicas"
WEIGHT_SYNC_BYTES = "verl.weight_sync.bytes"
CHECKPOINT_PATH = "verl.checkpoint.path"
CHECKPOINT_BYTES = "verl.checkpoint.bytes"
CHECKPOINT_FILES = "verl.checkpoint.files"
REPLICA_SPAN_PREFIX = "verl.replica."
SPAN_SCHEDULE = "verl.rollout.schedule"
WEIGHT_SYNC_SPAN_PREFIX = "verl.weight_sync."
# Spans of agent loops, besides OpenTelemetry's gen_ai.*
TURN_NUMBER = "verl.turn.number"
TRAJECTORY_KEPT = "verl.trajectory.kept"
UNFINISHED_TRAJECTORY = "verl.trajectory.unfinished"
CANCELLED = "verl.cancelled"
DATA_SOURCE = "verl.data_source"
SANDBOX_STATUS = "verl.sandbox.status"
ERROR_TYPE = error_attributes.ERROR_TYPE

SPAN_RUN = "verl.run"
SPAN_STEP = "verl.step"
SPAN_TRAJECTORY = "verl.trajectory"
SPAN_TURN = "verl.turn"
WORKER_SPAN_PREFIX = "verl.worker."

RANKS_PREFIX = "verl.ranks."
"""Of statistics over the ranks on a stage's span: `verl.ranks.<quantity>.<statistic>`."""

# Metrics
VERL_KEY = "verl.key"
METRIC = "metric"
VALUE_KIND = "verl.value.kind"
SIGNAL = "verl.otel.signal"
REASON = "verl.otel.reason"
OUTCOME = "verl.otel.outcome"
SITE = "verl.otel.site"

# Events
EVENT_NON_FINITE = "verl.non_finite"
EVENT_WORKER_ERROR = "verl.worker.error"
EVENT_TEXT = "verl.text"
TEXT_NAME = "verl.text.name"
TEXT_TRUNCATED = "verl.text.truncated"
EVENT_CHECKPOINT = "verl.checkpoint"
EVENT_STEP = "verl.step"
EVENT_RUN_STARTED = "verl.run.started"
EVENT_RUN_FINISHED = "verl.run.finished"
RUN_STATE = "verl.run.state"
EVENT_CONTROL = "verl.control"
CONTROL_ACTION = "verl.control.action"
CONTROL_RESULT = "verl.control.result"
CONTROL_BY = "verl.control.by"
CONTROL_REQUEST = "verl.control.request"

# Test data of `verl-otel doctor`
DOCTOR_ID = "verl.doctor.id"
SPAN_DOCTOR = "verl.doctor"
EVENT_DOCTOR = "verl.doctor"
SERVICE_DOCTOR = "verl-otel-doctor"
"""Its `service.name`, and the MLflow experiment on which the bridge notes it."""
