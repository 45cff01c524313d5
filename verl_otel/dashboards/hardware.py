"""*Hardware*: are the GPUs used, full, hot or broken, and what do the hosts do?"""

from grafana_foundation_sdk.builders.dashboard import Dashboard, Row

from verl_otel.dashboards import layout, queries
from verl_otel.dashboards.panels import LOST, About, Column, Query, bars, heat, lines, number, rows
from verl_otel.dashboards.uids import HARDWARE
from verl_otel.hardware import names
from verl_otel.semconv import attributes as attr
from verl_otel.semconv.prometheus import prometheus_label

_GPU = (attr.HOST_NAME, names.ID, names.NAME)
"""What tells GPUs apart. Two runs on one GPU both say its values: they are not added up."""
_OF_GPU = "{{host_name}} {{hw_name}}"
_HOST = (attr.HOST_NAME,)
_OF_HOST = "{{host_name}}"
_FULL = 0.85
_FAILED = {names.STATE: queries.equal("failed")}


def board(mlflow: str) -> Dashboard:
    board = layout.board(
        HARDWARE,
        "verl / Hardware",
        "Are the GPUs of the chosen runs used, full, hot or broken? What do the hosts do? Needs the extra `hardware`.",
        mlflow,
        [*queries.CHOSEN_RUN.values()],
    )
    _first_look(board)
    board.with_row(Row("GPUs"))
    _gpus(board)
    board.with_row(Row("Hosts"))
    _hosts(board)
    return board


def _each(metric: str, where: queries.Matchers | None = None, keep: tuple[str, ...] = _GPU) -> str:
    """The value of each GPU or host, once, whatever runs say it."""
    return f"max {queries.by(keep)} ({queries.series(metric, where)})"


def _first_look(board: Dashboard) -> None:
    board.with_panel(
        number("GPUs", [Query(f"count({_each('hw.gpu.memory.limit')})", "")], About("GPUs that the chosen runs use"), 3)
    )
    for title, aggregate, metric, thresholds in (
        ("Utilisation, mean", "avg", "hw.gpu.utilization", ((None, "red"), (0.3, "orange"), (0.6, "green"))),
        ("Utilisation, least", "min", "hw.gpu.utilization", ()),
        ("Memory, fullest", "max", "hw.gpu.memory.utilization", ((None, "green"), (_FULL, "orange"), (0.95, "red"))),
        ("Power", "sum", "hw.power", ()),
        ("Hottest", "max", "hw.temperature", ((None, "green"), (80, "orange"), (90, "red"))),
    ):
        shown = [Query(f"{aggregate}({_each(metric)})", "")]
        board.with_panel(number(title, shown, About.of(metric), 3, thresholds, graph=True))
    errors = f"sum(max {queries.by((*_GPU, attr.ERROR_TYPE))} ({queries.series('hw.errors')}))"
    board.with_panel(number("ECC errors", [Query(errors, "")], About.of("hw.errors"), 3, LOST))
    failed = f"sum({_each('hw.status', _FAILED)})"
    board.with_panel(number("GPUs failed", [Query(failed, "")], About.of("hw.status", unit="none"), 3, LOST))


def _gpus(board: Dashboard) -> None:
    board.with_panel(
        heat("Utilisation of each GPU", Query(_each("hw.gpu.utilization"), _OF_GPU), About.of("hw.gpu.utilization"))
    )
    board.with_panel(
        lines(
            "Memory of each GPU",
            [Query(_each("hw.gpu.memory.utilization"), _OF_GPU)],
            About.of("hw.gpu.memory.utilization"),
            width=12,
            thresholds=((None, "transparent"), (_FULL, "orange")),
            upto=1,
        )
    )
    board.with_panel(lines("Power", [Query(_each("hw.power"), _OF_GPU)], About.of("hw.power")))
    board.with_panel(
        lines(
            "Temperature",
            [Query(_each("hw.temperature"), _OF_GPU)],
            About.of("hw.temperature"),
            thresholds=((None, "transparent"), (85, "orange")),
        )
    )
    errors = f"max {queries.by((*_GPU, attr.ERROR_TYPE))} ({queries.series('hw.errors')})"
    board.with_panel(
        lines(
            "ECC errors", [Query(errors, "{{error_type}} " + _OF_GPU)], About.of("hw.errors", "Counted by the driver")
        )
    )
    columns = [
        Column("Utilisation", _each("hw.gpu.utilization"), "percentunit"),
        Column("Memory used", _each("hw.gpu.memory.usage"), "bytes"),
        Column("Memory", _each("hw.gpu.memory.limit"), "bytes"),
        Column("Memory share", _each("hw.gpu.memory.utilization"), "percentunit", ((None, "text"), (_FULL, "orange"))),
        Column("Power", _each("hw.power"), "watt"),
        Column("Temperature", _each("hw.temperature"), "celsius"),
        Column("Energy", _each("hw.energy"), "joule"),
        Column("Last XID", _last_xid(), "none", ((None, "text"), (1, "red"))),
        Column("Failed", _each("hw.status", _FAILED), "none", ((None, "text"), (1, "red"))),
    ]
    keys = dict(zip(_GPU, ("Host", "UUID", "GPU"), strict=True))
    board.with_panel(
        rows(
            "GPUs now",
            keys,
            columns,
            About(
                "The newest values, by GPU. Last XID: of NVIDIA's dcgm-exporter, if Prometheus scrapes one; 0 for none"
            ),
            height=7,
        )
    )
    running = f"avg_over_time({_each('hw.gpu.utilization')}[$__range:1m])"
    board.with_panel(
        bars(
            "Utilisation over the time range",
            [Query(running, _OF_GPU)],
            About.of("hw.gpu.utilization"),
            width=24,
            height=6,
        )
    )


def _last_xid() -> str:
    """Code of the last XID of each GPU that a run uses, by its UUID."""
    gpu = prometheus_label(names.ID)
    code = f'max by ({gpu}) (label_replace(DCGM_FI_DEV_XID_ERRORS, "{gpu}", "$1", "UUID", "(.+)"))'
    return f"{_each('hw.gpu.memory.limit')} * 0 + on ({gpu}) group_left () {code}"


def _hosts(board: Dashboard) -> None:
    busy = {"state": queries.none_of("idle|iowait")}
    cpu = f"sum {queries.by(_HOST)} ({_each('system.cpu.utilization', busy, (*_HOST, 'state'))})"
    board.with_panel(
        lines(
            "CPU in use",
            [Query(cpu, _OF_HOST)],
            About.of("system.cpu.utilization", "All states but idle and iowait"),
            upto=1,
        )
    )
    memory = _each("system.memory.utilization", {"state": queries.equal("used")}, _HOST)
    board.with_panel(
        lines(
            "Memory in use",
            [Query(memory, _OF_HOST)],
            About.of("system.memory.utilization"),
            thresholds=((None, "transparent"), (0.9, "orange")),
            upto=1,
        )
    )
    keep = (*_HOST, "device", "direction")
    received = f"rate({queries.series('system.network.io')}[$window])"
    network = f"sum {queries.by((*_HOST, 'direction'))} (max {queries.by(keep)} ({received}))"
    board.with_panel(
        lines(
            "Network",
            [Query(network, "{{direction}} " + _OF_HOST)],
            About.of("system.network.io", unit="Bps"),
        )
    )
