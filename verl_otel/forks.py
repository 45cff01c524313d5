"""Forked children: they have none of their parent's threads, and may have locks of its that nobody frees."""

import os
import threading
import weakref
from collections.abc import Callable
from typing import Any


def in_child(method: Callable[[], object]) -> None:
    """Call a bound method in each forked child of this process, as long as its object lives."""
    reference = weakref.WeakMethod(method)

    def call() -> None:
        found = reference()
        if found is not None:
            found()

    os.register_at_fork(after_in_child=call)


def lock(owner: Any, name: str, make: Callable[[], Any] = threading.Lock) -> Any:
    """A lock for the attribute `name` of `owner`, which may be a module; in each forked child a new one gets there.

    Args:
        make: `threading.RLock` for one that a thread may take twice.
    """
    reference = weakref.ref(owner)

    def call() -> None:
        found = reference()
        if found is not None:
            setattr(found, name, make())

    os.register_at_fork(after_in_child=call)
    return make()
