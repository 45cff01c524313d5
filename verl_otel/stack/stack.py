"""Start the stack's programs, wait until they answer, stop them."""

import http.client
import os
import signal
import time
import urllib.request
from collections.abc import Callable, Mapping
from pathlib import Path

from verl_otel.stack import StackError, binaries, ports, state
from verl_otel.stack.configuration import DEPLOY
from verl_otel.stack.processes import Process, uninterrupted
from verl_otel.stack.services import SERVICES

RULES = DEPLOY / "prometheus" / "alerts.yaml"
"""The alert rules that Prometheus has if nothing else is said."""

_SECONDS_TO_START = 120
_SECONDS_TO_END = 15


class Stack:
    """The programs of one folder. `with Stack(folder) as stack: ... stack.url("jaeger")`.

    Args:
        folder: logs and data.
        listen: port by name, as in `ports.USUAL`, which the others have; free ones by default.
        traces_on_disk: Jaeger's traces outlive its restart.
        rules: Prometheus' alert rules.
        relay: with the alert relay: the file that says to which chat robots alerts go, or empty for the one robot of
            the variables VERL_OTEL_RELAY_*. None: without it; Alertmanager finds one that is started later.
        program: where a program is; by default the tested versions, built if need be.
        processes: what runs already.
    """

    def __init__(
        self,
        folder: Path,
        listen: Mapping[str, int] | None = None,
        traces_on_disk: bool = False,
        rules: Path = RULES,
        relay: str | None = None,
        program: Callable[[str], Path] = binaries.binary,
        processes: Mapping[str, Process] | None = None,
    ) -> None:
        self.folder = folder
        self.ports = ports.free_ports(ports.USUAL) if listen is None else {**ports.USUAL, **listen}
        self.traces_on_disk = traces_on_disk
        self.rules = rules
        self.relay = relay
        self.services = [name for name in SERVICES if name != "relay" or relay is not None]
        self.program = program
        self.processes = dict(processes or {})

    @classmethod
    def started_in(cls, folder: Path, program: Callable[[str], Path] = binaries.binary) -> "Stack | None":
        """The stack that another command has started and none has stopped."""
        found = state.read(folder)
        if found is None:
            return None
        return cls(
            folder,
            found.ports,
            traces_on_disk=found.traces_on_disk,
            rules=found.rules,
            relay=found.relay,
            program=program,
            processes=found.processes,
        )

    def url(self, name: str) -> str:
        """Base URL of one of the ports."""
        return f"http://{self.address(name)}"

    def address(self, name: str) -> str:
        """Host and port of one of the ports."""
        return f"127.0.0.1:{self.ports[name]}"

    def health(self, name: str) -> str:
        """The URL that answers when a service is up."""
        port, _, path = SERVICES[name].health.partition("/")
        return f"{self.url(port)}/{path}"

    def runs(self, name: str) -> bool:
        """Whether there is a process for a service; it may hang."""
        return name in self.processes and self.processes[name].alive()

    def log(self, name: str) -> Path:
        """Where a service writes what it says."""
        return self.folder / f"{name}.log"

    def answers(self, name: str) -> bool:
        """Whether a service gives a good answer within 2 s."""
        try:
            with urllib.request.urlopen(self.health(name), timeout=2) as response:
                return response.status < 300
        except (OSError, ValueError, http.client.HTTPException):
            return False

    def last_lines(self, name: str, number: int) -> list[str]:
        """The end of a service's log."""
        try:
            with self.log(name).open("rb") as log:
                log.seek(max(0, log.seek(0, os.SEEK_END) - 8192))
                return log.read().decode(errors="replace").splitlines()[-number:]
        except OSError:
            return []

    def start(self, report: Callable[[str], None] = lambda _: None) -> "Stack":
        """Start what does not run, the destinations before the Collector, and wait until all of it answers.

        Raises:
            StackError: something does not start; then nothing runs that did not before.
        """
        self.folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        missing = [name for name in self.services if not self.runs(name)]
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

    def restart(self, *names: str) -> None:
        """Start again what has ended, on the same ports and with the same data, and wait until all of it answers."""
        for name in names:
            self._spawn(name)
        for name in names:
            self._wait(name)

    def stop(self, names: list[str] | None = None) -> None:
        """Stop what was started, the Collector first, so that it can hand over what it has."""
        wanted = [name for name in self.processes if names is None or name in names]
        running = {name: self.processes.pop(name) for name in wanted}
        collector = [running.pop("collector")] if "collector" in running else []
        for together in (collector, list(reversed(running.values()))):
            for process in together:
                process.send_signal(signal.SIGTERM)
            deadline = time.monotonic() + _SECONDS_TO_END
            for process in together:
                process.wait(deadline - time.monotonic())
                process.kill()  # also what it has left behind
        self._note()

    def __enter__(self) -> "Stack":
        return self.start()

    def __exit__(self, *_: object) -> None:
        self.stop()

    def _spawn(self, name: str) -> None:
        command, own = SERVICES[name].start(self)
        inherited = {k: v for k, v in os.environ.items() if not k.startswith(("OTEL_", "VERL_OTEL_", "TRACEPARENT"))}
        environment = {**inherited, **own}
        with uninterrupted():
            self.processes[name] = Process.start(command, environment, self.folder, self.log(name))
            self._note()

    def _wait(self, name: str) -> None:
        deadline = time.monotonic() + _SECONDS_TO_START
        while time.monotonic() < deadline and self.runs(name):
            if self.answers(name):
                return
            time.sleep(0.2)
        what = "does not answer" if self.runs(name) else "has ended, without an answer"
        tail = "\n".join(self.last_lines(name, 20))
        raise StackError(f"{name} {what} at {self.health(name)}; the end of {self.log(name)}:\n{tail}")

    def _note(self) -> None:
        state.write(self.folder, state.State(self.ports, self.traces_on_disk, self.rules, self.relay, self.processes))
