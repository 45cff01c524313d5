"""`DataParallelPPOActor.update_policy`, `DataParallelPPOCritic.update_critic` (verl 0.6.1 to 0.7.1).

A rank's gradient norm. The FSDP workers from before the engine return what they have computed on this rank, as
numbers; of the loss only parts.
"""

import functools
from types import ModuleType
from typing import Any

from verl_otel import border, telemetry
from verl_otel.hooks.patches import Patches
from verl_otel.metrics.values import to_number


def install_actor(module: ModuleType, patches: Patches) -> None:
    _wrap(module.DataParallelPPOActor, "update_policy", "actor/grad_norm", patches)


def install_critic(module: ModuleType, patches: Patches) -> None:
    _wrap(module.DataParallelPPOCritic, "update_critic", "critic/grad_norm", patches)


def _wrap(owner: Any, name: str, key: str, patches: Patches) -> None:
    original = getattr(owner, name)

    @functools.wraps(original)
    def update(*args: Any, **kwargs: Any) -> Any:
        metrics = original(*args, **kwargs)
        try:
            t = telemetry.peek()
            if t is not None:
                numbers = [to_number(value) for value in metrics.get(key, [])]  # one for each mini-batch
                t.workers.note("grad_norm", [number for number in numbers if number is not None])
        except Exception:
            border.caught("reading what a rank has computed")
        return metrics

    patches.set(owner, name, update)
