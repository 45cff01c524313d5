"""The trainer classes: `RayPPOTrainer` (verl 0.6.1 to 0.9.1) and the V1 `PPOTrainer` (0.9.0 on; 0.8.0: main_ppo_sync).

From `init`/`init_workers` the set-up phase, from `_validate` the validation before training (verl times only the later
ones), from `_save_checkpoint` that the run can be resumed, from `fit` the number of the step, the end of the run and
the last flush.
"""

from __future__ import annotations

import functools
from types import ModuleType
from typing import TYPE_CHECKING, Any

from opentelemetry import context as otel_context

from verl_otel import border, telemetry
from verl_otel.hooks import ray_actors
from verl_otel.hooks.closing import closing
from verl_otel.hooks.patches import Patches
from verl_otel.identity import remember_run

if TYPE_CHECKING:
    from verl_otel.assembly import Telemetry


def install_legacy(module: ModuleType, patches: Patches) -> None:
    trainer = module.RayPPOTrainer
    _wrap_setup(trainer, "init_workers", patches)
    _wrap_validate(trainer, patches)
    _wrap_save(trainer, patches)
    _wrap_fit(trainer, patches, waits_for_rollout=False)


def install_v1(module: ModuleType, patches: Patches) -> None:
    trainer = module.PPOTrainer
    _wrap_setup(trainer, "init", patches)
    _wrap_validate(trainer, patches)
    _wrap_save(trainer, patches)
    _wrap_fit(trainer, patches, waits_for_rollout=True)


def install_main_ppo_sync(trainer: Any, patches: Patches) -> None:
    """The forerunner of V1 in 0.8.0 (see `verl_otel.hooks.main_ppo_sync`)."""
    _wrap_setup(trainer, "init_workers", patches)
    _wrap_validate(trainer, patches)
    _wrap_save(trainer, patches)
    _wrap_fit(trainer, patches, waits_for_rollout=True)


def _wrap_setup(trainer: Any, name: str, patches: Patches) -> None:
    original = getattr(trainer, name)

    @functools.wraps(original)
    def setup(self: Any, *args: Any, **kwargs: Any) -> Any:
        t = telemetry.current()
        if t is None:
            return original(self, *args, **kwargs)
        t.steps.follow(self)

        def leave(scope: Any, error: BaseException | None) -> None:
            t.steps.leave(scope, error)
            if error is not None:  # there will be no `fit`
                _finish(t, error)

        with closing(leave, t.steps.enter_setup()):
            return original(self, *args, **kwargs)

    patches.set(trainer, name, setup)


def _wrap_validate(trainer: Any, patches: Patches) -> None:
    original = trainer._validate

    @functools.wraps(original)
    def _validate(self: Any, *args: Any, **kwargs: Any) -> Any:
        t = telemetry.current()
        if t is None:
            return original(self, *args, **kwargs)
        with closing(t.steps.leave, t.steps.enter_validation()):
            return original(self, *args, **kwargs)

    patches.set(trainer, "_validate", _validate)


def _wrap_save(trainer: Any, patches: Patches) -> None:
    original = trainer._save_checkpoint

    @functools.wraps(original)
    def _save_checkpoint(self: Any, *args: Any, **kwargs: Any) -> Any:
        result = original(self, *args, **kwargs)
        try:
            t = telemetry.peek()
            if t is not None:
                folder = str(self.config.trainer.default_local_dir)
                t.background.defer(remember_run, folder, t.identity.run_id, t.identity.attempt)
        except Exception:
            border.caught("remembering the run beside its checkpoint")
        return result

    patches.set(trainer, "_save_checkpoint", _save_checkpoint)


def _wrap_fit(trainer: Any, patches: Patches, waits_for_rollout: bool) -> None:
    original = trainer.fit

    @functools.wraps(original)
    def fit(self: Any, *args: Any, **kwargs: Any) -> Any:
        t = telemetry.current()
        if t is None:
            return original(self, *args, **kwargs)
        t.steps.follow(self)
        t.steps.waits_for_rollout = waits_for_rollout
        t.step_values.ask = ray_actors.ask_for_values

        def leave(token: Any, error: BaseException | None) -> None:
            otel_context.detach(token)
            _finish(t, error)

        with closing(leave, otel_context.attach(t.run_context)):
            return original(self, *args, **kwargs)

    patches.set(trainer, "fit", fit)


def _finish(t: Telemetry, error: BaseException | None) -> None:
    try:
        t.run_finished(error)
        t.finish(ray_actors.flush_actors)
    except Exception:
        border.caught("the end of training")
