"""fully_async's `MessageQueueClient` (verl 0.8.0 on): idle time of the rollouter, and the end of the run.

Trainer, rollouter and the runner that makes both are pickled by value; the client of the queue between them is not. The
rollouter asks for the size of the queue at each new version of the weights (`reset_staleness`), where its own time line
of samples in work (`_active_count_history`, 0.9.0 on) is read; the runner clears the queue when all is over.

`verl.experimental.agent_loop.agent_loop.AgentLoopWorker.__init__` (0.7.1 on): an agent-loop worker of fully_async, told
by the configuration, gets no numbers of steps but of samples.
"""

import functools
import sys
import time
from types import ModuleType
from typing import Any

from verl_otel import border, telemetry
from verl_otel.hooks import ray_actors
from verl_otel.hooks.patches import Patches
from verl_otel.metrics.derived import idle_ratio
from verl_otel.semconv import metrics as names

_LABELS = names.all_ranks(names.ROLLOUTER_IDLE)


def install(module: ModuleType, patches: Patches) -> None:
    client = module.MessageQueueClient
    _wrap_size(client, patches)
    _wrap_clear(client, patches)


def install_agent_loop(module: ModuleType, patches: Patches) -> None:
    worker = module.AgentLoopWorker
    original = worker.__init__

    @functools.wraps(original)
    def __init__(self: Any, *args: Any, **kwargs: Any) -> None:
        original(self, *args, **kwargs)
        try:
            t = telemetry.current()
            if t is not None and "async_training" in self.config:
                t.trajectories.steps_schedule = False
        except Exception:
            border.caught("looking at an agent-loop worker")

    patches.set(worker, "__init__", __init__)


def _wrap_size(client: Any, patches: Patches) -> None:
    original = client.get_queue_size

    @functools.wraps(original)
    def get_queue_size(self: Any, *args: Any, **kwargs: Any) -> Any:
        try:
            t, caller = telemetry.peek(), sys._getframe(1)
            if t is not None and caller.f_code.co_name == "reset_staleness":
                _measure(t, caller.f_locals["self"])
        except Exception:
            border.caught("the idle time of the rollouter")
        return original(self, *args, **kwargs)

    patches.set(client, "get_queue_size", get_queue_size)


def _measure(t: Any, rollouter: Any) -> None:
    history = getattr(rollouter, "_active_count_history", None)
    if history and getattr(rollouter, "processor_task", None) is not None:  # it is generating for the training
        idle = idle_ratio([(when, active) for when, active, *_ in history], time.time())
        if idle is not None:
            t.background.defer(t.instruments.set, names.ROLLOUTER_IDLE, _LABELS, idle)


def _wrap_clear(client: Any, patches: Patches) -> None:
    original = client.clear_queue

    @functools.wraps(original)
    def clear_queue(self: Any, *args: Any, **kwargs: Any) -> Any:
        try:
            t = telemetry.peek()
            if t is not None:
                t.budget.spend(0.5, functools.partial(ray_actors.end_run, sys.exc_info()[1]))
        except Exception:
            border.caught("the end of training")
        return original(self, *args, **kwargs)

    patches.set(client, "clear_queue", clear_queue)
