"""What goes wrong for people when processes fork, spawn, hang, die and come back (`../CASES.md`)."""

import json
import os
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import bed
import pytest
import yaml
from otlp_server import Server
from test_public_cases import recorded
from waiting import until

from verl_otel.background import Background
from verl_otel.recording import reader
from verl_otel.tracing import ids
from verl_otel.tracing.trajectories import MAX_SPANS

ROOT = Path(__file__).parents[2]
NOBODY = "http://127.0.0.1:1"

BEGIN = """
import os, sys, time
from verl_otel import telemetry
from verl_otel.semconv import metrics as names
telemetry.enable()
t = telemetry.current()

class Trainer:
    global_steps = 1

trainer = Trainer()
"""


def start(script, folder, **environ):
    """A process that records below `folder`."""
    environ = {"VERL_OTEL_FOLDER": str(folder), "VERL_OTEL_RUN_ID": "run-1", **environ}
    return subprocess.Popen(
        [sys.executable, "-c", BEGIN + textwrap.dedent(script)],
        env=bed.clean_environment(**environ),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def run(script, folder, **environ):
    """Standard output and error of a process that ends well."""
    process = start(script, folder, **environ)
    out, err = process.communicate(timeout=60)
    assert process.returncode == 0, err
    return out, err


# ---- V --------------------------------------------------------------------------------------------------------------


def test_v12_steps_that_are_done_again_after_a_restart_are_told_apart(new_memory):
    """V12: after a restart the steps overlapped, and the tracker dropped the earlier ones."""

    class Trainer:
        global_steps = 0

    traces, events = [], []
    for attempt, numbers in ((1, range(1, 8)), (2, range(5, 10))):  # a crash in step 7; the checkpoint is of step 4
        memory, trainer = new_memory(), Trainer()
        process = memory.process("trainer", attempt=attempt)
        process.steps.follow(trainer)
        for number in numbers:
            trainer.global_steps = number
            step = process.steps.enter("step")
            process.steps.leave(step)
            process.log({"training/global_step": number}, number)
        for span in memory.spans:
            traces.append((span.attributes["verl.run.attempt"], span.attributes["verl.step.number"]))
            assert span.attributes["verl.run.id"] == "run-1"
        events += [
            (event.attributes["verl.run.attempt"], event.attributes["verl.step.number"])
            for event in memory.events
            if event.event_name == "verl.step"
        ]
        assert list(memory.values("verl.training.step").values()) == [numbers[-1]]
        trace_ids = {span.context.trace_id for span in memory.spans}
        assert len(trace_ids) == len(numbers)
        assert trace_ids == {ids.trace_id("run-1", attempt, number) for number in numbers}
    wanted = [(1, number) for number in range(1, 8)] + [(2, number) for number in range(5, 10)]
    assert traces == events == wanted
    assert len({ids.trace_id("run-1", *which) for which in wanted}) == 12


# ---- O --------------------------------------------------------------------------------------------------------------


def test_o6_the_exit_is_not_blocked_while_the_collector_is_away(tmp_path):
    """O6: at exit the SDK waited for half a minute for a Collector that was away."""
    out, _ = run(
        """
        for _ in range(2000):
            t.tracer.start_span("one").end()
        print(time.time(), flush=True)
        """,
        tmp_path,
        OTEL_EXPORTER_OTLP_ENDPOINT=NOBODY,
        VERL_OTEL_EXIT_TIMEOUT="2",
    )
    assert time.time() - float(out) < 2 + 3
    assert len(reader.load(tmp_path / "run-1").spans) == 2000  # kept, to be replayed


DETECTOR = """
import os, subprocess, sys
from opentelemetry.sdk.resources import Resource, ResourceDetector

class Detector(ResourceDetector):
    def detect(self):
        depth = int(os.environ.get("DEPTH", "0"))
        print("detector", depth, flush=True)
        if depth < 3:  # enough to see that it does not end
            child = "import verl, verl_otel.hooks as h; from verl_otel.telemetry import peek; print(h.status(), peek())"
            subprocess.run([sys.executable, "-c", child], env={**os.environ, "DEPTH": str(depth + 1)}, check=True)
        return Resource.get_empty()
"""


def test_o10_a_child_that_is_spawned_while_we_are_set_up_is_instrumented_once_and_never_recursively(tmp_path):
    """O10: auto-instrumentation did not reach spawned children, or ran in the children of its own start for ever."""
    from opentelemetry.instrumentation import auto_instrumentation

    site = tmp_path / "site"
    for path, text in {
        "detecting.py": DETECTOR,
        "verl/__init__.py": "",  # all that is needed of verl
        "detecting-1.dist-info/METADATA": "Metadata-Version: 2.1\nName: detecting\nVersion: 1\n",
        "detecting-1.dist-info/entry_points.txt": "[opentelemetry_resource_detector]\ndetecting = detecting:Detector\n",
        "default_worker.py": "import verl; from verl_otel.telemetry import peek; print(bool(peek()))",
    }.items():
        (site / path).parent.mkdir(parents=True, exist_ok=True)
        (site / path).write_text(text)
    environ = {
        "PYTHONPATH": os.pathsep.join([os.path.dirname(auto_instrumentation.__file__), str(site)]),
        "OTEL_EXPERIMENTAL_RESOURCE_DETECTORS": "detecting",
        "OTEL_PYTHON_DISTRO": "verl_otel",
        "OTEL_PYTHON_CONFIGURATOR": "verl_otel",
        "VERL_OTEL_ACTIVE": "1",
        "VERL_OTEL_FOLDER": str(tmp_path / "recorded"),
    }
    result = subprocess.run(
        [sys.executable, site / "default_worker.py"],
        env=bed.clean_environment(**environ),
        capture_output=True,
        text=True,
        timeout=60,
    )
    *before, worker = result.stdout.splitlines()
    # The SDK asks its detectors when it is imported, and when we ask for the resource. The children are instrumented,
    # but have nothing to tell, so that no detector runs in them.
    assert before == ["detector 0", "{'process on verl': 'installed'} None"] * (len(before) // 2), result.stderr
    assert before and worker == "True"


def test_o12_an_exporter_whose_package_is_not_there_is_said_at_the_start(tmp_path):
    """O12: an ImportError at the end of each span was swallowed, and spans were dropped in silence."""
    process = subprocess.run(
        [
            sys.executable,
            "-c",
            "import sys; sys.modules['opentelemetry.exporter.otlp.proto.common'] = None\n"
            "from verl_otel import telemetry\ntelemetry.enable()\nprint(telemetry.current(), telemetry.current())",
        ],
        env=bed.clean_environment(OTEL_EXPORTER_OTLP_ENDPOINT=NOBODY, VERL_OTEL_FOLDER=str(tmp_path)),
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert (process.returncode, process.stdout.split()) == (0, ["None", "None"])  # the run goes on
    (warning,) = [line for line in process.stderr.splitlines() if "verl-otel:" in line]
    assert "opentelemetry.exporter.otlp.proto.common" in warning


FORK = """
t.steps.follow(trainer)
labels = {"rank": "all", "stage": "rollout", "model_type": "rollout"}
t.instruments.add(names.GENERATED_TOKENS, labels, 7)
step, stage = t.steps.enter("step"), t.steps.enter("gen")
child = os.fork()
if child == 0:
    scope = t.steps.enter("adv")
    t.steps.leave(scope)
    t.log({"in_child": 1.0}, 1)
    time.sleep(2)
    os._exit(0)
t.steps.leave(stage)
t.steps.leave(step)
t.log({"in_parent": 1.0}, 1)
os.waitpid(child, 0)
"""


def test_o14_a_forked_child_exports_its_own_by_itself_and_nothing_twice(tmp_path):
    """O14: gRPC hung after a fork; the SDK's readers export the parent's sums in each child again."""
    with Server() as server:
        run(FORK, tmp_path, OTEL_EXPORTER_OTLP_ENDPOINT=server.url, OTEL_METRIC_EXPORT_INTERVAL="200")
        assert sorted(server.names()) == ["verl.advantage", "verl.rollout", "verl.step"]
        sent = b"".join(content for of, content in server.taken if of == "logs")
        assert (sent.count(b"in_child"), sent.count(b"in_parent")) == (1, 1)
        with_sum = [content for of, content in server.taken if of == "metrics" and b"generated_tokens" in content]
        assert len(with_sum) > 3
        assert len({instance(content) for content in with_sum}) == 1


def test_o14_as_much_is_recorded_in_files(tmp_path):
    run(FORK, tmp_path, OTEL_METRIC_EXPORT_INTERVAL="200")
    spans = {span.name: span for span in reader.load(tmp_path / "run-1").spans}
    assert sorted(spans) == ["verl.advantage", "verl.rollout", "verl.step"]
    assert spans["verl.advantage"].parent_id == spans["verl.rollout"].span_id
    sums = {
        resource["service.instance.id"]
        for resource, of_scope in recorded(tmp_path, "Metrics")
        for metric in of_scope["metrics"]
        if metric["name"] == "verl.rollout.generated_tokens"
    }
    assert len(sums) == 1


def instance(content):
    """`service.instance.id` of a request of metrics."""
    from opentelemetry.proto.collector.metrics.v1.metrics_service_pb2 import ExportMetricsServiceRequest

    (group,) = ExportMetricsServiceRequest.FromString(content).resource_metrics
    return {a.key: a.value.string_value for a in group.resource.attributes}["service.instance.id"]


def test_o14_what_the_parent_had_handed_over_is_not_done_by_the_child_too(monkeypatch):
    monkeypatch.setattr("verl_otel.background.INTERVAL", 0.3)
    background = Background(lambda reason: None)
    time.sleep(0.1)  # it sleeps
    read, write = os.pipe()
    background.defer(os.write, write, b"parent ")
    child = os.fork()
    if child == 0:
        background.defer(os.write, write, b"child ")
        os._exit(0 if background.drained(10) else 1)
    assert os.waitpid(child, 0)[1] == 0
    assert background.drained(10)
    os.close(write)
    with os.fdopen(read) as file:
        assert sorted(file.read().split()) == ["child", "parent"]


# ---- C --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["local", "agent", "gateway", "variants/prometheus-scrape"])
def test_c8_a_collector_has_a_limit_of_memory_before_everything_else(name):
    """C8: its memory grew with series that had long ended."""
    config = yaml.safe_load((ROOT / f"collector/{name}.yaml").read_text())
    pipelines = config["service"]["pipelines"]
    assert pipelines
    assert {settings["processors"][0] for settings in pipelines.values()} == {"memory_limiter"}
    if "/" not in name:
        assert config["processors"]["memory_limiter"]["limit_mib"] > 0


# ---- J and M --------------------------------------------------------------------------------------------------------

STAGES = 15
RANKS = 256
AGENT_LOOP_WORKERS = 8
SAMPLES = 4096
TRAJECTORIES = 4  # VERL_OTEL_TRAJECTORIES


def test_j1_the_spans_of_a_steps_trace_are_bounded_and_what_is_left_out_is_counted(memory, clock):
    """J1: a trace of tens of thousands of spans cannot be looked at.

    The bound: 1 + stages + ranks x calls + agent-loop workers x trajectories x (1 + MAX_SPANS + scores), where the
    trajectories are VERL_OTEL_TRAJECTORIES, the slowest, and MAX_FAILED if so many fail.
    """

    class Rank:
        rank = 0

    class Trainer:
        global_steps = 3

    trainer, followed = memory.process("trainer"), Trainer()
    trainer.steps.follow(followed)
    ranks = memory.process("worker").workers
    step = trainer.steps.enter("step")
    for number in range(STAGES):
        stage = trainer.steps.enter("gen" if number == 0 else f"stage_{number}")
        for rank in range(RANKS):
            Rank.rank = rank
            ranks.leave(ranks.enter(Rank(), "work"))
        trainer.steps.leave(stage)
    for worker in range(AGENT_LOOP_WORKERS):
        t = memory.process("agent_loop", worker_index=str(worker)).trajectories
        for sample in range(SAMPLES // AGENT_LOOP_WORKERS):
            trajectory = t.enter(3, sample, 0, False)
            for _ in range(MAX_SPANS if sample == 0 else 1):
                t.leave(t.enter_part("generate_sequences"))
                t.leave(t.enter_tool("search"))
            clock.now += 1 if sample else 2
            t.leave(trajectory)
        t.release()
    trainer.steps.leave(step)
    spans = memory.spans
    assert {span.context.trace_id for span in spans} == {ids.trace_id("run-1", 1, 3)}
    # The first of each worker has too many spans and is the slowest.
    kept = AGENT_LOOP_WORKERS * TRAJECTORIES
    parts = AGENT_LOOP_WORKERS * (MAX_SPANS + 3 * (TRAJECTORIES - 1))
    assert len(spans) == 1 + STAGES + RANKS * STAGES + kept + parts
    assert memory.values("verl.otel.dropped", "verl.otel.reason") == {
        ("trajectory_cap",): SAMPLES - kept,
        ("trajectory_span_cap",): AGENT_LOOP_WORKERS * 2 * MAX_SPANS,
    }


HANG = """
t.steps.follow(trainer)
step = t.steps.enter("step")
t.steps.leave(t.steps.enter("gen"))
t.steps.leave(step)
t.log({"a": 1.0}, 1)
trainer.global_steps = 2
step = t.steps.enter("step")
t.steps.leave(t.steps.enter("gen"))
stage = t.steps.enter("update_actor")
time.sleep(60)
"""


class Hanging:
    """A driver that hangs in the second step's update, and is killed."""

    def __init__(self, folder):
        self.folder = folder
        process = start(HANG, folder, OTEL_METRIC_EXPORT_INTERVAL="200")
        try:
            until(lambda: self.active() >= {"step", "update_actor"} and len(self.spans()) == 3)
            self.while_it_hung = self.active(), [span.name for span in self.spans()]
        finally:
            process.send_signal(signal.SIGKILL)
            process.communicate()

    def active(self):
        """Timers that the last export shows as active."""
        found = set()
        for file in self.folder.rglob("*.metrics.jsonl"):
            for line in file.read_text().split("\n")[:-1][-1:]:  # whole lines
                for of_scope in json.loads(line)["resourceMetrics"][0]["scopeMetrics"]:
                    for metric in of_scope["metrics"]:
                        if metric["name"] == "verl.stage.active":
                            for point in (p for p in metric["gauge"]["dataPoints"] if "asDouble" in p):
                                labels = {a["key"]: a["value"].get("stringValue") for a in point["attributes"]}
                                found.add(labels["verl.timer"])
        return found

    def spans(self):
        return reader.load(self.folder).spans if any(self.folder.rglob("*.traces.jsonl")) else []


@pytest.fixture(scope="module")
def hanging(tmp_path_factory):
    return Hanging(tmp_path_factory.mktemp("hanging"))


def test_j2_a_stage_that_hangs_is_visible_before_it_ends(hanging):
    """J2, V18: spans are invisible until they end, and a run that hangs says nothing for hours."""
    active, names = hanging.while_it_hung
    assert active == {"step", "update_actor"}
    assert sorted(names) == ["verl.rollout", "verl.rollout", "verl.step"]  # the update has no span yet


def test_m5_of_a_killed_driver_the_steps_that_had_ended_are_whole_and_the_last_one_has_its_ended_stages(hanging):
    """M5: a trace whose root never ends stays "In progress"; only that of the step under way does."""
    spans = hanging.spans()
    by_id = {span.span_id: span for span in spans}
    (step,) = [span for span in spans if span.name == "verl.step"]
    first, second = sorted((span for span in spans if span.name == "verl.rollout"), key=lambda span: span.start)
    assert by_id[first.parent_id] is step
    assert second.parent_id == f"{ids.span_id('run-1', 1, 2, 'step'):016x}"  # by which the step is known all the same
    assert second.trace_id == f"{ids.trace_id('run-1', 1, 2):032x}"
    assert second.trace_id != f"{ids.trace_id('run-1', 2, 2):032x}"  # that of the step when the run goes on
