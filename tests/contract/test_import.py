"""What being installed and being loaded costs a process."""

import subprocess
import sys
from pathlib import Path

INSTRUMENT = str(Path(sys.executable).parent / "opentelemetry-instrument")


def python(code, *launch, **environment):
    import os

    env = {k: v for k, v in os.environ.items() if not k.startswith(("OTEL_", "VERL_OTEL_"))}
    command = [*launch, sys.executable, "-c", code]
    return subprocess.run(command, env={**env, **environment}, capture_output=True, text=True, timeout=120)


def test_nothing_imports_verl_ray_or_torch_because_we_are_loaded():
    loaded = python(
        "import sys; print([m for m in sys.modules if m.split('.')[0] in ('verl', 'ray', 'torch', 'mlflow', 'plotly')],"
        " 'verl_otel.instrumentor' in sys.modules)",
        INSTRUMENT,
    )
    assert loaded.stdout.strip() == "[] True", loaded.stderr


def test_a_process_that_never_uses_verl_gets_no_provider_and_no_thread():
    code = (
        "import threading; from opentelemetry import trace, metrics;"
        "print(type(trace.get_tracer_provider()).__name__, type(metrics.get_meter_provider()).__name__,"
        " threading.active_count())"
    )
    assert python(code, INSTRUMENT).stdout.split() == ["ProxyTracerProvider", "_ProxyMeterProvider", "1"]


def test_sdk_disabled_installs_nothing():
    code = "import ray, verl_otel.hooks as h; print(h.status(), ray.init.__module__)"
    result = python(code, INSTRUMENT, OTEL_SDK_DISABLED="true")
    assert result.stdout.split() == ["{}", "ray._private.worker"], result.stderr


def test_the_users_own_providers_are_used():
    code = """
from opentelemetry import trace
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
exporter = InMemorySpanExporter()
mine = TracerProvider()
mine.add_span_processor(SimpleSpanProcessor(exporter))
trace.set_tracer_provider(mine)
from verl.utils.profiler import marked_timer
with marked_timer("adv", {}):
    pass
from verl_otel import telemetry
telemetry.current().flush(5)
print([s.name for s in exporter.get_finished_spans()], trace.get_tracer_provider() is mine)
"""
    result = python(code, INSTRUMENT, VERL_OTEL_FOLDER="/dev/null/none")
    assert result.stdout.strip().splitlines()[-1] == "['verl.advantage'] True", result.stderr
