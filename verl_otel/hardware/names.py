"""The `hw.*` metrics and attributes, by OpenTelemetry's semantic conventions (all of them still in development).

Names are those of the installed `opentelemetry-semantic-conventions`; instruments and units are of schema 1.44.
"""

from dataclasses import dataclass

from opentelemetry.semconv._incubating.attributes import error_attributes, hw_attributes
from opentelemetry.semconv._incubating.metrics import hw_metrics

SCOPE = "verl_otel.hardware"
SCHEMA_URL = "https://opentelemetry.io/schemas/1.44.0"

ID = hw_attributes.HW_ID
NAME = hw_attributes.HW_NAME
VENDOR = hw_attributes.HW_VENDOR
MODEL = hw_attributes.HW_MODEL
PARENT = hw_attributes.HW_PARENT
"""UUID of the card of a MIG instance; empty for a whole card, since every point of an instrument has the same keys."""
TYPE = hw_attributes.HW_TYPE
STATE = hw_attributes.HW_STATE
GPU_TASK = hw_attributes.HW_GPU_TASK
SENSOR_LOCATION = hw_attributes.HW_SENSOR_LOCATION
ERROR_TYPE = error_attributes.ERROR_TYPE

GAUGE, COUNTER, UP_DOWN_COUNTER = "gauge", "counter", "up_down_counter"


@dataclass(frozen=True)
class Metric:
    """An asynchronous instrument."""

    name: str
    kind: str
    unit: str
    description: str


UTILIZATION = Metric(
    hw_metrics.HW_GPU_UTILIZATION,
    GAUGE,
    "1",
    "Fraction of time in which a kernel ran on the GPU, over the driver's last sampling period (up to 1 s)",
)
MEMORY_USAGE = Metric(
    hw_metrics.HW_GPU_MEMORY_USAGE,
    UP_DOWN_COUNTER,
    "By",
    "GPU memory that is not free: of all processes, and what the driver keeps for itself",
)
MEMORY_LIMIT = Metric(hw_metrics.HW_GPU_MEMORY_LIMIT, UP_DOWN_COUNTER, "By", "Size of the GPU memory")
MEMORY_UTILIZATION = Metric(
    hw_metrics.HW_GPU_MEMORY_UTILIZATION, GAUGE, "1", "Fraction of the GPU memory that is not free"
)
POWER = Metric(hw_metrics.HW_POWER, GAUGE, "W", "Power that the card draws")
ENERGY = Metric(hw_metrics.HW_ENERGY, COUNTER, "J", "Energy that the card has used since its driver was loaded")
TEMPERATURE = Metric(hw_metrics.HW_TEMPERATURE, GAUGE, "Cel", "Temperature of the GPU's die")
ERRORS = Metric(hw_metrics.HW_ERRORS, COUNTER, "{error}", "ECC errors of the card since its driver was loaded")
STATUS = Metric(
    hw_metrics.HW_STATUS, UP_DOWN_COUNTER, "1", "1 for the GPU's state, 0 for the other: ok, or failed (off the bus)"
)

_IS_GPU = {TYPE: hw_attributes.HwTypeValues.GPU.value}

FIELDS = {
    "utilization": (UTILIZATION, {GPU_TASK: hw_attributes.HwGpuTaskValues.GENERAL.value}),
    "memory.usage": (MEMORY_USAGE, {}),
    "memory.limit": (MEMORY_LIMIT, {}),
    "memory.utilization": (MEMORY_UTILIZATION, {}),
    "power": (POWER, _IS_GPU),
    "energy": (ENERGY, _IS_GPU),
    "temperature": (TEMPERATURE, {SENSOR_LOCATION: "gpu"}),
    "errors.corrected": (ERRORS, {**_IS_GPU, ERROR_TYPE: "corrected"}),
    "errors.uncorrected": (ERRORS, {**_IS_GPU, ERROR_TYPE: "uncorrected"}),
    "status.ok": (STATUS, {**_IS_GPU, STATE: hw_attributes.HwStateValues.OK.value}),
    "status.failed": (STATUS, {**_IS_GPU, STATE: hw_attributes.HwStateValues.FAILED.value}),
}
"""What a reader gives or the sampler derives -> its metric, and the attributes that tell it from the others of that."""

ALL = tuple(dict.fromkeys(metric for metric, _ in FIELDS.values()))
