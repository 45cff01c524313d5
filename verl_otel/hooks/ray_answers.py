"""What actors are asked for; and `ray._private.worker.disconnect` (Ray 2.41 to 2.60), with which Ray's shutdown begins.

While Ray shuts down, also at the end of a process, it ends the driver at once, with exit status 1 and without exit
handlers, if another thread uses it or only lets go of a reference to an object. Our threads do both under a lock, and
what they still wait for is given up before.
"""

import functools
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterable
from types import ModuleType
from typing import Any, TypeVar

from verl_otel import border, forks
from verl_otel.hooks.patches import Patches

Function = TypeVar("Function", bound=Callable[..., Any])

_using_ray = forks.lock(sys.modules[__name__], "_using_ray", threading.RLock)
_shuts_down = False


def install(module: ModuleType, patches: Patches) -> None:
    original = module.disconnect

    @functools.wraps(original)
    def disconnect(*args: Any, **kwargs: Any) -> Any:
        global _shuts_down
        with _using_ray:
            _shuts_down = True
            Answers.give_up_all()
        try:
            return original(*args, **kwargs)
        finally:
            _shuts_down = False  # it is not connected any more

    patches.set(module, "disconnect", disconnect)


def connected_ray() -> Any:
    """Ray, where this process is connected to it; else None: any of its functions would start it again."""
    ray = sys.modules.get("ray")
    return ray if ray is not None and not _shuts_down and ray.is_initialized() else None


def _using(function: Function) -> Function:
    """Ray does not shut down while `function` runs, nor before what it leaves behind is freed."""

    @functools.wraps(function)
    def using(*args: Any, **kwargs: Any) -> Any:
        with _using_ray:
            return function(*args, **kwargs)

    return using  # type: ignore[return-value]


class Answers:
    """What actors were asked for (`verl_otel.metrics.step_values.Answers`)."""

    _all: "weakref.WeakSet[Answers]" = weakref.WeakSet()
    _abandoned: list[Any] = []
    """References that nobody waits for, freed when Ray is used the next time."""

    def __init__(self, references: list[Any]) -> None:
        self.references = references
        self._dead = False
        self._all.add(self)

    def __del__(self) -> None:
        self._abandoned.append(self.references)

    @classmethod
    @_using
    def of(cls, actors: Iterable[Any], function: Callable[..., Any], *arguments: Any) -> "Answers":
        """Have each actor call `function(actor, *arguments)`, behind what it was called for before."""
        cls._abandoned.clear()
        references = []
        for actor in actors if connected_ray() is not None else ():
            try:
                references.append(actor.__ray_call__.remote(function, *arguments))
            except Exception:  # the actor is gone
                border.caught("asking an actor")
        return cls(references)

    @classmethod
    def give_up_all(cls) -> None:
        """Wait for nothing any longer. To be called while no other thread uses Ray."""
        for answers in list(cls._all):
            answers.references.clear()
        cls._abandoned.clear()

    @_using
    def ready(self) -> bool:
        ray = connected_ray()
        if not self.references or ray is None:
            return True
        _, missing = ray.wait(self.references, num_returns=len(self.references), timeout=0)
        return not missing

    def wait(self, timeout: float) -> None:
        """Wait until all have answered, `timeout` seconds at most."""
        deadline = time.monotonic() + timeout
        while not self.ready() and time.monotonic() < deadline:
            time.sleep(0.01)

    @_using
    def get(self) -> list[Any]:
        ray = connected_ray()
        if not self.references or ray is None:
            return []
        answered, self.references = ray.wait(self.references, num_returns=len(self.references), timeout=0)
        found = []
        for reference in answered:
            try:
                answer = ray.get(reference)
            except ray.exceptions.RayActorError:
                self._dead = True
                continue
            except Exception:  # the process does not have this package
                continue
            if answer is not None:
                found.append(answer)
        return found

    def dead(self) -> bool:
        return self._dead
