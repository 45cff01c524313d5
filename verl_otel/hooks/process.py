"""`verl` itself: a Ray worker that imports it is a process of the run, and shows so from then on.

Wraps nothing. The launcher is left out: its telemetry is made at `ray.init`, when verl's configuration is known, and it
joins the run only where it trains itself (`hooks/tracking.py`, `hooks/sft.py`).
"""

from types import ModuleType

from verl_otel import identity, telemetry
from verl_otel.hooks.patches import Patches


def install(module: ModuleType, patches: Patches) -> None:
    if not identity.in_ray_worker():
        return
    t = telemetry.current()
    if t is not None:
        t.join()
