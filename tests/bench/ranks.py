"""What N ranks cost the Collector and the backends: points and spans, CPU, memory, series, bytes.

    python tests/bench/ranks.py [--recording FOLDER] [--step SECONDS] [--steps NUMBER] [RANKS ...]

What one rank of a real run of the test bed has sent in a step is sent for each of N ranks, with an identity of its own
and the present time, through the real Collector to the real backends; so are the parts of the trainer, of verl's eight
agent-loop workers, and of a rollout server for every eight ranks. Prints a line for each N, and what a queue takes on
disk while the backends are away. The results are in docs/operating.md.
"""

import argparse
import hashlib
import http.client
import json
import random
import re
import shutil
import sys
import tempfile
import threading
import time
import urllib.request
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil

from verl_otel.export import otlp_json
from verl_otel.stack.stack import Stack

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "testbed"))
import bed

AGENT_LOOPS = 8  # verl's default, `agent.num_workers`
RANKS_OF_A_NODE = 8
EXPORT_INTERVAL = 10.0  # of OTLP metrics, seconds; our default
SENDERS = 6


class Template:
    """What one process of each role sends in the last step of a recorded run."""

    def __init__(self, recording: Path) -> None:
        by_role: dict[str, dict[str, list[Any]]] = {}
        seen = set()
        for path in sorted(recording.glob("*.jsonl")):
            role = path.name.split("-")[0]
            if role in by_role and path.name.rsplit(".", 2)[0] not in seen:
                continue  # a second process of this role
            seen.add(path.name.rsplit(".", 2)[0])
            for line in path.read_bytes().splitlines():
                signal, request = otlp_json.from_line(line) or ("", None)
                by_role.setdefault(role, {}).setdefault(signal, []).append(request)
        steps = [
            span for request in by_role["trainer"]["traces"] for span in spans(request) if span.name == "verl.step"
        ]
        self.parts: dict[str, list[tuple[str, Any]]] = {}
        self.owner: dict[bytes, str] = {}
        for role, signals in by_role.items():
            traces = [kept(request, steps[-1].trace_id) for request in signals.get("traces", ())]
            traces = [request for request in traces if request is not None]
            self.owner.update({span.span_id: role for request in traces for span in spans(request)})
            # The last export has every series of the process; it was sent as often as a step has calls.
            metrics = [signals["metrics"][-1]] * max(1, round(len(signals["metrics"]) / len(steps)))
            logs = signals.get("logs", [])[-2:-1]  # the last one tells that the run has ended
            self.parts[role] = [
                *(("metrics", request) for request in metrics),
                *(("traces", request) for request in traces),
                *(("logs", request) for request in logs),
            ]


def spans(request: Any) -> list[Any]:
    return [span for group in request.resource_spans for scope in group.scope_spans for span in scope.spans]


def points(request: Any) -> list[Any]:
    found = []
    for group in request.resource_metrics:
        for metric in (metric for scope in group.scope_metrics for metric in scope.metrics):
            found += getattr(metric, metric.WhichOneof("data")).data_points
    return found


def kept(request: Any, trace_id: bytes) -> Any:
    """The request with the spans of one trace only; None if there are none."""
    copy = type(request).FromString(request.SerializeToString())
    for scope in (scope for group in copy.resource_spans for scope in group.scope_spans):
        own = [span for span in scope.spans if span.trace_id == trace_id]
        del scope.spans[:]
        scope.spans.extend(own)
    return copy if spans(copy) else None


class Process:
    """One of the simulated processes: its requests, told apart from those of the others of its role."""

    def __init__(self, template: Template, role: str, number: int, run: str) -> None:
        self.role, self.number, self.owner = role, number, template.owner
        self.requests = [(signal, type(of).FromString(of.SerializeToString())) for signal, of in template.parts[role]]
        own = {
            "service.instance.id": f"{role}-{number}",
            "host.name": f"node-{number // RANKS_OF_A_NODE if role == 'worker' else number}",
            "verl.run.id": run,
        }
        for _, request in self.requests:
            for resource in (group.resource for _, groups in request.ListFields() for group in groups):
                for attribute in resource.attributes:
                    if attribute.key in own:
                        attribute.value.string_value = own[attribute.key]
        if role == "worker":
            for attribute in self._attributes():
                if attribute.key == "rank":
                    attribute.value.string_value = str(number)

    def _attributes(self) -> Any:
        for signal, request in self.requests:
            for item in spans(request) if signal == "traces" else points(request) if signal == "metrics" else ():
                yield from item.attributes

    def span_id(self, recorded: bytes, step: int) -> bytes:
        """A parent of another role is that of its first process."""
        role = self.owner.get(recorded, self.role)
        number = self.number if role == self.role else 0
        return hashlib.sha256(f"{role} {number} {step}".encode() + recorded).digest()[:8]

    def content(self, index: int, run: str, step: int) -> tuple[str, bytes, int]:
        """Signal, body and number of items of one of the requests, as it is sent now."""
        signal, request = self.requests[index]
        now = time.time_ns()
        if signal == "metrics":
            for point in points(request):
                point.time_unix_nano = now
                if hasattr(point, "as_double") and point.WhichOneof("value") == "as_double":
                    point.as_double *= 1 + random.uniform(0, 1e-3)
        elif signal == "traces":
            trace_id = hashlib.sha256(f"{run} {step}".encode()).digest()[:16]
            request = type(request).FromString(request.SerializeToString())
            for span in spans(request):
                took = span.end_time_unix_nano - span.start_time_unix_nano
                span.start_time_unix_nano, span.end_time_unix_nano = now - took, now
                span.trace_id, span.span_id = trace_id, self.span_id(span.span_id, step)
                span.parent_span_id = span.parent_span_id and self.span_id(span.parent_span_id, step)
        return signal, request.SerializeToString(), otlp_json.items(signal, request)


def simulated(template: Template, ranks: int, run: str) -> list[Process]:
    counts = {
        "trainer": 1,
        "worker": ranks,
        "agent_loop": AGENT_LOOPS,
        "reward_worker": 1,
        "rollout_server": -(-ranks // RANKS_OF_A_NODE),
    }
    there = {role: count for role, count in counts.items() if role in template.parts}
    return [Process(template, role, number, run) for role, count in there.items() for number in range(count)]


class Load:
    """Sends what the processes of a run send, each at a time of its own within the step."""

    def __init__(self, address: str, processes: list[Process], run: str) -> None:
        self.address, self.processes, self.run = address, processes, run
        self.items: Counter[str] = Counter()
        self.bytes: Counter[str] = Counter()
        self.late = 0.0
        self.refused = 0
        self._lock = threading.Lock()

    def send(self, steps: range, seconds: float, sample: Callable[[], None] = lambda: None) -> None:
        start = time.monotonic()
        threads = [threading.Thread(target=self._send, args=(i, steps, seconds, start)) for i in range(SENDERS)]
        for thread in threads:
            thread.start()
        while any(thread.is_alive() for thread in threads):
            sample()
            time.sleep(1)

    def _send(self, sender: int, steps: range, seconds: float, start: float) -> None:
        connection = http.client.HTTPConnection(self.address, timeout=30)
        for count, step in enumerate(steps):
            plan = []
            for process in self.processes[sender::SENDERS]:
                for index, (signal, _) in enumerate(process.requests):
                    plan.append((random.uniform(0, seconds), process, index))
                    if signal != "metrics":
                        continue
                exports = round(seconds / EXPORT_INTERVAL)  # besides those at once
                first = next(i for i, (signal, _) in enumerate(process.requests) if signal == "metrics")
                plan += [(random.uniform(0, seconds), process, first) for _ in range(exports)]
            for at, process, index in sorted(plan, key=lambda entry: entry[0]):
                wait = start + count * seconds + at - time.monotonic()
                if wait > 0:
                    time.sleep(wait)
                signal, body, items = process.content(index, self.run, step)
                connection.request("POST", f"/v1/{signal}", body, {"content-type": "application/x-protobuf"})
                answer = connection.getresponse()
                answer.read()
                with self._lock:
                    self.late = max(self.late, -wait)
                    self.refused += answer.status != 200
                    self.items[signal] += items
                    self.bytes[signal] += len(body)
        connection.close()


class Meter:
    """CPU and memory of each service, with its children."""

    def __init__(self, stack: Stack) -> None:
        self._stack = stack
        self._processes = {name: psutil.Process(process.pid) for name, process in stack.processes.items()}
        self.resident: Counter[str] = Counter()
        self._before = {name: self._seconds(name) for name in self._processes}

    def _all(self, name: str) -> list[psutil.Process]:
        return [self._processes[name], *self._processes[name].children(recursive=True)]

    def _seconds(self, name: str) -> float:
        times = [process.cpu_times() for process in self._all(name)]
        return sum(each.user + each.system for each in times)

    def sample(self) -> None:
        for name in self._processes:
            now = sum(process.memory_info().rss for process in self._all(name))
            self.resident[name] = max(self.resident[name], now)

    def cpu(self) -> dict[str, float]:
        """CPU seconds of each since the meter was made."""
        return {name: self._seconds(name) - before for name, before in self._before.items()}


def scraped(url: str) -> dict[str, float]:
    """name -> sum over all series of that name at a /metrics page."""
    with urllib.request.urlopen(url, timeout=10) as response:
        lines = response.read().decode().splitlines()
    found: Counter[str] = Counter()
    for line in lines:
        match = re.match(r"(\w+)(?:\{.*\})? (\S+)", line)
        if match and not line.startswith("#"):
            found[match[1]] += float(match[2])
    return dict(found)


def waits(stack: Stack) -> dict[str, float]:
    """exporter -> items in its queues."""
    with urllib.request.urlopen(stack.url("collector_self") + "/metrics", timeout=10) as response:
        text = response.read().decode()
    found: Counter[str] = Counter()
    for exporter, value in re.findall(
        r'^otelcol_exporter_queue_size\{.*exporter="([^"]+)".*\} (\S+)', text, re.MULTILINE
    ):
        found[exporter] += float(value)
    return {exporter: value for exporter, value in found.items() if value}


def measure(template: Template, ranks: int, seconds: float, steps: int) -> None:
    run = f"bench-{ranks}"
    with tempfile.TemporaryDirectory(prefix="ranks") as folder, Stack(Path(folder)) as stack:
        load = Load(stack.address("otlp_http"), simulated(template, ranks, run), run)
        meter = Meter(stack)
        prometheus = stack.url("prometheus") + "/metrics"
        before = scraped(prometheus)
        start = time.monotonic()
        load.send(range(steps), seconds, meter.sample)
        sent = time.monotonic() - start
        behind = waits(stack)
        while waits(stack) and time.monotonic() - start < sent + 60:
            meter.sample()
            time.sleep(1)
        took = time.monotonic() - start
        cpu, after, left = meter.cpu(), scraped(prometheus), waits(stack)
        own = scraped(stack.url("collector_self") + "/metrics")
        query = "count({verl_run_id!=%22%22})"
        with urllib.request.urlopen(f"{stack.url('prometheus')}/api/v1/query?query={query}", timeout=10) as response:
            series = int(json.load(response)["data"]["result"][0]["value"][1])
        samples = after["prometheus_tsdb_head_samples_appended_total"] - before.get(
            "prometheus_tsdb_head_samples_appended_total", 0
        )
        print(
            f"\n{ranks} ranks, {len(load.processes)} processes, {steps} steps of {seconds:g} s "
            f"(largest delay of the generator {load.late:.1f} s, refused {load.refused})"
        )
        for signal, items in load.items.items():
            print(
                f"  {signal:<8} {items / sent:>9.1f} /s {items / steps:>9.0f} a step "
                f"{load.bytes[signal] / sent / 1024:>9.1f} KiB/s {load.bytes[signal] / items:>7.0f} B each"
            )
        lost = sum(value for name, value in own.items() if "failed" in name and "enqueue" not in name)
        print(f"  waited in queues after the last step {behind}, {took - sent:.0f} s later {left}; failed {lost:.0f}")
        print(f"  Prometheus: {series} series, {samples:.0f} samples")
        for name in cpu:
            used = (
                f"{cpu[name] / sent:>6.3f} cores" if name not in ("bridge", "mlflow") else f"{cpu[name]:>6.1f} s of CPU"
            )
            print(f"  {name:<12} {used} {meter.resident[name] / 2**20:>7.0f} MiB at most")
        written = load.items["traces"] - left.get("otlp_http/mlflow_bridge", 0)
        print(f"  MLflow took {written:.0f} spans, {written / cpu['mlflow']:.0f} for each second of its CPU")
        for name in ("jaeger", "prometheus", "bridge"):
            stack.kill(name)
        queue = Path(folder) / "queue"
        filled = Counter(load.items)
        load.send(range(steps, steps + 1), seconds)
        load.items.subtract(filled)
        size = sum(file.stat().st_blocks * 512 for file in queue.iterdir())
        print(f"  backends away for a step: {dict(load.items)} sent, {sum(waits(stack).values()):.0f} items in queues, "
              f"{size / 2**20:.1f} MiB on disk", flush=True)  # fmt: skip


def record(folder: Path) -> Path:
    """A real run with critic and reference, recorded."""
    server = bed.ForkServer.start()
    try:
        run = bed.run(folder, [*bed.PPO_WITH_CRITIC_AND_REFERENCE, *bed.FAST_SAMPLER], steps=4, fork_server=server)
    finally:
        server.stop()
    if run.returncode != 0:
        raise SystemExit(run.output[-3000:])
    return run.telemetry


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("ranks", nargs="*", type=int, default=[8, 64, 256])
    parser.add_argument("--recording", type=Path, help="folder of a recorded run (default: one is made)")
    parser.add_argument("--step", type=float, default=10.0, help="seconds that a step takes")
    parser.add_argument("--steps", type=int, default=6)
    options = parser.parse_args()
    made = None if options.recording else Path(tempfile.mkdtemp(prefix="ranks"))
    try:
        template = Template(options.recording or record(made))
        for ranks in options.ranks:
            measure(template, ranks, options.step, options.steps)
    finally:
        if made:
            shutil.rmtree(made, ignore_errors=True)


if __name__ == "__main__":
    main()
