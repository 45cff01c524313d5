"""verl's asynchronous trainers and SFT: one real run of each, and what its steps say."""

from collections import Counter
from types import SimpleNamespace

import bed
import pytest
from recorded_metrics import last_points
from trees import assert_named, children, orphans, root, step_traces, traces

from verl_otel.recording import reader

pytestmark = pytest.mark.run

PHASES = {f"verl.weight_sync.{phase}" for phase in ("abort", "release", "transfer", "resume")}


OF_USERS = ("reward/creative_score", "reward/answer_length", "val/reward/")
"""What reward_logged.py logs, where a run has it."""
WRONG = "'no name' is not the name of a metric"
"""What it does wrong."""


def trained(tmp_path_factory, mode, arguments, **how):
    """A run of run_<mode>.sh, and what it recorded."""
    run = bed.run(tmp_path_factory.mktemp(mode), arguments, script=f"run_{mode}.sh", **how)
    assert run.returncode == 0, run.output[-4000:]
    recording = reader.load(run.telemetry)
    return SimpleNamespace(
        run=run,
        recording=recording,
        spans=recording.spans,
        steps=step_traces(recording.spans),
        events=recording.events_named("verl.step"),
        points=last_points(run.telemetry),
        complaints=[
            line
            for line in run.output.splitlines()
            if "Failed to detach" in line or ("verl-otel:" in line and WRONG not in line)
        ],
    )


def stages(trace):
    return [s.name for s in children(trace, root(trace)) if not s.name.startswith("verl.worker.")]


def assert_whole(mode, last_step, allowed_roots):
    """Each step is one trace, no span is without its parent, and no process of ours complains."""
    assert mode.complaints == []
    assert sorted(mode.steps) == list(range(1, last_step + 1))
    assert [span.name for span in mode.spans if span.error] == []
    for trace in traces(mode.spans).values():
        assert orphans(trace) == [], [span.name for span in trace]
        assert root(trace).name in allowed_roots
    (finished,) = mode.recording.events_named("verl.run.finished")
    assert finished.attributes["verl.run.state"] == "finished"


def assert_events_are_what_verl_printed(mode):
    """Every value that verl logged is in an event of its step, and of several calls for one step nothing is lost."""
    printed = mode.run.printed()
    logged = {
        step: {key: value for key, value in values.items() if not key.startswith(("verl.", *OF_USERS))}
        for step, values in mode.recording.step_values().items()
    }
    assert {step: sorted(values) for step, values in printed.items()} == {
        step: sorted(values) for step, values in logged.items() if values
    }
    for step, values in printed.items():
        assert {key: logged[step][key] for key in values} == pytest.approx(values, rel=1e-12, nan_ok=True)


def assert_waits(mode, times, last):
    """The rollout of each step is a wait, in so many parts; the idle ratio is the share of the `last` step."""
    share = {}
    for number, trace in mode.steps.items():
        waits = [s for s in children(trace, root(trace)) if s.attributes.get("verl.stage.wait")]
        assert [s.name for s in waits] == ["verl.rollout"] * times, number
        share[number] = sum(s.seconds for s in waits) / root(trace).seconds
        assert 0 < share[number] <= 1, number
    ((_, of_trainer),) = mode.points["verl.trainer.idle_ratio"]
    assert of_trainer["asDouble"] == pytest.approx(share[last], abs=0.02)


def policy_versions(mode):
    """Of the weights that each step trains, in the order of the steps."""
    return [root(mode.steps[number]).attributes["verl.policy.version"] for number in sorted(mode.steps)]


def staleness(mode):
    """(count, sum) over all steps."""
    (series,) = mode.points["verl.rollout.staleness"]
    return int(series[1]["count"]), series[1]["sum"]


# ---- separate_async -------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def separate(tmp_path_factory, fork_server):
    return trained(tmp_path_factory, "separate_async", ["trainer.save_freq=2"], ranks=1, fork_server=fork_server)


def test_separate_async_has_whole_traces_without_gaps(separate):
    assert_whole(separate, 3, {"verl.run", "verl.validation", "verl.step"})
    assert_events_are_what_verl_printed(separate)
    assert_named(separate.steps)


def test_separate_async_says_what_it_waited_for(separate):
    assert_waits(separate, 2, last=3)


def test_separate_async_says_how_stale_its_trajectories_are_and_links_to_them(separate):
    printed = separate.run.printed()
    count, total = staleness(separate)
    per_step = 8 * 4
    assert count == 3 * per_step
    assert total == pytest.approx(
        sum(printed[step]["training/off_policy/trajectory_staleness/mean"] * per_step for step in (1, 2, 3))
    )
    by_trace = {trace[0].trace_id: number for number, trace in separate.steps.items()}
    for number, trace in separate.steps.items():
        linked = [by_trace[link] for link in root(trace).links if link in by_trace]
        assert all(earlier < number for earlier in linked)
    assert any(set(root(trace).links) & set(by_trace) for trace in separate.steps.values())
    versions = [s.attributes.get("verl.policy.version") for s in separate.spans if s.name == "verl.trajectory"]
    assert versions and set(versions) <= {0, 1, 2, 3, None}
    assert versions.count(None) <= 8  # in flight when the training ended


def test_separate_async_shows_the_parts_of_its_weight_syncs(separate):
    for number, trace in separate.steps.items():
        (sync,) = [
            s
            for s in children(trace, root(trace))
            if s.name == "verl.weight_sync" and "update" in s.attributes["verl.timer"]
        ]
        parts = [s.name for s in children(trace, sync) if s.name in PHASES]
        assert parts == [f"verl.weight_sync.{part}" for part in ("abort", "release", "transfer", "resume", "resume")]
        servers = [s.name for part in children(trace, sync) for s in children(trace, part) if "replica" in s.name]
        assert servers == [
            f"verl.replica.{call}"
            for call in ("abort_all_requests", "release_kv_cache", "resume_kv_cache", "resume_generation")
        ]
        assert sync.attributes["verl.policy.version"] == number
        assert sync.attributes["verl.weight_sync.bytes"] > 400_000
        (transfer,) = [s for s in children(trace, sync) if s.name == "verl.weight_sync.transfer"]
        assert {s.name for s in children(trace, transfer)} >= {"verl.worker.update_weights"}


def test_a_checkpoint_says_where_and_how_much(separate):
    checkpoint, _ = sorted((s for s in separate.spans if s.name == "verl.checkpoint"), key=lambda s: s.start)
    folder = separate.run.folder / "ckpt" / "global_step_2"
    assert checkpoint.attributes["verl.checkpoint.path"] == str(folder)
    files = [path for path in folder.rglob("*") if path.is_file()]
    assert checkpoint.attributes["verl.checkpoint.bytes"] == sum(path.stat().st_size for path in files)
    event, _ = separate.recording.events_named("verl.checkpoint")
    assert event.attributes["verl.step.number"] == 2 and event.body["seconds"] > 0
    assert event.trace_id == checkpoint.trace_id
    assert (separate.run.folder / "ckpt" / ".verl-otel.json").exists()


# ---- fully_async ----------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def fully(tmp_path_factory, fork_server):
    scored = tmp_path_factory.mktemp("scored") / "rewards"
    logged = f"reward.custom_reward_function.path={bed.BED}/reward_logged.py"
    mode = trained(
        tmp_path_factory, "fully_async", ["trainer.save_freq=2", logged],
        ranks=1, fork_server=fork_server, environment={"REWARDS": str(scored)},
    )  # fmt: skip
    mode.scored = [float(line) for line in scored.read_text().splitlines()]
    return mode


def test_fully_async_has_whole_traces_without_gaps(fully):
    assert_whole(fully, 7, {"verl.run", "verl.step", "verl.trajectory"})  # in the 7th it hears that all is done
    assert_named(fully.steps)
    (validation,) = [
        s for s in fully.spans if s.name == "verl.validation" and s.parent_id == root(fully.steps[4]).span_id
    ]
    assert validation.resource["verl.worker.group"] == "FullyAsyncRollouter"


def test_fully_async_logs_several_times_under_one_number_and_nothing_is_lost(fully):
    assert_events_are_what_verl_printed(fully)
    calls = Counter(event.attributes["verl.step.number"] for event in fully.events if len(event.body) > 1)
    assert max(calls.values()) >= 3  # of the rollouter, of the trainer, and of the validation
    late = [e for e in fully.events if any(key.startswith("val-core/") for key in e.body)]
    assert {e.attributes["verl.step.number"] for e in late} == {0, 2}


def test_fully_async_knows_its_processes(fully):
    roles = {span.resource.get("verl.worker.group"): span.resource["verl.process.role"] for span in fully.spans}
    assert roles["FullyAsyncTrainer"] == "trainer"
    assert roles["FullyAsyncRollouter"] == "agent_loop"


def test_fully_async_says_waits_staleness_and_idle_times(fully):
    assert_waits(fully, 1, last=6)
    of_verl = fully.run.printed()[3]
    assert fully.recording.step_values()[3]["verl.trainer.idle_ratio"] == pytest.approx(
        of_verl["fully_async/trainer/idle_ratio"], abs=0.01
    )
    ((_, of_rollouter),) = fully.points["verl.rollouter.idle_ratio"]
    assert 0 <= of_rollouter["asDouble"] <= 1
    assert policy_versions(fully) == [0, 0, 1, 1, 2, 2, 3]
    # At a threshold of 0.5 none is more than one version behind: as many as verl says.
    assert staleness(fully) == (6 * 4 * 4, of_verl["fully_async/count/stale_trajectory_processed"])
    versions = {s.attributes.get("verl.policy.version") for s in fully.spans if s.name == "verl.trajectory"}
    assert 0 in versions and versions <= {0, 1, 2, 3, None}


def test_fully_async_has_what_users_log_in_the_workers_of_its_rollouter(fully):
    count, total = 0, 0.0
    for event in fully.events:
        for key in ("reward/answer_length", "val/reward/answer_length"):
            if key in event.body:
                number = event.body.get(f"{key}/count", 1)
                count, total = count + number, total + number * event.body[key]
    assert count == len(fully.scored) and total == pytest.approx(sum(fully.scored))


# ---- one_step_off ---------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def one_step_off(tmp_path_factory, fork_server):
    return trained(tmp_path_factory, "one_step_off", ["trainer.save_freq=2"], ranks=1, fork_server=fork_server)


def test_one_step_off_has_whole_traces_and_links_to_what_was_generated_ahead(one_step_off):
    assert_whole(one_step_off, 3, {"verl.run", "verl.validation", "verl.step"})
    assert_events_are_what_verl_printed(one_step_off)
    assert_named(one_step_off.steps)
    for trace in one_step_off.steps.values():
        generations = {s.span_id for s in trace if s.attributes.get("verl.timer") == "generate_async"}
        trajectories = [s for s in trace if s.name == "verl.trajectory" and not s.attributes["verl.validate"]]
        assert all(s.parent_id in generations for s in trajectories)
    for number in (2, 3):
        generated = one_step_off.steps[number - 1][0].trace_id
        assert generated in root(one_step_off.steps[number]).links


def test_one_step_off_says_waits_and_staleness(one_step_off):
    assert_waits(one_step_off, 1, last=3)
    assert policy_versions(one_step_off) == [0, 1, 2]
    assert staleness(one_step_off) == (3 * 32, 3 * 32)  # one version each, as verl numbers them
    made_in = {
        (s.attributes["verl.step.number"], s.attributes.get("verl.policy.version"))
        for s in one_step_off.spans
        if s.name == "verl.trajectory" and not s.attributes["verl.validate"]
    }
    assert made_in <= {(1, 0), (1, 1), (2, 2)}, "the first step makes its own batch and the next one's"


# ---- colocate_async -------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def colocate(tmp_path_factory, fork_server):
    return trained(tmp_path_factory, "colocate_async", [], ranks=1, fork_server=fork_server)


def test_colocate_async_has_whole_traces_and_no_idle_time(colocate):
    assert_whole(colocate, 3, {"verl.run", "verl.validation", "verl.step"})
    assert_events_are_what_verl_printed(colocate)
    assert "verl.trainer.idle_ratio" not in colocate.points  # its devices generate while it waits
    assert staleness(colocate)[0] == 3 * 8 * 4


# ---- SFT ------------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module", params=["torchrun", "ray"])
def sft(request, tmp_path_factory):
    return trained(tmp_path_factory, "sft", [request.param], steps=4)


def test_each_step_of_sft_is_a_trace_with_every_rank(sft):
    assert sft.complaints == []
    assert sorted(sft.steps) == [1, 2, 3, 4]
    for number, trace in sft.steps.items():
        assert orphans(trace) == []
        after = ["verl.validation", "verl.checkpoint"] if number % 2 == 0 else []
        assert stages(trace) == ["verl.update_actor", *after]
        calls = Counter((s.name, s.attributes["rank"]) for s in trace if s.name.startswith("verl.worker."))
        assert calls["verl.worker.train_batch", "0"] == calls["verl.worker.train_batch", "1"] == 1
        step, update = root(trace), children(trace, root(trace))[0]
        assert update.start - step.start < 0.05 * 1e9 + 0.05 * (step.end - step.start)
    assert_named(sft.steps)


def test_sft_says_once_what_shows_it(sft):
    assert sft.run.output.count(f"is recorded: verl-otel report {sft.run.telemetry}\n") == 1


def test_sft_can_be_found_by_its_processes(sft):
    """The dashboards offer the runs of which a process has joined: where SFT trains, that is not at the import."""
    joined = Counter(said["rank"] for said, _ in sft.points["verl.process.start_time"])
    assert joined.keys() == {"0", "1"}
    assert joined.total() == len([*sft.run.telemetry.glob("*.metrics.jsonl")])


def test_sft_logs_at_its_steps(sft):
    assert_events_are_what_verl_printed(sft)
    validated = {e.attributes["verl.step.number"] for e in sft.events if "val/loss" in e.body}
    assert validated == {2, 4}
    by_trace = {trace[0].trace_id: number for number, trace in sft.steps.items()}
    logged = [e for e in sft.events if {"train/loss", "val/loss"} & e.body.keys()]
    assert [by_trace[e.trace_id] for e in logged] == [e.attributes["verl.step.number"] for e in logged]


def test_sft_says_where_its_checkpoints_are(sft):
    paths = sorted(s.attributes["verl.checkpoint.path"] for s in sft.spans if s.name == "verl.checkpoint")
    assert paths == [str(sft.run.folder / "ckpt" / f"global_step_{step}") for step in (2, 4)]
