"""The last sample, shown to every export until it is too old.

Exports only look: whatever is slow or hangs (NVML does, when a GPU is lost) does so in the sampler's thread.
"""

import time
from collections.abc import Mapping, Sequence
from functools import partial
from weakref import WeakKeyDictionary

from opentelemetry.metrics import CallbackOptions, Meter, MeterProvider, Observation

_boards: WeakKeyDictionary[MeterProvider, "Board"] = WeakKeyDictionary()


class Board:
    """The observations of one sampler, by instrument."""

    @classmethod
    def of(cls, provider: MeterProvider) -> "Board":
        """The one board of a provider: instruments stay, with their callbacks, when a sampler stops and starts."""
        return _boards.setdefault(provider, cls())

    def __init__(self) -> None:
        self._values: Mapping[str, Sequence[Observation]] = {}
        self._until = 0.0

    def instrument(self, meter: Meter, kind: str, name: str, unit: str, description: str) -> None:
        """Make an asynchronous instrument that shows what is put under its name.

        Args:
            kind: `gauge`, `counter` or `up_down_counter`.
        """
        getattr(meter, f"create_observable_{kind}")(name, [partial(self._show, name)], unit, description)

    def put(self, values: Mapping[str, Sequence[Observation]], seconds: float) -> None:
        """Show these observations, and nothing else, for so many seconds at most."""
        self._values, self._until = values, time.monotonic() + seconds

    def clear(self) -> None:
        self._values = {}

    def _show(self, name: str, _: CallbackOptions) -> Sequence[Observation]:
        return self._values.get(name, ()) if time.monotonic() < self._until else ()
