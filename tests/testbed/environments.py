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
    wheels: tuple[Path, ...] = ()
    """Folders with a verl (or Ray) other than the environment's own; they come first on PYTHONPATH."""

    @property
    def instrument(self) -> str:
        """The command `opentelemetry-instrument`."""
        return str(self.python.parent / "opentelemetry-instrument")

    @property
    def variables(self) -> dict[str, str]:
        """Environment variables that make this version the one that is imported."""
        return {"PYTHONPATH": self.python_path()} if self.wheels else {}

    def python_path(self, *folders: Path) -> str:
        """PYTHONPATH for this version, with more folders."""
        return os.pathsep.join(map(str, (*folders, *self.wheels)))

    @property
    def assets(self) -> Path:
        """The tiny model, tokenizer and data, made once: transformers 4 cannot read what transformers 5 has written."""
        folder = self.python.parents[1] / "testbed-assets"
        if not (folder / "sft.parquet").exists():  # the last one that is made
            subprocess.run([self.python, BED / "make_assets.py", folder], check=True, stdout=subprocess.DEVNULL)
        return folder


def _here() -> Environment:
    found = [Path(str(importlib.metadata.distribution(name).locate_file(""))) for name in ("verl", "ray")]
    over = tuple(folder for folder in found if not folder.is_relative_to(sys.prefix))
    return Environment(importlib.metadata.version("verl"), Path(sys.executable), over)


HERE = _here()
"""The environment in which the tests run."""


@functools.cache
def environment(verl: str) -> Environment:
    """The environment for a version of verl, made now if it is not there. Needs the network the first time."""
    lock = "test" if verl >= "0.9" else "verl-0.8"
    python = HERE.python if lock == "test" else _made(lock)
    return Environment(verl, python, () if verl == INSTALLED[lock] else (wheel("verl", verl),))


def _made(lock: str) -> Path:
    venv = ROOT / f".venv-{lock}"
    subprocess.run([BED / "setup.sh", venv, lock], check=True, timeout=900)
    return venv / "bin" / "python"


def wheel(name: str, version: str) -> Path:
    """The folder of a package without what it needs, downloaded now if it is not there."""
    folder = CACHE / "wheels" / f"{name}-{version}"
    if not folder.exists():
        scratch = folder.with_name(f"{folder.name}.{os.getpid()}")
        command = [HERE.python.parent / "uv", "pip", "install", "-q", "--python", HERE.python, "--no-deps"]
        subprocess.run(
            [*command, "--compile-bytecode", "--target", scratch, f"{name}=={version}"], check=True, timeout=300
        )
        scratch.rename(folder)
    return folder
