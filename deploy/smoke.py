#!/usr/bin/env python3
"""Send one trace, one metric and one step event to the Collector, and read each back from its backend.

    python3 deploy/smoke.py

For the stack of deploy/compose.yaml and of `verl-otel up`; needs nothing but Python. Exit status 0 if all came through.
In MLflow it leaves a run in the experiment verl-otel-smoke.
"""

import argparse
import http.client
import json
import secrets
import sys
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Callable
from typing import Any

VALUE = 0.40625
RUN = f"smoke-{secrets.token_hex(4)}"
PROJECT = "verl-otel-smoke"
TRACE, SPAN = secrets.token_hex(16), secrets.token_hex(8)
SERVICE = "verl-otel-smoke"


def answer(url: str, body: Any = None) -> Any:
    """What a GET, or with a body a POST, answers, as JSON."""
    content = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(url, content, {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=10) as response:
        return json.loads(response.read() or b"null")


def attributes(**values: str) -> list[dict[str, Any]]:
    return [{"key": key.replace("_", "."), "value": {"stringValue": value}} for key, value in values.items()]


def send(otlp: str) -> None:
    """One trace, one metric and the events of a run with one step, as OTLP/JSON."""
    names = {"service_name": SERVICE, "verl_run_id": RUN, "verl_project_name": PROJECT, "verl_experiment_name": RUN}
    resource = {"attributes": attributes(**names)}
    now = time.time_ns()
    span = {
        "traceId": TRACE, "spanId": SPAN, "name": "smoke", "kind": 1,
        "startTimeUnixNano": str(now - 1_000_000), "endTimeUnixNano": str(now),
    }  # fmt: skip
    point = {"timeUnixNano": str(now), "asDouble": VALUE}
    step = [*attributes(**{"verl_run_attempt": "1"}), {"key": "verl.step.number", "value": {"intValue": "1"}}]
    values = [{"key": "smoke/value", "value": {"doubleValue": VALUE}}]
    events = [
        {"eventName": "verl.run.started", "attributes": step[:1], "body": {"kvlistValue": {"values": []}}},
        {"eventName": "verl.step", "attributes": step, "body": {"kvlistValue": {"values": values}}},
        {"eventName": "verl.run.finished", "attributes": [*step[:1], *attributes(verl_run_state="finished")],
         "body": {"kvlistValue": {"values": []}}},
    ]  # fmt: skip
    for number, event in enumerate(events):
        event["timeUnixNano"] = str(now + number)
    metric = {"name": "smoke.value", "gauge": {"dataPoints": [point]}}
    for path, request in (
        ("traces", {"resourceSpans": [{"resource": resource, "scopeSpans": [{"spans": [span]}]}]}),
        ("metrics", {"resourceMetrics": [{"resource": resource, "scopeMetrics": [{"metrics": [metric]}]}]}),
        ("logs", {"resourceLogs": [{"resource": resource, "scopeLogs": [{"logRecords": events}]}]}),
    ):
        answer(f"{otlp}/v1/{path}", request)


def in_jaeger(jaeger: str) -> bool:
    (trace,) = answer(f"{jaeger}/api/traces/{TRACE}")["data"]
    return [span["operationName"] for span in trace["spans"]] == ["smoke"]


def in_prometheus(prometheus: str) -> bool:
    query = urllib.parse.quote(f'smoke_value{{verl_run_id="{RUN}"}}')
    (series,) = answer(f"{prometheus}/api/v1/query?query={query}")["data"]["result"]
    return float(series["value"][1]) == VALUE


def in_mlflow(mlflow: str) -> bool:
    api = f"{mlflow}/api/2.0/mlflow"
    experiment = answer(f"{api}/experiments/get-by-name?experiment_name={PROJECT}")["experiment"]
    wanted = {"experiment_ids": [experiment["experiment_id"]], "filter": f"tags.`verl.run.id` = '{RUN}'"}
    (run,) = answer(f"{api}/runs/search", wanted)["runs"]
    metrics = {metric["key"]: metric["value"] for metric in run["data"]["metrics"]}
    trace = answer(f"{mlflow}/api/3.0/mlflow/traces/tr-{TRACE}")["trace"]["trace_info"]
    return metrics["smoke/value"] == VALUE and run["info"]["status"] == "FINISHED" and trace["state"] == "OK"


def with_alertmanager(prometheus: str) -> bool:
    return len(answer(f"{prometheus}/api/v1/alertmanagers")["data"]["activeAlertmanagers"]) == 1


def eventually(check: Callable[[str], bool], url: str, seconds: float) -> str:
    """Empty when the check passes in time, else why not."""
    deadline = time.monotonic() + seconds
    while True:
        try:
            if check(url):
                return ""
            why = "it is not what was sent"
        except urllib.error.HTTPError as error:
            why = f"not there (HTTP {error.code})"
        except (OSError, http.client.HTTPException) as error:
            why = f"cannot be asked: {getattr(error, 'reason', error)}"
        except (ValueError, KeyError, TypeError):
            why = "not there"
        if time.monotonic() > deadline:
            return why
        time.sleep(0.5)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--otlp", default="http://127.0.0.1:4318", help="the Collector, OTLP/HTTP (%(default)s)")
    parser.add_argument("--jaeger", default="http://127.0.0.1:16686", help="Jaeger (%(default)s)")
    parser.add_argument("--prometheus", default="http://127.0.0.1:9090", help="Prometheus (%(default)s)")
    parser.add_argument("--mlflow", default="http://127.0.0.1:5000", help="MLflow (%(default)s)")
    parser.add_argument("--seconds", type=float, default=60, help="how long to wait for each (%(default)s)")
    options = parser.parse_args()
    try:
        send(options.otlp)
    except (OSError, http.client.HTTPException) as error:
        print(f"FAILED  the Collector at {options.otlp} takes nothing: {error}")
        return 1
    print(f"sent    to {options.otlp}, as run {RUN}")
    failed = False
    for what, check, url in (
        ("trace", in_jaeger, options.jaeger),
        ("metric", in_prometheus, options.prometheus),
        ("step event and trace", in_mlflow, options.mlflow),
        ("Alertmanager known to Prometheus", with_alertmanager, options.prometheus),
    ):
        why = eventually(check, url, options.seconds)
        print(f"{'FAILED' if why else 'ok':<8}{what}, {url}{': ' if why else ''}{why}", flush=True)
        failed = failed or bool(why)
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
