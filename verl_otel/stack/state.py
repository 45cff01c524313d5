"""What is known of a stack after the command that started it has ended: a file in the stack's folder."""

import fcntl
import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from verl_otel.stack import StackError
from verl_otel.stack.processes import Process


@dataclass(frozen=True)
class State:
    """How it was started, as `Stack` is given it, and the processes by service."""

    ports: dict[str, int]
    traces_on_disk: bool
    rules: Path
    relay: str | None
    processes: dict[str, Process]


def default_folder() -> Path:
    """Where logs and data of the user's stack are, so that every command finds it from everywhere."""
    return Path(os.environ.get("XDG_DATA_HOME") or Path.home() / ".local" / "share") / "verl-otel" / "stack"


def read(folder: Path) -> State | None:
    """The stack that was started from a folder and not stopped, None if there is none."""
    path = _file(folder)
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
        return State(
            {name: int(port) for name, port in found["ports"].items()},
            bool(found["traces_on_disk"]),
            Path(found["rules"]),
            found["relay"],
            {name: Process(int(pid), int(started)) for name, (pid, started) in found["processes"].items()},
        )
    except FileNotFoundError:
        return None
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise StackError(f"{path} cannot be read ({error}): end the stack's programs by hand and delete it") from error


def write(folder: Path, state: State) -> None:
    """Note what runs; with nothing running, that there is no stack."""
    path = _file(folder)
    if not state.processes:
        path.unlink(missing_ok=True)
        return
    content = {
        "ports": state.ports,
        "traces_on_disk": state.traces_on_disk,
        "rules": str(state.rules),
        "relay": state.relay,
        "processes": {name: [process.pid, process.started] for name, process in state.processes.items()},
    }
    new = path.with_suffix(".new")
    new.write_text(json.dumps(content, indent=1), encoding="utf-8")
    new.replace(path)


@contextmanager
def alone(folder: Path) -> Iterator[None]:
    """No other command starts or stops this stack meanwhile."""
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        lock = (folder / "lock").open("w")
    except OSError as error:
        raise StackError(f"{folder} cannot be written ({error.strerror}): give another with --folder") from error
    with lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise StackError(f"another command starts or stops the stack in {folder}: wait for it") from None
        yield


def _file(folder: Path) -> Path:
    return folder / "state.json"
