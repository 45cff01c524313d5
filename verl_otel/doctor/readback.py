"""Whether the test data has come through to Jaeger, Prometheus and MLflow, and whether these can be asked at all."""

import time
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

from verl_otel.doctor.asked import Asked
from verl_otel.doctor.backends import Backend, NoAnswer
from verl_otel.doctor.findings import Finding, note, ok, problem, warning
from verl_otel.doctor.gathering import Gathering
from verl_otel.semconv import attributes as attr
from verl_otel.semconv import metrics as names
from verl_otel.semconv.prometheus import prometheus_name

SENT = 40.0
ARRIVES = 20.0
"""Seconds after which what was sent should be there: Collectors wait for a batch to be full."""

PAUSE = 0.5

_OLDEST_MLFLOW = (3, 14)


def check(asked: Asked) -> Iterator[Finding]:
    """Read back from each backend that was asked about."""
    wanted: list[tuple[str, Callable[[Asked], Iterator[Finding]]]] = []
    if asked.jaeger:
        wanted.append(("Jaeger", _jaeger))
    if asked.prometheus:
        wanted.append(("Prometheus", _prometheus))
    if asked.mlflow:
        wanted.append(("MLflow", _mlflow))
    end = asked.until(SENT + 2 * ARRIVES)
    gatherings = [(name, Gathering(partial(read, asked))) for name, read in wanted]
    for name, gathering in gatherings:
        ended = gathering.wait(end)
        yield from list(gathering.found)
        if isinstance(gathering.error, NoAnswer):
            yield problem("VO-BACKEND-NO-ANSWER", str(gathering.error), gathering.error.fix, backend=name)
        elif gathering.error is not None:
            raise gathering.error
        elif not ended:
            yield problem("VO-BACKEND-NO-ANSWER", f"{name} takes too long to answer", "look at its load", backend=name)


def _jaeger(asked: Asked) -> Iterator[Finding]:
    jaeger = Backend("Jaeger", asked.jaeger, asked.environ)
    jaeger.get("/api/services")
    yield from jaeger.clock()
    trace = asked.probe.trace_id.hex()

    def there() -> bool:
        return bool(jaeger.find(f"/api/traces/{trace}").get("data"))

    hint = "a Collector that samples tails may have left it out"
    yield from _read_back(asked, "traces", jaeger, there, f"the test span (trace {trace})", hint)


def _prometheus(asked: Asked) -> Iterator[Finding]:
    prometheus = Backend("Prometheus", asked.prometheus, asked.environ)
    prometheus.query("vector(1)")
    yield from prometheus.clock()
    metric = names.DOCTOR_TIMESTAMP
    name = prometheus_name(metric.name, metric.unit, metric.instrument)

    def there() -> bool:
        return bool(prometheus.query(f"{name} == {asked.probe.value!r}"))

    hint = "is it started with --web.enable-otlp-receiver, or does it scrape?"
    yield from _read_back(asked, "metrics", prometheus, there, f"the test metric ({name})", hint)


def _mlflow(asked: Asked) -> Iterator[Finding]:
    mlflow = Backend("MLflow", asked.mlflow, asked.environ)
    version = mlflow.text("/version").strip()
    yield from mlflow.clock()
    numbers = tuple(int(part) for part in version.split(".")[:2] if part.isdigit())
    if len(numbers) == 2 and numbers < _OLDEST_MLFLOW:
        yield warning(
            "VO-MLFLOW-OLD",
            f"MLflow is {version}, older than 3.14",
            "upgrade the server: its traces and runs would not belong together",
            version=version,
        )

    def there() -> bool:
        found = mlflow.find("/api/2.0/mlflow/experiments/get-by-name", experiment_name=attr.SERVICE_DOCTOR)
        tags = {tag.get("key"): tag.get("value") for tag in found.get("experiment", {}).get("tags", [])}
        return tags.get(attr.DOCTOR_ID) == asked.probe.id

    hint = "does the bridge (verl-otel bridge) run, of this version, with this MLflow?"
    yield from _read_back(
        asked, "logs", mlflow, there, f"the test event (a tag of the experiment {attr.SERVICE_DOCTOR})", hint
    )


def _read_back(
    asked: Asked, signal: str, backend: Backend, there: Callable[[], bool], what: str, hint: str
) -> Iterator[Finding]:
    data: dict[str, Any] = {"backend": backend.name, "signal": signal}
    if signal not in asked.probe.delivered(asked.until(SENT)):
        yield note(
            "VO-READ-BACK-NOTHING",
            f"{backend.name} answers; there is nothing to read back, since no test data was sent",
            "set OTEL_EXPORTER_OTLP_ENDPOINT; or see under endpoints why it was not taken",
            **data,
        )
        return
    end = asked.until(ARRIVES)
    while not there():
        if time.monotonic() + PAUSE > end:
            yield problem(
                "VO-READ-BACK-MISSING",
                f"{what} was taken by the endpoint, and is not in {backend.name} after {ARRIVES:g} s",
                f"look at the Collector's log, and at otelcol_exporter_send_failed_* for {backend.name}; {hint}",
                **data,
            )
            return
        time.sleep(PAUSE)
    seconds = time.time() - asked.probe.value
    what = f"{what} is in {backend.name}, {seconds:.1f} s after it was made"
    yield ok("VO-READ-BACK", what, seconds=round(seconds, 3), **data)
