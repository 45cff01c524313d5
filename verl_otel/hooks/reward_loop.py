"""`verl.experimental.reward_loop.reward_loop.RewardLoopWorker.compute_score` (by reference from verl 0.7.1 on).

The reward worker's side of `verl.compute_score`, under the trajectory whose reward it computes; and how long each one
takes.
"""

import functools
from types import ModuleType
from typing import Any

from verl_otel import border, telemetry
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
        score = t.scores.enter(_data_source(args[0] if args else kwargs.get("data")))
        with closing(t.scores.leave, score):
            result = await original(self, *args, **kwargs)
            t.scores.answered(score, result)
            return result

    patches.set(worker, "compute_score", propagation.with_carrier(compute_score))


def _data_source(data: Any) -> str | None:
    """Of a batch of one sample, verl's `DataProto`."""
    try:
        sources = data.non_tensor_batch.get("data_source")
        return None if sources is None or not len(sources) else str(sources[-1])
    except Exception:
        border.caught("reading the data source of a sample")
        return None
