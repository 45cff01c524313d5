"""Where each version of verl runs: an environment made from a lock, and over it, where need be, another verl wheel."""

import functools
import importlib.metadata
import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

BED = Path(__file__).resolve().parent
ROOT = BED.parents[1]
CACHE = Path(os.environ.get("VERL_OTEL_CACHE") or Path.home() / ".cache" / "verl-otel")

VERSIONS = ("0.6.1", "0.7.0", "0.7.1", "0.8.0", "0.9.0", "0.9.1")
"""The supported versions of verl."""

INSTALLED = {"test": "0.9.1", "verl-0.8": "0.8.0"}
"""Lock -> the version of verl in it."""


@dataclass(frozen=True)
class Environment:
    """One version of verl, ready to run."""

    verl: str
    python: Path
    wheel: Path | None = None
    """Folder with the verl of this version, if the environment's own is another; it comes first on PYTHONPATH."""

    @property
    def instrument(self) -> str:
        """The command `opentelemetry-instrument`."""
        return str(self.python.parent / "opentelemetry-instrument")

    @property
    def variables(self) -> dict[str, str]:
        """Environment variables that make this version the one that is imported."""
        return {"PYTHONPATH": self.python_path()} if self.wheel else {}

    def python_path(self, *folders: Path) -> str:
        """PYTHONPATH for this version, with more folders."""
        return os.pathsep.join(map(str, (*folders, *filter(None, [self.wheel]))))

    @property
    def assets(self) -> Path:
        """The tiny model, tokenizer and data, made once: transformers 4 cannot read what transformers 5 has written."""
        folder = self.python.parents[1] / "testbed-assets"
        if not (folder / "test.parquet").exists():
            subprocess.run([self.python, BED / "make_assets.py", folder], check=True, stdout=subprocess.DEVNULL)
        return folder


def _here() -> Environment:
    wheel = Path(str(importlib.metadata.distribution("verl").locate_file("")))
    return Environment(
        importlib.metadata.version("verl"), Path(sys.executable), None if wheel.is_relative_to(sys.prefix) else wheel
    )


HERE = _here()
"""The environment in which the tests run."""


@functools.cache
def environment(verl: str) -> Environment:
    """The environment for a version of verl, made now if it is not there. Needs the network the first time."""
    lock = "test" if verl >= "0.9" else "verl-0.8"
    python = HERE.python if lock == "test" else _made(lock)
    return Environment(verl, python, None if verl == INSTALLED[lock] else _wheel(verl))


def _made(lock: str) -> Path:
    venv = ROOT / f".venv-{lock}"
    subprocess.run([BED / "setup.sh", venv, lock], check=True, timeout=900)
    return venv / "bin" / "python"


def _wheel(verl: str) -> Path:
    folder = CACHE / "wheels" / f"verl-{verl}"
    if not folder.exists():
        scratch = folder.with_name(f"{folder.name}.{os.getpid()}")
        uv = HERE.python.parent / "uv"
        command = [uv, "pip", "install", "-q", "--python", HERE.python, "--no-deps", "--compile-bytecode"]
        subprocess.run([*command, "--target", scratch, f"verl=={verl}"], check=True, timeout=300)
        scratch.rename(folder)
    return folder
