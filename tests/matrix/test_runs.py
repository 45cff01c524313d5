"""Real runs of older versions of verl, instrumented: every stage, every rank, every printed value."""

from collections import Counter

import bed
import pytest
from environments import HERE, environment
from trees import STAGES_OF_PPO, children, orphans, root, step_traces, traces

from verl_otel.recording import reader

pytestmark = pytest.mark.run
matrix = pytest.mark.matrix

STAGES = {
    "gen": "verl.rollout",
    "reward": "verl.reward",
    "old_log_prob": "verl.log_prob",
    "ref": "verl.ref_log_prob",
    "values": "verl.values",
    "adv": "verl.advantage",
    "update_critic": "verl.update_critic",
    "update_actor": "verl.update_actor",
    "update_weights": "verl.weight_sync",
    "testing": "verl.validation",
}
"""verl's timers, in the order of a step."""

ENGINE_CALLS = {
    "verl.log_prob": "compute_log_prob",
    "verl.ref_log_prob": "compute_ref_log_prob",
    "verl.values": "infer_batch",
    "verl.update_critic": "train_mini_batch",
    "verl.update_actor": "update_actor",
    "verl.weight_sync": "update_weights",
}
LEGACY_CALLS = {
    "verl.rollout": "generate_sequences",
    "verl.log_prob": "compute_log_prob",
    "verl.ref_log_prob": "compute_ref_log_prob",
    "verl.values": "compute_values",
    "verl.update_critic": "update_critic",
    "verl.update_actor": "update_actor",
}
"""Compute stages and the call on each rank that does their work: with the engine workers, and with those before."""

OVERRIDES_0_7_1 = (
    "trainer.use_legacy_worker_impl=disable",
    "++actor_rollout_ref.actor.fsdp_config.strategy=fsdp2",
    "++actor_rollout_ref.ref.fsdp_config.strategy=fsdp2",
)


@pytest.fixture
def ran(tmp_path):
    """Runs a version; returns the finished run and its recording."""

    def of(version, *arguments, **options):
        verl = HERE if version == HERE.verl else environment(version)
        run = bed.run(tmp_path, arguments, verl=verl, fork_server=bed.fork_server(verl.python), steps=2, **options)
        assert run.returncode == 0, run.output[-4000:]
        return run, reader.load(run.telemetry)

    return of


def assert_recorded(run, recording, version, calls, ranks=("0",)):
    """What holds for every run: stages, ranks, values, no orphans, nothing to complain of."""
    complaints = [line for line in run.output.splitlines() if "verl-otel: " in line or "Failed to detach" in line]
    assert complaints == []
    assert {span.resource["verl.version"] for span in recording.spans} == {version}
    assert {name: orphans(trace) for trace in traces(recording.spans).values() for name in [root(trace).name]} == {
        "verl.run": [], "verl.validation": [], "verl.step": [],
    }  # fmt: skip
    printed = run.printed()
    steps = step_traces(recording.spans)
    assert sorted(steps) == [1, 2] and set(printed) == {0, 1, 2}
    for number, trace in steps.items():
        assert_stages(trace, printed[number], calls, ranks)
    events = recording.step_values()
    for number, values in printed.items():
        assert len(values) > (0 if number == 0 else 50)
        assert {key: events[number][key] for key in values} == pytest.approx(values, rel=1e-12, nan_ok=True)
    (finished,) = recording.events_named("verl.run.finished")
    assert finished.attributes["verl.run.state"] == "finished"


def assert_stages(trace, printed, calls, ranks):
    """Each timer that verl printed for the step is a stage of it, in verl's order, with its ranks."""
    timers = {key.removeprefix("timing_s/") for key in printed if key.startswith("timing_s/")}
    expected = [stage for timer, stage in STAGES.items() if timer in timers]
    step = root(trace)
    stages = [span for span in children(trace, step) if span.name in STAGES.values()]
    assert [span.name for span in stages] == expected
    for stage in stages:
        of_ranks = [s for s in children(trace, stage) if s.name.startswith("verl.worker.")]
        assert all(stage.start <= s.start <= s.end <= stage.end + 50_000_000 for s in of_ranks)
        if stage.name in calls:
            called = Counter((s.name.removeprefix("verl.worker."), s.attributes["rank"]) for s in of_ranks)
            assert called == {(calls[stage.name], rank): 1 for rank in ranks}, stage.name


def assert_trajectories(trace):
    """The rollout holds the first trajectories and perhaps the slowest, each with a turn and its generation."""
    (rollout,) = [span for span in trace if span.name == "verl.rollout"]
    trajectories = [span for span in children(trace, rollout) if span.name == "verl.trajectory"]
    assert Counter(span.attributes["verl.trajectory.kept"] for span in trajectories)["first"] == 4
    for trajectory in trajectories:
        (turn,) = [span for span in children(trace, trajectory) if span.name == "verl.turn"]
        assert [span.name for span in children(trace, turn)] == ["verl.generate"]


def test_ppo_of_0_8_0(ran):
    run, recording = ran("0.8.0", *bed.PPO_WITH_CRITIC_AND_REFERENCE, ranks=2)
    assert_recorded(run, recording, "0.8.0", ENGINE_CALLS, ranks=("0", "1"))
    for trace in step_traces(recording.spans).values():
        names = [span.name for span in children(trace, root(trace))]
        assert [name for name in names if name in STAGES_OF_PPO] == STAGES_OF_PPO
        assert_trajectories(trace)


@matrix
def test_main_ppo_sync_of_0_8_0(ran):
    entry = {"ENTRY": "verl.trainer.main_ppo_sync"}
    # verl sets this variable in a runtime_env that is given, where it has to be already.
    given = "++ray_kwargs.ray_init.runtime_env.env_vars.TRANSFER_QUEUE_ENABLE='1'"
    run, recording = ran("0.8.0", "grpo", given, ranks=1, environment=entry)
    assert_recorded(run, recording, "0.8.0", ENGINE_CALLS)
    for trace in step_traces(recording.spans).values():
        assert_trajectories(trace)
        (rollout,) = [span for span in trace if span.name == "verl.rollout"]
        assert rollout.attributes["verl.stage.wait"] is True


@matrix
def test_grpo_of_0_7_1(ran):
    run, recording = ran("0.7.1", "grpo", *OVERRIDES_0_7_1, ranks=1)
    assert_recorded(run, recording, "0.7.1", ENGINE_CALLS)
    for trace in step_traces(recording.spans).values():
        assert_trajectories(trace)


def assert_gradient_norms(run, recording, *models):
    """The ranks' own, over all of them, are what verl prints: with one mini-batch a step there is one value."""
    for number, trace in step_traces(recording.spans).items():
        for model in models:
            (stage,) = [span for span in trace if span.name == f"verl.update_{model}"]
            printed = run.printed()[number][f"{model}/grad_norm"]
            assert stage.attributes["verl.ranks.grad_norm.mean"] == pytest.approx(printed, rel=1e-6)


@matrix
def test_grpo_of_0_6_1(ran):
    run, recording = ran("0.6.1", "grpo", script="run_0_6.sh", ranks=1)
    assert_recorded(run, recording, "0.6.1", LEGACY_CALLS)
    assert_gradient_norms(run, recording, "actor")


@matrix
def test_ppo_of_0_6_1(ran):
    run, recording = ran("0.6.1", *bed.PPO_WITH_CRITIC_AND_REFERENCE, script="run_0_6.sh", ranks=2)
    assert_recorded(run, recording, "0.6.1", LEGACY_CALLS, ranks=("0", "1"))
    assert_gradient_norms(run, recording, "actor", "critic")


@matrix
def test_grpo_of_0_9_0(ran):
    run, recording = ran("0.9.0", "grpo", ranks=1)
    assert_recorded(run, recording, "0.9.0", ENGINE_CALLS)
    for trace in step_traces(recording.spans).values():
        assert_trajectories(trace)


@matrix
def test_legacy_trainer_of_0_9_1(ran):
    run, recording = ran("0.9.1", "grpo", "trainer.use_v1=False", ranks=1)
    assert_recorded(run, recording, "0.9.1", ENGINE_CALLS)
    for trace in step_traces(recording.spans).values():
        assert_trajectories(trace)
