"""`verl.trainer.ppo.ray_trainer.compute_advantage` (verl 0.6.1 to 0.9.1, all trainers): the groups of a step.

It is given the samples with the id of their prompt. In V1 with several outputs per session these are the last outputs.
From 0.8.0 on, other trainers than V1's give it with each sample the versions of the weights that generated it.
"""

import functools
from types import ModuleType
from typing import Any

from verl_otel import border, telemetry
from verl_otel.hooks.patches import Patches

_NEWEST_WEIGHTS = "max_global_steps"


def install(module: ModuleType, patches: Patches) -> None:
    original = module.compute_advantage

    @functools.wraps(original)
    def compute_advantage(*args: Any, **kwargs: Any) -> Any:
        try:
            t = telemetry.peek()
            if t is not None:
                data = args[0] if args else kwargs["data"]
                t.samples.of_groups(data)
                t.consumed.generated_with(data.non_tensor_batch.get(_NEWEST_WEIGHTS, ()))
        except Exception:
            border.caught("the groups of a batch")
        return original(*args, **kwargs)

    patches.set_everywhere(module, "compute_advantage", compute_advantage)
