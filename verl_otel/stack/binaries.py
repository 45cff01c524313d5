"""The programs of the stack that are written in Go: found on PATH, or built from their modules, once per version.

    python -m verl_otel.stack.binaries [collector] [jaeger] [prometheus] [alertmanager]

Needs Go 1.26 or later. The binaries go to $VERL_OTEL_CACHE (default ~/.cache/verl-otel), named after the hash of the
module files from which they were built, so a second run costs nothing.
"""

import hashlib
import os
import re
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from collections import deque
from collections.abc import Callable
from pathlib import Path

from verl_otel.stack import StackError
from verl_otel.stack.configuration import COLLECTOR, DEPLOY

CACHE = Path(os.environ.get("VERL_OTEL_CACHE") or Path.home() / ".cache" / "verl-otel")

# name -> (folder of the module files, packages to build, minutes from nothing on 2 cores)
SOURCES = {
    "collector": (COLLECTOR / "distribution", {"verl-otelcol": "."}, 4),
    "jaeger": (DEPLOY / "jaeger" / "build", {"jaeger": "github.com/jaegertracing/jaeger/cmd/jaeger"}, 5),
    "prometheus": (
        DEPLOY / "prometheus" / "build",
        {
            "prometheus": "github.com/prometheus/prometheus/cmd/prometheus",
            "promtool": "github.com/prometheus/prometheus/cmd/promtool",
        },
        6,
    ),
    "alertmanager": (
        DEPLOY / "alertmanager" / "build",
        {
            "alertmanager": "github.com/prometheus/alertmanager/cmd/alertmanager",
            "amtool": "github.com/prometheus/alertmanager/cmd/amtool",
        },
        3,
    ),
}

# program -> (its names on PATH, the oldest version that was seen to take our configuration)
ON_PATH = {
    "verl-otelcol": (("verl-otelcol", "otelcol-contrib"), (0, 155)),
    "jaeger": (("jaeger",), (2, 13)),
    "prometheus": (("prometheus",), (3, 5)),
    "alertmanager": (("alertmanager",), (0, 25)),
}

Report = Callable[[str], None]


def find(program: str, report: Report = print) -> Path:
    """The path of a program of `ON_PATH`: on PATH if it is new enough, else built."""
    names, oldest = ON_PATH[program]
    for name in names:
        path = shutil.which(name)
        if path is None:
            continue
        if (_version(path) or oldest) >= oldest:
            return Path(path)
        report(f"{path} is older than {'.'.join(map(str, oldest))}: not used")
    return binary(program, report)


def binary(program: str, report: Report = print) -> Path:
    """The path of a program of `SOURCES`, built if need be."""
    name = next(name for name, (_, packages, _) in SOURCES.items() if program in packages)
    return build(name, report) / program


def folder(name: str) -> Path:
    """Where the binaries of `name` are, or will be."""
    source = SOURCES[name][0]
    digest = hashlib.sha256()
    for path in sorted(source.iterdir()):
        digest.update(path.name.encode() + b"\0" + path.read_bytes())
    return CACHE / "bin" / f"{name}-{digest.hexdigest()[:12]}"


def build(name: str, report: Report = print) -> Path:
    """Build what `name` stands for, unless it is built already; returns the folder with the binaries."""
    target = folder(name)
    source, packages, minutes = SOURCES[name]
    if all((target / program).exists() for program in packages):
        return target
    if shutil.which("go") is None:
        raise StackError(
            f"{name} is not on PATH, and Go, to build it, is not either: install one of them (go.dev/dl, 1.26 or "
            "later), or use deploy/compose.yaml"
        )
    report(f"building {name} from its Go modules: the first time only, about {minutes} minutes on 2 cores")
    start = time.monotonic()
    CACHE.joinpath("bin").mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=CACHE, prefix="build-") as scratch:
        work, done = Path(scratch) / "source", Path(scratch) / "bin"
        shutil.copytree(source, work)
        for program, package in packages.items():
            for attempt in (1, 2, 3):  # a module proxy can be slow at the first request for a module
                status, messages = _go_build(package, work, done / program, report)
                if status == 0:
                    break
                if attempt == 3:
                    raise StackError(f"{name} could not be built; what go said:\n" + "\n".join(messages))
        shutil.rmtree(target, ignore_errors=True)
        done.rename(target)
    report(f"built {name} in {time.monotonic() - start:.0f} s: {target}")
    return target


def _go_build(package: str, work: Path, output: Path, report: Report) -> tuple[int, list[str]]:
    """Build one program, and say every 15 s how far it is; returns go's exit status and its last messages."""
    start = time.monotonic()
    go = subprocess.Popen(
        ["go", "build", "-v", "-trimpath", "-ldflags=-s -w", "-o", str(output), package],
        cwd=work,
        env={**os.environ, "CGO_ENABLED": "0", "GOFLAGS": "-buildvcs=false"},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        errors="replace",
    )
    last: deque[str] = deque(maxlen=30)
    compiled = 0

    def read() -> None:
        nonlocal compiled
        assert go.stderr is not None
        for line in go.stderr:
            last.append(line.rstrip())
            compiled += not line.startswith(("go: ", "#", "\t"))

    reader = threading.Thread(target=read, daemon=True)
    reader.start()
    try:
        while True:
            try:
                go.wait(15)
                break
            except subprocess.TimeoutExpired:
                now = last[-1] if last else "starting"
                report(f"  {output.name}: {time.monotonic() - start:.0f} s, {compiled} packages compiled ({now})")
    finally:
        if go.poll() is None:  # interrupted
            go.terminate()
            go.wait()
        reader.join()
    return go.returncode, list(last)


def _version(path: str) -> tuple[int, ...] | None:
    """The first two numbers of the version that a program says it has; builds from source may say none."""
    for argument in ("--version", "version"):
        try:
            said = subprocess.run([path, argument], capture_output=True, text=True, timeout=20)
        except (OSError, subprocess.TimeoutExpired):
            return None
        found = re.search(r"[vV]ersion\W+v?(\d+)\.(\d+)", said.stdout + said.stderr)
        if found:
            return int(found[1]), int(found[2])
    return None


if __name__ == "__main__":
    try:
        for wanted in sys.argv[1:] or SOURCES:
            print(build(wanted, lambda line: print(line, flush=True)), flush=True)
    except StackError as error:
        sys.exit(str(error))
