"""Traces as trees that a person can read."""

from collections import Counter, defaultdict
from collections.abc import Iterable
from typing import Any

from verl_otel.recording.reader import Span

STAGES_OF_PPO = [
    "verl.rollout",
    "verl.log_prob",
    "verl.ref_log_prob",
    "verl.values",
    "verl.advantage",
    "verl.update_critic",
    "verl.update_actor",
    "verl.weight_sync",
]
"""In order, with critic and reference; a checkpoint and a validation come on top in some steps."""

RANK_CALLS = {
    "verl.log_prob": "verl.worker.compute_log_prob",
    "verl.ref_log_prob": "verl.worker.compute_ref_log_prob",
    "verl.values": "verl.worker.infer_batch",
    "verl.update_critic": "verl.worker.train_mini_batch",
    "verl.update_actor": "verl.worker.update_actor",
    "verl.weight_sync": "verl.worker.update_weights",
}
"""Compute stages and the call on each rank that does their work."""


def traces(spans: Iterable[Span]) -> dict[str, list[Span]]:
    found: defaultdict[str, list[Span]] = defaultdict(list)
    for span in spans:
        found[span.trace_id].append(span)
    return dict(found)


def step_traces(spans: Iterable[Span]) -> dict[int, list[Span]]:
    """Step number -> spans of its trace."""
    return {
        root.attributes["verl.step.number"]: trace
        for trace in traces(spans).values()
        for root in trace
        if root.name == "verl.step"
    }


def root(trace: list[Span]) -> Span:
    (found,) = [span for span in trace if not span.parent_id]
    return found


def children(trace: list[Span], parent: Span) -> list[Span]:
    return sorted((span for span in trace if span.parent_id == parent.span_id), key=lambda span: span.start)


def orphans(trace: list[Span]) -> list[str]:
    ids = {span.span_id for span in trace}
    return [span.name for span in trace if span.parent_id and span.parent_id not in ids]


def assert_complete_ppo_step(trace: list[Span], ranks: Iterable[str] = ("0", "1")) -> None:
    """All stages in order, under each compute stage each rank, within the stage; nothing without a parent."""
    assert orphans(trace) == []
    step = root(trace)
    others = ("verl.rollout.schedule", "verl.checkpoint", "verl.validation")
    stages = [s for s in children(trace, step) if s.name not in others]
    assert [s.name for s in stages] == STAGES_OF_PPO
    for stage in stages:
        assert stage.attributes["rank"] == "all" and {"stage", "model_type"} <= stage.attributes.keys()
        called: dict[str, list[Any]] = defaultdict(list)
        for call in children(trace, stage):
            if call.name.startswith("verl.worker."):
                called[call.name].append(call.attributes["rank"])
                assert stage.start <= call.start <= call.end <= stage.end + 50_000_000
                assert call.attributes["stage"] == stage.attributes["stage"]
        expected = {RANK_CALLS[stage.name]: sorted(ranks)} if stage.name in RANK_CALLS else {}
        assert {name: sorted(found) for name, found in called.items()} == expected, stage.name


def assert_trajectories(trace: list[Span]) -> None:
    """The rollout stage holds the first trajectories and perhaps the slowest, each with a turn that has a generation,
    and a score; some scores with the reward worker's side."""
    (rollout,) = [s for s in trace if s.name == "verl.rollout"]
    trajectories = [s for s in children(trace, rollout) if s.name == "verl.trajectory"]
    kept = Counter(trajectory.attributes["verl.trajectory.kept"] for trajectory in trajectories)
    assert kept["first"] == 4 and kept["slowest"] <= 1 and not kept["failed"], kept
    for trajectory in trajectories:
        assert [s.name for s in children(trace, trajectory)] == ["verl.turn", "verl.compute_score"]
        turn = children(trace, trajectory)[0]
        assert [s.name for s in children(trace, turn)] == ["verl.generate"]
    assert {s.resource["service.name"] for s in trace if s.name == "verl.compute_score"} >= {"verl-agent-loop"}
    first = [t for t in trajectories if t.attributes["verl.trajectory.kept"] == "first"]
    assert first != []
    for generate in [g for t in first for turn in children(trace, t)[:1] for g in children(trace, turn)]:
        (served,) = children(trace, generate)
        assert (served.name, served.resource["service.name"]) == ("verl.server.generate", "verl-rollout-server")
        assert generate.start <= served.start <= served.end <= generate.end
        assert served.attributes["verl.replica"] in ("0", "1") and served.attributes["gen_ai.usage.output_tokens"] > 0
        assert served.attributes["stage"] in ("rollout", "validation")


def unnamed_share(trace: list[Span]) -> float:
    """Largest gap between stages, as a share of the step."""
    step = root(trace)
    last, largest = step.start, 0
    for stage in children(trace, step):
        if stage.start < step.end:
            largest = max(largest, stage.start - last)
            last = max(last, stage.end)
    return max(largest, step.end - last) / (step.end - step.start)


def assert_named(steps: dict[int, list[Span]], share: float = 0.05) -> None:
    """Of most steps no larger part is without a name: on a busy machine one may stand still."""
    shares = sorted(unnamed_share(trace) for trace in steps.values())
    assert shares[len(shares) // 2] < share, shares
