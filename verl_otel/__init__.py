"""OpenTelemetry instrumentation for verl.

Usage, with nothing edited::

    opentelemetry-instrument python -m verl.trainer.main_ppo ...

or from code, before verl is imported::

    from verl_otel import VerlInstrumentor

    VerlInstrumentor().instrument()

`instrument()` takes `tracer_provider`, `meter_provider` and `logger_provider`; by default those that are set globally
are used, and made from the `OTEL_*` variables if none are. `uninstrument()` puts every patched name back.
"""

from verl_otel.instrumentor import VerlInstrumentor
from verl_otel.version import __version__

__all__ = ["VerlInstrumentor", "__version__"]
