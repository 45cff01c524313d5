"""The HTML page of a recorded run (`report/page.py`) and its command: what was recorded, nothing more, and inert."""

import json
import math
import os
import re
import subprocess
import sys
from html.parser import HTMLParser

import pytest
from opentelemetry.sdk._logs import LoggerProvider
from opentelemetry.sdk._logs.export import SimpleLogRecordProcessor
from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor

from verl_otel.assembly import Telemetry
from verl_otel.cli import main
from verl_otel.config import Settings
from verl_otel.export.files import FileLogExporter, FileSpanExporter
from verl_otel.identity import Identity
from verl_otel.recording import reader
from verl_otel.report import page
from verl_otel.tracing.ids import DerivedIdGenerator

HOSTILE = "</script><img src=x onerror=alert(1)><b>&\"'"


class Trainer:
    def __init__(self):
        self.global_steps = 0


class Run:
    """A small run whose telemetry goes through the real exporters to files."""

    def __init__(self, run_id="run-1", attempt=1, role="trainer"):
        identity = Identity(run_id, attempt, role, project="gsm8k", experiment="ppo <1>")
        resource = identity.resource()
        tracer_provider = TracerProvider(resource=resource, id_generator=DerivedIdGenerator(), shutdown_on_exit=False)
        tracer_provider.add_span_processor(SimpleSpanProcessor(FileSpanExporter()))
        logger_provider = LoggerProvider(resource=resource, shutdown_on_exit=False)
        logger_provider.add_log_record_processor(SimpleLogRecordProcessor(FileLogExporter()))
        self.telemetry = Telemetry(
            Settings.from_environ(),
            identity,
            tracer_provider=tracer_provider,
            meter_provider=MeterProvider(shutdown_on_exit=False),
            logger_provider=logger_provider,
        )
        self.trainer = Trainer()
        self.telemetry.steps.follow(self.trainer)

    def started(self, **parameters):
        self.telemetry.run_started("gsm8k", "ppo <1>", parameters)

    def step(self, metrics, stages=("gen", "update_actor"), error=None):
        t = self.telemetry
        self.trainer.global_steps += 1
        step = t.steps.enter("step")
        for timer in stages:
            stage = t.steps.enter(timer)
            call = t.workers.enter(None, timer)
            t.workers.leave(call, error)
            t.steps.leave(stage, error)
        t.steps.leave(step, error)
        t.log(metrics, self.trainer.global_steps)
        assert t.background.drained(30)

    def finished(self, error=None):
        self.telemetry.run_finished(error)
        self.telemetry.close()


@pytest.fixture
def root(tmp_path, monkeypatch):
    monkeypatch.setenv("VERL_OTEL_FOLDER", str(tmp_path / "recordings"))
    return tmp_path / "recordings"


@pytest.fixture
def recorded(root):
    """A run of three steps."""
    run = Run()
    run.started(**{"data.train_batch_size": 8, "actor_rollout_ref.model.path": "/models/<tiny>"})
    for step in range(3):
        run.step({"critic/score/mean": step / 3, "actor/lr": 1e-6, "note": "text"})
    run.finished()
    return root / "run-1"


class Page(HTMLParser):
    """The tags and texts of a page as a browser sees them."""

    def __init__(self, text):
        super().__init__()
        self.tags, self.texts, self.scripts = [], [], []
        self._in = ""
        self.feed(text)
        self.close()

    def handle_starttag(self, tag, attrs):
        self.tags.append((tag, dict(attrs)))
        self._in = tag
        if tag == "script":
            self.scripts.append("")

    def handle_endtag(self, tag):
        self._in = ""

    def handle_data(self, text):
        if self._in == "script":
            self.scripts[-1] += text
        else:
            self.texts.append(text)


def data_of(text):
    """The data in a page, as its script reads them."""
    (data,) = re.findall(r'<script id="data" type="application/json">(.*?)</script>', text, re.DOTALL)

    def refuse(constant):
        raise AssertionError(f"{constant} is not JSON")

    return json.loads(data, parse_constant=refuse)


def test_a_recorded_run_becomes_a_page(recorded):
    text = page.render(reader.load(recorded))
    data = data_of(text)
    assert [timeline["label"] for timeline in data["timelines"]] == ["step 1", "step 2", "step 3"]
    assert [bar["name"] for bar in data["timelines"][0]["bars"]] == [
        *("verl.rollout", "verl.worker.gen"),
        *("verl.update_actor", "verl.worker.update_actor"),
    ]
    assert data["timelines"][0]["lanes"] == ["trainer", "rank 0"]
    assert [share["step"] for share in data["shares"]] == [1, 2, 3]
    assert set(data["shares"][0]["seconds"]) <= set(data["colors"]), "as in the time line"
    assert set(data["shares"][0]["seconds"]) == {"rollout", "update_actor", "(no stage)"}
    assert all(seconds >= 0 for share in data["shares"] for seconds in share["seconds"].values())
    assert data["curves"]["critic/score/mean"] == [{"attempt": 1, "x": [1, 2, 3], "y": [0.0, 1 / 3, 2 / 3], "bad": 0}]
    assert "note" not in data["curves"]


def test_the_page_says_what_run_it_was(recorded):
    found = Page(page.render(reader.load(recorded)))
    texts = " ".join(found.texts)
    for expected in ("gsm8k", "ppo <1>", "run-1", "finished", "1 to 3", "1 trainer", "3 step events", "/models/<tiny>"):
        assert expected in texts


def test_the_page_needs_no_network(recorded):
    for _, attributes in Page(page.render(reader.load(recorded))).tags:
        assert "src" not in attributes and "href" not in attributes


def test_hostile_names_stay_inert(root):
    run = Run(run_id="run-1")
    run.started(**{HOSTILE: HOSTILE})
    run.step({f"{HOSTILE}/mean": 1.0, "ok": 2.0}, stages=(HOSTILE,), error=RuntimeError(HOSTILE))
    run.finished(RuntimeError(HOSTILE))
    text = page.render(reader.load(root))
    data = data_of(text)
    assert list(data["curves"]) == [f"{HOSTILE}/mean", "ok"]
    assert HOSTILE in data["timelines"][0]["bars"][0]["error"]
    found = Page(text)
    assert len(found.scripts) == 3
    assert json.loads(found.scripts[1]) == data
    assert not {"img", "b"} & {tag for tag, _ in found.tags}
    assert any(HOSTILE in each for each in found.texts)  # the error, readable


def test_values_that_are_not_finite_are_counted_and_not_drawn(root):
    run = Run()
    for value in (1.0, math.nan, math.inf, -math.inf, 2.0):
        run.step({"actor/grad_norm": value})
    run.finished()
    text = page.render(reader.load(root))
    (curve,) = data_of(text)["curves"]["actor/grad_norm"]
    assert curve == {"attempt": 1, "x": [1, 2, 3, 4, 5], "y": [1.0, None, None, None, 2.0], "bad": 3}


def test_values_are_on_the_page_at_full_precision(root):
    run = Run()
    run.step({"a": 0.1 + 0.2, "b": 5e-324, "c": 2**53 + 1})
    run.finished()
    curves = data_of(page.render(reader.load(root)))["curves"]
    assert [curves[key][0]["y"] for key in "abc"] == [[0.1 + 0.2], [5e-324], [2**53 + 1]]


def test_each_attempt_of_a_run_has_a_curve_of_its_own(root):
    for attempt in (1, 2):
        run = Run(attempt=attempt)
        run.step({"a": float(attempt)})
        run.finished()
    data = data_of(page.render(reader.load(root)))
    assert [(curve["attempt"], curve["y"]) for curve in data["curves"]["a"]] == [(1, [1.0]), (2, [2.0])]
    assert [timeline["label"] for timeline in data["timelines"]] == ["step 1", "step 1 (attempt 2)"]


def test_a_run_that_failed_shows_its_error(root):
    run = Run()
    run.step({"a": 1.0}, error=RuntimeError("CUDA out of memory"))
    run.finished(RuntimeError("CUDA out of memory"))
    texts = " ".join(Page(page.render(reader.load(root))).texts)
    assert "failed" in texts
    assert "verl.worker.update_actor (rank 0): RuntimeError: CUDA out of memory" in texts


def test_a_run_that_was_killed_is_not_called_finished(root):
    Run().step({"a": 1.0})
    assert "not finished" in " ".join(Page(page.render(reader.load(root))).texts)


def test_a_run_without_steps_is_a_page(root):
    run = Run()
    run.started(a=1)
    run.finished()
    data = data_of(page.render(reader.load(root)))
    assert (data["timelines"], data["shares"], data["curves"]) == ([], [], {})


def test_trajectories_and_validation_have_lanes(root):
    run = Run()
    t = run.telemetry
    validation = t.steps.enter_validation()
    t.steps.leave(validation)
    run.step({"a": 1.0}, stages=("gen",))
    for sample in range(2):
        trajectory = t.trajectories.enter(1, sample, 0, False)
        t.trajectories.leave(t.trajectories.enter_part("generate_sequences"))
        t.trajectories.leave(trajectory)
    run.finished()
    data = data_of(page.render(reader.load(root)))
    assert [timeline["label"] for timeline in data["timelines"]] == ["validation before training", "step 1"]
    assert data["timelines"][1]["lanes"] == ["trainer", "rank 0", "trajectory 1", "trajectory 2"]
    bars = [bar["name"] for bar in data["timelines"][1]["bars"] if bar["lane"] == "trajectory 1"]
    assert bars == ["verl.generate"], "not the turn, which would cover it"


def test_what_is_inside_a_call_is_in_its_lane_and_does_not_cover_it(tmp_path):
    def span(name, parent="", **attributes):
        return reader.Span("t", name, parent, name, 0, 10, {"verl.step.number": 1, **attributes}, {}, None)

    recording = reader.Recording(tmp_path)
    recording.spans = [
        span("verl.step"),
        span("verl.rollout", "verl.step"),
        span("verl.worker.generate", "verl.rollout", rank="1"),
        span("verl.grade", "verl.worker.generate"),
        span("verl.trajectory", "verl.rollout"),
        span("verl.generate", "verl.trajectory"),
        span("verl.server.generate", "verl.generate"),
        span("verl.lost", "verl.circle"),
        span("verl.circle", "verl.lost"),
    ]
    (timeline,) = data_of(page.render(recording))["timelines"]
    assert {bar["name"]: (bar["lane"], bar["inner"]) for bar in timeline["bars"]} == {
        "verl.rollout": ("trainer", False),
        "verl.worker.generate": ("rank 1", False),
        "verl.grade": ("rank 1", True),
        "verl.generate": ("trajectory 1", False),
        "verl.server.generate": ("trajectory 1", True),
        "verl.lost": ("trainer", True),
        "verl.circle": ("trainer", True),
    }


def test_the_time_lines_of_a_long_run_are_the_first_the_last_and_the_slowest(root, monkeypatch):
    monkeypatch.setattr(page, "MAX_TIMELINES", 6)
    run = Run()
    for _ in range(10):
        run.step({"a": 1.0}, stages=())
    run.finished()
    data = data_of(page.render(reader.load(root)))
    labels = [timeline["label"] for timeline in data["timelines"]]
    assert len(labels) <= 6
    assert labels[:2] == ["step 1", "step 2"] and labels[-2:] == ["step 9", "step 10"]
    assert data["omitted"] == 4
    assert len(data["shares"]) == 10
    assert len(data["curves"]["a"][0]["x"]) == 10


def test_a_missing_folder_says_what_to_give(tmp_path):
    with pytest.raises(reader.NoRecording, match="is not a folder: give the one"):
        reader.load(tmp_path / "missing")


def test_a_folder_without_a_recording_says_what_it_needs(tmp_path):
    (tmp_path / "trainer.traces.jsonl").write_text("not json\n")
    with pytest.raises(reader.NoRecording, match="no recorded spans or events"):
        reader.load(tmp_path)


def test_the_command_writes_the_page_and_says_where(recorded, capsys):
    assert main(["report", str(recorded)]) == 0
    assert capsys.readouterr().out.strip() == str(recorded / "report.html")
    assert data_of((recorded / "report.html").read_text())["curves"]


def test_the_command_writes_where_it_is_told(recorded, tmp_path, capsys):
    assert main(["report", str(recorded), "-o", str(tmp_path / "page.html")]) == 0
    assert (tmp_path / "page.html").is_file()
    assert not (recorded / "report.html").exists()


def test_without_a_folder_it_is_of_the_run_that_was_recorded_last(recorded, monkeypatch, capsys):
    older = recorded.parent / "z-older" / "trainer-node-1.traces.jsonl"
    older.parent.mkdir()
    older.write_text("")
    os.utime(older, (1, 1))
    without_steps = recorded.parent / "z-newer" / "launcher-node-2.metrics.jsonl"  # of a script, say
    without_steps.parent.mkdir()
    without_steps.write_text("")
    monkeypatch.setenv("VERL_OTEL_FOLDER", str(recorded.parent))
    assert main(["report"]) == 0
    assert capsys.readouterr().out.strip() == str(recorded / "report.html")
    monkeypatch.setenv("VERL_OTEL_FOLDER", str(recorded / "none"))
    assert main(["report"]) == 1
    assert f"no run is recorded in {recorded / 'none'}" in capsys.readouterr().err


def test_runs_are_not_mixed_on_one_page(root, capsys):
    for run in ("run-1", "run-2"):
        Run(run).finished()
    assert main(["report", str(root)]) == 1
    assert "has several runs, give the folder of one: run-1, run-2" in capsys.readouterr().err
    assert not (root / "report.html").exists()


def test_a_page_that_cannot_be_written_is_said(recorded, tmp_path, capsys):
    assert main(["report", str(recorded), "-o", str(tmp_path / "none" / "page.html")]) == 1
    out, err = capsys.readouterr()
    assert (out, "Traceback" in err) == ("", False)
    assert err.startswith(f"verl-otel: {tmp_path}/none/page.html cannot be written (No such file or directory)")


def test_making_the_page_again_gives_the_same_page(recorded):
    assert main(["report", str(recorded)]) == 0
    first = (recorded / "report.html").read_text()
    assert main(["report", str(recorded)]) == 0
    assert (recorded / "report.html").read_text() == first


@pytest.mark.parametrize("make", [lambda path: None, lambda path: path.mkdir(), lambda path: path.write_text("a file")])
def test_the_command_fails_with_a_message_where_nothing_is_recorded(tmp_path, capsys, make):
    make(tmp_path / "run")
    assert main(["report", str(tmp_path / "run")]) == 1
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("verl-otel: ") and str(tmp_path / "run") in err


@pytest.mark.parametrize(
    "arguments",
    [[], ["report", "a", "--unknown"], ["unknown"], *([of, "--port", "99999"] for of in ("bridge", "alert-relay"))],
)
def test_wrong_arguments_are_a_usage_error(arguments, capsys):
    with pytest.raises(SystemExit) as stop:
        main(arguments)
    assert stop.value.code == 2
    assert "usage: verl-otel" in capsys.readouterr().err


def test_a_reader_who_has_seen_enough_ends_a_command_quietly():
    """`verl-otel alert-rules | head -1`"""
    with subprocess.Popen(
        [sys.executable, "-m", "verl_otel.cli", "alert-rules"], stdout=subprocess.PIPE, stderr=subprocess.PIPE
    ) as process:
        process.stdout.close()
        assert (process.stderr.read(), process.wait(60)) == (b"", 141)


def test_the_command_says_its_version(capsys):
    from verl_otel import __version__

    with pytest.raises(SystemExit) as stop:
        main(["--version"])
    assert stop.value.code == 0
    assert capsys.readouterr().out.strip() == f"verl-otel {__version__}"


@pytest.mark.parametrize("uri", ["sqlite:///x.db", "postgresql://user:Zq7planted@host/mlflow"])
def test_a_bridge_without_a_server_to_write_to_is_refused(capsys, uri):
    assert main(["bridge", "--mlflow", uri]) == 2
    said = capsys.readouterr().err
    assert "needs an MLflow server" in said
    assert "Zq7planted" not in said


def test_what_was_not_finite_is_on_the_page_with_its_steps(root):
    run = Run()
    run.started()
    for value in (1.0, math.nan, math.inf, 2.0):
        run.step({"actor/grad_norm": value})
    run.finished()
    found = Page(page.render(reader.load(root / "run-1")))
    assert "actor/grad_norm, reduced over the ranks: step 2, 3" in found.texts


def test_what_is_recorded_and_spooled_is_there_once(recorded):
    once = reader.load(recorded)
    (recorded / "spool").mkdir()
    for path in recorded.glob("*.jsonl"):
        (recorded / "spool" / path.name).write_bytes(path.read_bytes())
    twice = reader.load(recorded)
    assert (len(twice.spans), len(twice.events)) == (len(once.spans), len(once.events))
