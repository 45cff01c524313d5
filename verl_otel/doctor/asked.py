"""What a doctor was asked: of which environment, with which backends, for how long."""

import time
from collections.abc import Mapping
from dataclasses import dataclass, field

from verl_otel.doctor import TIMEOUT
from verl_otel.doctor.probe import Probe


@dataclass(frozen=True)
class Asked:
    """See the module. URLs are empty, and `ray` is None, where nothing was asked about them."""

    environ: Mapping[str, str]
    jaeger: str = ""
    prometheus: str = ""
    mlflow: str = ""
    ray: str | None = None
    timeout: float = TIMEOUT
    probe: Probe = field(default_factory=Probe)
    start: float = field(default_factory=time.monotonic)

    def until(self, seconds: float) -> float:
        """When something that may take so many seconds from now on has to be over, by `time.monotonic()`."""
        return min(time.monotonic() + seconds, self.start + self.timeout)
