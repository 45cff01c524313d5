"""What was opened around a call of verl's is closed however the call ends, and told the exception that ends it."""

from collections.abc import Callable
from types import TracebackType
from typing import Any


class closing:
    """`with closing(leave, opened): ...` calls `leave(opened, error)` at the end; the exception goes on."""

    __slots__ = ("_leave", "_opened")

    def __init__(self, leave: Callable[[Any, BaseException | None], None], opened: Any) -> None:
        self._leave = leave
        self._opened = opened

    def __enter__(self) -> None:
        pass

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._leave(self._opened, error)
