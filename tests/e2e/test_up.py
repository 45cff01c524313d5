"""`verl-otel up`, `status`, `down` from an installed wheel, with the real backends; `deploy/smoke.py` against them."""

import os
import re
import signal
import subprocess
import sys
import zipfile
from pathlib import Path

import bed
import pytest

from verl_otel.stack import StackError, binaries
from verl_otel.stack.configuration import COLLECTOR, DEPLOY
from verl_otel.stack.stack import Stack

pytestmark = pytest.mark.stack

PROGRAMS = {"mlflow", "jaeger", "prometheus", "alertmanager", "bridge", "collector"}


@pytest.fixture(scope="module")
def installed(tmp_path_factory):
    """What the wheel has, without a checkout around it."""
    folder = tmp_path_factory.mktemp("wheel")
    uv = [bed.PYTHON.parent / "uv", "build", "--wheel", "-o", folder, "--no-build-isolation", "--python", bed.PYTHON]
    subprocess.run([*uv, bed.ROOT], check=True, capture_output=True, timeout=120)
    (wheel,) = folder.glob("verl_otel-*.whl")
    zipfile.ZipFile(wheel).extractall(folder / "site")
    return folder / "site"


@pytest.fixture
def verl_otel(installed, tmp_path):
    folder = tmp_path / "stack"

    def command(name, *options):
        line = [sys.executable, "-m", "verl_otel.cli", name, "--folder", folder, *options]
        environment = bed.clean_environment(PYTHONPATH=str(installed))
        return subprocess.run(line, capture_output=True, text=True, timeout=200, cwd=tmp_path, env=environment)

    yield command
    stack = Stack.started_in(folder)
    if stack is not None:
        stack.stop()


def programs_in(folder):
    """Pids of what works in a folder."""
    found = []
    for cwd in Path("/proc").glob("[0-9]*/cwd"):
        try:
            if cwd.readlink() == folder:
                found.append(int(cwd.parent.name))
        except OSError:
            continue
    return found


def smoke(stack, seconds):
    urls = [word for name in ("jaeger", "prometheus", "mlflow") for word in (f"--{name}", stack.url(name))]
    command = [sys.executable, "-I", "-S", DEPLOY / "smoke.py", "--otlp", stack.url("otlp_http"), *urls]
    return subprocess.run([*command, "--seconds", str(seconds)], capture_output=True, text=True, timeout=300)


def test_up_smoke_a_crash_status_down(verl_otel, installed, tmp_path):
    folder = tmp_path / "stack"
    up = verl_otel("up", "--free-ports")
    assert up.returncode == 0, up.stdout + up.stderr
    stack = Stack.started_in(folder)
    assert stack is not None and set(stack.processes) == PROGRAMS and all(map(stack.answers, PROGRAMS))
    assert f"export OTEL_EXPORTER_OTLP_ENDPOINT={stack.url('otlp_http')}" in up.stdout
    assert stack.rules.is_relative_to(installed), "the files are those of the wheel"

    done = smoke(stack, 60)
    assert done.returncode == 0, done.stdout + done.stderr
    assert len(re.findall(r"^ok ", done.stdout, re.MULTILINE)) == 4

    os.kill(stack.processes["jaeger"].pid, signal.SIGKILL)
    stack.processes["jaeger"].wait(10)
    status = verl_otel("status")
    assert status.returncode == 1
    assert re.search(r"^jaeger +has ended", status.stdout, re.MULTILINE)
    assert len(re.findall(r"^\w+ +runs", status.stdout, re.MULTILINE)) == len(PROGRAMS) - 1
    failed = smoke(stack, 3)
    assert failed.returncode == 1
    assert re.findall(r"^FAILED +([^,]+)", failed.stdout, re.MULTILINE) == ["trace"]

    down = verl_otel("down")
    assert down.returncode == 0, down.stderr
    assert programs_in(folder) == []
    assert {"prometheus", "mlflow.db", "jaeger", "collector.log"} <= {path.name for path in folder.iterdir()}


def test_the_wheel_builds_the_same_programs(installed):
    code = "from verl_otel.stack.binaries import *; print([str(folder(name)) for name in SOURCES])"
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, capture_output=True, text=True, env=bed.clean_environment(PYTHONPATH=str(installed)))
    ours = [name for name, (source, *_) in binaries.SOURCES.items() if not source.is_relative_to(bed.ROOT / "tests")]
    assert done.stdout.strip() == str([str(binaries.folder(name)) for name in ours]), done.stderr
    for part in (COLLECTOR, DEPLOY / "jaeger", DEPLOY / "prometheus", DEPLOY / "alertmanager"):
        files = {path for path in part.rglob("*") if path.is_file()}
        inside = installed / "verl_otel" / "stack" / "files"
        assert files and all((inside / path.relative_to(bed.ROOT)).is_file() for path in files)


def test_a_program_is_built_once_and_what_go_says_of_a_broken_one_is_shown(tmp_path, monkeypatch):
    source = tmp_path / "source"
    source.mkdir()
    (source / "go.mod").write_text("module example.org/small\n\ngo 1.21\n")
    (source / "main.go").write_text('package main\n\nfunc main() { print("it works") }\n')
    monkeypatch.setattr(binaries, "CACHE", tmp_path / "cache")
    monkeypatch.setattr(binaries, "SOURCES", {"small": (source, {"small": "."}, 1)})
    said = []
    small = binaries.binary("small", said.append)
    assert subprocess.run([small], capture_output=True, text=True).stderr == "it works"
    assert [line.split()[0] for line in said] == ["building", "built"]
    assert binaries.binary("small", said.append) == small and len(said) == 2
    (source / "main.go").write_text("package main\n\nfunc main() { nonsense() }\n")
    with pytest.raises(StackError, match="nonsense"):
        binaries.binary("small", said.append)
    assert not list((tmp_path / "cache").glob("build-*"))
