"""Coverage-guided fuzzing of what reads what others have written: a minute for each target.

Arguments: seconds for each target, and targets (default: all). An input that breaks a target is left in the working
directory as `crash-...`, and the exit status is not 0.
"""

import json
import logging
import subprocess
import sys
import tempfile
from pathlib import Path

TARGETS = ("otlp", "lines", "bridge", "keys", "environment")
NAMES = ("VERL_OTEL_LEVELS", "VERL_OTEL_RANK_DETAIL", "VERL_OTEL_TRAJECTORIES", "VERL_OTEL_UNKNOWN_KEYS")
NAMES += ("VERL_OTEL_EXIT_TIMEOUT", "VERL_OTEL_MODE", "OTEL_EXPORTER_OTLP_ENDPOINT", "OTEL_SDK_DISABLED")


def fuzz(target, seconds):
    import atheris

    with atheris.instrument_imports(include=["verl_otel"]):
        from google.protobuf.message import DecodeError
        from opentelemetry.proto.collector.logs.v1.logs_service_pb2 import ExportLogsServiceRequest

        from verl_otel.bridges import events, server
        from verl_otel.config import Settings
        from verl_otel.export import otlp_json
        from verl_otel.recording import reader
        from verl_otel.semconv import metrics

    def otlp(content):
        for signal in ("traces", "metrics", "logs"):
            try:
                request = otlp_json.from_bytes(signal, content)
            except DecodeError:
                continue
            assert otlp_json.items_of_bytes(signal, content) == otlp_json.items(signal, request)
            otlp_json.split(signal, request, 64)

    def lines(content):
        found = otlp_json.from_line(content)
        if found is not None:
            again = otlp_json.from_line(otlp_json.to_line(found[1]))
            assert again is not None and again[0] == found[0]
        (folder / "one.jsonl").write_bytes(content)
        try:
            reader.load(folder)
        except reader.NoRecording:
            pass

    def bridge(content):
        for kind in ("application/x-protobuf", "application/json"):
            request = ExportLogsServiceRequest()
            try:
                server._decode(content, kind, request)
            except server.BadRequest:
                continue
            for event in events.events_of(request):
                json.dumps(event.body, default=str)

    def keys(content):
        key = content.decode(errors="replace")
        for series in metrics.series_of(key):
            assert series.metric.name.startswith("verl.")
        assert metrics.derived_name(key) == metrics.derived_name(key)

    def environment(content):
        data = atheris.FuzzedDataProvider(content)
        env = {name: data.ConsumeUnicodeNoSurrogates(40) for name in NAMES}
        Settings.from_environ(env).effective(env)

    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        logging.disable()  # what a setting should be is said once for each wrong one
        options = [sys.argv[0], f"-max_total_time={seconds}", "-timeout=10", "-rss_limit_mb=4096", "-verbosity=0"]
        atheris.Setup([*options, "-print_final_stats=1"], locals()[target])
        atheris.Fuzz()


if __name__ == "__main__":
    if sys.argv[1:2] == ["--one"]:
        fuzz(sys.argv[2], int(sys.argv[3]))
    seconds, *chosen = sys.argv[1:] or ["60"]
    codes = []
    for one in chosen or TARGETS:
        print(f"== {one}", flush=True)
        codes.append(subprocess.run([sys.executable, __file__, "--one", one, seconds], check=False).returncode)
    sys.exit(max(codes))
