"""NVIDIA's GPUs, through NVML (package `nvidia-ml-py`, module `pynvml`).

NVML ignores `CUDA_VISIBLE_DEVICES` and numbers cards by PCI bus. CUDA does so only with `CUDA_DEVICE_ORDER=PCI_BUS_ID`;
its default, `FASTEST_FIRST`, is known to be the same order only where all cards are of one kind.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterator
from typing import Any

from verl_otel.hardware.readers import Device, DeviceLost

logger = logging.getLogger(__name__)


class NvmlReader:
    """The `GpuReader` for NVIDIA's GPUs."""

    mask = "CUDA_VISIBLE_DEVICES"
    ray_resource = "GPU"

    @classmethod
    def open(cls) -> NvmlReader | None:
        """A reader, or None where NVML is absent or does not work."""
        try:
            import pynvml

            pynvml.nvmlInit()
        except Exception as error:
            logger.debug("no NVML: %s: %s", type(error).__name__, error)
            return None
        return cls(pynvml)

    def __init__(self, nvml: Any) -> None:
        self._nvml = nvml
        self._handles: dict[str, Any] = {}
        self._unsupported: set[tuple[str, Callable[..., Any]]] = set()
        self._lost = (nvml.NVMLError_GpuIsLost, nvml.NVMLError_ResetRequired)
        self._never = (
            AttributeError,  # not in this version of the package
            nvml.NVMLError_FunctionNotFound,  # not in this version of the driver
            nvml.NVMLError_NotSupported,
            nvml.NVMLError_NoPermission,
        )

    def devices(self) -> list[Device]:
        cards: list[tuple[int, str, str, list[Device]]] = []
        kinds = set()
        count = self._nvml.nvmlDeviceGetCount()
        for number in range(count):
            try:
                handle = self._nvml.nvmlDeviceGetHandleByIndex(number)
                uuid, model = self._identify(handle)
                instances = list(self._instances(handle, uuid, number))
            except self._nvml.NVMLError as error:
                logger.debug("GPU %d does not answer: %s", number, error)
                continue
            cards.append((number, uuid, model, instances))
            kinds.add((model, self._size(handle), bool(instances)))
        by_bus = os.environ.get("CUDA_DEVICE_ORDER") == "PCI_BUS_ID" or len(kinds) == 1
        certain = by_bus and len(cards) == count
        found = []
        for number, uuid, model, instances in cards:
            found.append(Device(uuid, f"GPU {number}", "NVIDIA", model, number if certain else None))
            found.extend(instances)
        return found

    def _instances(self, handle: Any, card: str, number: int) -> Iterator[Device]:
        """The MIG instances of a card."""
        nvml = self._nvml
        try:
            if nvml.nvmlDeviceGetMigMode(handle)[0] != nvml.NVML_DEVICE_MIG_ENABLE:
                return
            count = nvml.nvmlDeviceGetMaxMigDeviceCount(handle)
        except self._never:
            return
        for part in range(count):
            try:
                instance = nvml.nvmlDeviceGetMigDeviceHandleByIndex(handle, part)
            except nvml.NVMLError_NotFound:
                continue
            uuid, model = self._identify(instance)
            ids = f"{nvml.nvmlDeviceGetGpuInstanceId(instance)}/{nvml.nvmlDeviceGetComputeInstanceId(instance)}"
            name = f"GPU {number} MIG {part}"
            yield Device(uuid, name, "NVIDIA", model, None, parent=card, aliases=(f"MIG-{card}/{ids}",))

    def _identify(self, handle: Any) -> tuple[str, str]:
        uuid = _text(self._nvml.nvmlDeviceGetUUID(handle))
        self._handles[uuid] = handle
        return uuid, _text(self._nvml.nvmlDeviceGetName(handle))

    def _size(self, handle: Any) -> int | None:
        try:
            return self._nvml.nvmlDeviceGetMemoryInfo(handle).total
        except self._never:
            return None

    def read(self, device: Device) -> dict[str, float]:
        handle = self._handles[device.uuid]
        values: dict[str, float] = {}
        # Power and the like belong to the card, which other jobs use too: they are not read for a part of it.
        for read in _OF_A_PART if device.parent else _OF_A_CARD:
            if (device.uuid, read) in self._unsupported:
                continue
            try:
                values.update(read(self._nvml, handle))
            except self._lost as error:
                raise DeviceLost(str(error)) from error
            except self._never:
                self._unsupported.add((device.uuid, read))
            except self._nvml.NVMLError as error:
                logger.debug("%s of %s is not known now: %s", read.__name__, device.name, error)
        return values

    def close(self) -> None:
        try:
            self._nvml.nvmlShutdown()
        except self._nvml.NVMLError as error:
            logger.debug("NVML does not shut down: %s", error)


def _text(value: str | bytes) -> str:
    return value.decode() if isinstance(value, bytes) else value  # bytes: `pynvml` before 11.5


def _utilization(nvml: Any, handle: Any) -> dict[str, float]:
    return {"utilization": nvml.nvmlDeviceGetUtilizationRates(handle).gpu / 100}


def _memory(nvml: Any, handle: Any) -> dict[str, float]:
    memory = nvml.nvmlDeviceGetMemoryInfo(handle)
    return {"memory.usage": memory.used, "memory.limit": memory.total}


def _power(nvml: Any, handle: Any) -> dict[str, float]:
    return {"power": nvml.nvmlDeviceGetPowerUsage(handle) / 1000}  # mW


def _energy(nvml: Any, handle: Any) -> dict[str, float]:
    return {"energy": nvml.nvmlDeviceGetTotalEnergyConsumption(handle) / 1000}  # mJ


def _temperature(nvml: Any, handle: Any) -> dict[str, float]:
    try:
        return {"temperature": nvml.nvmlDeviceGetTemperature(handle, nvml.NVML_TEMPERATURE_GPU)}
    except (AttributeError, nvml.NVMLError_FunctionNotFound):  # NVIDIA announced that CUDA 14 removes it
        return {"temperature": nvml.nvmlDeviceGetTemperatureV(handle, nvml.NVML_TEMPERATURE_GPU)}


def _corrected(nvml: Any, handle: Any) -> dict[str, float]:
    return {"errors.corrected": _errors(nvml, handle, nvml.NVML_MEMORY_ERROR_TYPE_CORRECTED)}


def _uncorrected(nvml: Any, handle: Any) -> dict[str, float]:
    return {"errors.uncorrected": _errors(nvml, handle, nvml.NVML_MEMORY_ERROR_TYPE_UNCORRECTED)}


def _errors(nvml: Any, handle: Any, kind: int) -> int:
    return nvml.nvmlDeviceGetTotalEccErrors(handle, kind, nvml.NVML_VOLATILE_ECC)


_OF_A_PART = (_utilization, _memory)
_OF_A_CARD = (*_OF_A_PART, _power, _energy, _temperature, _corrected, _uncorrected)
