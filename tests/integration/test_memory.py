"""Memory of the trainer's process over a long run."""

import json
import os
import subprocess
import sys

SCRIPT = """
import gc, json, os, random
from opentelemetry.sdk._logs import LoggerProvider
from opentelemetry.sdk._logs.export import BatchLogRecordProcessor, LogRecordExporter, LogRecordExportResult
from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.metrics.export import MetricExporter, MetricExportResult, PeriodicExportingMetricReader
from verl_otel import log_scalar, telemetry


class ForgetLogs(LogRecordExporter):
    def export(self, batch):
        return LogRecordExportResult.SUCCESS

    def force_flush(self, timeout_millis=0):
        return True

    def shutdown(self):
        pass


class ForgetMetrics(MetricExporter):
    def export(self, metrics_data, timeout_millis=0, **kwargs):
        return MetricExportResult.SUCCESS

    def force_flush(self, timeout_millis=0):
        return True

    def shutdown(self, timeout_millis=0, **kwargs):
        pass


logs = LoggerProvider(shutdown_on_exit=False)
logs.add_log_record_processor(BatchLogRecordProcessor(ForgetLogs(), schedule_delay_millis=200))
meter = MeterProvider([PeriodicExportingMetricReader(ForgetMetrics(), 1000)], shutdown_on_exit=False)
telemetry.enable(logger_provider=logs, meter_provider=meter)
t = telemetry.current()


def resident():
    gc.collect()
    with open("/proc/self/statm") as statm:
        return int(statm.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")


keys = [f"group_{i % 7}/metric_{i}" for i in range(300)]
found = {}
for step in range(1, 20_001):
    scope = t.steps.enter("step")
    with_stage = t.steps.enter("update_actor")
    t.steps.leave(with_stage)
    t.steps.leave(scope)
    log_scalar("reward/mine", step)
    t.log({key: random.random() for key in keys}, step)
    if step % 50 == 0:  # what waits is no growth: 20 KiB a step
        assert t.background.drained(60)
    if step in (2_000, 20_000):
        found[step] = resident()
print(json.dumps(found[20_000] - found[2_000]))
"""


def test_memory_is_flat_over_twenty_thousand_steps_of_three_hundred_keys(tmp_path):
    env = {key: value for key, value in os.environ.items() if not key.startswith(("OTEL_", "VERL_OTEL_"))}
    env["OTEL_TRACES_EXPORTER"] = "none"
    result = subprocess.run(
        [sys.executable, "-c", SCRIPT], env=env, cwd=tmp_path, capture_output=True, text=True, timeout=600
    )
    assert result.returncode == 0, result.stderr[-2000:]
    growth = json.loads(result.stdout.splitlines()[-1])
    assert growth < 5 * 2**20, f"{growth / 2**20:.1f} MiB"
