"""`verl.workers.rollout.replica.RolloutReplica` (verl 0.6.1 to 0.9.1): replicas whose servers run, and their address.

Its `init_*` launch the servers, of all backends, in the process that manages them; subclasses override what these call.
"""

import functools
from types import ModuleType
from typing import Any

from verl_otel import telemetry
from verl_otel.hooks.patches import Patches

LAUNCHING = ("init_hybrid", "init_hybrid_colocated", "init_colocated", "init_standalone")
"""`init_hybrid_colocated`: 0.7.1 on."""


def install(module: ModuleType, patches: Patches) -> None:
    replica = module.RolloutReplica
    names = [name for name in LAUNCHING if hasattr(replica, name)]
    if not names:
        raise AttributeError(f"RolloutReplica has none of {', '.join(LAUNCHING)}")
    for name in names:
        patches.set(replica, name, _announced(getattr(replica, name)))


def _announced(original: Any) -> Any:
    @functools.wraps(original)
    async def init(self: Any, *args: Any, **kwargs: Any) -> Any:
        result = await original(self, *args, **kwargs)
        t = telemetry.peek()
        if t is not None:
            t.server_launched(self)
        return result

    return init
