"""One file per seam of verl or Ray. Each says what it wraps and in which versions that exists.

`HOOKS` lists them. A hook is installed when the module that it wraps is imported, by `install(module, patches)`;
nothing is imported by us. In versions of verl that are known not to have a seam, its hook is left out; one that is
missed in any other turns that one hook off, with a warning; the others work.
"""

import functools
import re
from collections.abc import Callable
from dataclasses import dataclass
from types import ModuleType

import wrapt

from verl_otel import border, identity
from verl_otel.hooks import (
    advantage,
    agent_loop,
    auto_await,
    data_metrics,
    engine,
    engine_tracing,
    fully_async,
    legacy_workers,
    llm_client,
    main_ppo_sync,
    process,
    ray_actors,
    ray_answers,
    ray_init,
    register,
    reward_loop,
    rollout_replica,
    rollout_server,
    rollout_trace,
    sandbox,
    sft,
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
    since: str = "0"
    """First version of verl that has the seam, if the oldest supported one has not."""
    until: str = ""
    """First version of verl that has it no more."""

    @property
    def seam(self) -> str:
        """Name and module: a hook can be on several modules, and a module have several hooks."""
        return f"{self.name} on {self.module}"

    def is_in(self, verl: str) -> bool:
        """Whether this version of verl has the seam; where no version is known, it is tried."""
        version = _numbers(verl)
        return not version or (_numbers(self.since) <= version and (not self.until or version < _numbers(self.until)))


def _numbers(version: str) -> list[int]:
    """`0.8.0rc1` -> [0, 8, 0]"""
    return [int(number) for number in re.findall(r"\d+", version)[:3]]


HOOKS = (
    Hook("process", "verl", process.install),
    Hook("main_ppo_sync", "ray", main_ppo_sync.install, since="0.8.0", until="0.9.0"),
    Hook("main_ppo_sync", "verl.trainer.main_ppo_sync", main_ppo_sync.install_imported, since="0.8.0", until="0.9.0"),
    Hook("ray_init", "ray", ray_init.install),  # last on `ray`: it looks at who calls it
    Hook("ray_actors", "ray.actor", ray_actors.install),
    Hook("ray_answers", "ray._private.worker", ray_answers.install),
    Hook("rollout_server", "ray.actor", rollout_server.install),
    Hook("timer", "verl.utils.profiler.performance", timer.install),
    Hook("tracking", "verl.utils.tracking", tracking.install),
    Hook("register", "verl.single_controller.base.decorator", register.install),
    Hook("worker_group", "verl.single_controller.ray.base", worker_group.install),
    Hook("rollout_trace", "verl.utils.rollout_trace", rollout_trace.install),
    Hook("auto_await", "verl.utils.ray_utils", auto_await.install, since="0.7.1"),
    Hook("auto_await", "verl.checkpoint_engine.base", auto_await.install_manager, since="0.7.1"),
    Hook("trainer", "verl.trainer.ppo.ray_trainer", trainer.install_legacy),
    Hook("trainer", "verl.trainer.ppo.v1.trainer_base", trainer.install_v1, since="0.9.0"),
    Hook("trainer", "verl.experimental.separation.ray_trainer", trainer.install_separate, since="0.7.1"),
    Hook("trainer", "verl.experimental.one_step_off_policy.ray_trainer", trainer.install_one_step_off, since="0.8.0"),
    Hook("fully_async", "verl.experimental.fully_async_policy.message_queue", fully_async.install, since="0.8.0"),
    Hook("fully_async", "verl.experimental.agent_loop.agent_loop", fully_async.install_agent_loop, since="0.7.1"),
    Hook("sft", "verl.utils.checkpoint.checkpoint_handler", sft.install),
    Hook("data_metrics", "verl.trainer.ppo.metric_utils", data_metrics.install),
    Hook("advantage", "verl.trainer.ppo.ray_trainer", advantage.install),
    Hook("engine", "verl.workers.engine_workers", engine.install, since="0.7.0"),
    Hook("engine_tracing", "vllm.v1.engine.async_llm", engine_tracing.install_vllm),
    Hook("engine_tracing", "sglang.srt.managers.tokenizer_manager", engine_tracing.install_sglang),
    Hook("legacy_workers", "verl.workers.actor.dp_actor", legacy_workers.install_actor, until="0.8.0"),
    Hook("legacy_workers", "verl.workers.critic.dp_critic", legacy_workers.install_critic, until="0.8.0"),
    Hook("llm_client", "verl.workers.rollout.llm_server", llm_client.install, since="0.8.0"),
    Hook("llm_client", "verl.experimental.agent_loop.agent_loop", llm_client.install_before_0_8, until="0.8.0"),
    Hook("rollout_replica", "verl.workers.rollout.replica", rollout_replica.install),
    Hook("agent_loop", "verl.experimental.agent_loop.agent_loop", agent_loop.install),
    Hook("tools", "verl.experimental.agent_loop.tool_agent_loop", tools.install_agent_loop),
    Hook("tools", "verl.tools.base_tool", tools.install_base_tool),
    Hook("tools", "verl.tools.function_tool", tools.install_function_tool, since="0.8.0"),
    Hook("sandbox", "verl.utils.reward_score.sandbox_fusion.utils", sandbox.install),
    Hook("reward_loop", "verl.experimental.reward_loop.reward_loop", reward_loop.install, since="0.7.1"),
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


@functools.cache
def _verl() -> str:
    return identity.verl_version()


def _apply(hook: Hook) -> Callable[[ModuleType], None]:
    def apply(module: ModuleType) -> None:
        if not _active or hook.seam in _installed or not hook.is_in(_verl()):
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
