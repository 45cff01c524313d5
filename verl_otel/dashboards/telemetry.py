"""*Telemetry health*: is what the other dashboards show all there is, and what does it cost?"""

from grafana_foundation_sdk.builders.dashboard import Dashboard, Row

from verl_otel.dashboards import layout, queries
from verl_otel.dashboards.panels import LOST, OF_RUN, RUN_COLUMNS, About, Column, Query, lines, number, rows
from verl_otel.dashboards.queries import BY_ROLE, rate, total
from verl_otel.dashboards.uids import TELEMETRY
from verl_otel.semconv import attributes as attr

_SIGNAL = (attr.SIGNAL,)
_EXPORTED, _DROPPED, _FAILURES = "verl.otel.exported", "verl.otel.dropped", "verl.otel.failures"
_COLLECTOR = (
    "The Collector's own metric. A Prometheus that scrapes the Collectors has it (port 8888; of the gateway 8988); "
    "those of all Collectors, whatever runs are chosen"
)
_TOO_LATE = '{__name__=~"otelcol_processor_filter_datapoints[._]filtered"}'
"""With a dot where Prometheus 3 scrapes the Collector, with an underscore where an older one does."""
_SIGNALS = ("spans", "metric_points", "log_records")


def board(mlflow: str) -> Dashboard:
    board = layout.board(
        TELEMETRY,
        "verl / Telemetry health",
        "Is what the other dashboards show all there is, and what does it cost?",
        mlflow,
        [*queries.CHOSEN_RUN.values(), "role"],
    )
    _first_look(board)
    board.with_row(Row("In the training processes"))
    _processes(board)
    board.with_row(Row("Collectors"))
    _collectors(board)
    board.with_row(Row("What it costs"))
    _costs(board)
    return board


def _outcome(word: str) -> queries.Matchers:
    return {**BY_ROLE, attr.OUTCOME: queries.equal(word)}


def _first_look(board: Dashboard) -> None:
    delivered = f"sum({rate(_EXPORTED, _outcome('delivered'))})"
    board.with_panel(
        number("Delivered per second", [Query(delivered, "")], About.of(_EXPORTED, unit="suffix: items/s"), graph=True)
    )
    dropped = f"sum({total(_EXPORTED, _outcome('dropped'))}) or vector(0)"
    board.with_panel(number("Lost", [Query(dropped, "")], About.of(_EXPORTED, "Of them: dropped"), thresholds=LOST))
    spooled = f"(sum({total(_EXPORTED, _outcome('spooled'))}) or vector(0))"
    replayed = f"(sum({total(_EXPORTED, _outcome('replayed'))}) or vector(0))"
    board.with_panel(
        number(
            "Waiting on disk",
            [Query(f"{spooled} - {replayed}", "")],
            About.of(_EXPORTED, "Spooled minus replayed: sent when the Collector is back, or by `verl-otel replay`"),
            thresholds=((None, "green"), (1, "orange")),
        )
    )
    left_out = f"sum({total(_DROPPED, BY_ROLE)}) or vector(0)"
    board.with_panel(number("Left out on purpose", [Query(left_out, "")], About.of(_DROPPED)))
    failures = f"sum({total(_FAILURES, BY_ROLE)}) or vector(0)"
    board.with_panel(number("Failures of verl-otel", [Query(failures, "")], About.of(_FAILURES), thresholds=LOST))
    fullest = f"max({_fill()})"
    board.with_panel(
        number(
            "Fullest queue",
            [Query(fullest, "")],
            About(f"Of the queues below. {_COLLECTOR}", "percentunit"),
            thresholds=((None, "green"), (0.5, "orange"), (0.8, "red")),
            graph=True,
        )
    )


def _fill() -> str:
    """Share of each queue of a Collector that is full."""
    size, capacity = (
        f"max by (instance, exporter, data_type) (otelcol_exporter_queue_{word})" for word in ("size", "capacity")
    )
    return f"{size} / {capacity}"


def _processes(board: Dashboard) -> None:
    board.with_panel(
        lines(
            "What became of spans, points and events",
            [
                Query(
                    rate(_EXPORTED, BY_ROLE, (*_SIGNAL, attr.OUTCOME)),
                    "{{verl_otel_signal}} {{verl_otel_outcome}} " + OF_RUN,
                )
            ],
            About.of(_EXPORTED, unit="suffix: items/s"),
            width=12,
        )
    )
    board.with_panel(
        lines(
            "Left out, so far",
            [
                Query(
                    f"sum {queries.by((*queries.RUN, *_SIGNAL, attr.REASON))} ({queries.series(_DROPPED, BY_ROLE)})",
                    "{{verl_otel_signal}} {{verl_otel_reason}} " + OF_RUN,
                )
            ],
            About.of(_DROPPED, "Caps on trajectories, keys and queues"),
            width=12,
        )
    )
    keep = (attr.PROCESS_ROLE, *_SIGNAL, attr.OUTCOME, attr.REASON)
    titles = ("Role", "Signal", "Outcome", "Reason")
    lost = total(_EXPORTED, {**BY_ROLE, attr.OUTCOME: queries.other_than("delivered")}, keep)
    board.with_panel(
        rows(
            "Not delivered at once",
            {**RUN_COLUMNS, **dict(zip(keep, titles, strict=True))},
            [Column("Items", lost, "none")],
            About.of(_EXPORTED),
            width=12,
            height=6,
        )
    )
    sites = (attr.PROCESS_ROLE, attr.SITE)
    board.with_panel(
        rows(
            "Failures that were stopped",
            {**RUN_COLUMNS, attr.PROCESS_ROLE: "Role", attr.SITE: "Where"},
            [Column("Count", total(_FAILURES, {**BY_ROLE, attr.SITE: queries.other_than("none")}, sites), "none")],
            About.of(_FAILURES, "Please report them"),
            width=12,
            height=6,
        )
    )


def _collectors(board: Dashboard) -> None:
    board.with_panel(
        lines(
            "Queues, how full",
            [Query(_fill(), "{{exporter}} {{data_type}} {{instance}}")],
            About(f"A destination that is away fills its own queue. {_COLLECTOR}", "percentunit"),
            upto=1,
        )
    )
    board.with_panel(
        lines(
            "Not sent to a destination",
            [
                Query(
                    f"sum by (exporter) (rate(otelcol_exporter_send_failed_{signal}[$window]))",
                    f"{signal} {{{{exporter}}}}",
                )
                for signal in _SIGNALS
            ],
            About(f"Refused for good by the destination, and dropped. {_COLLECTOR}", "suffix: items/s"),
        )
    )
    board.with_panel(
        lines(
            "Refused at the entrance",
            [
                Query(
                    f"sum by (receiver) (rate(otelcol_receiver_refused_{signal}[$window]))",
                    f"{signal} {{{{receiver}}}}",
                )
                for signal in _SIGNALS
            ]
            + [Query(f"sum by (filter) (rate({_TOO_LATE}[$window]))", "{{filter}}")],
            About(f"Memory limit, or points that are too late for Prometheus. {_COLLECTOR}", "suffix: items/s"),
        )
    )


def _costs(board: Dashboard) -> None:
    board.with_panel(
        lines(
            "Items sent",
            [Query(rate(_EXPORTED, BY_ROLE, (attr.PROCESS_ROLE,)), "{{verl_process_role}} " + OF_RUN)],
            About.of(_EXPORTED, "By role of the process", "suffix: items/s"),
        )
    )
    count = f"count {queries.by(queries.RUN)} ({queries.select('', {attr.RUN_ID: queries.other_than('')})})"
    board.with_panel(
        lines("Series in Prometheus", [Query(count)], About("Series of a run that have points now", "none"))
    )
    board.with_panel(
        lines(
            "Collectors",
            [
                Query("sum by (instance) (rate(otelcol_process_cpu_seconds[$window]))", "CPU {{instance}}"),
            ],
            About(f"CPU seconds per second. {_COLLECTOR}", "percentunit"),
            width=4,
        )
    )
    board.with_panel(
        lines(
            "Collectors' memory",
            [Query("max by (instance) (otelcol_process_memory_rss)", "{{instance}}")],
            About(f"Resident memory. {_COLLECTOR}", "bytes"),
            width=4,
        )
    )
