"""On a real Ray cluster, with the verl that is installed: how its programs use Ray besides worker groups."""

import shutil
import subprocess
import tempfile
from pathlib import Path

import bed
import pytest

from verl_otel.recording import reader
from verl_otel.tracing import ids

SCRIPT = Path(__file__).with_name("small_programs.py")


@pytest.fixture(scope="module")
def ran(tmp_path_factory):
    folder, ray_folder = tmp_path_factory.mktemp("programs"), tempfile.mkdtemp(prefix="vo", dir="/tmp")
    environment = bed.clean_environment(VERL_OTEL_FOLDER=str(folder), VERL_OTEL_RUN_ID="small")
    try:
        result = subprocess.run(
            [bed.INSTRUMENT, bed.LAUNCHER, SCRIPT, ray_folder],
            env=environment, capture_output=True, text=True, timeout=180,
        )  # fmt: skip
    finally:
        shutil.rmtree(ray_folder, ignore_errors=True)
    output = result.stdout + result.stderr
    assert result.returncode == 0, output[-3000:]
    return reader.load(folder), output


def test_nothing_is_complained_of(ran):
    assert [line for line in ran[1].splitlines() if "verl-otel: " in line or "Failed to detach" in line] == []


def test_a_trainer_that_travels_by_value_has_its_stages(ran):
    recording, _ = ran
    steps = [span for span in recording.spans if span.name == "verl.step"]
    assert len(steps) == 2 and all(span.resource["verl.process.role"] == "trainer" for span in steps)
    for step in steps:
        stages = sorted((s for s in recording.spans if s.parent_id == step.span_id), key=lambda s: s.start)
        assert [s.name for s in stages] == ["verl.rollout", "verl.update_actor"]
        assert all(step.start <= s.start <= s.end <= step.end and s.trace_id == step.trace_id for s in stages)


def test_what_it_logs_is_in_its_events(ran):
    recording, output = ran
    events = recording.events_named("verl.step")
    assert [event.attributes["verl.step.number"] for event in events] == [3, 3]
    assert all(event.body["actor/loss"] == 0.1234567890123 for event in events)
    assert output.count("actor/loss:0.1234567890123") == 2


def test_trajectories_are_in_the_trace_of_their_step_with_turns(ran):
    recording, _ = ran
    trajectories = [span for span in recording.spans if span.name == "verl.trajectory"]
    assert len(trajectories) == 4
    for trajectory in trajectories:
        assert trajectory.trace_id == f"{ids.trace_id('small', 1, 3):032x}"
        assert trajectory.resource["verl.process.role"] == "agent_loop"
        turns = [s for s in recording.spans if s.parent_id == trajectory.span_id and s.name == "verl.turn"]
        assert sorted(turn.attributes["verl.turn.number"] for turn in turns) == [1, 2]
        for turn in turns:
            assert [s.name for s in recording.spans if s.parent_id == turn.span_id] == ["verl.generate"]


@pytest.mark.verl(since="0.7.1")
def test_the_reward_workers_side_is_in_the_trajectory(ran):
    recording, _ = ran
    trajectories = {span.span_id for span in recording.spans if span.name == "verl.trajectory"}
    scores = [span for span in recording.spans if span.name == "verl.compute_score"]
    assert len(scores) >= 2  # of the first step's, those whose worker had answered already
    assert {span.parent_id for span in scores} <= trajectories
    assert {span.resource["verl.process.role"] for span in scores} == {"reward_worker"}
