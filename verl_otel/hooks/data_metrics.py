"""`verl.trainer.ppo.metric_utils.compute_data_metrics` (verl 0.6.1 to 0.9.1, all trainers): the samples of a step.

It is given the whole batch, in the trainer process, on the CPU. What it returns is not touched.
"""

import functools
from types import ModuleType
from typing import Any

from verl_otel import border, telemetry
from verl_otel.hooks.patches import Patches


def install(module: ModuleType, patches: Patches) -> None:
    original = module.compute_data_metrics

    @functools.wraps(original)
    def compute_data_metrics(*args: Any, **kwargs: Any) -> Any:
        result = original(*args, **kwargs)
        try:
            t = telemetry.peek()
            if t is not None:
                t.samples.of_batch(args[0] if args else kwargs["batch"])
        except Exception:
            border.caught("the distributions of a batch")
        return result

    patches.set_everywhere(module, "compute_data_metrics", compute_data_metrics)
