"""`verl.utils.profiler.performance._timer` (same place in verl 0.6.1 to 0.9.1): every stage that verl times.

`simple_timer` and all variants of `marked_timer` call this module's global `_timer`, so one replacement covers them
all.
"""

import functools
from collections.abc import Iterator
from types import ModuleType

from verl_otel import telemetry
from verl_otel.hooks.patches import Patches


def install(module: ModuleType, patches: Patches) -> None:
    original = module._timer

    @functools.wraps(original)
    def _timer(name: str, timing_raw: dict[str, float]) -> Iterator[None]:
        t = telemetry.current()
        if t is None:
            yield from original(name, timing_raw)
            return
        part = t.trajectories.enter_part(name)
        scope = None if part is not None else t.steps.enter(name)
        error: BaseException | None = None
        try:
            yield from original(name, timing_raw)
        except BaseException as e:
            error = e
            raise
        finally:
            t.trajectories.leave(part, error)
            t.steps.leave(scope, error)

    patches.set(module, "_timer", _timer)
