"""`verl.workers.engine_workers.TrainingWorker._postprocess_output` (verl 0.7.0 to 0.9.1): a rank's own loss.

It is given what the engine has computed on this rank, just before verl reduces it over the ranks. Only numbers that are
on the CPU already are read: nothing waits for the device.
"""

import functools
from collections.abc import Iterator
from types import ModuleType
from typing import Any

from verl_otel import border, telemetry
from verl_otel.hooks.patches import Patches
from verl_otel.metrics.values import to_number


def install(module: ModuleType, patches: Patches) -> None:
    worker = module.TrainingWorker
    original = worker._postprocess_output

    @functools.wraps(original)
    def _postprocess_output(self: Any, output: Any, *args: Any, **kwargs: Any) -> Any:
        try:
            t = telemetry.peek()
            if t is not None and not kwargs.get("forward_only"):
                _note(t, output)
        except Exception:
            border.caught("reading what a rank has computed")
        return original(self, output, *args, **kwargs)

    patches.set(worker, "_postprocess_output", _postprocess_output)


def _note(t: Any, output: Any) -> None:
    losses = list(_numbers(output["loss"]))
    if losses:
        t.workers.note("loss", [sum(losses)])  # verl sums the micro-batches, which are scaled
    metrics = output["metrics"]
    for key, quantity in (("grad_norm", "grad_norm"), ("lr", "learning_rate")):
        t.workers.note(quantity, list(_numbers(metrics.get(key))))


def _numbers(value: Any) -> Iterator[float]:
    for item in value if isinstance(value, list | tuple) else [value]:
        if getattr(getattr(item, "device", None), "type", "cpu") == "cpu":
            number = to_number(item)
            if number is not None:
                yield number
