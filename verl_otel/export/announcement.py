"""The one line that a run says of itself when it begins: its id, and where to look for it."""

import os
import sys

from verl_otel import border, config
from verl_otel.export.files import run_folder
from verl_otel.export.providers import FILE_EXPORTER, OTLP_GRPC, OTLP_HTTP, PROMETHEUS, Providers
from verl_otel.version import __version__

_said = False


def announce(run_id: str, settings: config.Settings, providers: Providers) -> None:
    """Print it to standard error, once in this process. Never raises."""
    global _said
    if config.ACTIVE in os.environ:  # a process of a run whose launcher has said it
        return
    try:
        places = _places(run_folder(settings.folder, run_id), providers)
        if places and not _said and sys.stderr is not None:
            _said = True
            print(f"verl-otel {__version__}: run {run_id} {'; '.join(places)}", file=sys.stderr, flush=True)
    except Exception:
        border.caught("saying where the run can be seen")


def _places(folder: str, providers: Providers) -> list[str]:
    places: dict[str, None] = {}  # in order, each once
    for signal, exporters in providers.exporters().items():
        for exporter in exporters:
            if exporter == FILE_EXPORTER:
                places[f"is recorded: verl-otel report {folder}"] = None
            elif exporter in (OTLP_HTTP, OTLP_GRPC):
                of_signal = os.environ.get(f"OTEL_EXPORTER_OTLP_{signal.upper()}_ENDPOINT", "").strip()
                endpoint = of_signal or os.environ.get("OTEL_EXPORTER_OTLP_ENDPOINT", "").strip()
                places[f"is sent to {config.without_secrets(endpoint or 'http://localhost:4318')}"] = None
            elif exporter == PROMETHEUS:
                places["is scraped by Prometheus"] = None
    return list(places)
