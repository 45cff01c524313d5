"""What users may call from their own code: a reward function, an agent loop, a subclass of a trainer, in any process.

Nothing here raises or blocks; where telemetry is off it does nothing. Names of metrics are `<module>/<name>`, such as
`reward/creative_score`. Rank, stage, model_type and the current step are attached.
"""

from __future__ import annotations

import functools
import inspect
import re
from collections.abc import Callable, Iterable
from types import TracebackType
from typing import Any, TypeVar

from verl_otel import border, telemetry

_Function = TypeVar("_Function", bound=Callable[..., Any])

_STAGE_NAME = re.compile(r"[a-z][a-z0-9_]{0,63}")
_MAX_STAGES = 100
_stages: set[str] = set()


def log_scalar(name: str, value: Any) -> None:
    """Log a number: a gauge with its last value, and in the step's event the mean over the step.

    Args:
        value: a Python, numpy or torch scalar on the CPU.
    """
    _log("log_scalar", lambda t: t.user.scalar(name, value))


def log_histogram(name: str, values: Iterable[Any]) -> None:
    """Log numbers of one distribution: a histogram, and in the step's event mean, minimum, maximum and count."""
    _log("log_histogram", lambda t: t.user.histogram(name, values))


def log_text(name: str, text: str) -> None:
    """Log a text (up to 4096 characters, 16 per step and process): an event, and an artifact of the MLflow run."""
    _log("log_text", lambda t: t.user.text(name, text))


def declare(
    name: str,
    kind: str = "",
    *,
    unit: str = "",
    description: str = "",
    frequency: str = "step",
    scope: str = "rank",
) -> None:
    """Say once what a metric is, before it is first logged; without it, scalars are gauges.

    Args:
        kind: `gauge`, `counter` (values are added up) or `histogram`; by default a histogram if there is one value for
            each episode, else a gauge.
        unit: in UCUM, such as `s` or `{token}`.
        frequency: `step`, `epoch` (the event has it once, when the epoch is over) or `episode` (many in a step).
        scope: `rank` (each process has its own value) or `global` (it is the same in all: `rank="all"`).
    """

    def log(t: Any) -> None:
        by_default = "histogram" if frequency == "episode" else "gauge"
        t.user.declare(name, kind or by_default, unit, description, frequency, scope)

    _log("declare", log)


def flush(timeout: float = 5.0) -> None:
    """Send what is pending, waiting `timeout` seconds at most."""
    t = telemetry.peek()
    if t is not None:
        try:
            t.flush(timeout)
        except Exception:
            border.caught("flush")


class stage:
    """A stage of the user's own: a span `verl.<name>` and its duration, under the step, rank or trajectory it is in.

    As context manager, or as decorator of a function or coroutine function::

        with stage("filter_samples"): ...

        @stage("filter_samples")
        async def filter_samples(...): ...

    Args:
        name: lower-case letters, digits and `_`.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._opened: list[Any] = []

    def __enter__(self) -> None:
        self._opened.append(_enter(self._name))

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        opened = self._opened.pop()
        if opened is not None:
            t, scope = opened
            t.steps.leave(scope, error)

    def __call__(self, function: _Function) -> _Function:
        name = self._name
        if inspect.iscoroutinefunction(function):

            @functools.wraps(function)
            async def call(*args: Any, **kwargs: Any) -> Any:
                with stage(name):
                    return await function(*args, **kwargs)

        else:

            @functools.wraps(function)
            def call(*args: Any, **kwargs: Any) -> Any:
                with stage(name):
                    return function(*args, **kwargs)

        return call  # type: ignore[return-value]


def _enter(name: str) -> Any:
    try:
        t = telemetry.current()
        if t is None or not _legal_stage(name):
            return None
        scope = t.steps.enter(name)
        return None if scope is None else (t, scope)
    except Exception:
        border.caught("opening a stage")
        return None


def _legal_stage(name: Any) -> bool:
    if name in _stages:
        return True
    if isinstance(name, str) and _STAGE_NAME.fullmatch(name) and name != "step" and len(_stages) < _MAX_STAGES:
        _stages.add(name)
        return True
    border.warn_once(
        f"stage {str(name)[:80]}",
        "stage(%r) has no span: a name is of lower-case letters, digits and _, it is not `step`, and there are at most "
        "%d of them",
        str(name)[:200],
        _MAX_STAGES,
    )
    return False


def _log(what: str, log: Callable[[Any], None]) -> None:
    try:
        t = telemetry.current()
        if t is not None:
            log(t)
    except Exception:
        border.caught(what)
