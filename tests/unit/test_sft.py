"""SFT (`tracing/sft.py`): verl times nothing there, and each step is a trace all the same, over all ranks."""

import pytest

from verl_otel.tracing import ids


class Worker:
    def __init__(self, rank):
        self.rank = rank


class Rank:
    """A rank under torchrun, which runs the loop by itself."""

    def __init__(self, memory, rank, logs=False, resumed=0):
        self.process = memory.process("worker", worker_index=str(rank))
        self.worker = Worker(rank)
        self.process.sft.begin()
        self.process.sft.resumed(resumed)
        if logs:
            self.process.sft.logs()
        self.logging = logs
        self.number = resumed

    def call(self, method, error=None):
        workers = self.process.workers
        workers.leave(workers.enter(self.worker, method), error)

    def log(self, data):
        if self.logging:
            self.process.log(dict(data), self.number)
            self.process.sft.logged(self.number)

    def step(self):
        self.number += 1
        self.call("train_batch")
        self.log({"train/loss": 1.0})

    def validate(self):
        self.call("infer_batch")
        self.call("infer_batch")
        self.log({"val/loss": 1.0})

    def save(self):
        sft, steps = self.process.sft, self.process.steps
        steps.leave(sft.enter_checkpoint())


@pytest.fixture
def ranks(memory):
    return [Rank(memory, 0, logs=True), Rank(memory, 1)]


STEP = {"verl.step": {"verl.update_actor": {"verl.worker.train_batch": {}, "verl.worker.train_batch (2)": {}}}}
CALLS = {f"verl.worker.infer_batch{suffix}": {} for suffix in ("", " (2)", " (3)", " (4)")}


def test_a_step_is_one_trace_with_the_call_of_each_rank(ranks, memory):
    for rank in ranks:
        rank.step()
    assert memory.tree() == STEP
    assert len({span.context.trace_id for span in memory.spans}) == 1
    assert memory.span("verl.step").attributes["verl.step.number"] == 1
    stage = memory.span("verl.update_actor").attributes
    assert (stage["rank"], stage["stage"], stage["model_type"]) == ("all", "update", "actor")
    calls = [span.attributes for span in memory.spans if span.name == "verl.worker.train_batch"]
    assert sorted((c["rank"], c["stage"], c["model_type"]) for c in calls) == [
        ("0", "update", "actor"),
        ("1", "update", "actor"),
    ]


def test_validation_and_checkpoint_are_in_the_trace_of_their_step(ranks, memory):
    for rank in ranks:
        rank.step()
        rank.validate()
        rank.save()
        rank.step()
    step = memory.tree()
    assert step == {
        "verl.step": {**STEP["verl.step"], "verl.validation": CALLS, "verl.checkpoint": {}},
        "verl.step (2)": STEP["verl.step"],
    }
    roots = [span for span in memory.spans if span.name == "verl.step"]
    assert [span.context.trace_id for span in roots] == [ids.trace_id("run-1", 1, number) for number in (1, 2)]


def test_a_step_ends_when_its_values_are_logged_and_its_stage_when_the_call_ends(ranks, memory):
    ranks[0].number = 1
    ranks[0].call("train_batch")
    assert [span.name for span in memory.spans] == ["verl.update_actor", "verl.worker.train_batch"]
    ranks[0].log({"train/loss": 1.0})
    assert "verl.step" in [span.name for span in memory.spans]


def test_a_resumed_training_goes_on_counting_as_verl_does(memory):
    for rank in (Rank(memory, 0, logs=True, resumed=7), Rank(memory, 1, resumed=7)):
        rank.step()
    assert memory.tree() == STEP
    assert memory.span("verl.step").attributes["verl.step.number"] == 8


def test_a_step_that_fails_is_an_error_and_the_next_ones_are_whole(ranks, memory):
    ranks[0].call("train_batch", RuntimeError("out of memory"))
    ranks[0].process.sft.close(RuntimeError("out of memory"))
    assert {span.name: span.status.description for span in memory.spans} == dict.fromkeys(
        ["verl.step", "verl.update_actor", "verl.worker.train_batch"], "RuntimeError: out of memory"
    )


def test_on_ray_the_drivers_stage_lasts_until_verl_logs(memory):
    driver = memory.process("launcher")
    driver.sft.begin()
    driver.sft.logs()
    driver.sft.enter_call("train_batch")
    assert memory.spans == []
    driver.log({"train/loss": 1.0}, 1)
    driver.sft.logged(1)
    assert memory.tree() == {"verl.step": {"verl.update_actor": {}}}


def test_without_sft_calls_of_the_engine_are_no_steps(memory):
    process = memory.process("worker")
    process.workers.leave(process.workers.enter(Worker(0), "train_batch"))
    process.sft.logged(1)
    assert [span.name for span in memory.spans] == ["verl.worker.train_batch"]


def test_under_torchrun_all_ranks_share_the_span_of_the_run(memory, monkeypatch):
    """torchrun's own process never loads verl."""
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "none")
    first, second = (memory.process("worker", worker_index=str(rank)) for rank in (0, 1))
    for rank, process in enumerate((first, second)):
        process.workers.leave(process.workers.enter(Worker(rank), "reset"))
    second.close()
    first.close()
    assert memory.tree() == {"verl.run": {"verl.worker.reset": {}, "verl.worker.reset (2)": {}}}


def test_a_rank_that_has_a_launcher_makes_no_run(memory, monkeypatch):
    process = memory.process("worker")
    process.close()
    assert memory.spans == []


def test_other_calls_in_a_step_are_below_it_on_every_rank(ranks, memory):
    for rank in ranks:
        rank.call("train_batch")
        rank.call("step_profile")
    ranks[0].number = 1
    ranks[0].log({"train/loss": 1.0})
    (step,) = memory.tree().values()
    assert sorted(step) == ["verl.update_actor", "verl.worker.step_profile", "verl.worker.step_profile (2)"]
