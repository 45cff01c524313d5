"""`verl.trainer.ppo.ray_trainer.compute_advantage` (verl 0.6.1 to 0.9.1, all trainers): the groups of a step.

It is given the samples with the id of their prompt. In V1 with several outputs per session these are the last outputs.
"""

import functools
from types import ModuleType
from typing import Any

from verl_otel import border, telemetry
from verl_otel.hooks.patches import Patches


def install(module: ModuleType, patches: Patches) -> None:
    original = module.compute_advantage

    @functools.wraps(original)
    def compute_advantage(*args: Any, **kwargs: Any) -> Any:
        try:
            t = telemetry.peek()
            if t is not None:
                t.samples.of_groups(args[0] if args else kwargs["data"])
        except Exception:
            border.caught("the groups of a batch")
        return original(*args, **kwargs)

    patches.set_everywhere(module, "compute_advantage", compute_advantage)
