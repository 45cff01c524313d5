"""From `Tracking.log` to a value that Prometheus's query API gives, through the real Collector: p50, p95, max.

Aim: 1.2 s at p95. Argument: number of steps (default 40).
"""

import json
import os
import random
import sys
import tempfile
import time
import urllib.request
from pathlib import Path

from verl_otel.stack.stack import Stack


def value_of(url):
    with urllib.request.urlopen(url, timeout=5) as response:
        result = json.load(response)["data"]["result"]
    return float(result[0]["value"][1]) if result else None


def main(steps):
    with tempfile.TemporaryDirectory() as folder, Stack(Path(folder)) as stack:
        os.environ["OTEL_EXPORTER_OTLP_ENDPOINT"] = stack.url("otlp_http")
        from verl_otel import VerlInstrumentor

        VerlInstrumentor().instrument(skip_dep_check=True)
        from verl.utils.tracking import Tracking

        tracking = Tracking("bench", "latency", default_backend=[])
        url = f"{stack.url('prometheus')}/api/v1/query?query=verl_training_step"
        filler = {f"group_{i % 7}/metric_{i}": random.random() for i in range(100)}
        delays = []
        for step in range(1, steps + 1):
            tracking.log({"training/global_step": step, **filler}, step)
            start = time.monotonic()
            while value_of(url) != step:
                if time.monotonic() - start > 30:
                    raise SystemExit(f"step {step} does not arrive within 30 s")
                time.sleep(0.01)
            delays.append(time.monotonic() - start)
            time.sleep(random.uniform(0.2, 0.8))
        VerlInstrumentor().uninstrument()
    delays.sort()
    p50, p95 = delays[len(delays) // 2], delays[int(len(delays) * 0.95) - 1]
    print(
        f"\nTracking.log -> Prometheus, {steps} steps of 101 metrics: "
        f"p50 {p50:.2f} s, p95 {p95:.2f} s, max {delays[-1]:.2f} s (aim: p95 1.20 s)"
    )


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 40)
