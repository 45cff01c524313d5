"""Switches the hooks on and off: what `opentelemetry-instrument` loads (group `opentelemetry_instrumentor`).

Runs in every Python process under `opentelemetry-instrument`, most of which never import verl: registers import hooks
and does nothing else.
"""

import os
from collections.abc import Collection
from typing import Any

from opentelemetry.instrumentation.instrumentor import BaseInstrumentor

from verl_otel import config, hooks, identity, telemetry
from verl_otel.package import _instruments


class VerlInstrumentor(BaseInstrumentor):
    """An instrumentor for verl."""

    def instrumentation_dependencies(self) -> Collection[str]:
        return _instruments

    def _instrument(self, **kwargs: Any) -> None:
        """Install the hooks.

        Args:
            tracer_provider, meter_provider, logger_provider: providers to use instead of the global ones.
            levels: module -> `off`, `basic` or `detailed`, as in `VERL_OTEL_LEVELS`.
            rank_detail: `all`, `outliers`, `off` or a number, as in `VERL_OTEL_RANK_DETAIL`.
            export_interval: seconds between two exports of metrics, as in `OTEL_METRIC_EXPORT_INTERVAL`.
        """
        if config.sdk_disabled():
            return
        config.publish(kwargs.get("levels"), kwargs.get("rank_detail"), kwargs.get("export_interval"))
        if not identity.in_ray_itself():
            identity.ensure_run_id()
        if config.ACTIVE in os.environ:
            identity.tidy_resource_attributes()
        telemetry.enable(
            tracer_provider=kwargs.get("tracer_provider"),
            meter_provider=kwargs.get("meter_provider"),
            logger_provider=kwargs.get("logger_provider"),
        )
        hooks.install(config.Settings.from_environ().disabled_hooks)

    def _uninstrument(self, **kwargs: Any) -> None:
        hooks.uninstall()
        telemetry.disable()
