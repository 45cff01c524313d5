"""Replacing names of verl and Ray, and putting them back."""

import sys
from typing import Any

_MISSING = object()


class Patches:
    """The names replaced so far, in order."""

    def __init__(self) -> None:
        self._done: list[tuple[Any, str, Any, Any]] = []

    def set(self, owner: Any, name: str, replacement: Any) -> None:
        """Replace `owner.name`. On a class, what is put back is what the class's own `__dict__` had."""
        original = vars(owner).get(name, _MISSING)
        setattr(owner, name, replacement)
        self._done.append((owner, name, original, replacement))

    def set_everywhere(self, module: Any, name: str, replacement: Any) -> None:
        """Replace `module.name`, and the same object in modules of verl that have imported it by name already."""
        original = getattr(module, name)
        self.set(module, name, replacement)
        for other_name, other in list(sys.modules.items()):
            if other_name.startswith("verl.") and other is not module and vars(other).get(name) is original:
                self.set(other, name, replacement)

    def undo(self) -> None:
        """Put every name back, last first; a name that somebody else has replaced since is left to them."""
        while self._done:
            owner, name, original, replacement = self._done.pop()
            if vars(owner).get(name) is not replacement:
                continue
            if original is _MISSING:
                delattr(owner, name)
            else:
                setattr(owner, name, original)
