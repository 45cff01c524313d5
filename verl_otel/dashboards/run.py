"""*Run*: does it learn, and where does the step's time go?"""

from grafana_foundation_sdk.builders.dashboard import Dashboard, Row

from verl_otel.dashboards import layout, queries
from verl_otel.dashboards.panels import LOST, OF_RUN, RUN_COLUMNS, About, Column, Query, heat, lines, number, rows
from verl_otel.dashboards.queries import REDUCED, value
from verl_otel.dashboards.uids import RUN
from verl_otel.semconv import attributes as attr

_KL = "verl.kl.type"
_MODEL = (attr.MODEL_TYPE,)


def board(mlflow: str) -> Dashboard:
    board = layout.board(
        RUN,
        "verl / Run",
        "One run, or some side by side: does it learn, and where does the step's time go?",
        mlflow,
        [*queries.CHOSEN_RUN.values()],
        window=False,
    )
    _first_look(board)
    board.with_row(Row("Learning"))
    _learning(board)
    board.with_row(Row("Responses"))
    _responses(board)
    board.with_row(Row("Time"))
    _time(board)
    board.with_row(Row("Not finite"))
    _not_finite(board)
    return board


def _first_look(board: Dashboard) -> None:
    def newest(title, metric, width, thresholds=(), decimals=None):
        shown = [Query(value(metric, REDUCED))]
        return number(title, shown, About.of(metric), width, thresholds, decimals, graph=True)

    step = [Query(queries.last("verl.training.step", REDUCED))]
    board.with_panel(number("Step", step, About.of("verl.training.step"), 2, decimals=0))
    board.with_panel(newest("Reward", "verl.reward.mean", 3, decimals=3))
    kl = [Query(value("verl.kl.divergence", REDUCED, (_KL,)), "{{verl_kl_type}} " + OF_RUN)]
    board.with_panel(number("KL", kl, About.of("verl.kl.divergence"), 6, graph=True))
    board.with_panel(newest("Entropy", "verl.policy.entropy", 3))
    board.with_panel(newest("Clip fraction", "verl.policy.clip_fraction", 2, ((None, "green"), (0.25, "orange"))))
    board.with_panel(newest("Step time", "verl.step.time", 3))
    board.with_panel(newest("Throughput per GPU", "verl.throughput", 3))
    board.with_panel(
        number(
            "Not finite",
            [Query(f"sum({queries.total('verl.metric.non_finite')}) or vector(0)", "")],
            About.of("verl.metric.non_finite", "All that were counted, not only in the time range"),
            2,
            LOST,
        )
    )


def _learning(board: Dashboard) -> None:
    board.with_panel(
        lines(
            "Reward",
            [
                Query(value(f"verl.reward.{statistic}", REDUCED), f"{statistic} {OF_RUN}")
                for statistic in ("mean", "max", "min")
            ],
            About.of("verl.reward.mean", "Raw scores, before the KL penalty"),
        )
    )
    scores = f"sum by (le) (increase({queries.series('verl.reward.score', part='bucket')}[$__rate_interval]))"
    board.with_panel(
        heat(
            "Scores of samples",
            Query(scores, "{{le}}"),
            About.of("verl.reward.score", "Of all chosen runs together"),
            width=8,
            buckets=True,
        )
    )
    board.with_panel(
        lines(
            "Validation",
            [
                Query(
                    value(
                        "verl.validation.score",
                        {"verl.validation.core": queries.equal("true")},
                        tuple(f"verl.validation.{part}" for part in ("data_source", "variable", "metric", "n")),
                    ),
                    "{{verl_validation_data_source}} {{verl_validation_variable}} "
                    "{{verl_validation_metric}}@{{verl_validation_n}} " + OF_RUN,
                )
            ],
            About.of("verl.validation.score", "What verl files under val-core/"),
        )
    )
    board.with_panel(
        lines(
            "KL divergence",
            [Query(value("verl.kl.divergence", REDUCED, (_KL,)), "{{verl_kl_type}} " + OF_RUN)],
            About.of("verl.kl.divergence"),
        )
    )
    board.with_panel(lines("Entropy", [Query(value("verl.policy.entropy", REDUCED))], About.of("verl.policy.entropy")))
    board.with_panel(
        lines(
            "Clip fraction",
            [
                Query(value("verl.policy.clip_fraction", REDUCED)),
                Query(value("verl.policy.clip_fraction.lower", REDUCED), "lower bound " + OF_RUN),
                Query(value("verl.value.clip_fraction", REDUCED), "critic " + OF_RUN),
            ],
            About.of("verl.policy.clip_fraction", "Of the critic: of value predictions"),
            thresholds=((None, "transparent"), (0.25, "orange")),
        )
    )
    board.with_panel(
        lines(
            "Loss",
            [
                Query(value("verl.loss", REDUCED, (*_MODEL, attr.STAGE)), "{{model_type}} {{stage}} " + OF_RUN),
                Query(value("verl.policy.loss", REDUCED), "policy gradient " + OF_RUN),
                Query(value("verl.value.loss", REDUCED), "value function " + OF_RUN),
            ],
            About.of("verl.loss", "Policy gradient: without entropy and KL terms"),
        )
    )
    board.with_panel(
        lines(
            "Gradient norm",
            [Query(value("verl.grad_norm", REDUCED, _MODEL), "{{model_type}} " + OF_RUN)],
            About.of("verl.grad_norm"),
        )
    )
    board.with_panel(
        lines(
            "Critic: explained variance",
            [Query(value("verl.value.explained_variance", REDUCED))],
            About.of("verl.value.explained_variance", "Only with a critic"),
        )
    )
    board.with_panel(
        lines(
            "Groups that teach nothing",
            [
                Query(value("verl.group.zero_variance", REDUCED), "no variance " + OF_RUN),
                Query(value("verl.group.all_right", REDUCED), "all right " + OF_RUN),
                Query(value("verl.group.all_wrong", REDUCED), "all wrong " + OF_RUN),
            ],
            About.of("verl.group.zero_variance", "Groups: the responses to one prompt (GRPO)"),
            upto=1,
        )
    )
    board.with_panel(
        lines(
            "Advantage",
            [
                Query(value(f"verl.advantage.{statistic}", REDUCED), f"{statistic} {OF_RUN}")
                for statistic in ("mean", "max", "min")
            ],
            About.of("verl.advantage.mean"),
        )
    )
    board.with_panel(
        lines(
            "Learning rate",
            [Query(value("verl.learning_rate", REDUCED, _MODEL), "{{model_type}} " + OF_RUN)],
            About.of("verl.learning_rate"),
        )
    )


def _responses(board: Dashboard) -> None:
    board.with_panel(
        lines(
            "Length of responses",
            [
                Query(value(f"verl.response.length.{statistic}", REDUCED), f"{statistic} {OF_RUN}")
                for statistic in ("mean", "max", "min")
            ],
            About.of("verl.response.length.mean", unit="suffix: tok"),
        )
    )
    board.with_panel(
        lines(
            "Responses cut off",
            [
                Query(value("verl.response.clip_ratio", REDUCED), "as long as can be " + OF_RUN),
                Query(value("verl.response.aborted_ratio", REDUCED), "without a token " + OF_RUN),
            ],
            About.of("verl.response.clip_ratio"),
            upto=1,
        )
    )
    board.with_panel(
        lines(
            "Length of prompts",
            [
                Query(value(f"verl.prompt.length.{statistic}", REDUCED), f"{statistic} {OF_RUN}")
                for statistic in ("mean", "max")
            ],
            About.of("verl.prompt.length.mean", unit="suffix: tok"),
        )
    )


def _time(board: Dashboard) -> None:
    board.with_panel(
        lines(
            "Share of the step by stage",
            [Query(value("verl.step.stage_share", REDUCED, (attr.TIMER,)), "{{verl_timer}} " + OF_RUN)],
            About.of("verl.step.stage_share", "What is missing to 100 % is time that no stage accounts for"),
            width=12,
            stacked=True,
            upto=1,
        )
    )
    board.with_panel(
        lines(
            "Step time",
            [
                Query(value("verl.step.time", REDUCED)),
                Query(value("verl.step.unaccounted", REDUCED), "no stage accounts for " + OF_RUN),
            ],
            About.of("verl.step.time"),
            width=12,
        )
    )
    board.with_panel(
        lines(
            "Tokens per second",
            [
                Query(value("verl.throughput", REDUCED), "step, per GPU " + OF_RUN),
                Query(value("verl.rollout.throughput", REDUCED), "rollout, responses " + OF_RUN),
            ],
            About.of("verl.throughput", "Of the rollout: response tokens of all GPUs; absent where verl only waits"),
        )
    )
    board.with_panel(
        lines("Tokens of the step", [Query(value("verl.step.tokens", REDUCED))], About.of("verl.step.tokens"))
    )
    board.with_panel(
        lines(
            "Model FLOPs utilisation",
            [Query(value("verl.mfu", REDUCED, (*_MODEL, attr.STAGE)), "{{model_type}} {{stage}} " + OF_RUN)],
            About.of("verl.mfu"),
        )
    )


def _not_finite(board: Dashboard) -> None:
    keep = (attr.METRIC, attr.VERL_KEY, attr.RANK)
    board.with_panel(
        rows(
            "NaN and infinite values",
            {**RUN_COLUMNS, **dict(zip(keep, ("Metric", "Key", "Rank"), strict=True))},
            [Column("Count", queries.total("verl.metric.non_finite", keep=keep), "none")],
            About.of("verl.metric.non_finite", "Rank `all`: the value that verl has reduced over the ranks"),
            width=12,
            height=6,
        )
    )
    board.with_panel(
        lines(
            "NaN and infinite values so far",
            [
                Query(
                    f"sum {queries.by((*queries.RUN, attr.METRIC, attr.RANK))} "
                    f"({queries.series('verl.metric.non_finite')})",
                    "{{metric}} rank {{rank}} " + OF_RUN,
                )
            ],
            About.of("verl.metric.non_finite"),
            width=12,
            height=6,
        )
    )
