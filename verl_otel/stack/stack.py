"""Start the stack's programs, wait until they answer, stop them."""

import os
import signal
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Mapping
from pathlib import Path

from verl_otel.stack import StackError, binaries, ports
from verl_otel.stack.configuration import DEPLOY
from verl_otel.stack.processes import Process
from verl_otel.stack.services import SERVICES

_SECONDS_TO_START = 120
_SECONDS_TO_END = 15


class Stack:
    """The programs of one folder. `with Stack(folder) as stack: ... stack.url("jaeger")`.

    Args:
        folder: logs and data.
        listen: port by name, as in `ports.USUAL`; free ones by default.
        environment: for all of them.
        traces_on_disk: Jaeger's traces outlive its restart.
        rules: Prometheus' alert rules.
        program: where a program is; by default the tested versions, built if need be.
    """

    def __init__(
        self,
        folder: Path,
        listen: Mapping[str, int] | None = None,
        environment: Mapping[str, str] | None = None,
        traces_on_disk: bool = False,
        rules: Path = DEPLOY / "prometheus" / "alerts.yaml",
        program: Callable[[str], Path] = binaries.binary,
    ) -> None:
        self.folder = folder
        self.ports = dict(listen or ports.free_ports(ports.USUAL))
        self.environment = dict(environment or {})
        self.traces_on_disk = traces_on_disk
        self.rules = rules
        self.program = program
        self.processes: dict[str, Process] = {}

    def url(self, name: str) -> str:
        """Base URL of one of the ports."""
        return f"http://{self.address(name)}"

    def address(self, name: str) -> str:
        """Host and port of one of the ports."""
        return f"127.0.0.1:{self.ports[name]}"

    def health(self, name: str) -> str:
        """The URL that answers when a service is up."""
        return self.url(SERVICES[name].port) + SERVICES[name].health

    def log(self, name: str) -> Path:
        """Where a service writes what it says."""
        return self.folder / f"{name}.log"

    def start(self, report: Callable[[str], None] = lambda _: None) -> "Stack":
        """Start what does not run, the destinations before the Collector, and wait until all of it answers.

        Raises:
            StackError: something does not start; then nothing runs that did not before.
        """
        self.folder.mkdir(parents=True, exist_ok=True)
        missing = [name for name in SERVICES if name not in self.processes or not self.processes[name].alive()]
        try:
            for name in missing:
                report(f"starting {name}")
                self._spawn(name)
            for name in missing:
                self._wait(name)
                report(f"{name} answers")
        except BaseException:
            self.stop(missing)
            raise
        return self

    def kill(self, name: str) -> None:
        """End one of them as a crash does (SIGKILL)."""
        self.processes[name].kill()

    def restart(self, name: str) -> None:
        """Start one again that has ended, on the same ports and with the same data, and wait until it answers."""
        self._spawn(name)
        self._wait(name)

    def stop(self, names: list[str] | None = None) -> None:
        """Stop what was started, the Collector first, so that it can hand over what it has."""
        running = {name: self.processes.pop(name) for name in names or list(self.processes) if name in self.processes}
        collector = [running.pop("collector")] if "collector" in running else []
        for together in (collector, list(reversed(running.values()))):
            for process in together:
                process.send_signal(signal.SIGTERM)
            deadline = time.monotonic() + _SECONDS_TO_END
            for process in together:
                process.wait(deadline - time.monotonic())
                process.kill()  # also what it has left behind

    def __enter__(self) -> "Stack":
        return self.start()

    def __exit__(self, *_: object) -> None:
        self.stop()

    def _spawn(self, name: str) -> None:
        command, own = SERVICES[name].start(self)
        inherited = {k: v for k, v in os.environ.items() if not k.startswith(("OTEL_", "VERL_OTEL_", "TRACEPARENT"))}
        environment = {**inherited, **self.environment, **own}
        self.processes[name] = Process.start(command, environment, self.folder, self.log(name))

    def _wait(self, name: str) -> None:
        deadline = time.monotonic() + _SECONDS_TO_START
        while time.monotonic() < deadline and self.processes[name].alive():
            if answers(self.health(name)):
                return
            time.sleep(0.2)
        tail = self.log(name).read_text(errors="replace")[-2000:]
        what = "does not answer" if self.processes[name].alive() else "has ended, without an answer"
        raise StackError(f"{name} {what} at {self.health(name)}; the end of {self.log(name)}:\n{tail}")


def answers(url: str) -> bool:
    """Whether there is a good answer at `url` within 2 s."""
    try:
        with urllib.request.urlopen(url, timeout=2) as response:
            return response.status < 300
    except (OSError, urllib.error.URLError):
        return False
