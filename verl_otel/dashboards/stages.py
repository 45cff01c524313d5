"""*Stages and ranks*: which stage is slow, and which rank keeps the others waiting?"""

from grafana_foundation_sdk.builders.dashboard import Dashboard, Row

from verl_otel.dashboards import layout, queries
from verl_otel.dashboards.panels import OF_RUN, RUN_COLUMNS, About, Column, Query, heat, lines, matrix, number, rows
from verl_otel.dashboards.queries import BY_ROLE, PER_RANK, REDUCED
from verl_otel.dashboards.uids import STAGES
from verl_otel.semconv import attributes as attr
from verl_otel.semconv.prometheus import prometheus_label
from verl_otel.semconv.stages import STEP_TIMER

_CALLS = {**PER_RANK, **BY_ROLE}
_GROUP = (attr.WORKER_GROUP, attr.RANK)
"""A rank is one inside its worker group."""
_OF_RANK = "{{verl_worker_group}} {{rank}} " + OF_RUN
_EXEMPLARS = "Points are calls whose trace is known: click on one to open it in Jaeger."


def board(mlflow: str) -> Dashboard:
    board = layout.board(
        STAGES,
        "verl / Stages and ranks",
        "Which stage is slow, and which rank keeps the others waiting?",
        mlflow,
        [*queries.CHOSEN_RUN.values(), "role", "rank"],
    )
    _first_look(board)
    board.with_row(Row("Stages"))
    _stages(board)
    board.with_row(Row("Ranks"))
    _ranks(board)
    board.with_row(Row("Values of each rank, before verl reduces them"))
    _values(board)
    return board


def _first_look(board: Dashboard) -> None:
    board.with_panel(
        number(
            "Slowest rank / median",
            [Query(f"max {queries.by(queries.RUN)} ({queries.series('verl.worker.straggler')})")],
            About.of("verl.worker.straggler", "The worst stage of the last step"),
            6,
            ((None, "green"), (1.5, "orange"), (2, "red")),
            decimals=2,
            graph=True,
        )
    )
    calls = f"rate({queries.series('verl.worker.duration', _CALLS, 'count')}[$window])"
    ranks = f"count {queries.by(queries.RUN)} (count {queries.by((*queries.RUN, *_GROUP))} ({calls}))"
    board.with_panel(
        number(
            "Ranks that report", [Query(ranks)], About("Ranks of worker groups whose calls are counted"), 6, graph=True
        )
    )
    slowest = f"max {queries.by(queries.RUN)} ({queries.quantile(0.95, 'verl.stage.duration', keep=(attr.TIMER,))})"
    board.with_panel(number("Slowest stage, p95", [Query(slowest)], About.of("verl.stage.duration"), 6, graph=True))
    unaccounted = queries.value("verl.step.unaccounted", REDUCED)
    board.with_panel(number("In no stage", [Query(unaccounted)], About.of("verl.step.unaccounted"), 6, graph=True))


def _stages(board: Dashboard) -> None:
    stage = "{{verl_timer}} " + OF_RUN
    board.with_panel(
        lines(
            "Duration of stages, p95",
            [Query(queries.quantile(0.95, "verl.stage.duration", keep=(attr.TIMER,)), stage, exemplars=True)],
            About.of("verl.stage.duration", _EXEMPLARS),
            width=12,
            height=9,
        )
    )
    board.with_panel(
        lines(
            "Duration of stages in the last step",
            [
                Query(
                    queries.value("verl.timing", {attr.STAGE: queries.none_of("step|other"), **REDUCED}, (attr.TIMER,)),
                    stage,
                )
            ],
            About.of("verl.timing", "Without the step itself and timers that are no stage"),
            width=12,
            height=9,
        )
    )
    board.with_panel(
        rows(
            "Stages that run now",
            {**RUN_COLUMNS, attr.TIMER: "Stage"},
            [
                Column(
                    "For",
                    queries.since("verl.stage.active", {attr.TIMER: queries.other_than(STEP_TIMER)}, (attr.TIMER,)),
                    "s",
                )
            ],
            About.of("verl.stage.active", "A stage shorter than an export (10 s) may not be seen"),
            width=12,
        )
    )
    board.with_panel(
        lines(
            "Slowest rank / median, by stage",
            [Query(queries.value("verl.worker.straggler", keep=(attr.TIMER,)), stage)],
            About.of("verl.worker.straggler", "1 is a stage whose ranks take equally long"),
            width=12,
            thresholds=((None, "transparent"), (1.5, "orange")),
        )
    )


def _ranks(board: Dashboard) -> None:
    busy = queries.rate("verl.worker.duration", _CALLS, _GROUP, "sum")
    board.with_panel(
        heat(
            "Compute time of each rank",
            Query(busy, _OF_RANK),
            About(
                "Share of the time that each rank spends in verl's calls (calls inside calls count twice). A row that "
                "is darker than the others is a rank that the others wait for.\n\n`verl.worker.duration`",
                "percentunit",
            ),
            height=9,
        )
    )
    board.with_panel(
        lines(
            "Duration of calls by rank, mean",
            [
                Query(
                    queries.mean("verl.worker.duration", _CALLS, (*_GROUP, attr.WORKER_METHOD)),
                    "{{verl_worker_method}} " + _OF_RANK,
                )
            ],
            About.of("verl.worker.duration"),
            width=12,
            height=9,
        )
    )
    mean = "sum by ({0}) ({1}) / (sum by ({0}) ({2}) > 0)".format(
        f"{attr.RANK}, {prometheus_label(attr.WORKER_METHOD)}",
        *(
            f"last_over_time({queries.series('verl.worker.duration', _CALLS, part)}[$__range])"
            for part in ("sum", "count")
        ),
    )
    board.with_panel(
        matrix(
            "Mean duration of a call: method by rank",
            prometheus_label(attr.WORKER_METHOD),
            attr.RANK,
            mean,
            About.of("verl.worker.duration", "Over the whole life of the chosen runs' processes, all of them together"),
            height=10,
        )
    )
    board.with_panel(
        lines(
            "Duration of calls, p95",
            [
                Query(
                    queries.quantile(0.95, "verl.worker.duration", _CALLS, (attr.WORKER_METHOD,)),
                    "{{verl_worker_method}} " + OF_RUN,
                    exemplars=True,
                )
            ],
            About.of("verl.worker.duration", f"Over all chosen ranks. {_EXEMPLARS}"),
            width=12,
            height=10,
        )
    )


def _values(board: Dashboard) -> None:
    keep = (*_GROUP, attr.MODEL_TYPE)
    for title, metric in (("Loss", "verl.loss"), ("Gradient norm", "verl.grad_norm")):
        own = queries.value(metric, {**_CALLS, attr.VERL_KEY: queries.none_of("val/.*")}, keep)
        board.with_panel(lines(title, [Query(own, "{{model_type}} " + _OF_RANK)], About.of(metric)))
    board.with_panel(
        lines(
            "GPU memory after a call",
            [
                Query(queries.value("verl.worker.memory.used", _CALLS, _GROUP), "in use " + _OF_RANK),
                Query(queries.value("verl.worker.memory.allocated", _CALLS, _GROUP), "torch " + _OF_RANK),
                Query(queries.value("verl.worker.memory.total", _CALLS, _GROUP), "of the device " + _OF_RANK),
            ],
            About.of("verl.worker.memory.used", "torch: what it has allocated in the rank's process"),
        )
    )
