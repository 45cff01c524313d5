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
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from importlib import import_module
from typing import IO, Any

from verl_otel import config

PROGRAMS = {
    "hooks": "verl_otel.doctor.hooks",
    "pipeline": "verl_otel.doctor.settings",
    "ray": "verl_otel.doctor.cluster",
}
"""Name -> the module whose `in_child` is the program."""

ENDED, LATE = "ended", "it takes too long"
"""The key of what comes last: why the process has ended, empty if it did what it had to."""

_NOT_ITS_OWN = {config.ACTIVE}

ENDS = 5.0
"""Seconds for a process to end that has said everything."""


def run(name: str, environ: Mapping[str, str], end: float, argument: str = "") -> Iterator[dict[str, Any]]:
    """Start a program, and give what it finds as it comes; last `{"ended": why}`.

    Args:
        end: by `time.monotonic()`; the process is killed then.
        argument: for the program.
    """
    read, write = os.pipe()
    command = [sys.executable, "-m", "verl_otel.doctor.child", name, str(write), argument]
    with tempfile.TemporaryFile() as said:
        process = subprocess.Popen(
            command,
            env=_environment(environ),
            pass_fds=[write],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=said,
        )
        os.close(write)
        ended = False
        try:
            for line in _lines(read, end):
                if line is None:
                    ended = True
                else:
                    yield json.loads(line)
        finally:
            os.close(read)
            try:
                status = process.wait(ENDS if ended else 0)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
                status = 0
        yield {ENDED: _reason(status, said) if ended else LATE}


def _lines(descriptor: int, end: float) -> Iterator[bytes | None]:
    """The lines that come until `end`; None where the last one was the last."""
    pending = b""
    while select.select([descriptor], [], [], max(0.0, end - time.monotonic()))[0]:
        content = os.read(descriptor, 1 << 16)
        if not content:
            yield None
            return
        *lines, pending = (pending + content).split(b"\n")
        yield from lines


def _reason(status: int, said: IO[bytes]) -> str:
    """Empty where all is well."""
    if status <= 0:
        return f"it was ended by signal {-status}" if status else ""
    said.seek(0)
    lines = said.read().decode(errors="replace").strip().splitlines()
    return f"it ended with status {status}" + (f" ({lines[-1][-300:]})" if lines else "")


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
