"""Pythons other than the machine's, unpacked once from pinned Go modules (python-build-standalone inside).

Go is needed for the stack's binaries as well, and its modules come from a mirror that every Go user has.
"""

import gzip
import json
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "testbed"))
from environments import CACHE

MODULE = "github.com/kluctl/go-embed-python"
PINNED = {
    "3.10": ("v0.0.0-3.10.16-20241219-1", "h1:bfJRrtWlbdrPtwXXXZzA95yj2Pr9AvSbxDEm8YvbaP0="),
    "3.12": ("v0.0.0-3.12.3-20240415-1", "h1:IX2O3LJUL0AjYsROGZ4aNENTEb3c/Ll/0b9Yb/8P61Q="),
}
"""Python -> the module's version and its checksum."""


def python(version: str) -> Path:
    """The interpreter of a Python version (`3.10`, `3.12`), unpacked now if it is not there."""
    module_version, checksum = PINNED[version]
    folder = CACHE / "pythons" / module_version
    program = folder / "bin" / f"python{version}"
    if program.exists():
        return program
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder.parent) as scratch:
        Path(scratch, "go.mod").write_text("module pythons\n")
        environment = {**os.environ, "GOFLAGS": "-mod=mod"}
        command = ["go", "mod", "download", "-json", f"{MODULE}@{module_version}"]
        done = subprocess.run(command, cwd=scratch, env=environment, check=True, capture_output=True, timeout=600)
        downloaded = json.loads(done.stdout)
        assert downloaded["Sum"] == checksum, downloaded
        unpacked = Path(scratch, "python")
        _unpack(Path(downloaded["Dir"], "python", "internal", "data", "linux-amd64"), unpacked)
        if not folder.exists():
            unpacked.rename(folder)
    return program


def _unpack(source: Path, target: Path) -> None:
    for file in json.loads((source / "files.json").read_text())["files"]:
        path = target / file["name"]
        if "symlink" in file:
            path.symlink_to(file["symlink"])
        elif (source / file["name"]).is_dir():
            path.mkdir(parents=True, exist_ok=True)
        else:
            path.parent.mkdir(parents=True, exist_ok=True)
            if file.get("compressed"):
                with gzip.open(source / f"{file['name']}.gz") as packed, path.open("wb") as plain:
                    shutil.copyfileobj(packed, plain)
            else:
                shutil.copyfile(source / file["name"], path)
            path.chmod(file["perm"] & 0o777)
