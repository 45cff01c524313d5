"""The oldest supported OpenTelemetry (the lower bounds of pyproject.toml) does with metrics what the newest does."""

import os
import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
UV = str(Path(sys.executable).parent / "uv")
TESTS = ("tests/unit/test_recorder.py", "tests/unit/test_instruments.py")
"""Among others: what happens with values that are not finite."""


def test_the_recorder_works_with_the_oldest_supported_opentelemetry(tmp_path):
    bounds = re.findall(r'"(opentelemetry-[a-z-]+)>=([\w.]+)', (ROOT / "pyproject.toml").read_text())
    oldest = sorted({f"{name}=={version}" for name, version in bounds if "exporter-prometheus" not in name})
    oldest = [package for package in oldest if "system-metrics" not in package]  # an extra
    assert len(oldest) == 6
    python = tmp_path / "venv" / "bin" / "python"
    subprocess.run([UV, "venv", "-q", "--python", sys.executable, tmp_path / "venv"], check=True, timeout=120)
    packages = [*oldest, "wrapt", "pyyaml", "numpy", "pytest", "pytest-timeout", "hypothesis"]
    subprocess.run([UV, "pip", "install", "-q", "--python", python, *packages], check=True, timeout=300)
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    command = [python, "-m", "pytest", "-q", "-p", "no:cacheprovider", *TESTS]
    result = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, timeout=300)
    assert result.returncode == 0, result.stdout[-3000:]
    assert " passed" in result.stdout and "skipped" not in result.stdout
