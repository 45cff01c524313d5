"""The folder in which runs are recorded and spooled: its disk, and what was never sent."""

import os
import re
import shutil
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from verl_otel.config import FOLDER, Settings
from verl_otel.doctor.asked import Asked
from verl_otel.doctor.findings import Finding, note, ok, problem, warning
from verl_otel.recording import replay

LITTLE, ALMOST_NONE = 2 << 30, 100 << 20
"""Bytes that are free."""

READ = 256 << 20
"""Bytes of spools that are read; of what is beyond, only the size is known."""

SHOWN = 20
"""Runs that are told of, the latest."""

_SPOOLED = re.compile(r".+-(?P<host>[^/]+)-(?P<pid>\d+)-[0-9a-f]{6}\.(?:traces|metrics|logs)\.\d+\.jsonl")


def check(asked: Asked) -> Iterator[Finding]:
    """The disk, then each run with something in its spool."""
    folder = Path(Settings.from_environ(asked.environ).folder)
    yield from _disk(folder)
    spooled = _spooled(folder) if folder.is_dir() else []
    budget, nothing = READ, True
    for run in spooled[:SHOWN]:
        found, budget = _of_run(run, budget)
        nothing = nothing and not found
        yield from found
    if len(spooled) > SHOWN:
        what = f"{len(spooled) - SHOWN} older runs in {folder} have a spool too"
        yield note("VO-SPOOL-MORE", what, "replay or remove what is above, and call doctor again")
    if nothing:
        yield ok("VO-SPOOL", f"nothing in {folder} waits to be sent", folder=str(folder))


def _disk(folder: Path) -> Iterator[Finding]:
    there = next(place for place in (folder, *folder.parents) if place.exists())
    try:
        with tempfile.TemporaryFile(dir=there):
            pass
        free = shutil.disk_usage(there).free
    except OSError as error:
        yield problem(
            "VO-FOLDER",
            f"{there} cannot be written ({error.strerror}): nothing can be recorded or spooled there",
            f"set {FOLDER} to a folder that can be written",
            folder=str(folder),
        )
        return
    data = {"folder": str(folder), "free": free}
    what = f"runs are recorded and spooled in {folder}, where {_size(free)} are free"
    fix = f"make room, or set {FOLDER}: what cannot be spooled while a Collector is away is lost"
    if free < ALMOST_NONE:
        yield problem("VO-DISK", what, fix, **data)
    elif free < LITTLE:
        yield warning("VO-DISK", what, fix, **data)
    else:
        yield ok("VO-DISK", what, **data)


def _spooled(folder: Path) -> list[Path]:
    """The folders of runs with a spool that has files, the latest first."""
    found = []
    for spool in folder.glob("*/spool"):
        try:
            if any(path.suffix == ".jsonl" for path in spool.iterdir()):
                found.append((spool.stat().st_mtime, spool.parent))
        except OSError:  # another user's, or gone
            continue
    return [run for _, run in sorted(found, reverse=True)]


@dataclass
class _Spool:
    """What is in the spool of a run. Bytes; `oldest` is Unix time."""

    records: int = 0
    size: int = 0
    oldest: float = 0.0
    running: set[int] = field(default_factory=set)
    unknown: bool = False


def _of_run(run: Path, budget: int) -> tuple[list[Finding], int]:
    spool = _Spool()
    offsets = replay.offsets(run / "spool" / replay.STATE)
    for path in sorted((run / "spool").glob("*.jsonl")):
        try:
            budget = _add(spool, path, offsets.get(path.name, 0), budget)
        except OSError:  # sent and removed meanwhile, or not ours to read
            continue
    data = {"run": str(run), "records": spool.records, "bytes": spool.size, "processes": sorted(spool.running)}
    if not spool.size:
        return [], budget
    age = _age(time.time() - spool.oldest)
    what = (
        f"{run}: {'at least ' if spool.unknown else ''}{spool.records} requests ({_size(spool.size)}) were not sent, "
    )
    if spool.running:
        pids = ", ".join(map(str, sorted(spool.running)))
        what += f"the oldest for {age}; the run goes on (process {pids})"
        return [note("VO-SPOOL-OF-A-RUN", what, "its processes send them when the endpoint is back", **data)], budget
    command = f"verl-otel replay {run} --endpoint http://<collector>:4318"
    return [warning("VO-SPOOL-LEFT", f"{what}the oldest for {age}", f"send them: {command}", **data)], budget


def _add(spool: _Spool, path: Path, sent: int, budget: int) -> int:
    """Count a file's records that were not sent; returns what is left of the bytes that may be read."""
    status = path.stat()
    if budget <= 0:
        spool.unknown, left = True, status.st_size - sent
        if left <= 0:
            return 0
        spool.size += left
    else:
        size = 0
        with path.open("rb") as lines:
            lines.seek(sent)
            for line in lines:
                budget -= len(line)
                if line.strip() not in replay.NOTHING:
                    spool.records += 1
                    size += len(line)
        if not size:
            return budget
        spool.size += size
    spool.oldest = min(spool.oldest or status.st_mtime, status.st_mtime)
    name = _SPOOLED.fullmatch(path.name)
    if name and name["host"] == os.uname().nodename and _runs(int(name["pid"])):
        spool.running.add(int(name["pid"]))
    return budget


def _runs(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        pass
    return True


def _size(count: float) -> str:
    for unit in ("bytes", "KiB", "MiB"):
        if count < 1024:
            return f"{count:.0f} {unit}"
        count /= 1024
    return f"{count:.1f} GiB"


def _age(seconds: float) -> str:
    for unit, length in (("days", 86400), ("hours", 3600), ("minutes", 60)):
        if seconds >= 2 * length:
            return f"{seconds / length:.0f} {unit}"
    return f"{max(0.0, seconds):.0f} seconds"
