"""What reads GPUs: the interface, NVIDIA's own reader, and those of other vendors from other packages.

A package adds a reader with an entry point of the group `verl_otel_gpu_reader`: a callable without arguments that
returns a `GpuReader`. On a machine without its devices, `devices()` returns nothing.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import entry_points
from typing import Protocol

from verl_otel import border

GROUP = "verl_otel_gpu_reader"


class DeviceLost(Exception):
    """A device no longer answers, and will not until it is reset."""


@dataclass(frozen=True)
class Device:
    """A card, or a part of one that is used like a card (MIG instance)."""

    uuid: str
    name: str
    """Easily recognised on the node, e.g. `GPU 3`."""
    vendor: str
    model: str
    index: int | None
    """The index that means this device in the variable `GpuReader.mask`; None where that is not certain."""
    parent: str = ""
    """UUID of the card, for a part of one."""
    aliases: tuple[str, ...] = ()
    """Other names that mean this device in the variable `GpuReader.mask`."""


class GpuReader(Protocol):
    """Reads the GPUs of one kind of driver. Called from one thread."""

    mask: str
    """Environment variable with the devices that a process may use, e.g. `CUDA_VISIBLE_DEVICES`."""
    ray_resource: str
    """What Ray calls these devices: `GPU`, `NPU`."""

    def devices(self) -> Sequence[Device]:
        """All devices of the node, whatever the mask says."""
        ...

    def read(self, device: Device) -> Mapping[str, float]:
        """Current values of a device, by the keys of `names.FIELDS`; without those that it does not support.

        Units: fraction of time (`utilization`), bytes (`memory.*`), W, J, degrees Celsius, number of errors.

        Raises:
            DeviceLost: it fell off the bus.
        """
        ...

    def close(self) -> None: ...


def load() -> list[GpuReader]:
    """The readers that work here. NVML that is absent or broken is no news; a broken reader of others is."""
    from verl_otel.hardware.nvml import NvmlReader  # it needs the classes above

    found: list[GpuReader] = []
    nvml = NvmlReader.open()
    if nvml is not None:
        found.append(nvml)
    for entry_point in entry_points(group=GROUP):
        try:
            found.append(entry_point.load()())
        except Exception as error:
            border.warn_once(
                f"GPU reader {entry_point.name}",
                "no metrics of GPUs through %r (%s), which cannot be loaded (%s: %s): repair or uninstall its package",
                entry_point.name,
                entry_point.value,
                type(error).__name__,
                error,
            )
    return found
