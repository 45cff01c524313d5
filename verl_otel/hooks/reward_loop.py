"""`verl.experimental.reward_loop.reward_loop.RewardLoopWorker.compute_score` (by reference from verl 0.7.1 on).

The reward worker's side of `verl.compute_score`, under the trajectory whose reward it computes.
"""

import functools
from types import ModuleType
from typing import Any

from verl_otel import telemetry
from verl_otel.hooks.closing import closing
from verl_otel.hooks.patches import Patches
from verl_otel.tracing import propagation


def install(module: ModuleType, patches: Patches) -> None:
    worker = module.RewardLoopWorker
    original = worker.compute_score

    @functools.wraps(original)
    async def compute_score(self: Any, *args: Any, **kwargs: Any) -> Any:
        t = telemetry.current()
        if t is None:
            return await original(self, *args, **kwargs)
        propagation.into_threads()
        with closing(t.trajectories.leave, t.trajectories.enter_score()):
            return await original(self, *args, **kwargs)

    patches.set(worker, "compute_score", propagation.with_carrier(compute_score))
