"""What a step of an asynchronous trainer says: waits, what it trained on, parts of its weight sync, its checkpoint."""

import asyncio
import contextlib
import itertools
import json
import time
from concurrent.futures import Future

import pytest
from opentelemetry.context import Context
from opentelemetry.sdk.trace.id_generator import RandomIdGenerator

from verl_otel import border
from verl_otel.metrics.derived import idle_ratio
from verl_otel.tracing import ids, propagation
from verl_otel.tracing.consumed import MAX_LINKS
from verl_otel.tracing.weight_sync import MAX_SERVERS


class Trainer:
    global_steps = 0


@pytest.fixture
def process(memory):
    process = memory.process(attempt=2)
    process.trainer = Trainer()
    process.steps.follow(process.trainer)
    return process


@contextlib.contextmanager
def timed(process, timer):
    scope, error = process.steps.enter(timer), None
    try:
        yield scope
    except BaseException as e:
        error = e
        raise
    finally:
        process.steps.leave(scope, error)


@contextlib.contextmanager
def step(process):
    process.trainer.global_steps += 1
    with timed(process, "step") as scope:
        yield scope


# ---- waits ----------------------------------------------------------------------------------------------------------


def test_the_idle_ratio_is_the_share_of_the_step_that_its_stages_waited(process, memory):
    process.steps.waits_for_rollout = process.steps.rollout_is_elsewhere = True
    with step(process):
        with timed(process, "gen"):
            time.sleep(0.06)
        with timed(process, "update_actor"):
            time.sleep(0.02)
        with timed(process, "switch_wait"):
            time.sleep(0.04)
    root, *stages = memory.spans
    waits = sum(s.end_time - s.start_time for s in stages if s.attributes.get("verl.stage.wait"))
    (ratio,) = memory.values("verl.trainer.idle_ratio").values()
    assert ratio == pytest.approx(waits / (root.end_time - root.start_time), abs=0.02)
    assert 0.6 < ratio < 1
    assert process.step_values.peek(1, "verl.trainer.idle_ratio") == ratio


def test_without_devices_of_their_own_there_is_no_idle_ratio(process, memory):
    process.steps.waits_for_rollout = True
    with step(process), timed(process, "gen"):
        pass
    assert memory.points("verl.trainer.idle_ratio") == []


def test_each_step_has_its_own_waits(process, memory):
    process.steps.waits_for_rollout = process.steps.rollout_is_elsewhere = True
    with step(process), timed(process, "gen"):
        time.sleep(0.02)
    with step(process), timed(process, "adv"):
        time.sleep(0.02)
    assert memory.values("verl.trainer.idle_ratio") == {(): 0.0}


@pytest.mark.parametrize(
    ("history", "ratio"),
    [
        ([(0, 0)], 1.0),
        ([(0, 3)], 0.0),
        # three pauses in one version of the weights: at 2..3, 5..7 and from 9 on
        ([(0, 1), (2, 0), (3, 2), (4, 1), (5, 0), (7, 4), (9, 0)], 0.4),
        ([(0, 1), (20, 0)], 0.0),  # the clock went back
        ([(10, 1)], None),
        ([], None),
    ],
)
def test_the_idle_ratio_of_the_rollouter_counts_every_pause(history, ratio):
    assert idle_ratio(history, 10) == ratio


# ---- what a step trained on -----------------------------------------------------------------------------------------


def tags(*of):
    return [{"global_steps": scheduled, "max_global_steps": version} for scheduled, version in of]


def test_staleness_is_a_distribution_over_the_trajectories(process, memory):
    process.steps.policy_version = 5
    with step(process):
        process.consumed.tagged([*tags((6, 5), (6, 5), (5, 4), (3, 2)), {"is_padding": True, "max_global_steps": 0}])
    (point,) = memory.points("verl.rollout.staleness")
    assert (point.count, point.sum, point.max) == (4, 4, 3)


def test_a_version_that_verl_does_not_say_is_left_out(process, memory):
    process.consumed.tagged(tags((1, 0)))
    assert memory.points("verl.rollout.staleness") == []  # before the first weight sync nobody knows
    process.steps.policy_version = 1
    process.consumed.tagged([{"global_steps": 1}, {"global_steps": 1, "max_global_steps": None}])
    assert memory.points("verl.rollout.staleness") == []


def test_a_step_links_to_the_rollouts_of_earlier_steps(process, memory):
    for _ in range(2):
        with step(process), timed(process, "gen"):
            pass
    with step(process):
        process.consumed.tagged(tags((3, 2), (2, 1), (2, 2), (1, 0)))
    rollouts = {s.context.span_id: s for s in memory.spans if s.name == "verl.rollout"}
    links = {
        (rollouts[link.context.span_id].context.trace_id == link.context.trace_id, *link.attributes.values())
        for link in memory.spans[-1].links
    }
    assert links == {(True, 2, 2), (True, 1, 1)}


def test_links_are_capped_and_what_is_beyond_is_counted(process, memory):
    for _ in range(MAX_LINKS + 3):
        with step(process):
            pass
    with step(process):
        process.consumed.tagged(tags(*[(number, 0) for number in range(1, MAX_LINKS + 4)] * 2))
    last = memory.spans[-1]
    assert len(last.links) == MAX_LINKS
    assert last.attributes["verl.rollout.links_omitted"] == 6


def test_there_is_no_link_to_a_step_of_an_earlier_attempt(process, memory):
    process.trainer.global_steps = 9
    with step(process):
        process.consumed.tagged(tags((9, 9), (10, 9)))
    (root,) = memory.spans
    assert list(root.links) == [] and root.attributes["verl.rollout.links_omitted"] == 1


def test_where_ids_cannot_be_known_there_are_no_links(new_memory):
    memory = new_memory(id_generator=RandomIdGenerator())
    process = memory.process()
    process.trainer = Trainer()
    process.steps.follow(process.trainer)
    for _ in range(2):
        with step(process):
            process.consumed.tagged(tags((1, 0)))
    assert [list(span.links) for span in memory.spans] == [[], []]


def test_a_batch_that_was_generated_ahead_is_linked_and_has_its_trajectories(process, memory):
    """one_step_off: `generate_async` of step 1 makes what `gen` of step 2 waits for."""
    process.steps.waits_for_rollout = process.steps.generates_ahead = True
    process.trainer.global_steps = 1
    first = process.steps.enter("generate_async")
    process.steps.leave(first)
    process.trainer.global_steps = 0
    with step(process):
        with timed(process, "gen"):
            pass
        with timed(process, "generate_async"):
            pass
    with step(process), timed(process, "gen"):
        pass
    spans = memory.spans
    (second,) = [s for s in spans if s.name == "verl.step" and s.attributes["verl.step.number"] == 2]
    (one,) = [s for s in spans if s.name == "verl.step" and s.attributes["verl.step.number"] == 1]
    ahead = [s for s in spans if s.attributes.get("verl.timer") == "generate_async"]
    assert [link.context.span_id for link in one.links] == []  # what it waited for is in its own trace
    assert [link.context.span_id for link in second.links] == [ahead[1].context.span_id]
    assert ahead[0].context.span_id == ids.span_id("run-1", 2, 1, "gen")


# ---- weight sync ----------------------------------------------------------------------------------------------------


async def call(process, name, inside=None, version=None, result=None):
    opened = process.weight_sync.enter(name, version, 3)
    try:
        if inside is not None:
            await inside()
    except BaseException as error:
        process.weight_sync.leave(opened, error)
        raise
    process.weight_sync.leave(opened, None, result)


async def sync(process, fails=False):
    await call(process, "abort_replicas")
    await call(process, "release_kv_cache_replicas")
    process.weight_sync.begin_transfer()
    if fails:
        raise RuntimeError("a replica is gone")
    for name in ("resume_kv_cache_replicas", "resume_generation_replicas"):
        process.weight_sync.end_transfer(name)
        await call(process, name)


def test_the_parts_of_a_weight_sync_are_below_it_in_order(process, memory):
    with step(process), timed(process, "update_weights"):
        result = {"checkpoint_engine/payload_mbytes": 0.5}
        asyncio.run(call(process, "update_weights", lambda: sync(process), 7, result))
    stage = memory.span("verl.weight_sync")
    parts = [s for s in memory.spans if s.parent is not None and s.parent.span_id == stage.context.span_id]
    assert [s.name.rpartition(".")[2] for s in parts] == ["abort", "release", "transfer", "resume", "resume"]
    assert all(a.end_time <= b.start_time for a, b in itertools.pairwise(parts))
    assert stage.attributes["verl.policy.version"] == 7 and stage.attributes["verl.weight_sync.bytes"] == 2**19
    assert parts[0].attributes["verl.weight_sync.call"] == "abort_replicas"
    assert parts[0].attributes["verl.weight_sync.replicas"] == 3
    assert {s.attributes["stage"] for s in parts} == {"weight_sync"}
    assert process.steps.policy_version == 7


def test_a_part_has_no_duration_of_its_own_among_the_stages(process, memory):
    with step(process), timed(process, "update_weights"):
        asyncio.run(call(process, "update_weights", lambda: sync(process), 7))
    assert {p.attributes["verl.timer"]: p.count for p in memory.points("verl.stage.duration")} == {
        "step": 1,
        "update_weights": 1,
    }
    assert "verl.weight_sync.bytes" not in memory.span("verl.weight_sync").attributes


def test_a_sync_that_fails_ends_its_transfer_and_its_version_is_not_that_of_the_servers(process, memory):
    with pytest.raises(RuntimeError), step(process), timed(process, "update_weights"):
        asyncio.run(call(process, "update_weights", lambda: sync(process, fails=True), 7))
    assert memory.span("verl.weight_sync.transfer").status.description == "RuntimeError: a replica is gone"
    assert process.steps.policy_version is None


def test_replicas_that_are_paused_in_another_stage_are_a_part_of_that(process, memory):
    with step(process), timed(process, "gen"):
        asyncio.run(call(process, "sleep_replicas"))
    assert memory.tree() == {"verl.step": {"verl.rollout": {"verl.weight_sync.release": {}}}}
    assert memory.span("verl.rollout").attributes.get("verl.policy.version") is None


def test_each_server_that_is_paused_has_its_own_span(process, memory):
    async def servers():
        for number in range(MAX_SERVERS + 2):
            answered = process.weight_sync.server_called("sleep")
            if answered is not None:
                answer = Future()
                answer.set_exception(OSError("gone")) if number == 1 else answer.set_result(None)
                answered(answer)

    with step(process), timed(process, "gen"):
        assert process.weight_sync.server_called("sleep") is None  # a user's own actor, perhaps
        asyncio.run(call(process, "sleep_replicas", servers))
    spans = [s for s in memory.spans if s.name == "verl.replica.sleep"]
    assert [s.attributes["rank"] for s in spans] == [str(number) for number in range(MAX_SERVERS)]
    assert {s.parent.span_id for s in spans} == {memory.span("verl.weight_sync.release").context.span_id}
    assert [s.attributes["rank"] for s in spans if s.status.description == "OSError: gone"] == ["1"]
    assert memory.values("verl.otel.dropped", "verl.otel.reason") == {("server_cap",): 2}


def test_a_sync_before_training_is_in_the_runs_trace(memory):
    run = memory.tracer.start_span("verl.run", context=Context())
    process = memory.process("trainer", run)
    process.trainer = Trainer()
    process.steps.follow(process.trainer)
    with timed(process, "update_weights"):
        pass
    assert memory.span("verl.weight_sync").parent.span_id == run.get_span_context().span_id


def test_a_sync_inside_the_timer_of_a_sync_is_one_span(process, memory):
    with step(process), timed(process, "sync_rollout_weights"), timed(process, "update_weights"):
        pass
    assert memory.tree() == {"verl.step": {"verl.weight_sync": {}}}


# ---- checkpoints ----------------------------------------------------------------------------------------------------


def save(process, folder, files=()):
    with timed(process, "save_checkpoint"):
        process.checkpoints.saving(f"{folder}/global_step_4/actor")
        process.checkpoints.saving(f"{folder}/global_step_4/critic")
        for name, size in files:
            path = folder / "global_step_4" / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(b"x" * size)


def test_a_checkpoint_says_where_and_how_much_and_whose_it_is(process, memory, tmp_path):
    with step(process):
        save(process, tmp_path, [("actor/model.pt", 1000), ("critic/model.pt", 500), ("data.pt", 1)])
    span = memory.span("verl.checkpoint")
    what = {
        "verl.checkpoint.path": f"{tmp_path}/global_step_4",
        "verl.checkpoint.bytes": 1501,
        "verl.checkpoint.files": 3,
    }
    assert {key: span.attributes[key] for key in what} == what
    (event,) = [e for e in memory.events if e.event_name == "verl.checkpoint"]
    assert what.items() <= dict(event.attributes).items() and event.attributes["verl.step.number"] == 1
    assert event.body["seconds"] == pytest.approx((span.end_time - span.start_time) / 1e9, abs=0.02)
    assert event.trace_id == span.context.trace_id
    assert json.loads((tmp_path / ".verl-otel.json").read_text()) == {"run_id": "run-1", "attempt": 2}


def test_a_checkpoint_that_this_node_does_not_see_has_no_size(process, memory, tmp_path):
    with step(process):
        save(process, tmp_path)
    span = memory.span("verl.checkpoint")
    assert span.attributes["verl.checkpoint.path"] and "verl.checkpoint.bytes" not in span.attributes


def test_looking_at_a_checkpoint_does_not_hold_up_the_training(process, memory, tmp_path, monkeypatch):
    def slow(path):
        time.sleep(0.5)
        return contextlib.nullcontext([])

    monkeypatch.setattr("verl_otel.tracing.checkpoints.os.scandir", slow)
    start = time.perf_counter()
    with step(process):
        save(process, tmp_path)
    assert time.perf_counter() - start < 0.2
    span = memory.span("verl.checkpoint")
    assert (span.end_time - span.start_time) / 1e9 < 0.2


def test_a_checkpoint_that_fails_is_not_told_as_written(process, memory, tmp_path):
    with pytest.raises(OSError), step(process), timed(process, "save_checkpoint"):
        process.checkpoints.saving(f"{tmp_path}/global_step_4/actor")
        raise OSError("disk full")
    assert memory.span("verl.checkpoint").status.description == "OSError: disk full"
    assert [e for e in memory.events if e.event_name == "verl.checkpoint"] == []
    assert not (tmp_path / ".verl-otel.json").exists()


def test_secrets_in_the_path_are_not_shown(process, memory):
    with step(process), timed(process, "save_checkpoint"):
        process.checkpoints.saving("s3://key:hunter2@bucket/runs/global_step_4/actor?token=hunter2")
    assert memory.span("verl.checkpoint").attributes["verl.checkpoint.path"] == "s3://bucket/runs/global_step_4"


def test_what_is_saved_outside_of_a_checkpoints_stage_is_not_taken_for_one(process, memory, tmp_path):
    with step(process), timed(process, "adv"):
        process.checkpoints.saving(f"{tmp_path}/global_step_4/actor")
        process.checkpoints.saving(None)
    assert "verl.checkpoint.path" not in memory.span("verl.advantage").attributes
    assert border.failures() == {}


# ---- values under other numbers than the steps' ---------------------------------------------------------------------


def test_where_verl_logs_under_other_numbers_values_belong_to_the_next_event(process, memory):
    """fully_async: two steps for each version of the weights, under whose number it logs."""
    process.step_values.by_number = False
    for version, first in ((1, 1), (2, 3)):
        for number in (first, first + 1):
            process.step_values.add(number, {f"verl.of_step_{number}": float(number)})
        process.log({"actor/loss": 0.5}, version)
        process.background.drained(10)
    events = {e.attributes["verl.step.number"]: set(e.body) for e in memory.events if e.event_name == "verl.step"}
    assert events == {
        1: {"actor/loss", "verl.of_step_1", "verl.of_step_2"},
        2: {"actor/loss", "verl.of_step_3", "verl.of_step_4"},
    }


# ---- fully_async: other processes -----------------------------------------------------------------------------------


def test_the_end_of_a_loop_is_no_error(process, memory):
    class TrainingStopException(Exception):
        pass

    process.steps.waits_for_rollout = process.steps.rollout_is_elsewhere = True
    with pytest.raises(TrainingStopException), step(process), timed(process, "gen"):
        raise TrainingStopException("queue returned None")
    assert {span.status.status_code.name for span in memory.spans} == {"UNSET"}
    assert memory.points("verl.trainer.idle_ratio") == []  # it was no step


def test_a_validation_elsewhere_is_in_the_trace_of_the_step_that_asked_for_it(process, memory):
    rollouter = memory.process("agent_loop", attempt=2)
    with step(process):
        pass
    carrier = propagation.inject(process.steps.current_context())
    rollouter.steps.validates_for(propagation.extract(carrier))
    for _ in range(2):
        with timed(rollouter, "rollouter/validate_time"):
            scope = rollouter.steps.enter_validation()
            rollouter.steps.leave(scope)
    asked, other = [s for s in memory.spans if s.name == "verl.validation"]
    assert asked.parent.span_id == memory.span("verl.step").context.span_id
    assert other.parent is None
    assert asked.attributes["rank"] == "all"


def test_a_trajectory_says_which_weights_generated_it(memory):
    worker = memory.process("agent_loop").trajectories
    for versions in ([4], [4, 5, 6], [None], []):
        trajectory = worker.enter(1, 0, 0, False)
        for version in versions:
            worker.generated_with(version)
        worker.leave(trajectory)
    found = [(s.attributes.get("verl.policy.version"), s.attributes.get("verl.policy.version.oldest"))
             for s in memory.spans]  # fmt: skip
    assert found == [(4, None), (6, 4), (None, None), (None, None)]


def test_trajectories_that_no_step_has_scheduled_are_capped_per_version_of_the_weights(memory):
    worker = memory.process("agent_loop").trajectories
    worker.steps_schedule = False
    for version in (0, 1):
        for _ in range(6):
            trajectory = worker.enter(17, 0, 0, False)  # the number of a sample
            worker.generated_with(version)
            worker.leave(trajectory)
    first = [s for s in memory.spans if s.attributes["verl.trajectory.kept"] == "first"]  # besides the slowest
    recorded = [s.attributes["verl.policy.version"] for s in first]
    assert recorded == [0] * 4 + [0] + [1] * 4  # before the first answer nobody knows the version
    assert {s.parent for s in memory.spans} == {None}
    assert not any("verl.step.number" in s.attributes for s in memory.spans)


@pytest.mark.parametrize(
    ("failure", "state"), [({}, "finished"), ({"exception.type": "ValueError", "exception.message": "x"}, "failed")]
)
def test_only_the_process_that_trains_says_how_the_run_has_ended(memory, failure, state):
    trainer, other = memory.process("trainer"), memory.process("agent_loop")
    trainer.run_started("project", "experiment", {})
    for told in (trainer, other, trainer):
        told.run_ended(failure)
    ends = [e for e in memory.events if e.event_name == "verl.run.finished"]
    assert [(e.attributes["verl.run.state"], dict(e.body)) for e in ends] == [(state, failure)]
