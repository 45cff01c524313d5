"""*Fleet*: all runs. Which one is stuck, slow, lost, or alerts?"""

from grafana_foundation_sdk.builders.dashboard import Dashboard, Row
from grafana_foundation_sdk.builders.table import Panel

from verl_otel.dashboards import layout, queries
from verl_otel.dashboards.panels import RUN_COLUMNS, About, Column, Query, lines, link, number, rows, states
from verl_otel.dashboards.queries import FRESH, REDUCED
from verl_otel.dashboards.uids import FLEET, RUN
from verl_otel.semconv import attributes as attr
from verl_otel.semconv.prometheus import prometheus_label
from verl_otel.semconv.stages import STEP_TIMER

_NAMES = (attr.PROJECT_NAME, attr.EXPERIMENT_NAME)
_ENDS = {-4: ("failed", "red"), -3: ("killed", "purple"), -2: ("stopped", "blue"), -1: ("finished", "text")}
"""How a run may have ended, by the number that stands for it."""
_RUN_ID, _ATTEMPT = (prometheus_label(attribute) for attribute in queries.RUN)


def board(mlflow: str) -> Dashboard:
    board = layout.board(
        FLEET,
        "verl / Fleet",
        "All runs: which is stuck, slow, lost, or alerts?",
        mlflow,
        [*queries.CHOSEN_RUN.values()],
    )
    started = queries.series(queries.PRESENCE)
    reporting = f"count(count by ({_RUN_ID}) (time() - timestamp({started}) < {FRESH})) or vector(0)"
    seen = f"count(count by ({_RUN_ID}) (last_over_time({started}[$__range])))"
    board.with_panel(
        number("Runs reporting", [Query(reporting, "")], About(f"Runs that sent something in the last {FRESH} s"))
    )
    board.with_panel(number("Runs seen", [Query(seen, "")], About("Runs that sent something in the time range")))
    for severity, color in (("critical", "red"), ("warning", "orange")):
        alerts = f"count({queries.firing({'severity': queries.equal(severity)})}) or vector(0)"
        board.with_panel(
            number(
                f"Alerts: {severity}",
                [Query(alerts, "")],
                About(f"Alerts of severity {severity} that fire for the chosen runs"),
                thresholds=((None, "green"), (1, color)),
            )
        )
    board.with_panel(
        number(
            "Longest since a step",
            [Query(f"max({queries.since('verl.step.last_timestamp', REDUCED)})", "")],
            About("Of the runs that report, the longest time since verl has logged a step", "s"),
            none="no run",
        )
    )
    board.with_panel(
        number(
            "Tokens trained per second",
            [Query(f"sum({queries.rate('verl.training.tokens', REDUCED)})", "")],
            About("Prompt and response tokens per second that all chosen runs train on", "suffix: tok/s"),
            graph=True,
        )
    )
    board.with_panel(_runs())
    board.with_row(Row("Progress"))
    for title, metric, unit in (
        ("Step", "verl.training.step", ""),
        ("Reward", "verl.reward.mean", ""),
        ("Step time", "verl.step.time", ""),
        ("Throughput per GPU", "verl.throughput", ""),
    ):
        board.with_panel(lines(title, [Query(queries.value(metric, REDUCED))], About.of(metric, unit=unit), width=12))
    board.with_row(Row("Now"))
    board.with_panel(_stages_now())
    board.with_panel(_alerts_now())
    return board


def _state() -> str:
    """How a run has ended, as one of `_ENDS`; of one that has not, the seconds for which it has been silent."""
    ends = [
        f"{queries.last('verl.run.end_time', {attr.RUN_STATE: queries.equal(state)})} * 0 + {code}"
        for code, (state, _) in _ENDS.items()
    ]
    return " or ".join([*ends, queries.silent_for()])


def _runs() -> Panel:
    def with_names(expression: str) -> str:
        """The query, with the names of each run."""
        names = f"{queries.last(queries.PRESENCE, keep=_NAMES)} * 0"
        return f"{names} + on ({_RUN_ID}, {_ATTEMPT}) group_left () ({expression})"

    alerts = f"count {queries.by(queries.RUN[:1])} ({queries.firing()})"
    with_alerts = queries.last(queries.PRESENCE) + f" * 0 + on ({_RUN_ID}) group_left () {alerts}"
    columns = [
        Column(
            "State",
            with_names(_state()),
            mappings=states(
                *((code, code, state, color) for code, (state, color) in _ENDS.items()),
                (0, FRESH, "reporting", "green"),
                (FRESH, None, "silent", "orange"),
            ),
        ),
        Column("Step", with_names(queries.last("verl.training.step", REDUCED)), "none"),
        Column(
            "Since last step",
            with_names("time() - " + queries.last("verl.step.last_timestamp", REDUCED)),
            "s",
            decimals=0,
        ),
        Column("Step time", with_names(queries.last("verl.step.time", REDUCED)), "s"),
        Column("Tokens/s/GPU", with_names(queries.last("verl.throughput", REDUCED)), decimals=1),
        Column("Reward", with_names(queries.last("verl.reward.mean", REDUCED)), decimals=3),
        Column("Non-finite", with_names(queries.total("verl.metric.non_finite")), "none", ((None, "red"),)),
        Column("Alerts", with_names(with_alerts), "none", ((None, "red"),)),
    ]
    keys = {attr.PROJECT_NAME: "Project", attr.EXPERIMENT_NAME: "Experiment", **RUN_COLUMNS}
    run = "${__data.fields.Run}"
    links = {
        "Run": [
            link("Run", layout.run_link(RUN, run)),
            link("Steps in Jaeger", layout.jaeger_steps(run), new_tab=True),
            link("MLflow", "${mlflow}", new_tab=True),
        ]
    }
    about = About(
        f"Attempts of all chosen runs within the time range. reporting: something was sent in the last {FRESH} s; "
        "silent: nothing was, and nothing said that it ends, so that it is lost; otherwise how it has ended. Click on "
        "a run to look into it."
    )
    return rows("Runs", keys, columns, about, links=links, height=9)


def _stages_now() -> Panel:
    expr = queries.since("verl.stage.active", {attr.TIMER: queries.other_than(STEP_TIMER)}, (attr.TIMER,))
    return rows(
        "Stages that run now",
        {**RUN_COLUMNS, attr.TIMER: "Stage"},
        [Column("For", expr, "s")],
        About("verl's timers that are open, and since when. A stage shorter than an export (10 s) may not be seen."),
        width=12,
    )


def _alerts_now() -> Panel:
    keys = {"severity": "Severity", "alertname": "Alert", attr.RUN_ID: "Run", attr.STAGE: "Stage", attr.RANK: "Rank"}
    expr = f"max {queries.by([*keys])} ({queries.firing()})"
    return rows(
        "Alerts that fire",
        keys,
        [Column("Firing", expr, "none")],
        About("From Prometheus' rules (deploy/prometheus/alerts.yaml)"),
        width=12,
        links={"Run": [link("Run", layout.run_link(RUN, "${__data.fields.Run}"))]},
    )
