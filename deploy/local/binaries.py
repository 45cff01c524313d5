"""Build the Collector, Jaeger and Prometheus from their Go modules, once per version.

    python deploy/local/binaries.py [collector] [jaeger] [prometheus]

Needs Go 1.26 or later. The binaries go to $VERL_OTEL_CACHE (default ~/.cache/verl-otel), named after the hash of the
module files from which they were built, so a second run costs nothing.
"""

import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
CACHE = Path(os.environ.get("VERL_OTEL_CACHE") or Path.home() / ".cache" / "verl-otel")

# name -> (folder of the module files, packages to build, minutes from nothing on 2 cores)
SOURCES = {
    "collector": (ROOT / "collector" / "distribution", {"verl-otelcol": "."}, 4),
    "jaeger": (
        ROOT / "deploy" / "jaeger" / "build",
        {"jaeger": "github.com/jaegertracing/jaeger/cmd/jaeger"},
        5,
    ),
    "prometheus": (
        ROOT / "deploy" / "prometheus" / "build",
        {
            "prometheus": "github.com/prometheus/prometheus/cmd/prometheus",
            "promtool": "github.com/prometheus/prometheus/cmd/promtool",
        },
        6,
    ),
}


def folder(name: str) -> Path:
    """Where the binaries of `name` are, or will be."""
    source = SOURCES[name][0]
    digest = hashlib.sha256()
    for path in sorted(source.iterdir()):
        digest.update(path.name.encode() + b"\0" + path.read_bytes())
    return CACHE / "bin" / f"{name}-{digest.hexdigest()[:12]}"


def binary(program: str) -> Path:
    """The path of a program (`verl-otelcol`, `jaeger`, `prometheus`, `promtool`), built if need be."""
    name = next(name for name, (_, packages, _) in SOURCES.items() if program in packages)
    return build(name) / program


def build(name: str) -> Path:
    """Build what `name` stands for, unless it is built already; returns the folder with the binaries."""
    target = folder(name)
    source, packages, minutes = SOURCES[name]
    if all((target / program).exists() for program in packages):
        return target
    if shutil.which("go") is None:
        raise SystemExit("Go is needed to build the local stack (go.dev/dl, 1.26 or later); or use deploy/compose.yaml")
    print(f"building {name} from its Go modules (first time only, about {minutes} minutes on 2 cores) ...", flush=True)
    start = time.monotonic()
    environment = {**os.environ, "CGO_ENABLED": "0", "GOFLAGS": "-buildvcs=false"}
    CACHE.joinpath("bin").mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=CACHE, prefix="build-") as scratch:
        work, done = Path(scratch) / "source", Path(scratch) / "bin"
        shutil.copytree(source, work)
        for program, package in packages.items():
            command = ["go", "build", "-trimpath", "-ldflags=-s -w", "-o", str(done / program), package]
            for attempt in (1, 2, 3):  # a module proxy can be slow at the first request for a module
                if subprocess.run(command, cwd=work, env=environment).returncode == 0:
                    break
                if attempt == 3:
                    raise SystemExit(f"{name} could not be built: see the messages of go above")
        shutil.rmtree(target, ignore_errors=True)
        done.rename(target)
    print(f"built {name} in {time.monotonic() - start:.0f} s: {target}", flush=True)
    return target


if __name__ == "__main__":
    for wanted in sys.argv[1:] or SOURCES:
        print(build(wanted))
