"""What the user's resource attributes do to the labels by which runs, ranks and processes are told apart."""

from collections.abc import Iterator
from urllib.parse import unquote

from verl_otel.doctor.asked import Asked
from verl_otel.doctor.findings import Finding, note, ok, warning
from verl_otel.identity import RESOURCE_ATTRIBUTES
from verl_otel.semconv import attributes as attr
from verl_otel.semconv.prometheus import prometheus_label

_OF_PROMETHEUS = {"job", "instance", "le", "quantile", "__name__"}
_OF_POINTS = {attr.RANK, attr.STAGE, attr.MODEL_TYPE}
_OF_THE_RUN = {attr.RUN_ID, attr.RUN_ATTEMPT, attr.PROCESS_ROLE, attr.WORKER_GROUP}
_OF_A_PROCESS = {attr.PROCESS_PID, attr.HOST_NAME}


def check(asked: Asked) -> Iterator[Finding]:
    """`OTEL_RESOURCE_ATTRIBUTES` and `OTEL_SERVICE_NAME`, which win over ours."""
    text = asked.environ.get(RESOURCE_ATTRIBUTES, "")
    parts = [part.strip() for part in text.split(",") if part.strip()]
    malformed = sum("=" not in part for part in parts)
    keys = [unquote(part.partition("=")[0].strip()) for part in parts if "=" in part]
    found = list(_conflicts(keys, asked.environ.get("OTEL_SERVICE_NAME", "").strip()))
    if malformed:
        found.append(
            warning(
                "VO-RESOURCE-MALFORMED",
                f"{malformed} of {len(parts)} parts of {RESOURCE_ATTRIBUTES} are not key=value, and are left out",
                "write key=value,key=value, and commas in values as %2C",
                parts=malformed,
            )
        )
    yield from found
    if not found:
        shown = f"{', '.join(keys)} do not collide" if keys else "no attribute of yours collides"
        yield ok("VO-RESOURCE", f"{shown} with labels of runs, ranks and processes", attributes=keys)


def _conflicts(keys: list[str], service_name: str) -> Iterator[Finding]:
    if service_name or attr.SERVICE_NAME in keys:
        yield note(
            "VO-RESOURCE-SERVICE-NAME",
            "service.name is set: all processes of the run have the same, in Jaeger and as `job`",
            "tell them apart by verl.process.role; without it they are verl-trainer, verl-worker, ...",
        )
    for key in keys:
        label = prometheus_label(key)
        if key in _OF_THE_RUN:
            yield warning(
                "VO-RESOURCE-OF-THE-RUN",
                f"{RESOURCE_ATTRIBUTES} sets {key}, by which verl-otel tells runs and processes apart",
                f"leave it out; to name a run set {_VARIABLES.get(key, 'nothing')}",
                attribute=key,
            )
        elif key in _OF_POINTS:
            yield warning(
                "VO-RESOURCE-OF-POINTS",
                f"{RESOURCE_ATTRIBUTES} sets {key}, which each point has with a value of its own",
                "call it something else: where resource attributes become labels, one of the two is lost",
                attribute=key,
            )
        elif label in _OF_PROMETHEUS:
            yield warning(
                "VO-RESOURCE-OF-PROMETHEUS",
                f"{RESOURCE_ATTRIBUTES} sets {key}, which is Prometheus' own label {label}",
                "call it something else; `job` is made of service.namespace and service.name, `instance` of "
                "service.instance.id",
                attribute=key,
            )
        elif key in _OF_A_PROCESS:
            yield note(
                "VO-RESOURCE-OF-A-PROCESS",
                f"{RESOURCE_ATTRIBUTES} sets {key}, so all processes that inherit it have the same",
                "leave it out: each process has its own",
                attribute=key,
            )
    by_label: dict[str, set[str]] = {}
    for key in keys:
        by_label.setdefault(prometheus_label(key), set()).add(key)
    for label, same in sorted(by_label.items()):
        ours = {name for name in (*_OF_THE_RUN, *_OF_A_PROCESS, *_OF_POINTS) if prometheus_label(name) == label}
        both = sorted(same | ours) if same - ours else []
        if len(both) > 1:
            yield warning(
                "VO-RESOURCE-SAME-LABEL",
                f"{' and '.join(both)} are both the label {label} in Prometheus",
                f"rename the one in {RESOURCE_ATTRIBUTES}",
                attributes=both,
                label=label,
            )


_VARIABLES = {attr.RUN_ID: "VERL_OTEL_RUN_ID", attr.RUN_ATTEMPT: "VERL_OTEL_RUN_ATTEMPT"}
