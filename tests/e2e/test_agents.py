"""Agent loops with tools: one run of a user's own loop, which fails at times, with tools that fail, in threads."""

import itertools
from collections import Counter

import bed
import pytest
from recorded_metrics import last_points
from trees import assert_named, children, orphans, step_traces, traces

from verl_otel.recording import reader

pytestmark = pytest.mark.run

ROLLOUTS, VALIDATED = 8 * 4, 8
"""Trajectories of a step, prompts x responses; and of the validation after the second step."""


@pytest.fixture(scope="module")
def run(tmp_path_factory, fork_server):
    loops = "actor_rollout_ref.rollout.agent"
    run = bed.run(
        tmp_path_factory.mktemp("agents"),
        [
            *bed.FAST_SAMPLER,
            "trainer.val_before_train=False",
            f"{loops}.agent_loop_config_path={bed.BED}/agent_loops.yaml",
            f"{loops}.default_agent_loop=drafting_agent",
        ],
        script="run_tool.sh",
        ranks=1,
        steps=2,
        fork_server=fork_server,
    )
    assert run.returncode == 0, run.output[-3000:]
    return run


@pytest.fixture(scope="module")
def recorded(run):
    return reader.load(run.telemetry)


@pytest.fixture(scope="module")
def steps(recorded):
    return step_traces(recorded.spans)


def total(run, name, *labels):
    """Sum of a counter, or count of a histogram, by the values of some labels."""
    sums = Counter()
    for said, point in last_points(run.telemetry).get(name, ()):
        value = point.get("count", point.get("asInt", point.get("asDouble")))
        sums[tuple(said[label] for label in labels)] += int(float(value))
    return dict(sums)


WHICH = ("verl.step.number", "verl.validate", "verl.trajectory.kept")


def of_kind(spans, name):
    return [span for span in spans if span.name == name]


def failures(run):
    """How many trajectories verl says to have failed."""
    return run.output.count("LookupError: no draft is any good")


def test_no_span_is_an_orphan(recorded):
    assert [name for trace in traces(recorded.spans).values() for name in orphans(trace)] == []


def test_no_large_part_of_a_step_is_without_a_name(steps):
    assert_named(steps)


def test_a_trajectory_reads_from_top_to_bottom(steps):
    """Turns, each with its generation first and then its tools, in order; the score at the end."""
    assert sorted(steps) == [1, 2]
    shapes = Counter()
    for trace in steps.values():
        (rollout,) = of_kind(trace, "verl.rollout")
        for trajectory in of_kind(children(trace, rollout), "verl.trajectory"):
            assert trajectory.attributes["gen_ai.agent.name"] == "drafting_agent"
            assert trajectory.attributes["verl.data_source"] == "tiny/arith"
            inside = children(trace, trajectory)
            turns = of_kind(inside, "verl.turn")
            assert [turn.attributes["verl.turn.number"] for turn in turns] == [*range(1, len(turns) + 1)]
            assert all(a.end <= b.start for a, b in itertools.pairwise(inside)), "one after the other"
            ends_with = ["verl.turn"] if trajectory.error else ["verl.turn", "verl.compute_score"]
            assert [span.name for span in inside][-len(ends_with) :] == ends_with
            drafting = trajectory.attributes["verl.rollout.index"] in (1, 2)
            for turn in turns:
                parts = [span.name for span in children(trace, turn)]
                drafts = 2 if drafting and turn is turns[0] else 1
                assert parts == ["verl.generate"] * drafts + ["verl.tool"] * (len(parts) - drafts)
                shapes[tuple(parts)] += 1
    assert shapes["verl.generate", "verl.generate"] > 0 and shapes["verl.generate", "verl.tool"] > 0


def test_the_first_the_slowest_and_all_that_failed_are_there_and_the_rest_is_counted(run, recorded):
    assert failures(run) > 0
    recorded_here = of_kind(recorded.spans, "verl.trajectory")
    kept = Counter(tuple(map(span.attributes.get, WHICH)) for span in recorded_here)
    for group in ((1, False), (2, False), (2, True)):
        assert kept[(*group, "first")] == 4 and kept[(*group, "slowest")] <= 1
    failed = [span for span in of_kind(recorded.spans, "verl.trajectory") if span.error]
    assert len(failed) == failures(run)
    assert {span.error for span in failed} == {"LookupError: no draft is any good"}
    assert all(span.attributes["verl.trajectory.kept"] in ("first", "failed") for span in failed)
    assert sum(total(run, "verl.trajectory.failures", "error.type").values()) == failures(run)
    left_out = total(run, "verl.otel.dropped", "verl.otel.reason")
    assert left_out == {("trajectory_cap",): 2 * ROLLOUTS + VALIDATED - len(recorded_here)}


def test_the_errors_of_tools_that_verl_tells_only_the_model_are_visible(run, recorded):
    errors = total(run, "verl.tool.errors", "gen_ai.tool.name", "error.type")
    assert {(name, error) for name, error in errors} == {
        ("divide", "ZeroDivisionError"),
        ("_OTHER", "unknown_tool"),
        ("add", "invalid_arguments"),
    }
    calls = total(run, "verl.tool.duration", "gen_ai.tool.name")
    assert calls["divide",] == errors["divide", "ZeroDivisionError"]
    assert calls["add",] > errors["add", "invalid_arguments"]
    tools = of_kind(recorded.spans, "verl.tool")
    assert tools
    for span in tools:
        name, error = span.attributes["gen_ai.tool.name"], span.attributes.get("error.type")
        assert bool(span.error) == (error is not None)
        if name == "divide":
            assert error == "ZeroDivisionError" and span.events[0].name == "exception"


def test_what_a_tool_does_in_a_thread_is_under_its_call(recorded):
    by_id = {span.span_id: span for span in recorded.spans}
    divisions = of_kind(recorded.spans, "verl.division")
    for span in divisions:
        assert by_id[span.parent_id].attributes["gen_ai.tool.name"] == "divide"
    live = [
        span
        for span in of_kind(recorded.spans, "verl.tool")
        if span.attributes["gen_ai.tool.name"] == "divide"
        and by_id[by_id[span.parent_id].parent_id].attributes["verl.trajectory.kept"] == "first"
    ]
    assert len(divisions) == len(live)


def test_generations_say_what_was_asked_and_answered(recorded):
    for span in of_kind(recorded.spans, "verl.generate"):
        said = span.attributes
        assert said["gen_ai.provider.name"] == "hf_cpu"
        assert said["gen_ai.request.model"].endswith("/model")
        assert said["gen_ai.request.temperature"] == (0.0 if said["stage"] == "validation" else 1.0)
        assert 0 < said["gen_ai.usage.output_tokens"] <= 12 < said["gen_ai.usage.input_tokens"]
        assert said["gen_ai.response.finish_reasons"] == ["completed"]


def test_every_score_is_measured(run):
    scores = total(run, "verl.compute_score.duration", "verl.data_source", "stage")
    # A reward worker is asked once whether it takes the context of calls; what comes before its answer has none.
    before, after = scores.get(("tiny/arith", "other"), 0), scores["tiny/arith", "reward"]
    assert before + after == 2 * ROLLOUTS - failures(run) and after > ROLLOUTS
    assert scores["tiny/arith", "validation"] == VALIDATED
    assert "verl.compute_score.errors" not in last_points(run.telemetry)


def test_no_prompt_and_no_response_is_recorded(run):
    written = "".join(path.read_text() for path in run.telemetry.glob("*.jsonl"))
    assert "gen_ai.usage.input_tokens" in written
    assert "What is" not in written and "messages" not in written and "no_such_tool" not in written
