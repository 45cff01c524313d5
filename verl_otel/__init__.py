"""OpenTelemetry instrumentation for verl.

Usage, with nothing edited::

    opentelemetry-instrument python -m verl.trainer.main_ppo ...

or from code, before verl is imported::

    from verl_otel import VerlInstrumentor

    VerlInstrumentor().instrument()

`instrument()` takes `tracer_provider`, `meter_provider` and `logger_provider`; by default those that are set globally
are used, and made from the `OTEL_*` variables if none are. `uninstrument()` puts every patched name back.

Metrics and stages of your own, from any process of a run::

    from verl_otel import log_scalar, stage

    with stage("filter_samples"):
        log_scalar("reward/creative_score", 0.7)
"""

from verl_otel.api import declare, flush, log_histogram, log_scalar, log_text, stage
from verl_otel.instrumentor import VerlInstrumentor
from verl_otel.version import __version__

__all__ = [
    "VerlInstrumentor",
    "__version__",
    "declare",
    "flush",
    "log_histogram",
    "log_scalar",
    "log_text",
    "stage",
]
