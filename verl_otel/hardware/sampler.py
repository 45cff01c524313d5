"""The sampler: announces the GPUs of its process and, if this process is elected, samples those of the whole run."""

import logging
import os
import threading
from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any

from opentelemetry.metrics import MeterProvider, Observation

from verl_otel import border, forks
from verl_otel.hardware import host, names, readers, visible
from verl_otel.hardware.board import Board
from verl_otel.hardware.election import Election
from verl_otel.hardware.readers import Device, DeviceLost, GpuReader
from verl_otel.identity import WORKER, Identity
from verl_otel.semconv import attributes as attr
from verl_otel.version import __version__

logger = logging.getLogger(__name__)

FIRST_TRY = 1.0
"""Seconds before the first look, so that the actor's constructor has begun when Ray is asked for its GPUs."""

SHOWN = 3
"""Intervals for which a sample is shown if no newer one comes."""

_HOST_LABELS = {attr.RANK: attr.ALL_RANKS, attr.STAGE: "other", attr.MODEL_TYPE: "none"}


class Sampler:
    """The hardware thread of one process."""

    def __init__(
        self, identity: Identity, meter_provider: MeterProvider, interval: float, stopping: threading.Event
    ) -> None:
        self._identity = identity
        self._provider = meter_provider
        self._interval = interval
        self._stopping = stopping
        self._board = Board.of(meter_provider)
        self._readers: list[GpuReader] = []
        self._devices: dict[str, tuple[GpuReader, Device]] = {}
        self._lost: set[str] = set()
        self._announcement: dict[str, Any] = {}
        self._election: Election | None = None
        self._host: host.Host | None = None
        self._set_up = False
        self._unsure: set[str] = set()

    def run(self) -> None:
        """Sample until `stopping` is set; return at once where there is nothing to sample."""
        self._readers = readers.load()
        try:
            self._list_devices()
            if self._devices or host.is_available():
                self._take_part()
        finally:
            for reader in self._readers:
                reader.close()

    def _take_part(self) -> None:
        try:
            election = self._election = Election(self._identity.run_id)
        except OSError as error:
            border.warn_once(
                "hardware folder",
                "no hardware metrics from this process, since it has no place to agree with the others on the node on "
                "which one samples (%s): set TMPDIR to a folder that this user can write to",
                error,
            )
            return
        forks.in_child(self._forget)
        self._stopping.wait(min(FIRST_TRY, self._interval))
        try:
            while not self._stopping.is_set():
                try:
                    self._announce(election)
                    if election.is_won():
                        self._sample(election)
                except Exception:
                    border.caught("sampling the hardware")
                self._stopping.wait(self._interval)
        finally:
            self._board.clear()
            election.leave()

    def _forget(self) -> None:
        """In a forked child, which exports too: show nothing, and keep no lock when the parent dies."""
        self._board.clear()
        if self._election is not None:
            self._election.abandon()

    # ---- devices ------------------------------------------------------------------------------------------------

    def _list_devices(self) -> None:
        for reader in self._readers:
            try:
                self._devices.update({device.uuid: (reader, device) for device in reader.devices()})
            except Exception as error:
                logger.debug("%s cannot list devices: %s: %s", type(reader).__name__, type(error).__name__, error)

    def _used_here(self) -> list[str]:
        found: list[str] = []
        for reader in self._readers:
            devices = [device for its_reader, device in self._devices.values() if its_reader is reader]
            try:
                found += visible.used_here(self._identity.role, reader, devices)
            except visible.Unsure as reason:
                if reader.mask in self._unsure:
                    continue
                self._unsure.add(reader.mask)
                border.warn_once(
                    f"devices by {reader.mask}",
                    "no metrics of this process's GPUs, since %s=%r does not tell for certain which they are (%s): set "
                    "CUDA_DEVICE_ORDER=PCI_BUS_ID, or give UUIDs",
                    reader.mask,
                    os.environ.get(reader.mask),
                    reason,
                )
        return found

    def _announce(self, election: Election) -> None:
        rank = self._identity.worker_index if self._identity.role == WORKER else None
        announcement = {"pid": os.getpid(), "uuids": self._used_here(), "rank": rank}
        if announcement != self._announcement and (announcement["uuids"] or self._announcement):
            election.announce(announcement)
            self._announcement = announcement

    # ---- samples ------------------------------------------------------------------------------------------------

    def _sample(self, election: Election) -> None:
        values: dict[str, list[Observation]] = defaultdict(list)
        ranks: dict[str, list[str | None]] = defaultdict(list)
        for announcement in election.announced():
            for uuid in announcement["uuids"]:
                ranks[uuid].append(announcement["rank"])
        if not ranks.keys() <= self._devices.keys():
            self._list_devices()  # MIG instances can be made at any time
        for uuid in sorted(ranks.keys() & self._devices.keys()):
            self._sample_device(*self._devices[uuid], ranks[uuid], values)
        if not self._set_up:
            self._set_up = True
            self._make_instruments()
        elif self._host is not None:
            try:
                values.update(self._host.sample())
            except Exception:
                border.caught("sampling the host")
        self._board.put(dict(values), SHOWN * self._interval)

    def _make_instruments(self) -> None:
        meter = self._provider.get_meter(names.SCOPE, __version__, names.SCHEMA_URL)
        for metric in names.ALL:
            self._board.instrument(meter, metric.kind, metric.name, metric.unit, metric.description)
        if host.is_available():
            try:
                self._host = host.Host(self._provider, self._board, _HOST_LABELS)
            except Exception as error:
                logger.debug("no metrics of the host: %s: %s", type(error).__name__, error)

    def _sample_device(
        self,
        reader: GpuReader,
        device: Device,
        ranks: Sequence[str | None],
        values: Mapping[str, list[Observation]],
    ) -> None:
        read = self._read(reader, device)
        usage, limit = read.get("memory.usage"), read.get("memory.limit")
        if usage is not None and limit:
            read["memory.utilization"] = usage / limit
        attributes = {
            names.ID: device.uuid,
            names.NAME: device.name,
            names.VENDOR: device.vendor,
            names.MODEL: device.model,
            names.PARENT: device.parent,
            attr.RANK: _rank(ranks),
            attr.STAGE: "other",
            attr.MODEL_TYPE: "none",
        }
        for field, (metric, own) in names.FIELDS.items():
            if field in read:
                values[metric.name].append(Observation(read[field], {**attributes, **own}))

    def _read(self, reader: GpuReader, device: Device) -> dict[str, float]:
        read: dict[str, float] = {}
        if device.uuid not in self._lost:
            try:
                read.update(reader.read(device))
            except DeviceLost as error:
                self._lost.add(device.uuid)
                border.warn_once(f"GPU {device.uuid}", "%s (%s) is lost: %s", device.name, device.uuid, error)
            except Exception:
                border.caught(f"reading {device.vendor} GPUs")
                return {}
        failed = device.uuid in self._lost
        return {**read, "status.ok": int(not failed), "status.failed": int(failed)}


def _rank(ranks: Sequence[str | None]) -> str:
    """The rank of the one rank worker on a device; `all` if it is not exactly one."""
    workers = [rank for rank in ranks if rank is not None]
    return workers[0] if len(workers) == 1 else attr.ALL_RANKS
