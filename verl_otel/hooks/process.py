"""`verl` itself: a Ray worker that imports it is a process of the run, and shows so from then on.

Wraps nothing. The launcher is left out: its telemetry is made at `ray.init`, when verl's configuration is known.
"""

import time
from types import ModuleType

from verl_otel import identity, telemetry
from verl_otel.hooks.patches import Patches
from verl_otel.semconv import attributes as attr
from verl_otel.semconv import metrics as names


def install(module: ModuleType, patches: Patches) -> None:
    if not identity.in_ray_worker():
        return
    t = telemetry.current()
    if t is not None:
        labels = {attr.RANK: t.identity.worker_index, attr.STAGE: "other", attr.MODEL_TYPE: "none"}
        t.instruments.set(names.PROCESS_START_TIME, labels, time.time())
