"""A real InfluxDB (1.6, Debian's package, unpacked beside the other binaries)."""

import os
import shutil
import subprocess
import tempfile
import time
from pathlib import Path

import requests

from verl_otel.stack.binaries import CACHE
from verl_otel.stack.ports import free_ports

PACKAGE = "influxdb"


def influxd() -> Path:
    """The program, downloaded if need be."""
    target = CACHE / "influxdb"
    program = target / "usr" / "bin" / "influxd"
    if not program.exists():
        CACHE.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=CACHE) as scratch:
            if subprocess.run(["apt-get", "download", "-q", PACKAGE], cwd=scratch).returncode:
                subprocess.run(["apt-get", "update", "-q"], check=True)  # no lists of packages yet
                subprocess.run(["apt-get", "download", "-q", PACKAGE], cwd=scratch, check=True)
            (package,) = Path(scratch).glob("*.deb")
            unpacked = Path(scratch) / "unpacked"
            subprocess.run(["dpkg", "-x", str(package), str(unpacked)], check=True)
            shutil.rmtree(target, ignore_errors=True)
            unpacked.rename(target)
    return program


class InfluxDB:
    """A server with the database `verl`, on free ports of loopback.

    Args:
        password: of its only user, `verl`; empty for a server that asks for none.
    """

    def __init__(self, folder: Path, password: str = "") -> None:
        self.folder, self.password = folder, password
        self.ports = free_ports(["http", "rpc"])
        self.url = f"http://127.0.0.1:{self.ports['http']}"
        self.write_url = f"{self.url}/write?db=verl"
        self.auth = ("verl", password) if password else None

    def start(self) -> None:
        environment = {
            **os.environ,
            "INFLUXDB_REPORTING_DISABLED": "true",
            "INFLUXDB_BIND_ADDRESS": f"127.0.0.1:{self.ports['rpc']}",
            "INFLUXDB_HTTP_BIND_ADDRESS": f"127.0.0.1:{self.ports['http']}",
            "INFLUXDB_HTTP_AUTH_ENABLED": str(bool(self.password)).lower(),
            **{
                f"INFLUXDB_{name}": str(self.folder / name.lower()) for name in ("META_DIR", "DATA_DIR", "DATA_WAL_DIR")
            },
        }
        with (self.folder / "influxd.log").open("ab") as log:
            self.process = subprocess.Popen(
                [str(influxd()), "run"],
                cwd=self.folder,
                env=environment,
                stdout=log,
                stderr=log,
                stdin=subprocess.DEVNULL,
            )
        deadline = time.monotonic() + 60
        while True:
            try:
                requests.get(f"{self.url}/ping", timeout=5)
                break
            except requests.RequestException:
                if time.monotonic() > deadline or self.process.poll() is not None:
                    raise RuntimeError((self.folder / "influxd.log").read_text()[-2000:]) from None
                time.sleep(0.1)
        if self.password:
            self.ask(f"CREATE USER verl WITH PASSWORD '{self.password}' WITH ALL PRIVILEGES", database="")
        self.ask("CREATE DATABASE verl", database="")

    def kill(self) -> None:
        """As a crash does."""
        self.process.kill()
        self.process.wait()

    def ask(self, query: str, database: str = "verl") -> list[tuple[dict[str, str], list[dict[str, object]]]]:
        """The answer to InfluxQL: for each series its tags and its rows."""
        answer = requests.post(
            f"{self.url}/query", params={"db": database, "epoch": "ns"}, data={"q": query}, auth=self.auth, timeout=30
        )
        answer.raise_for_status()
        (result,) = answer.json()["results"]
        assert "error" not in result, result
        return [
            (series.get("tags", {}), [dict(zip(series["columns"], row, strict=True)) for row in series["values"]])
            for series in result.get("series", [])
        ]
