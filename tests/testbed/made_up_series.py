"""Series that a CPU run of the test bed cannot have, made up from the registry: GPUs, rollout engines, faults, alerts.

Everything of it belongs to the project `made-up`. Values mean nothing; names, types and labels are as in real life.
"""

import itertools
import json
import math
import urllib.request
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from verl_otel.semconv import attributes as attr
from verl_otel.semconv import registry
from verl_otel.semconv.prometheus import prometheus_name
from verl_otel.semconv.registry import Metric

PROJECT = "made-up"
CLUSTER = "made-up-cluster"

_SERVER = {"verl.replica": ["0", "1"]}
_ALERT = {
    "alertstate": ["firing"],
    "stage": ["rollout"],
    attr.PROJECT_NAME: [PROJECT],
    attr.EXPERIMENT_NAME: ["made-up"],
}
_QUEUE = {"exporter": ["otlp_grpc/jaeger", "otlp_http/prometheus"], "data_type": ["traces"]}
_SENT, _RECEIVED = {"exporter": ["otlp_http/prometheus"]}, {"receiver": ["otlp"]}
_SIGNALS = ("spans", "metric_points", "log_records")

OTHERS: dict[str, tuple[str, Mapping[str, Sequence[str]]]] = {
    "ALERTS": ("one", {**_ALERT, "alertname": ["VerlRunHung"], "severity": ["critical", "warning"]}),
    "DCGM_FI_DEV_XID_ERRORS": ("gauge", {"UUID": [f"GPU-{number}" for number in range(4)]}),
    "otelcol_exporter_queue_size": ("gauge", _QUEUE),
    "otelcol_exporter_queue_capacity": ("capacity", _QUEUE),
    **{f"otelcol_exporter_send_failed_{signal}": ("counted", _SENT) for signal in _SIGNALS},
    **{f"otelcol_receiver_refused_{signal}": ("counted", _RECEIVED) for signal in _SIGNALS},
    "otelcol_processor_filter_datapoints_filtered": ("counted", {"filter": ["filter/too_late"]}),
    "otelcol_process_cpu_seconds": ("counted", {}),
    "otelcol_process_memory_rss": ("gauge", {}),
    "vllm:num_requests_running": ("gauge", _SERVER),
    "vllm:num_requests_waiting": ("gauge", _SERVER),
    "vllm:kv_cache_usage_perc": ("share", _SERVER),
    "vllm:time_to_first_token_seconds": ("histogram", _SERVER),
    "sglang:num_running_reqs": ("gauge", _SERVER),
    "sglang:num_queue_reqs": ("gauge", _SERVER),
    "sglang:token_usage": ("share", _SERVER),
    "sglang:time_to_first_token_seconds": ("histogram", _SERVER),
}
"""Metrics that are not ours, in Prometheus' names: of its rules, NVIDIA's dcgm-exporter, the Collector, vLLM and
SGLang. `counted`: a counter without `_total`, as the Collector has them."""

_TIMERS = ["gen", "reward", "old_log_prob", "ref", "adv", "update_actor", "update_weights"]
_FANNED: dict[str, Sequence[str]] = {
    attr.TIMER: _TIMERS,
    attr.REPLICA: ["0", "1"],
    attr.WORKER_METHOD: ["compute_log_prob", "update_actor"],
    attr.TOKEN_TYPE: ["input", "output"],
    attr.OUTCOME: ["delivered", "spooled", "replayed", "dropped"],
    attr.SIGNAL: ["traces", "metrics"],
    attr.SITE: ["none", "opening the span of gen"],
    "verl.validation.core": ["true"],
    "verl.kl.type": ["penalty", "loss", "update"],
    "state": ["used", "free", "user", "idle"],
    "direction": ["receive", "transmit"],
    "device": ["eth0"],
    "hw.state": ["ok", "failed"],
    "hw.parent": [""],
    "error.type": ["uncorrected"],
    "verl.key": ["made/up"],
}
_RANKS = [str(rank) for rank in range(4)]
_OF_RANKS = ("verl.worker.duration", "verl.worker.memory.", "verl.server.", "gen_ai.server.")
_CONSTANT = {"hw.gpu.memory.limit": 1e11}
_GROWS = {"verl.training.step", "verl.training.epoch"}


def by_prometheus_name() -> dict[str, Metric]:
    """Prometheus name (of a histogram: of its base) -> metric of the registry."""
    return {prometheus_name(m.name, m.unit, m.instrument): m for m in registry.load().metrics.values()}


def payload(run: str, attempt: int, names: Iterable[str], start: float, end: float, seed: int = 0) -> dict[str, Any]:
    """An OTLP request with a point of each series every 10 s.

    Args:
        names: Prometheus names, of histograms the base: of metrics of the registry, or of `OTHERS`.
        seed: for other values of the same series.
    """
    times = [start + 10 * number for number in range(int((end - start) / 10) + 1)]
    known = by_prometheus_name()
    by_role: dict[str, list[dict[str, Any]]] = {}
    for name in sorted(set(names)):
        if name in known:
            metric = known[name]
            fields = {
                **_kind(metric),
                "unit": metric.unit,
                **_points(_of_registry(metric), metric, times, seed),
            }
            for role in _roles(metric):
                by_role.setdefault(role, []).append({"name": metric.name, **_shaped(fields)})
        else:
            kind, labels = OTHERS[name]
            fields = {"kind": kind, "unit": "", **_points(labels, None, times, seed, kind)}
            by_role.setdefault("", []).append({"name": name, **_shaped(fields)})
    resources = []
    for role, metrics in by_role.items():
        resource = {
            "service.name": f"verl-{role or 'other'}",
            "service.namespace": "verl",
            "service.instance.id": f"{run}-{attempt}-{role}",
            "host.name": "gpu-node-1",
            "k8s.cluster.name": CLUSTER,
            attr.RUN_ID: run,
            attr.RUN_ATTEMPT: str(attempt),
            attr.PROJECT_NAME: PROJECT,
            attr.EXPERIMENT_NAME: "made-up",
            **({attr.PROCESS_ROLE: role, attr.WORKER_GROUP: "WorkerDict"} if role else {}),
        }
        resources.append({"resource": {"attributes": _attributes(resource)}, "scopeMetrics": [{"metrics": metrics}]})
    return {"resourceMetrics": resources}


def send(url: str, request: Mapping[str, Any]) -> None:
    """POST it to an OTLP/HTTP endpoint for metrics."""
    body = json.dumps(request).encode()
    headers = {"Content-Type": "application/json"}
    with urllib.request.urlopen(urllib.request.Request(url, body, headers), timeout=60) as response:
        answer = json.loads(response.read() or b"{}")
    assert not answer.get("partialSuccess"), answer


def _roles(metric: Metric) -> list[str]:
    if metric.name == "verl.process.start_time":
        return ["trainer", "worker", "rollout_server"]
    if metric.name.startswith(("verl.server.", "gen_ai.server.")):
        return ["rollout_server"]
    return ["trainer", "worker"] if metric.per_rank else ["worker" if _ranked(metric) else "trainer"]


def _ranked(metric: Metric) -> bool:
    return metric.name.startswith(_OF_RANKS)


def _of_registry(metric: Metric) -> dict[str, Sequence[str]]:
    labels: dict[str, Sequence[str]] = {
        attr.RANK: _RANKS
        if _ranked(metric)
        else [*_RANKS[:2], attr.ALL_RANKS]
        if metric.per_rank
        else [attr.ALL_RANKS],
        attr.STAGE: ["update" if metric.name == "verl.timing" else metric.stage],  # a timing has its timer's
        attr.MODEL_TYPE: [metric.model_type],
    }
    examples = registry.load().attributes
    for name in (*metric.attributes, *([attr.VERL_KEY] if metric.keys else [])):
        labels[name] = _FANNED.get(name) or [str(value) for value in examples.get(name, {}).get("examples", ["x"])[:2]]
    if "hw.id" in labels:
        labels["hw.id"] = [f"GPU-{number}" for number in range(4)]
    return labels


def _kind(metric: Metric) -> dict[str, str]:
    return {"kind": metric.instrument}


def _points(
    labels: Mapping[str, Sequence[str]], metric: Metric | None, times: Sequence[float], seed: int, kind: str = ""
) -> dict[str, Any]:
    kind = kind or (metric.instrument if metric else "")
    bounds = list(metric.boundaries) if metric and metric.boundaries else [0.01, 0.1, 0.5, 1.0, 5.0]
    points = []
    for number, chosen in enumerate(itertools.product(*labels.values())):
        said = dict(zip(labels, chosen, strict=True))
        if "hw.id" in said:
            said["hw.name"] = said["hw.id"].replace("-", " ")
        attributes = _attributes(said)
        for index, at in enumerate(times):
            stamp = {"startTimeUnixNano": _nanos(times[0] - 10), "timeUnixNano": _nanos(at), "attributes": attributes}
            if kind == "histogram":
                points.append({**stamp, **_histogram(bounds, (index + 1) * (2 + (number + seed) % 3), number)})
            else:
                points.append({**stamp, "asDouble": _value(metric, kind, number + seed, index, at, times[0])})
    return {"points": points}


def _value(metric: Metric | None, kind: str, number: int, index: int, at: float, start: float) -> float:
    wave = 0.5 + 0.4 * math.sin(index / 5 + number)
    if kind in ("counter", "counted"):
        return float((index + 1) * (1 + number % 3))
    constant = {"one": 1.0, "capacity": 100.0}.get(kind) or _CONSTANT.get(metric.name if metric else "")
    if constant is not None:
        return constant
    if metric and metric.name == "hw.status":
        return float(number % 2 == 0)
    if kind == "share" or (metric and metric.unit == "1"):
        return wave
    if metric and metric.unit == "s" and "Unix time" in metric.brief:
        return start if "process" in metric.name else at - 3
    if metric and metric.name in _GROWS:
        return float(index + 1)
    scale = {"By": 8e10, "Cel": 90.0, "W": 700.0, "{token}/s": 900.0}.get(metric.unit if metric else "", 10.0)
    return scale * wave


def _histogram(bounds: Sequence[float], count: int, number: int) -> dict[str, Any]:
    middle = len(bounds) // 2
    counts = [0] * (len(bounds) + 1)
    for one in range(count):
        counts[max(0, min(len(bounds), middle + (one + number) % 3 - 1))] += 1
    total = sum(counts[index] * bounds[min(index, len(bounds) - 1)] for index in range(len(counts)))
    return {
        "count": str(count),
        "sum": float(total),
        "bucketCounts": [str(one) for one in counts],
        "explicitBounds": list(bounds),
    }


def _shaped(fields: Mapping[str, Any]) -> dict[str, Any]:
    kind, points = fields["kind"], {"dataPoints": fields["points"]}
    if kind == "histogram":
        return {"unit": fields["unit"], "histogram": {**points, "aggregationTemporality": 2}}
    if kind in ("counter", "updowncounter"):
        data = {**points, "aggregationTemporality": 2, "isMonotonic": kind == "counter"}
        return {"unit": fields["unit"], "sum": data}
    return {"unit": fields["unit"], "gauge": points}


def _attributes(values: Mapping[str, str]) -> list[dict[str, Any]]:
    return [{"key": name, "value": {"stringValue": value}} for name, value in values.items()]


def _nanos(seconds: float) -> str:
    return str(int(seconds * 1e9))
