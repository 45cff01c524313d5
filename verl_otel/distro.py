"""The distro of a verl job: what `opentelemetry-instrument` loads before any instrumentation.

It sets nothing up. Providers are made when verl is first used in a process (`verl_otel.telemetry`), so that the other
processes of a Ray cluster, whose own metrics need the global MeterProvider, stay as they are.

Where the package `opentelemetry-distro` is installed too, say which one is meant: `OTEL_PYTHON_DISTRO=verl_otel
OTEL_PYTHON_CONFIGURATOR=verl_otel`.
"""

from typing import Any

from opentelemetry.instrumentation.distro import BaseDistro
from opentelemetry.sdk._configuration import _BaseConfigurator


class VerlDistro(BaseDistro):
    """Leaves every `OTEL_*` variable as the user set it."""

    def _configure(self, **kwargs: Any) -> None:
        pass


class VerlConfigurator(_BaseConfigurator):
    """Makes no provider: see the module."""

    def _configure(self, **kwargs: Any) -> None:
        pass
