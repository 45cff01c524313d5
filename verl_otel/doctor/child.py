"""What could break, block or change a process is done in one of its own: `python -m verl_otel.doctor.child NAME FD`.

The program that is named writes what it finds to a descriptor, one JSON object a line, so that one that is killed, or
crashes in somebody's C++, loses only what comes after.
"""

import contextlib
import json
import os
import select
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from importlib import import_module
from typing import Any

from verl_otel import config

PROGRAMS = {
    "hooks": "verl_otel.doctor.hooks",
    "pipeline": "verl_otel.doctor.settings",
    "ray": "verl_otel.doctor.cluster",
}
"""Name -> the module whose `in_child` is the program."""

ENDED = "ended"
"""The key of what comes last: why the process has ended, empty if it did what it had to."""

_NOT_ITS_OWN = (config.ACTIVE, config.RUN_ID, config.RUN_ATTEMPT, "TRACEPARENT", "TRACESTATE")


def run(name: str, environ: Mapping[str, str], end: float, argument: str = "") -> Iterator[dict[str, Any]]:
    """Start a program, and give what it finds as it comes; last `{"ended": why}`.

    Args:
        end: by `time.monotonic()`; the process is killed then.
        argument: for the program.
    """
    read, write = os.pipe()
    command = [sys.executable, "-m", "verl_otel.doctor.child", name, str(write), argument]
    process = subprocess.Popen(
        command,
        env=_environment(environ),
        pass_fds=[write],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    os.close(write)
    late = False
    try:
        pending = b""
        while True:
            late = not select.select([read], [], [], max(0.0, end - time.monotonic()))[0]
            content = b"" if late else os.read(read, 1 << 16)
            if not content:
                break
            *lines, pending = (pending + content).split(b"\n")
            for line in lines:
                yield json.loads(line)
    finally:
        os.close(read)
        if late:
            process.kill()
        try:
            status = process.wait(max(1.0, end - time.monotonic()))
        except subprocess.TimeoutExpired:  # it has said everything, and does not end
            process.kill()
            status = 0
    yield {ENDED: "it takes too long" if late else _reason(status)}


def _reason(status: int) -> str:
    return f"it was ended by signal {-status}" if status < 0 else f"it ended with status {status}" if status else ""


def _environment(environ: Mapping[str, str]) -> dict[str, str]:
    """This process's own, without what instruments a process, or makes it one of a run."""
    env = {key: value for key, value in environ.items() if key not in _NOT_ITS_OWN}
    folders = [folder for folder in env.get("PYTHONPATH", "").split(os.pathsep) if "auto_instrumentation" not in folder]
    env["PYTHONPATH"] = os.pathsep.join(filter(None, folders))
    return env


def _main(name: str, descriptor: str, argument: str) -> None:
    os.set_inheritable(int(descriptor), False)
    program: Callable[[str], Iterable[dict[str, Any]]] = import_module(PROGRAMS[name]).in_child
    with os.fdopen(int(descriptor), "w", buffering=1) as out, contextlib.suppress(BrokenPipeError):
        for found in program(argument):
            out.write(json.dumps(found) + "\n")
        out.flush()
        os._exit(0)  # no exit handler of others may take its time, or send anything


if __name__ == "__main__":
    _main(*sys.argv[1:])
