"""One file per seam of verl or Ray. Each says what it wraps and in which versions that exists.

`HOOKS` lists them. A hook is installed when the module that it wraps is imported, by `install(module, patches)`;
nothing is imported by us. A seam that some version lacks turns that one hook off, with a warning; the others work.
"""

from collections.abc import Callable
from dataclasses import dataclass
from types import ModuleType

import wrapt

from verl_otel import border
from verl_otel.hooks import (
    advantage,
    agent_loop,
    auto_await,
    data_metrics,
    engine,
    llm_client,
    process,
    ray_actors,
    ray_init,
    register,
    reward_loop,
    rollout_trace,
    sandbox,
    timer,
    tools,
    tracking,
    trainer,
    worker_group,
)
from verl_otel.hooks.patches import Patches


@dataclass(frozen=True)
class Hook:
    """A seam: the name by which it can be disabled, the module that it is in, and what to do when that is imported."""

    name: str
    module: str
    install: Callable[[ModuleType, Patches], None]

    @property
    def seam(self) -> str:
        """Name and module: a hook can be on several modules, and a module have several hooks."""
        return f"{self.name} on {self.module}"


HOOKS = (
    Hook("process", "verl", process.install),
    Hook("ray_init", "ray", ray_init.install),
    Hook("ray_actors", "ray.actor", ray_actors.install),
    Hook("timer", "verl.utils.profiler.performance", timer.install),
    Hook("tracking", "verl.utils.tracking", tracking.install),
    Hook("register", "verl.single_controller.base.decorator", register.install),
    Hook("worker_group", "verl.single_controller.ray.base", worker_group.install),
    Hook("rollout_trace", "verl.utils.rollout_trace", rollout_trace.install),
    Hook("auto_await", "verl.utils.ray_utils", auto_await.install),
    Hook("trainer", "verl.trainer.ppo.ray_trainer", trainer.install_legacy),
    Hook("trainer", "verl.trainer.ppo.v1.trainer_base", trainer.install_v1),
    Hook("data_metrics", "verl.trainer.ppo.metric_utils", data_metrics.install),
    Hook("advantage", "verl.trainer.ppo.ray_trainer", advantage.install),
    Hook("engine", "verl.workers.engine_workers", engine.install),
    Hook("llm_client", "verl.workers.rollout.llm_server", llm_client.install),
    Hook("llm_client", "verl.experimental.agent_loop.agent_loop", llm_client.install_before_0_8),
    Hook("agent_loop", "verl.experimental.agent_loop.agent_loop", agent_loop.install),
    Hook("tools", "verl.experimental.agent_loop.tool_agent_loop", tools.install_agent_loop),
    Hook("tools", "verl.tools.base_tool", tools.install_base_tool),
    Hook("tools", "verl.tools.function_tool", tools.install_function_tool),
    Hook("reward_loop", "verl.experimental.reward_loop.reward_loop", reward_loop.install),
    Hook("sandbox", "verl.utils.reward_score.sandbox_fusion.utils", sandbox.install),
)

_patches = Patches()
_installed: dict[str, str] = {}
_active = False


def install(disabled: frozenset[str] = frozenset()) -> None:
    """Install each hook when its module is imported; at once if it is imported already."""
    global _active
    _active = True
    for hook in HOOKS:
        if hook.name in disabled:
            continue
        wrapt.register_post_import_hook(_apply(hook), hook.module)


def uninstall() -> None:
    """Put every patched name back."""
    global _active
    _active = False
    _patches.undo()
    _installed.clear()


def status() -> dict[str, str]:
    """What became of each hook in this process: `seam -> "installed"` or the reason why not."""
    return dict(_installed)


def _apply(hook: Hook) -> Callable[[ModuleType], None]:
    def apply(module: ModuleType) -> None:
        if not _active or hook.seam in _installed:
            return
        try:
            hook.install(module, _patches)
            _installed[hook.seam] = "installed"
        except Exception as error:
            _installed[hook.seam] = f"{type(error).__name__}: {error}"
            border.warn_once(
                f"hook {hook.module}",
                "this version of %s does not have what the hook %r needs (%s: %s); that part of the telemetry is off",
                hook.module,
                hook.name,
                type(error).__name__,
                error,
            )

    return apply
