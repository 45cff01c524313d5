"""Second way into a verl process: verl >= 0.9 imports this module in every process (entry point group `verl.plugins`).

It reaches workers of a Ray cluster to which `PYTHONPATH` does not get through. It does something only where an
instrumented launcher says so, and nothing where the instrumentor is at work already.
"""

import os

from verl_otel import border, config


def activate() -> None:
    """Instrument this process if it belongs to an instrumented run. Never raises."""
    try:
        if os.environ.get(config.ACTIVE):
            from verl_otel.instrumentor import VerlInstrumentor

            instrumentor = VerlInstrumentor()
            if not instrumentor.is_instrumented_by_opentelemetry:
                instrumentor.instrument(skip_dep_check=True)
    except Exception:
        border.caught("instrumenting through verl.plugins")


activate()
