"""Which GPUs this process of the run uses, by UUID. Where that is not certain: none, rather than another job's.

- A Ray worker uses the GPUs that Ray gave to its actor, and no others. Its device mask alone does not tell: an actor
  without a GPU has an empty mask with some versions of Ray and the node's with others, and with
  `RAY_EXPERIMENTAL_NOSET_CUDA_VISIBLE_DEVICES` no worker has a mask of its own. verl's rollout servers ask Ray for no
  GPU: they use those of its rank workers.
- A rank worker of torchrun uses the one of its visible GPUs that `LOCAL_RANK` counts.
- The launcher uses none.
"""

import logging
import os
import sys
from collections.abc import Mapping, Sequence

from verl_otel import identity
from verl_otel.hardware.readers import Device, GpuReader

logger = logging.getLogger(__name__)


class Unsure(Exception):
    """A device mask does not tell for certain which devices it means."""


def used_here(role: str, reader: GpuReader, devices: Sequence[Device]) -> list[str]:
    """UUIDs of the devices that this process uses.

    Raises:
        Unsure: the mask of this process may mean other devices than NVML's numbers say.
    """
    return used(role, os.environ, reader.mask, devices, given_by_ray(reader.ray_resource), seen_by_torch())


def used(
    role: str,
    environ: Mapping[str, str],
    mask: str,
    devices: Sequence[Device],
    given: Sequence[str] | None,
    seen: Sequence[str],
) -> list[str]:
    """See the module.

    Args:
        mask: the variable with the device mask.
        given: the ids that Ray gave to the actor, in the terms of the mask; None outside of Ray's workers.
        seen: UUIDs of CUDA's devices in their order, without the prefix, where CUDA is initialised: they need no
            guessing of what the mask means.
    """
    certain = _known(seen, devices)
    if given is not None:
        return certain if len(certain) == len(given) else resolve(",".join(given), devices)
    if role != identity.WORKER:
        return []
    visible = certain or resolve(environ.get(mask), devices)
    local_rank = environ.get("LOCAL_RANK", "")
    if not local_rank.isdecimal():
        return visible
    if not certain and mask not in environ:
        return resolve(local_rank, devices)
    return visible[int(local_rank) : int(local_rank) + 1]


def resolve(mask: str | None, devices: Sequence[Device]) -> list[str]:
    """The UUIDs that a device mask means, in its order. CUDA's rules:

    None (unset) means all devices; the first entry that means no device, such as -1, ends the list; an entry that is
    repeated makes it empty; a GPU's UUID may be cut to a beginning that no other has.

    Raises:
        Unsure: it has numbers, and they are not known to be those of the devices; or it means a card that is split
            into MIG instances: CUDA takes one of them, and does not say which.
    """
    split = {device.parent for device in devices if device.parent}
    cards = [device for device in devices if not device.parent]
    if mask is None:
        if split:
            raise Unsure("no mask, and cards that are split into MIG instances")
        return [card.uuid for card in cards]
    found: list[str] = []
    kind = None
    for entry in (part.strip() for part in mask.split(",")):
        if kind not in (None, _kind(entry)):
            break
        kind = _kind(entry)
        uuid = _numbered(int(entry), cards) if entry.isdecimal() else _named(entry, devices)
        if uuid is None:
            break
        if uuid in split:
            raise Unsure(f"{entry} is a card that is split into MIG instances")
        if uuid in found:
            return []
        found.append(uuid)
    return found


def _kind(entry: str) -> str:
    return "number" if entry.isdecimal() else entry[:4]


def _numbered(number: int, cards: Sequence[Device]) -> str | None:
    numbers = {card.index: card.uuid for card in cards if card.index is not None}
    if cards and not numbers:
        raise Unsure("it has numbers, and the cards differ or one does not answer")
    return numbers.get(number)


def _named(entry: str, devices: Sequence[Device]) -> str | None:
    for device in devices:
        if entry == device.uuid or entry in device.aliases:
            return device.uuid
    if not entry.startswith("GPU-") or entry == "GPU-":
        return None
    begun = [device.uuid for device in devices if device.uuid.startswith(entry)]
    return begun[0] if len(begun) == 1 else None


def _known(seen: Sequence[str], devices: Sequence[Device]) -> list[str]:
    """The devices with these UUIDs; none if one of them is unknown, or a card that is split."""
    split = {device.parent for device in devices}
    uuids = {device.uuid.partition("-")[2]: device.uuid for device in devices if device.uuid not in split}
    return [uuids[uuid] for uuid in seen] if all(uuid in uuids for uuid in seen) else []


def given_by_ray(resource: str) -> list[str] | None:
    """The ids of a resource's devices that Ray gave to the actor of this process; None outside of Ray's workers."""
    if not identity.in_ray_worker():
        return None
    try:
        ray = sys.modules.get("ray")
        if ray is None or not ray.is_initialized():
            return []
        return list(ray.get_runtime_context().get_accelerator_ids().get(resource, []))
    except Exception as error:
        logger.debug("Ray does not say which devices this actor has: %s: %s", type(error).__name__, error)
        return []


def seen_by_torch() -> list[str]:
    """UUIDs of CUDA's devices, in CUDA's order, without the prefix `GPU-`; empty where CUDA is not initialised."""
    try:
        cuda = sys.modules["torch"].cuda
        if not cuda.is_initialized():
            return []
        return [str(cuda.get_device_properties(number).uuid) for number in range(cuda.device_count())]
    except Exception as error:  # not imported, being imported, or before torch 2.6
        logger.debug("torch does not tell CUDA's devices: %s: %s", type(error).__name__, error)
        return []
