"""Forked children: they have none of their parent's threads, and may have locks of its that nobody frees."""

import os
import weakref
from collections.abc import Callable


def in_child(method: Callable[[], object]) -> None:
    """Call a bound method in each forked child of this process, as long as its object lives."""
    reference = weakref.WeakMethod(method)

    def call() -> None:
        found = reference()
        if found is not None:
            found()

    os.register_at_fork(after_in_child=call)
