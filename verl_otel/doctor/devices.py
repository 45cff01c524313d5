"""Which GPUs there are, and which of them CUDA would show to a process that is started here."""

from collections.abc import Iterator, Mapping
from typing import Any

from verl_otel.doctor.asked import Asked
from verl_otel.doctor.findings import Finding, note, ok, warning
from verl_otel.hardware import visible
from verl_otel.hardware.nvml import NvmlReader
from verl_otel.hardware.readers import Device

_NO_DRIVER = (
    "on a machine with NVIDIA's GPUs: does nvidia-smi work here? In a container, NVIDIA_DRIVER_CAPABILITIES needs "
    "`utility`"
)
_BY_UUID = "set it to UUIDs (nvidia-smi -L), or set CUDA_DEVICE_ORDER=PCI_BUS_ID"


def check(asked: Asked) -> Iterator[Finding]:
    """NVML's devices by UUID, against the mask."""
    reason, fix = _no_nvml()
    if reason:
        what = f"no NVML ({reason}): metrics of GPUs will be missing, everything else works"
        yield note("VO-GPU-NO-NVML", what, fix)
        return
    reader = NvmlReader.open()
    if reader is None:  # it was there a moment ago
        yield warning("VO-GPU-NO-NVML", "NVML does not answer", "look with nvidia-smi, and at the kernel's log")
        return
    try:
        yield from _devices(reader.devices(), asked.environ)
    finally:
        reader.close()


def _no_nvml() -> tuple[str, str]:
    """Why NVML does not work here, and what to do; empty where it does."""
    try:
        import pynvml
    except ImportError:
        return "the package nvidia-ml-py is not installed", "pip install 'verl-otel[hardware]'"
    try:
        pynvml.nvmlInit()
        pynvml.nvmlShutdown()
    except Exception as error:
        return f"{type(error).__name__}: {error}", _NO_DRIVER
    return "", ""


def _devices(devices: list[Device], environ: Mapping[str, str]) -> Iterator[Finding]:
    mask = environ.get(NvmlReader.mask)
    shown_mask = f"{NvmlReader.mask}={mask}" if mask is not None else f"{NvmlReader.mask} is not set"
    names = {device.uuid: f"{device.name} {device.model} {device.uuid}" for device in devices}
    data: dict[str, Any] = {"mask": mask, "devices": names}
    if not devices:
        yield note("VO-GPU-NONE", "NVML works, and has no GPU", "is this the node that you mean?", **data)
        return
    try:
        used = visible.resolve(mask, devices)
    except visible.Unsure as error:
        what = f"{shown_mask} does not tell for certain which of {len(devices)} devices it means ({error})"
        yield warning("VO-GPU-UNSURE", what, f"{_BY_UUID}; until then there are no metrics of GPUs", **data)
        return
    wanted = [part.strip() for part in (mask or "").split(",") if part.strip()]
    if mask is not None and len(used) < len(wanted) and not (len(wanted) == 1 and wanted[0] in ("-1", "NoDevFiles")):
        yield warning(
            "VO-GPU-MASK",
            f"{shown_mask} means {len(used)} devices, not {len(wanted)}: CUDA stops at the first that is not there, "
            "and one that is named twice makes it empty",
            f"correct {NvmlReader.mask}; the devices are: {'; '.join(names.values())}",
            visible=used,
            **data,
        )
        return
    shown = "; ".join(names[uuid] for uuid in used) or "none"
    yield ok("VO-GPU", f"{shown_mask}: {len(used)} of {len(devices)} devices: {shown}", visible=used, **data)
