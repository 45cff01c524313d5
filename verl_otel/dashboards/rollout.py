"""*Rollout*: do the servers keep up, and what becomes of the trajectories?"""

from grafana_foundation_sdk.builders.dashboard import Dashboard, Row

from verl_otel.dashboards import layout, queries
from verl_otel.dashboards.panels import LOST, OF_RUN, About, Query, lines, number
from verl_otel.dashboards.queries import REDUCED, quantile, rate, select, value
from verl_otel.dashboards.uids import ROLLOUT
from verl_otel.semconv import attributes as attr

_SERVER = (attr.REPLICA,)
_OF_SERVER = "{{verl_replica}} " + OF_RUN
_EXEMPLARS = "Points are those whose trace is known: click on one to open it in Jaeger."
_ENGINE = About(
    "The engine's own metric, under its own name, vLLM's or SGLang's: needs the scrape job "
    "deploy/prometheus/scrape-rollout-servers.yaml"
)


def board(mlflow: str) -> Dashboard:
    board = layout.board(
        ROLLOUT,
        "verl / Rollout",
        "Do the servers keep up, and what becomes of the trajectories?",
        mlflow,
        [*queries.CHOSEN_RUN.values()],
    )
    _first_look(board)
    board.with_row(Row("Servers"))
    _servers(board)
    board.with_row(Row("Inside the engine"))
    _engine(board)
    board.with_row(Row("Trajectories, tools, scores"))
    _trajectories(board)
    board.with_row(Row("Asynchronous training"))
    _asynchronous(board)
    return board


def _first_look(board: Dashboard) -> None:
    active = f"sum {queries.by(queries.RUN)} ({queries.series('verl.server.active_requests')})"
    board.with_panel(
        number("Requests in servers", [Query(active)], About.of("verl.server.active_requests"), graph=True)
    )
    output = rate("verl.server.tokens", {attr.TOKEN_TYPE: queries.equal("output")})
    board.with_panel(
        number("Tokens out", [Query(output)], About.of("verl.server.tokens", unit="suffix: tok/s"), graph=True)
    )
    board.with_panel(
        number(
            "Request, p95", [Query(quantile(0.95, "gen_ai.server.request.duration"))],
            About.of("gen_ai.server.request.duration"), graph=True,
        )
    )  # fmt: skip
    for title, metric in (
        ("Trajectories failed", "verl.trajectory.failures"),
        ("Tool calls failed", "verl.tool.errors"),
    ):
        failed = f"sum({queries.total(metric)}) or vector(0)"
        board.with_panel(number(title, [Query(failed, "")], About.of(metric), thresholds=LOST))
    versions = queries.series("verl.server.policy_version")
    behind = f"max {queries.by(queries.RUN)} ({versions}) - min {queries.by(queries.RUN)} ({versions})"
    board.with_panel(
        number(
            "Weights apart",
            [Query(behind)],
            About.of("verl.server.policy_version", "Newest version of a server minus the oldest one"),
            thresholds=((None, "green"), (2, "orange")),
            graph=True,
        )
    )


def _servers(board: Dashboard) -> None:
    active = f"sum {queries.by((*queries.RUN, *_SERVER))} ({queries.series('verl.server.active_requests')})"
    board.with_panel(
        lines("Requests in each server", [Query(active, _OF_SERVER)], About.of("verl.server.active_requests"))
    )
    ended = rate("verl.server.requests", keep=(attr.STOP_REASON,))
    board.with_panel(
        lines(
            "Requests ended",
            [Query(ended, "{{verl_stop_reason}} " + OF_RUN)],
            About.of(
                "verl.server.requests", "By why they ended; aborts are those that a weight sync or verl cuts", "reqps"
            ),
        )
    )
    tokens = rate("verl.server.tokens", keep=(attr.TOKEN_TYPE,))
    board.with_panel(
        lines(
            "Tokens in and out",
            [Query(tokens, "{{gen_ai_token_type}} " + OF_RUN)],
            About.of("verl.server.tokens", unit="suffix: tok/s"),
        )
    )
    board.with_panel(
        lines(
            "Duration of requests",
            [
                Query(quantile(share, "gen_ai.server.request.duration"), f"p{share * 100:.0f} {OF_RUN}")
                for share in (0.5, 0.95)
            ],
            About.of("gen_ai.server.request.duration"),
        )
    )
    board.with_panel(
        lines(
            "Time per output token, p95",
            [Query(quantile(0.95, "verl.server.token.duration", keep=_SERVER), _OF_SERVER)],
            About.of("verl.server.token.duration"),
        )
    )
    cached, taken = (
        rate("verl.server.cached_tokens"),
        rate("verl.server.tokens", {attr.TOKEN_TYPE: queries.equal("input")}),
    )
    board.with_panel(
        lines(
            "Input tokens from the prefix cache",
            [Query(f"{cached} / ({taken} > 0)")],
            About.of("verl.server.cached_tokens", "As a share of all input tokens", "percentunit"),
            upto=1,
        )
    )
    board.with_panel(
        lines(
            "Version of the weights",
            [
                Query(value("verl.server.policy_version", keep=_SERVER), _OF_SERVER),
                Query(value("verl.training.step", REDUCED), "step " + OF_RUN),
            ],
            About.of("verl.server.policy_version", "Beside the trainer's step"),
            width=12,
        )
    )
    board.with_panel(
        lines(
            "Preemptions",
            [Query(rate("verl.server.preemptions", keep=_SERVER), _OF_SERVER)],
            About.of("verl.server.preemptions", "The engine ran out of KV cache", "ops"),
            width=12,
        )
    )


def _engine(board: Dashboard) -> None:
    def of_each(*names: str) -> list[Query]:
        keep = queries.by((*queries.RUN, *_SERVER))
        return [Query(f"sum {keep} ({select(name)})", _OF_SERVER) for name in names]

    board.with_panel(
        lines("Running", of_each("vllm:num_requests_running", "sglang:num_running_reqs"), _ENGINE, width=6)
    )
    board.with_panel(lines("Waiting", of_each("vllm:num_requests_waiting", "sglang:num_queue_reqs"), _ENGINE, width=6))
    board.with_panel(
        lines(
            "KV cache in use",
            of_each("vllm:kv_cache_usage_perc", "sglang:token_usage"),
            About(_ENGINE.text, "percentunit"),
            width=6,
            upto=1,
        )
    )
    keep = queries.by((*queries.RUN, *_SERVER, "le"))
    names = [f"{engine}:time_to_first_token_seconds_bucket" for engine in ("vllm", "sglang")]
    first = [f"histogram_quantile(0.95, sum {keep} (rate({select(name)}[$window])))" for name in names]
    board.with_panel(
        lines("First token, p95", [Query(expr, _OF_SERVER) for expr in first], About(_ENGINE.text, "s"), width=6)
    )


def _trajectories(board: Dashboard) -> None:
    board.with_panel(
        lines(
            "Generation requests of the agent loops",
            [Query(quantile(share, "verl.generate.duration"), f"p{share * 100:.0f} {OF_RUN}") for share in (0.5, 0.95)],
            About.of("verl.generate.duration"),
        )
    )
    board.with_panel(
        lines(
            "Turns of a conversation",
            [Query(value(f"verl.turns.{word}", REDUCED), f"{word} {OF_RUN}") for word in ("mean", "max")],
            About.of("verl.turns.mean"),
        )
    )
    errors = [
        Query(rate("verl.trajectory.failures", keep=(attr.ERROR_TYPE,)), "trajectory {{error_type}} " + OF_RUN),
        Query(
            rate("verl.tool.errors", keep=("gen_ai.tool.name", attr.ERROR_TYPE)),
            "tool {{gen_ai_tool_name}} {{error_type}} " + OF_RUN,
        ),
        Query(rate("verl.compute_score.errors", keep=(attr.ERROR_TYPE,)), "score {{error_type}} " + OF_RUN),
    ]
    board.with_panel(lines("Failures", errors, About.of("verl.trajectory.failures", "And of tools and scores", "ops")))
    board.with_panel(
        lines(
            "Tool calls, p95",
            [Query(quantile(0.95, "verl.tool.duration", keep=("gen_ai.tool.name",)), "{{gen_ai_tool_name}} " + OF_RUN)],
            About.of("verl.tool.duration"),
        )
    )
    board.with_panel(
        lines(
            "Computation of a score, p95",
            [
                Query(
                    quantile(0.95, "verl.compute_score.duration", keep=(attr.DATA_SOURCE,)),
                    "{{verl_data_source}} " + OF_RUN,
                    exemplars=True,
                )
            ],
            About.of("verl.compute_score.duration", _EXEMPLARS),
        )
    )
    board.with_panel(
        lines(
            "Cases in the sandbox",
            [Query(rate("verl.sandbox.cases", keep=(attr.SANDBOX_STATUS,)), "{{verl_sandbox_status}} " + OF_RUN)],
            About.of("verl.sandbox.cases", unit="ops"),
        )
    )


def _asynchronous(board: Dashboard) -> None:
    board.with_panel(
        lines(
            "Staleness of trajectories",
            [
                Query(quantile(0.5, "verl.rollout.staleness"), "p50 " + OF_RUN),
                Query(quantile(0.95, "verl.rollout.staleness"), "p95 " + OF_RUN),
                Query(value("verl.off_policy.staleness.max", REDUCED), "largest, by verl " + OF_RUN),
            ],
            About.of("verl.rollout.staleness"),
            width=6,
        )
    )
    board.with_panel(
        lines(
            "Idle",
            [
                Query(value("verl.trainer.idle_ratio"), "trainer " + OF_RUN),
                Query(value("verl.rollouter.idle_ratio"), "rollouter " + OF_RUN),
            ],
            About.of("verl.trainer.idle_ratio", "Rollouter: of fully_async"),
            width=6,
            upto=1,
        )
    )
    board.with_panel(
        lines(
            "Samples on their way",
            [
                Query(value("verl.fully_async.active_tasks"), "in generation " + OF_RUN),
                Query(value("verl.fully_async.pending_queue"), "waiting for generation " + OF_RUN),
                Query(value("verl.fully_async.message_queue"), "waiting for the trainer " + OF_RUN),
            ],
            About.of("verl.fully_async.message_queue", "Of fully_async"),
            width=6,
        )
    )
    board.with_panel(
        lines(
            "Prompts thrown away",
            [
                Query(
                    value("verl.rollout.evicted", keep=("verl.eviction.reason",)), "{{verl_eviction_reason}} " + OF_RUN
                ),
                Query(value("verl.rollout.surplus"), "surplus " + OF_RUN),
            ],
            About.of("verl.rollout.evicted"),
            width=6,
        )
    )
