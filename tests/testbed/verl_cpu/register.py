"""Entry point loaded by verl itself: VERL_USE_EXTERNAL_MODULES=verl_cpu.register.

verl imports this at the end of `import verl`, in the driver and in every Ray worker.
Each block says whether it is a public extension point or a patch.
"""

import importlib.util

if importlib.util.find_spec("verl.plugin"):
    # (1) extension point: platform registry of verl >= 0.9. Selected with VERL_PLATFORM=cpu.
    from verl_cpu import platform  # noqa: F401
else:
    from verl_cpu import before_0_9

    before_0_9.apply()

# (2) extension point: rollout registries (the recipe of verl's docs/extend_guide.rst).
from verl.workers.rollout.base import _ROLLOUT_REGISTRY  # noqa: E402
from verl.workers.rollout.replica import RolloutReplicaRegistry  # noqa: E402


def _load_replica():
    from verl_cpu.rollout import HFCpuReplica

    return HFCpuReplica


RolloutReplicaRegistry.register("hf_cpu", _load_replica)
_ROLLOUT_REGISTRY[("hf_cpu", "async")] = "verl_cpu.rollout.ServerAdapter"

# (3) the one patch of verl; before anything imports verl.workers.engine_workers.
from verl_cpu import patches  # noqa: E402

patches.apply()

# (4) extension point: engine registry, for device "cpu".
from verl_cpu import engines  # noqa: E402, F401
