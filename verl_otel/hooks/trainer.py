"""The trainer classes: `RayPPOTrainer` (verl 0.6.1 to 0.9.1), the V1 `PPOTrainer` (0.9.0 on; 0.8.0: main_ppo_sync),
`SeparateRayPPOTrainer` (0.7.1 on; the base of those whose rollouts have devices of their own) and
`OneStepOffRayTrainer` (0.8.0 on).

From `init`/`init_workers` the set-up phase, from `_validate` the validation before training (verl times only the later
ones), from `fit` the number of the step, the end of the run and the last flush, from V1's `_add_batch_to_generate` and
`step` the scheduling of rollouts and the trajectories that it trained on. fully_async's trainer is pickled by value:
what is called of its base says that it is there. With run control on, `fit` (if it is no coroutine) takes requests, and
`_save_checkpoint` saves those checkpoints that were asked for.
"""

from __future__ import annotations

import functools
import inspect
from types import ModuleType
from typing import TYPE_CHECKING, Any

from opentelemetry import context as otel_context

from verl_otel import border, telemetry
from verl_otel.hooks import ray_actors
from verl_otel.hooks.closing import closing
from verl_otel.hooks.patches import Patches
from verl_otel.semconv import attributes as attr

if TYPE_CHECKING:
    from verl_otel.assembly import Telemetry


def install_legacy(module: ModuleType, patches: Patches) -> None:
    trainer = module.RayPPOTrainer
    _wrap_setup(trainer, "init_workers", patches)
    _wrap_save(trainer, patches)
    _wrap_validate(trainer, patches)
    _wrap_fit(trainer, patches, waits_for_rollout=False)


def install_v1(module: ModuleType, patches: Patches) -> None:
    trainer = module.PPOTrainer
    _wrap_setup(trainer, "init", patches)
    _wrap_save(trainer, patches)
    _wrap_validate(trainer, patches)
    _wrap_fit(trainer, patches, waits_for_rollout=True)
    _wrap_schedule(trainer, patches)
    _wrap_step(trainer, patches)


def install_separate(module: ModuleType, patches: Patches) -> None:
    trainer = module.SeparateRayPPOTrainer
    _wrap_setup(trainer, "init_workers", patches)
    _follow_from(trainer, "_init_resource_pools", patches)
    _follow_from(trainer, "_fit_start_profile", patches)


def install_one_step_off(module: ModuleType, patches: Patches) -> None:
    _wrap_fit(module.OneStepOffRayTrainer, patches, waits_for_rollout=True)


def install_main_ppo_sync(trainer: Any, patches: Patches) -> None:
    """The forerunner of V1 in 0.8.0 (see `verl_otel.hooks.main_ppo_sync`)."""
    _wrap_setup(trainer, "init_workers", patches)
    _wrap_save(trainer, patches)
    _wrap_validate(trainer, patches)
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
        t = telemetry.peek()
        if t is None or t.control is None:
            return original(self, *args, **kwargs)
        return t.control.saving(functools.partial(original, self, *args, **kwargs))

    patches.set(trainer, "_save_checkpoint", _save_checkpoint)


def _wrap_schedule(trainer: Any, patches: Patches) -> None:
    original = trainer._add_batch_to_generate

    @functools.wraps(original)
    def _add_batch_to_generate(self: Any, *args: Any, **kwargs: Any) -> Any:
        t = telemetry.peek()
        if t is None:
            return original(self, *args, **kwargs)
        where = {attr.STAGE: "rollout", attr.MODEL_TYPE: "rollout"}
        with closing(t.steps.leave, t.steps.enter_part(attr.SPAN_SCHEDULE, where)):
            return original(self, *args, **kwargs)

    patches.set(trainer, "_add_batch_to_generate", _add_batch_to_generate)


def _wrap_step(trainer: Any, patches: Patches) -> None:
    original = trainer.step

    @functools.wraps(original)
    def step(self: Any, *args: Any, **kwargs: Any) -> Any:
        batch = original(self, *args, **kwargs)
        try:
            t = telemetry.peek()
            if t is not None:
                t.consumed.tagged(batch.tags)
        except Exception:
            border.caught("looking at what a step trained on")
        return batch

    patches.set(trainer, "step", step)


def _follow_from(trainer: Any, name: str, patches: Patches) -> None:
    """From this method on, which the trainer process calls, know the trainer."""
    original = getattr(trainer, name)

    @functools.wraps(original)
    def method(self: Any, *args: Any, **kwargs: Any) -> Any:
        t = telemetry.current()
        if t is not None:
            _follow(t, self, waits_for_rollout=True)
            t.takes_no_requests()
        return original(self, *args, **kwargs)

    patches.set(trainer, name, method)


def _follow(t: Telemetry, trainer: Any, waits_for_rollout: bool) -> None:
    t.steps.follow(trainer)
    t.steps.waits_for_rollout = waits_for_rollout
    classes = {cls.__name__ for cls in type(trainer).__mro__}
    separate = "SeparateRayPPOTrainer" in classes or getattr(trainer, "trainer_mode", "") == "separate_async"
    t.steps.rollout_is_elsewhere = separate
    t.steps.generates_ahead = "OneStepOffRayTrainer" in classes
    # fully_async logs under versions of the weights, of which each takes several steps.
    t.step_values.by_number = not hasattr(trainer, "current_param_version")
    t.step_values.ask = ray_actors.ask_for_values


def _wrap_fit(trainer: Any, patches: Patches, waits_for_rollout: bool) -> None:
    original = trainer.fit

    def running(t: Telemetry, trainer: Any) -> closing:
        _follow(t, trainer, waits_for_rollout)

        def leave(token: Any, error: BaseException | None) -> None:
            otel_context.detach(token)
            _finish(t, error)

        return closing(leave, otel_context.attach(t.run_context))

    if inspect.iscoroutinefunction(original):

        @functools.wraps(original)
        async def fit(self: Any, *args: Any, **kwargs: Any) -> Any:
            t = telemetry.current()
            if t is None:
                return await original(self, *args, **kwargs)
            with running(t, self):
                return await original(self, *args, **kwargs)

    else:

        @functools.wraps(original)
        def fit(self: Any, *args: Any, **kwargs: Any) -> Any:
            t = telemetry.current()
            if t is None:
                return original(self, *args, **kwargs)
            with running(t, self):
                t.take_requests(self)
                return original(self, *args, **kwargs)

    patches.set(trainer, "fit", fit)


def _finish(t: Telemetry, error: BaseException | None) -> None:
    try:
        t.run_finished(error)
        t.finish(ray_actors.flush_actors)
    except Exception:
        border.caught("the end of training")
