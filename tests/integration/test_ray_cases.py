"""What goes wrong for people between Ray and OpenTelemetry (group R of ../CASES.md), on a real local cluster."""

import json
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import bed
import pytest

from verl_otel.recording import reader

HERE = Path(__file__).parent
TRACE_ID, SPAN_ID = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"


class Cases:
    """The run of ray_cases.py: what its driver got, all output, and what was recorded."""

    def __init__(self, folder, ray_folder):
        package = folder / "broken" / "verl_otel"
        package.mkdir(parents=True)
        (package / "__init__.py").write_text("raise ImportError('broken for the test')")
        job = {"runtime_env": {"env_vars": {"OF_THE_JOB": "kept", "OTEL_SERVICE_NAME": "of-the-job"}}}
        result = subprocess.run(
            [bed.INSTRUMENT, sys.executable, HERE / "ray_cases.py", ray_folder, package.parent],
            cwd=folder,
            env=bed.clean_environment(
                VERL_OTEL_FOLDER=str(folder / "recorded"),
                PYTHONPATH=str(HERE),
                TRACEPARENT=f"00-{TRACE_ID}-{SPAN_ID}-01",
                RAY_JOB_CONFIG_JSON_ENV_VAR=json.dumps(job),
            ),
            capture_output=True,
            text=True,
            timeout=180,
        )
        self.output = result.stdout + result.stderr
        assert result.returncode == 0, self.output[-5000:]
        (line,) = [line for line in result.stdout.splitlines() if line.startswith("got ")]
        self.got = json.loads(line[4:])
        self.logs = "".join(
            path.read_text(errors="replace")
            for pattern in ("worker-*.out", "worker-*.err")
            for path in Path(ray_folder).glob(f"session_latest/logs/{pattern}")
        )
        self.spans = reader.load(folder / "recorded").spans
        self.by_id = {span.span_id: span for span in self.spans}

    def named(self, name):
        return [span for span in self.spans if span.name == name]

    def span(self, name):
        (found,) = self.named(name)
        return found

    def parent(self, span):
        """Name of a span's parent."""
        return self.by_id[span.parent_id].name


@pytest.fixture(scope="module")
def cases(tmp_path_factory):
    ray_folder = tempfile.mkdtemp(prefix="vo", dir="/tmp")
    try:
        yield Cases(tmp_path_factory.mktemp("cases"), ray_folder)
    finally:
        shutil.rmtree(ray_folder, ignore_errors=True)


def test_r1_an_actor_answers_whatever_is_wrong_with_its_telemetry(cases):
    """R1: an exception in the start-up hook killed every worker."""
    assert cases.got["R1"] == [2, [2, "broken for the test"]]
    assert "cannot be made" in cases.logs or "cannot be set up" in cases.logs  # and says so


def test_r3_actors_that_actors_have_made_are_in_one_trace(cases):
    """R3: with the hook on, nested actors failed."""
    assert cases.got["R3"] == ["supervisor", "middle", "leaf"]
    (leaf,) = [
        span for span in cases.named("verl.worker.leaf") if span.parent_id in cases.by_id and inside(cases, span)
    ]
    names, span = [], leaf
    while span is not None:
        names.append(span.name)
        assert span.trace_id == leaf.trace_id
        span = cases.by_id.get(span.parent_id)
    assert names == [
        *("verl.worker.leaf", "verl.worker.middle", "verl.worker.supervise", "verl.supervised", "verl.step")
    ]
    processes = {s.resource["service.instance.id"] for s in cases.spans if s.trace_id == leaf.trace_id}
    assert len(processes) == 4


def inside(cases, span):
    """Whether the span is in a step, not of a first call."""
    return any(s.name == "verl.step" and s.trace_id == span.trace_id for s in cases.spans)


def test_r5_the_run_is_part_of_the_trace_of_whoever_started_it(cases):
    """R5: context from outside did not reach the actors; people passed it by hand."""
    run = cases.span("verl.run")
    assert (run.trace_id, run.parent_id) == (TRACE_ID, SPAN_ID)
    first = [span for span in cases.named("verl.worker.supervise") if not inside(cases, span)]
    assert [(span.trace_id, span.parent_id) for span in first] == [(TRACE_ID, run.span_id)]
    assert all(step.links == (TRACE_ID,) for step in cases.named("verl.step"))


def test_r5_what_ray_job_submit_has_set_reaches_the_workers_unchanged(cases):
    assert cases.got["R5"] == ["kept", "of-the-job"]
    services = {span.resource["service.name"] for span in cases.spans if span.name.startswith("verl.worker.")}
    assert services == {"of-the-job"}


def test_r6_concurrent_calls_of_an_async_actor_have_their_own_parents(cases):
    """R6: async methods had no span, or that of another call."""
    assert cases.got["R6"] == list(range(50))
    calls = [span for span in cases.named("verl.worker.say") if inside(cases, span)]
    assert {stage: [cases.parent(call) for call in calls].count(stage) for stage in map(cases.parent, calls)} == {
        f"verl.concurrent_{stage}": 10 for stage in range(5)
    }
    moments = sorted([(call.start, 1) for call in calls] + [(call.end, -1) for call in calls])
    open_now = most = 0
    for _, change in moments:
        open_now += change
        most = max(most, open_now)
    assert most > 25  # they did run at the same time


def test_r6_an_async_generator_that_is_left_early_costs_nothing(cases):
    """R6: "Token was created in a different Context" when a generator was closed early."""
    assert cases.got["R6 items"] == [[number, cases.got["R6 stage"]] for number in range(2)]
    assert cases.got["R6 stage"] == cases.span("verl.generated").span_id
    assert cases.got["R6 after"] == "0" * 16  # nothing is left attached in the actor
    for text in ("Failed to detach context", "different Context", "_ray_trace_ctx"):
        assert text not in cases.output + cases.logs


def test_r7_methods_with_fixed_signatures_and_queues_work(cases):
    """R7: an unexpected keyword in the call of a queue's actor and of Serve."""
    assert cases.got["R7"] == [[1, 2], [1, 2], [1, 2], [1, 2], [1, 3]]
    assert cases.got["R7 queue"] == [True, "a", "b", "c", True]


def test_r9_what_a_killed_actor_did_a_second_ago_is_there(cases):
    """R9: spans were never exported, since the worker ended first. Of ours at most the last second is lost."""
    calls = [span for span in cases.named("verl.worker.registered") if inside(cases, span)]
    assert [cases.parent(call) for call in sorted(calls, key=lambda call: call.start)] == ["verl.fixed"] * 2 + [
        "verl.doomed"
    ]


def test_r13_spans_inside_tasks_are_under_one_root(cases):
    """R13: only the driver's span was there, those inside the tasks were missing."""
    assert cases.got["R13"] == list(range(8))
    inner = [span for span in cases.spans if span.name.endswith("_of_task")]
    assert len(inner) == 24
    assert {span.parent_id for span in inner} == {cases.span("verl.run").span_id}
