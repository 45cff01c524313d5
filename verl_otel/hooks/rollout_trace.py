"""`verl.utils.rollout_trace.rollout_trace_attr` (verl 0.6.1 to 0.9.1; `trace=` from 0.7.0): trajectories.

verl opens it around each run of an agent loop, of its own and of users' classes. What verl's own rollout tracing does
inside stays as it is.
"""

from __future__ import annotations

import functools
import inspect
from types import ModuleType, TracebackType
from typing import TYPE_CHECKING, Any

from verl_otel import telemetry
from verl_otel.hooks.patches import Patches
from verl_otel.tracing import propagation

if TYPE_CHECKING:
    from verl_otel.assembly import Telemetry


def install(module: ModuleType, patches: Patches) -> None:
    original = module.rollout_trace_attr
    signature = inspect.signature(original)

    @functools.wraps(original)
    def rollout_trace_attr(*args: Any, **kwargs: Any) -> Any:
        inner = original(*args, **kwargs)
        t = telemetry.current()
        if t is None:
            return inner
        bound = signature.bind(*args, **kwargs)
        return _TrajectoryContext(t, inner, bound.arguments)

    patches.set_everywhere(module, "rollout_trace_attr", rollout_trace_attr)


class _TrajectoryContext:
    """verl's context manager inside ours."""

    def __init__(self, t: Telemetry, inner: Any, arguments: dict[str, Any]) -> None:
        self._telemetry = t
        self._inner = inner
        self._arguments = arguments
        self._opened: Any = None

    def __enter__(self) -> Any:
        propagation.into_threads()
        get = self._arguments.get
        self._opened = self._telemetry.trajectories.enter(
            get("step"), get("sample_index"), get("rollout_n"), get("validate", False)
        )
        try:
            return self._inner.__enter__()
        except BaseException as error:
            self._telemetry.trajectories.leave(self._opened, error)
            raise

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> Any:
        try:
            return self._inner.__exit__(kind, error, traceback)
        finally:
            self._telemetry.trajectories.leave(self._opened, error)
