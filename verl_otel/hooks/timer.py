"""`verl.utils.profiler.performance._timer` (same place in verl 0.6.1 to 0.9.1): every stage that verl times.

`simple_timer` and all variants of `marked_timer` call this module's global `_timer`, so one replacement covers them
all. With run control on, the trainer looks here whether a checkpoint was asked for.
"""

import functools
from collections.abc import Iterator
from types import ModuleType

from verl_otel import telemetry
from verl_otel.hooks.closing import closing
from verl_otel.hooks.patches import Patches


def install(module: ModuleType, patches: Patches) -> None:
    original = module._timer

    @functools.wraps(original)
    def _timer(name: str, timing_raw: dict[str, float]) -> Iterator[None]:
        t = telemetry.current()
        if t is None:
            yield from original(name, timing_raw)
            return
        if t.control is not None:
            t.control.stage_begins()
        part = t.trajectories.enter_part(name)
        if part is not None:
            with closing(t.trajectories.leave, part):
                yield from original(name, timing_raw)
        else:
            with closing(t.steps.leave, t.steps.enter(name)):
                yield from original(name, timing_raw)

    patches.set(module, "_timer", _timer)
