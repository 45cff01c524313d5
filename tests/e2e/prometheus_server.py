"""A real Prometheus beside the stack's, with a configuration of the test's own."""

import subprocess
import urllib.request
from pathlib import Path
from typing import Any

from asking import eventually, get

from verl_otel.stack.binaries import binary
from verl_otel.stack.ports import free_ports


class Prometheus:
    """`Prometheus(folder, config, "--web...")`; `start` it again after `kill`, and it has its data."""

    def __init__(self, folder: Path, config: Path, *options: str) -> None:
        self._log = folder / "prometheus.log"
        self.address = f"127.0.0.1:{free_ports(['web'])['web']}"
        self.url = f"http://{self.address}"
        paths = f"--config.file={config}", f"--storage.tsdb.path={folder / 'prometheus'}"
        self._command = [str(binary("prometheus")), *paths, f"--web.listen-address={self.address}", *options]

    def start(self) -> None:
        with self._log.open("ab") as log:
            self._process = subprocess.Popen(self._command, stdout=log, stderr=log, stdin=subprocess.DEVNULL)
        assert eventually(lambda: urllib.request.urlopen(f"{self.url}/-/ready", timeout=5)), self._log.read_text()

    def kill(self) -> None:
        """As a crash does."""
        self._process.kill()
        self._process.wait()

    def ask(self, query: str) -> list[tuple[dict[str, str], Any]]:
        """(labels, [time, value]) of each series, or (labels, [[time, value], ...]) if the query has a range."""
        found = get(f"{self.url}/api/v1/query", query=query)["data"]["result"]
        return [(series["metric"], series.get("value") or series.get("values")) for series in found]

    def __enter__(self) -> "Prometheus":
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.kill()
