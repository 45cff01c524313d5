"""CPU, memory and network of the host, through `opentelemetry-instrumentation-system-metrics`.

Its instruments are put on the board rather than straight on the provider: `psutil` computes the utilisation between two
calls from the same thread, so that calls from exports, which come from several threads, would give wrong values.
"""

import importlib.util
import re
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from statistics import fmean
from typing import Any

from opentelemetry.metrics import CallbackOptions, Meter, MeterProvider, Observation

from verl_otel.hardware.board import Board

CONFIG = {
    "system.cpu.time": ["idle", "user", "system", "iowait", "irq"],
    "system.cpu.utilization": ["idle", "user", "system", "iowait", "irq"],
    "system.memory.usage": ["used", "free", "cached"],
    "system.memory.utilization": ["used", "free", "cached"],
    "system.network.io": ["transmit", "receive"],
}

_VIRTUAL = re.compile(r"lo$|veth|cali|cilium|lxc|docker|br-|virbr|cni|flannel|kube|nodelocaldns|tunl|dummy|ifb")
"""Network devices that only pass on, inside of the host, what another one sends: one per container, without bound."""


def is_available() -> bool:
    """Whether the package is installed."""
    try:
        return importlib.util.find_spec("opentelemetry.instrumentation.system_metrics") is not None
    except ImportError:
        return False


_Callback = tuple[Callable[[CallbackOptions], Iterable[Observation]], Callable[[list[float]], float]]
"""A callback of the instrumentor, and how the values of all CPUs become one: times are summed, fractions averaged."""


class Host:
    """The host's metrics. All calls must come from one thread."""

    def __init__(self, provider: MeterProvider, board: Board, labels: Mapping[str, str]) -> None:
        """
        Raises:
            ImportError: the package or `psutil` is not usable.
        """
        from opentelemetry.instrumentation.system_metrics import SystemMetricsInstrumentor

        class OwnInstrumentor(SystemMetricsInstrumentor):
            _instance = None  # else it would be the user's own instrumentor, with another configuration

        self._callbacks: dict[str, _Callback] = {}
        instrumentor = OwnInstrumentor(labels=dict(labels), config=dict(CONFIG))
        instrumentor.instrument(skip_dep_check=True, meter_provider=_Redirect(provider, board, self._callbacks))
        self.sample()  # the first utilisation is over no time at all

    def sample(self) -> dict[str, list[Observation]]:
        """Current observations, by the instrument's name."""
        return {name: _reduced(callback(CallbackOptions()), of) for name, (callback, of) in self._callbacks.items()}


class _Redirect:
    """The part of a meter provider and its meter that the instrumentor uses; what is observed goes to a board."""

    def __init__(self, provider: MeterProvider, board: Board, callbacks: dict[str, _Callback]) -> None:
        self._provider, self._board, self._callbacks = provider, board, callbacks

    def get_meter(self, *arguments: Any, **named: Any) -> "_Redirect":
        self._meter: Meter = self._provider.get_meter(*arguments, **named)
        return self

    def create_observable_counter(self, **arguments: Any) -> None:
        self._create("counter", sum, **arguments)

    def create_observable_gauge(self, **arguments: Any) -> None:
        self._create("gauge", fmean, **arguments)

    def _create(
        self, kind: str, of_all: Any, *, name: str, callbacks: Sequence[Any], unit: str, description: str
    ) -> None:
        (callback,) = callbacks
        self._callbacks[name] = (callback, of_all)
        self._board.instrument(self._meter, kind, name, unit, description)


def _reduced(observations: Iterable[Observation], of_all: Callable[[list[float]], float]) -> list[Observation]:
    """Without virtual network devices; over all CPUs: hundreds of series per node would tell little more."""
    kept: list[Observation] = []
    of_cpus: dict[tuple[tuple[str, Any], ...], list[float]] = defaultdict(list)
    for observation in observations:
        attributes = dict(observation.attributes or {})
        if attributes.pop("cpu", None) is not None:
            of_cpus[tuple(attributes.items())].append(observation.value)
        elif not _VIRTUAL.match(str(attributes.get("device", ""))):
            kept.append(observation)
    return kept + [Observation(of_all(values), dict(key)) for key, values in of_cpus.items()]
