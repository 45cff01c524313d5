"""`verl.utils.tracking.Tracking` (`__init__`, `log`: verl 0.6.1 to 0.9.1; `finish`: 0.9.0 on): the run and its metrics.

`log` hands over a shallow copy of the dictionary and does what it did before; then a run that was asked to may pause.
verl's own loggers are not touched.
"""

from __future__ import annotations

import functools
import inspect
import subprocess
import threading
from collections.abc import Mapping
from types import ModuleType
from typing import TYPE_CHECKING, Any

from verl_otel import border, telemetry
from verl_otel import config as config_module
from verl_otel.hooks.patches import Patches

if TYPE_CHECKING:
    from verl_otel.assembly import Telemetry

RECORDED_PARAMETERS = (
    "algorithm.adv_estimator",
    "algorithm.gamma",
    "algorithm.lam",
    "algorithm.kl_ctrl.kl_coef",
    "algorithm.use_kl_in_reward",
    "algorithm.norm_adv_by_std_in_grpo",
    "data.train_batch_size",
    "data.max_prompt_length",
    "data.max_response_length",
    "data.shuffle",
    "data.seed",
    "model.path",
    "optim.lr",
    "actor_rollout_ref.model.path",
    "actor_rollout_ref.actor.strategy",
    "actor_rollout_ref.actor.optim.lr",
    "actor_rollout_ref.actor.ppo_mini_batch_size",
    "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu",
    "actor_rollout_ref.actor.ppo_epochs",
    "actor_rollout_ref.actor.clip_ratio",
    "actor_rollout_ref.actor.entropy_coeff",
    "actor_rollout_ref.actor.use_kl_loss",
    "actor_rollout_ref.actor.kl_loss_coef",
    "actor_rollout_ref.actor.kl_loss_type",
    "actor_rollout_ref.rollout.name",
    "actor_rollout_ref.rollout.n",
    "actor_rollout_ref.rollout.temperature",
    "actor_rollout_ref.rollout.top_p",
    "actor_rollout_ref.rollout.top_k",
    "actor_rollout_ref.rollout.tensor_model_parallel_size",
    "actor_rollout_ref.rollout.gpu_memory_utilization",
    "critic.model.path",
    "critic.optim.lr",
    "critic.strategy",
    "trainer.nnodes",
    "trainer.n_gpus_per_node",
    "trainer.total_epochs",
    "trainer.total_training_steps",
    "trainer.save_freq",
    "trainer.test_freq",
    "trainer.use_v1",
    "trainer.v1.trainer_mode",
)
"""What of verl's configuration is recorded: settings that change results, nothing that can hold a secret."""


def install(module: ModuleType, patches: Patches) -> None:
    tracking = module.Tracking
    _wrap_init(tracking, patches)
    _wrap_log(tracking, patches)
    if hasattr(tracking, "finish"):
        _wrap_finish(tracking, patches)


def _wrap_init(tracking: Any, patches: Patches) -> None:
    original = tracking.__init__
    signature = inspect.signature(original)

    @functools.wraps(original)
    def __init__(self: Any, *args: Any, **kwargs: Any) -> None:
        original(self, *args, **kwargs)
        try:
            t = telemetry.current()
            if t is not None:
                t.join()
                t.sft.logs()
                given = signature.bind(self, *args, **kwargs).arguments
                names = str(given["project_name"]), str(given["experiment_name"])
                announcement = (t, *names, parameters(given.get("config")))
                threading.Thread(target=_announce, args=announcement, name="verl-otel-run-started", daemon=True).start()
        except Exception:
            border.caught("Tracking.__init__")

    patches.set(tracking, "__init__", __init__)


def _wrap_log(tracking: Any, patches: Patches) -> None:
    original = tracking.log

    @functools.wraps(original)
    def log(self: Any, data: Any, step: Any, *args: Any, **kwargs: Any) -> Any:
        try:
            t = telemetry.current()
            if t is not None:
                t.log(dict(data), step)
                t.sft.logged(step)
        except Exception:
            border.caught("Tracking.log")
        result = original(self, data, step, *args, **kwargs)
        t = telemetry.peek()
        if t is not None and t.control is not None:
            t.control.logged()
        return result

    patches.set(tracking, "log", log)


def _wrap_finish(tracking: Any, patches: Patches) -> None:
    original = tracking.finish

    @functools.wraps(original)
    def finish(self: Any, *args: Any, **kwargs: Any) -> Any:
        try:
            t = telemetry.peek()
            if t is not None and not getattr(self, "_finished", False):
                exit_code = kwargs.get("exit_code", args[0] if args else 0)
                t.run_finished(None, state="finished" if exit_code == 0 else "failed")
        except Exception:
            border.caught("Tracking.finish")
        return original(self, *args, **kwargs)

    patches.set(tracking, "finish", finish)


def _announce(t: Telemetry, project: str, experiment: str, recorded: dict[str, Any]) -> None:
    try:
        commit = _git_commit()
        t.run_started(project, experiment, {**recorded, "vcs.ref.head.revision": commit} if commit else recorded)
    except Exception:
        border.caught("announcing the run")


def parameters(config: Any) -> dict[str, Any]:
    """The recorded part of verl's configuration, by dotted name; settings that a version lacks are left out."""
    found: dict[str, Any] = {}
    for name in RECORDED_PARAMETERS:
        node = config
        for part in name.split("."):
            node = node.get(part) if isinstance(node, Mapping) else None
        if isinstance(node, str):
            found[name] = config_module.shown_path(node)
        elif isinstance(node, int | float | bool):
            found[name] = node
    return found


def _git_commit() -> str:
    """Commit of the working directory, empty if there is none."""
    command = ["git", "rev-parse", "HEAD"]
    try:
        result = subprocess.run(command, capture_output=True, text=True, timeout=5, check=False)
    except (OSError, subprocess.SubprocessError):
        return ""
    return result.stdout.strip() if result.returncode == 0 else ""
