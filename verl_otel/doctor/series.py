"""What Prometheus has of the runs: how many series, which are there twice, which are missing, what was lost."""

from collections.abc import Iterator
from typing import Any

from verl_otel.doctor.asked import Asked
from verl_otel.doctor.backends import Backend, NoAnswer
from verl_otel.doctor.findings import Finding, note, ok, warning
from verl_otel.semconv import registry
from verl_otel.semconv.prometheus import prometheus_name

MANY = 10_000
"""Series of one metric that are worth a thought."""

TOP = 5


def _in_prometheus(name: str) -> str:
    metric = registry.load().metrics[name]
    return prometheus_name(metric.name, metric.unit, metric.instrument)


_STEP, _MFU, _THROUGHPUT = map(_in_prometheus, ("verl.training.step", "verl.mfu", "verl.throughput"))
_EXPORTED, _FAILURES = map(_in_prometheus, ("verl.otel.exported", "verl.otel.failures"))
_STARTED, _DOCTOR = map(_in_prometheus, ("verl.process.start_time", "verl.doctor.timestamp"))

_OURS = f'__name__=~"verl_.+|gen_ai_.+|hw_.+",__name__!="{_DOCTOR}"'
_DROPPED = f'sum by (verl_otel_reason) ({_EXPORTED}{{verl_otel_outcome="dropped"}}) > 0'
_FAILED = f'sum by (verl_otel_site) ({_FAILURES}{{verl_otel_site!="none"}}) > 0'
_TWICE = f'count by (verl_run_id, verl_run_attempt) ({_STEP}{{rank="all",stage="step"}}) > 1'
_WITHOUT_STEPS = f"count by (verl_run_id) ({_STARTED}) unless on (verl_run_id) {_STEP}"
_NO_MFU = f"count by (verl_run_id) ({_MFU} == 0 and on (verl_run_id, verl_run_attempt) {_THROUGHPUT} > 0)"


def check(asked: Asked) -> Iterator[Finding]:
    """Nothing where no Prometheus is given; where it does not answer, the area read back says so."""
    if not asked.prometheus:
        return
    prometheus = Backend("Prometheus", asked.prometheus, asked.environ)
    try:
        yield from _cardinality(prometheus)
        yield from _twice(prometheus)
        yield from _runs(prometheus)
    except NoAnswer:
        return


def _cardinality(prometheus: Backend) -> Iterator[Finding]:
    total = _number(prometheus.query(f"count({{{_OURS}}})"))
    runs = _number(prometheus.query('count(count by (verl_run_id) ({verl_run_id!=""}))'))
    if not total:
        yield note("VO-SERIES-NONE", "Prometheus has no series of a run now", "they are shown while a run goes on")
        return
    top = {
        series["metric"].get("__name__", ""): int(float(series["value"][1]))
        for series in prometheus.query(f"topk({TOP}, count by (__name__) ({{{_OURS}}}))")
    }
    top = dict(sorted(top.items(), key=lambda item: -item[1]))
    data = {"series": total, "runs": runs, "top": top}
    shown = f"{total} series of {runs} runs; most: {', '.join(f'{name} {count}' for name, count in top.items())}"
    if max(top.values(), default=0) <= MANY:
        yield ok("VO-SERIES", shown, **data)
        return
    yield warning(
        "VO-SERIES-MANY",
        shown,
        "fewer with VERL_OTEL_RANK_DETAIL=outliers, VERL_OTEL_LEVELS=<module>=basic or VERL_OTEL_UNKNOWN_KEYS=0",
        **data,
    )


def _twice(prometheus: Backend) -> Iterator[Finding]:
    for series in prometheus.query(_TWICE):
        run = series["metric"].get("verl_run_id", "")
        yield warning(
            "VO-SERIES-TWICE",
            f"run {run} has {float(series['value'][1]):.0f} series of {_STEP}: every sum() counts twice",
            "its metrics come by two ways (pushed and scraped, or through two Collectors): take one away; or two "
            "trainings have one VERL_OTEL_RUN_ID",
            run=run,
        )


def _runs(prometheus: Backend) -> Iterator[Finding]:
    for id, query, what, fix in (
        ("VO-RUN-WITHOUT-STEPS", _WITHOUT_STEPS, "it has processes, and has not logged a step yet", _FIX_OF_NO_STEPS),
        ("VO-RUN-WITHOUT-MFU", _NO_MFU, "verl says that its MFU is 0, and its throughput is not", _FIX_OF_NO_MFU),
    ):
        for series in prometheus.query(query):
            run = series["metric"].get("verl_run_id", "")
            yield note(id, f"run {run}: {what}", fix, run=run)
    for id, query, label, what, fix in (
        ("VO-TELEMETRY-DROPPED", _DROPPED, "verl_otel_reason", "telemetry was lost", _FIX_OF_DROPPED),
        ("VO-TELEMETRY-FAILED", _FAILED, "verl_otel_site", "parts of verl-otel failed or warned", _FIX_OF_FAILED),
    ):
        counts = {series["metric"].get(label, ""): float(series["value"][1]) for series in prometheus.query(query)}
        if counts:
            shown = ", ".join(f"{name} {count:.0f}" for name, count in counts.items())
            yield warning(id, f"{what} in runs that Prometheus shows now: {shown}", fix, counts=counts)


_FIX_OF_NO_STEPS = "if it should have: is the hook tracking on, and does the trainer call Tracking.log?"
_FIX_OF_NO_MFU = "verl does not know the FLOPs of this model or GPU: the 0 is verl's, and means nothing"
_FIX_OF_DROPPED = "see the log of the runs; spool_full and spool_failed: give VERL_OTEL_FOLDER more room"
_FIX_OF_FAILED = "look for `verl-otel:` in the log of the runs; each is said once, with what to do"


def _number(series: list[dict[str, Any]]) -> int:
    return int(float(series[0]["value"][1])) if series else 0
