"""All areas, side by side, within a time; what one of them breaks or blocks on is a finding too."""

import os
import platform
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial

from verl_otel.doctor import (
    activation,
    cluster,
    devices,
    endpoints,
    hooks,
    labels,
    readback,
    runs,
    series,
    settings,
    versions,
)
from verl_otel.doctor.asked import Asked
from verl_otel.doctor.findings import LEVELS, OK, PROBLEM, WARNING, Finding, warning
from verl_otel.doctor.gathering import Gathering
from verl_otel.doctor.secrets import Secrets


@dataclass(frozen=True)
class Area:
    """What is looked at together. `seconds` is how long it may take."""

    name: str
    check: Callable[[Asked], Iterator[Finding]]
    seconds: float


AREAS = (
    Area("versions", versions.check, 20),
    Area("activation", activation.check, 20),
    Area("hooks", hooks.check, hooks.SECONDS + 5),
    Area("settings", settings.check, settings.SECONDS + 5),
    Area("labels", labels.check, 10),
    Area("endpoints", endpoints.check, endpoints.SECONDS + 10),
    Area("read back", readback.check, readback.SENT + 2 * readback.ARRIVES + 5),
    Area("series", series.check, 60),
    Area("GPUs", devices.check, 15),
    Area("runs", runs.check, 30),
    Area("Ray cluster", cluster.check, cluster.SECONDS + 5),
)


@dataclass(frozen=True)
class Examination:
    """What was found, by area, in their order. `time` is Unix time, `seconds` how long it took."""

    findings: tuple[tuple[str, Finding], ...]
    probe_id: str
    time: float
    seconds: float
    host: str
    python: str

    @property
    def level(self) -> str:
        """The weightiest of the findings."""
        return max((finding.level for _, finding in self.findings), key=LEVELS.index, default=OK)

    def count(self, level: str) -> int:
        return sum(finding.level == level for _, finding in self.findings)

    def exit_status(self, strict: bool) -> int:
        """0, or 1 where something is wrong: a problem, or if `strict` a warning."""
        return int(self.level == PROBLEM or (strict and self.level == WARNING))


def examine(asked: Asked, areas: tuple[Area, ...] = AREAS) -> Examination:
    """Look at everything. Never raises; takes `asked.timeout` seconds at most."""
    now = time.time()
    secrets = Secrets(asked.environ, (asked.jaeger, asked.prometheus, asked.mlflow))
    gatherings = [(area, Gathering(partial(area.check, asked))) for area in areas]
    findings = []
    for area, gathering in gatherings:
        ended = gathering.wait(min(asked.start + area.seconds, asked.start + asked.timeout))
        found = list(gathering.found)
        if not ended:
            what = f"looking at {area.name} takes too long, and was left"
            found.append(warning("VO-CHECK-LATE", what, "give it more time with --timeout, or look at the load"))
        elif gathering.error is not None:
            what = f"looking at {area.name} has failed ({type(gathering.error).__name__}: {gathering.error})"
            found.append(warning("VO-CHECK-FAILED", what, "please report it with this line"))
        findings += [(area.name, secrets.without(finding)) for finding in found]
    return Examination(
        findings=tuple(findings),
        probe_id=asked.probe.id,
        time=now,
        seconds=time.monotonic() - asked.start,
        host=os.uname().nodename,
        python=platform.python_version(),
    )
