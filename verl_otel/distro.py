"""The distro of a verl job: what `opentelemetry-instrument` loads before any instrumentation.

It sets nothing up. Providers are made when verl is first used in a process (`verl_otel.telemetry`), so that the other
processes of a Ray cluster, whose own metrics need the global MeterProvider, stay as they are.

Where the package `opentelemetry-distro` is installed too, say which one is meant: `OTEL_PYTHON_DISTRO=verl_otel
OTEL_PYTHON_CONFIGURATOR=verl_otel`.
"""

from typing import Any

from opentelemetry.instrumentation.distro import BaseDistro


class VerlDistro(BaseDistro):
    """Leaves every `OTEL_*` variable as the user set it."""

    def _configure(self, **kwargs: Any) -> None:
        pass

    def load_instrumentor(self, entry_point: Any, **kwargs: Any) -> None:
        """Load an instrumentation; the host's own metrics are sampled once per node (`verl_otel.hardware`) instead."""
        if entry_point.name != "system_metrics":
            super().load_instrumentor(entry_point, **kwargs)


class VerlConfigurator:
    """Makes no provider: see the module. (The SDK's base class would load the SDK into every process.)"""

    def configure(self, **kwargs: Any) -> None:
        pass
