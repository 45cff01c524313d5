"""`verl.trainer.main_ppo_sync.PPOTrainer` (verl 0.8.0 only): the trainer with the transfer queue, before it became V1.

It is part of the program that is run, `python -m verl.trainer.main_ppo_sync`: no import hook sees its class, and Ray
pickles that by value. So, before Ray starts, its `__init__` is wrapped; the wrapper travels with the class and, in the
process that trains, has the rest wrapped as in other versions. It refers to nothing of ours by name, and works in a
process that does not have this package.
"""

import functools
import sys
from collections.abc import Callable
from types import ModuleType
from typing import Any

from verl_otel import border
from verl_otel.hooks import trainer
from verl_otel.hooks.patches import Patches

_MODULE = "verl.trainer.main_ppo_sync"

_arrived: set[type] = set()


def install(module: ModuleType, patches: Patches) -> None:
    """On `ray`: look for the class in the program that is run when this starts Ray."""
    original = module.init

    @functools.wraps(original)
    def init(*args: Any, **kwargs: Any) -> Any:
        try:
            program = sys.modules["__main__"]
            if getattr(program.__spec__, "name", None) == _MODULE:
                patches.set(program.PPOTrainer, "__init__", _travelling(program.PPOTrainer.__init__))
        except Exception:
            border.caught("wrapping the trainer of main_ppo_sync")
        return original(*args, **kwargs)

    patches.set(module, "init", init)


def install_imported(module: ModuleType, patches: Patches) -> None:
    """On the module itself: in a program of the user's that imports it, the class travels by reference."""
    trainer.install_main_ppo_sync(module.PPOTrainer, patches)


def arrived(trainer_class: type) -> None:
    """Runs in the process that trains."""
    try:
        if trainer_class not in _arrived:
            _arrived.add(trainer_class)
            trainer.install_main_ppo_sync(trainer_class, Patches())
    except Exception:
        border.caught("wrapping the trainer of main_ppo_sync")


def _travelling(original: Callable[..., None]) -> Callable[..., None]:
    @functools.wraps(original)
    def __init__(self: Any, *args: Any, **kwargs: Any) -> None:
        try:
            from verl_otel.hooks import main_ppo_sync
        except ImportError:
            pass
        else:
            main_ppo_sync.arrived(type(self))
        original(self, *args, **kwargs)

    return __init__
