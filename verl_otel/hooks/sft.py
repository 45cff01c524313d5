"""SFT: `verl.utils.checkpoint.checkpoint_handler.CheckpointHandler` (verl 0.6.1 to 0.9.1): only its trainers make one.

The trainers themselves run as `__main__`. Their handler says that this process runs SFT, from which step it resumes,
and when it saves; on Ray it has the group of ranks that the driver calls. The ranks' own calls come by `register` (from
0.7.0 on: before, there are no steps), the values of a step by `Tracking.log`.
"""

import functools
import os
from types import ModuleType
from typing import Any

from verl_otel import border, telemetry
from verl_otel.hooks.closing import closing
from verl_otel.hooks.patches import Patches
from verl_otel.semconv.stages import SFT_TRAIN_TIMER, SFT_VALIDATION_TIMER


def install(module: ModuleType, patches: Patches) -> None:
    handler = module.CheckpointHandler
    _wrap_init(handler, patches)
    _wrap_load(handler, patches)
    _wrap_save(handler, patches)


def _wrap_init(handler: Any, patches: Patches) -> None:
    original = handler.__init__

    @functools.wraps(original)
    def __init__(self: Any, *args: Any, **kwargs: Any) -> None:
        original(self, *args, **kwargs)
        try:
            t = telemetry.current()
            if t is not None:
                t.join()
                t.sft.begin()
                t.takes_no_requests()
                if t.identity.launcher_is_silent and t.identity.worker_index == "0":
                    t.announce()
                if getattr(getattr(self, "mode", None), "name", "") == "RAY":
                    for name in (SFT_TRAIN_TIMER, SFT_VALIDATION_TIMER):
                        setattr(self.engine, name, _called_by_driver(name, getattr(self.engine, name)))
        except Exception:
            border.caught("the beginning of SFT")

    patches.set(handler, "__init__", __init__)


def _called_by_driver(name: str, method: Any) -> Any:
    """A method of a group of ranks: it returns before they have done it, and its stage lasts until verl logs."""

    @functools.wraps(method)
    def call(*args: Any, **kwargs: Any) -> Any:
        t = telemetry.peek()
        if t is not None:
            t.sft.enter_call(name)
        return method(*args, **kwargs)

    return call


def _wrap_load(handler: Any, patches: Patches) -> None:
    original = handler.load_checkpoint

    @functools.wraps(original)
    def load_checkpoint(self: Any, *args: Any, **kwargs: Any) -> Any:
        step = original(self, *args, **kwargs)
        t = telemetry.peek()
        if t is not None:
            t.sft.resumed(step)
        return step

    patches.set(handler, "load_checkpoint", load_checkpoint)


def _wrap_save(handler: Any, patches: Patches) -> None:
    original = handler.save_checkpoint

    @functools.wraps(original)
    def save_checkpoint(self: Any, step: Any, *args: Any, **kwargs: Any) -> Any:
        t = telemetry.peek()
        if t is None:
            return original(self, step, *args, **kwargs)
        with closing(t.steps.leave, t.sft.enter_checkpoint()):
            t.checkpoints.saving(os.path.join(str(self.default_local_dir), f"global_step_{step}"))
            return original(self, step, *args, **kwargs)

    patches.set(handler, "save_checkpoint", save_checkpoint)
