"""`verl-otel replay`: recordings and spools are sent, each record once, and what is in the way is said."""

import argparse
import fcntl
import json
import os
import shutil
import signal as signals
import stat
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from otlp_server import Server, points, records, spans
from waiting import until

from verl_otel.cli import replay as cli
from verl_otel.export import otlp_json
from verl_otel.export.files import FileSpanExporter
from verl_otel.export.spool import Spool
from verl_otel.recording import replay
from verl_otel.recording.replay import CannotReplay

SECRET = "s3cr3t-7731"


@pytest.fixture
def folder(tmp_path):
    """A run of 20 spans, 3 points and 2 events in two spools."""
    folder = tmp_path / "run-1"
    for process, first in (("a", 0), ("b", 10)):
        spool = Spool(str(folder / "spool"), process)
        for i in range(first, first + 10):
            spool.write("traces", spans(str(i)))
        spool.close()
    spool = Spool(str(folder / "spool"), "c")
    spool.write("metrics", points(3))
    spool.write("logs", records(2))
    spool.close()
    return folder


@pytest.fixture(autouse=True)
def quickly(monkeypatch):
    monkeypatch.setattr(replay, "PAUSE", 0.01)


def in_order(server):
    return sorted(server.names(), key=int)


ALL = [str(i) for i in range(20)]


def run(folder, *arguments):
    parser = argparse.ArgumentParser()
    cli.add_to(parser.add_subparsers())
    options = parser.parse_args(["replay", str(folder), *arguments])
    return options.run(options)


def test_every_record_is_sent_once(folder, server, capsys):
    assert run(folder, "--endpoint", server.url) == 0
    assert in_order(server) == ALL
    assert (server.items("metrics"), server.items("logs")) == (3, 2)
    assert "sent 25 items in 22 requests; 0 requests were sent before" in capsys.readouterr().out
    assert run(folder, "--endpoint", server.url + "/") == 0
    assert run(folder / "spool", "--endpoint", server.url) == 0  # the same, given otherwise
    assert run(folder.parent, "--endpoint", server.url) == 0
    assert len(server.taken) == 22
    assert "sent 0 items in 0 requests; 22 requests were sent before" in capsys.readouterr().out


def test_recordings_are_sent_too(tmp_path, server, monkeypatch):
    monkeypatch.setenv("VERL_OTEL_FOLDER", str(tmp_path))
    provider = TracerProvider(resource=Resource({"verl.run.id": "run-1"}), shutdown_on_exit=False)
    provider.add_span_processor(SimpleSpanProcessor(FileSpanExporter()))
    for i in range(3):
        provider.get_tracer("t").start_span(str(i)).end()
    assert run(tmp_path / "run-1", "--endpoint", server.url) == 0
    assert in_order(server) == ["0", "1", "2"]
    provider.get_tracer("t").start_span("3").end()  # the process goes on
    assert run(tmp_path / "run-1", "--endpoint", server.url) == 0
    assert in_order(server) == ["0", "1", "2", "3"]
    provider.shutdown()


@pytest.fixture
def recorded_and_spooled(folder):
    """The same run, which has recorded all besides (`otlp,verl_otel_file`): of its spans 0 to 29 the first 20 were
    spooled."""
    with (folder / "a-host-1.traces.copy.jsonl").open("wb") as file:
        file.writelines(otlp_json.to_line(otlp_json.from_bytes("traces", spans(str(i)))) for i in range(30))
    return folder


def test_of_a_run_that_has_sent_its_data_itself_only_the_spool_is_sent(recorded_and_spooled, server, capsys):
    assert run(recorded_and_spooled, "--endpoint", server.url) == 0
    assert in_order(server) == ALL
    out = capsys.readouterr().out
    assert out.startswith("sent 25 items in 22 requests; 0 requests were sent before\n")
    assert "1 files with copies" in out and "--copies" in out
    assert run(recorded_and_spooled, "--endpoint", server.url) == 0  # again
    assert run(recorded_and_spooled.parent, "--endpoint", server.url) == 0  # all runs
    assert run(recorded_and_spooled / "spool", "--endpoint", server.url) == 0
    assert in_order(server) == ALL
    assert "--copies" not in capsys.readouterr().out.splitlines()[-1]  # of the spool nothing is left out


def test_copies_beside_an_empty_spool_are_left_out_too(recorded_and_spooled, server, capsys):
    for path in (recorded_and_spooled / "spool").iterdir():
        path.unlink()
    assert run(recorded_and_spooled, "--endpoint", server.url) == 0
    assert server.taken == []
    assert "sent 0 items" in (out := capsys.readouterr().out) and "--copies" in out


def test_copies_are_sent_if_asked_for(recorded_and_spooled, server, capsys):
    assert run(recorded_and_spooled, "--endpoint", server.url, "--copies") == 0
    assert sorted(set(server.names()), key=int) == [str(i) for i in range(30)]
    assert "left out" not in capsys.readouterr().out


@pytest.mark.parametrize("run_id", ["run-1", "run-2"])
def test_what_was_only_recorded_is_sent_also_beside_a_spool_and_copies(recorded_and_spooled, server, run_id):
    """Of the same run an attempt that was offline, or a signal with `verl_otel_file` alone; or another run."""
    other = recorded_and_spooled.parent / run_id
    other.mkdir(exist_ok=True)
    (other / "b-host-1.traces.jsonl").write_bytes(otlp_json.to_line(otlp_json.from_bytes("traces", spans("99"))))
    assert run(recorded_and_spooled.parent, "--endpoint", server.url) == 0
    assert in_order(server) == [*ALL, "99"]


def test_what_a_process_has_sent_itself_is_not_sent_again(tmp_path, server):
    spool = Spool(str(tmp_path / "run" / "spool"), "a")
    kept = [spool.write("traces", spans(str(i))) for i in range(4)]
    spool.done(kept[0])
    spool.done(kept[2])
    done = replay.replay(tmp_path / "run", server.url)
    assert in_order(server) == ["1", "3"]
    assert (done.items, done.unreadable) == (2, 0)
    assert replay.replay(tmp_path / "run", server.url).before == 2


@pytest.mark.parametrize("variables", [
    {"OTEL_EXPORTER_OTLP_ENDPOINT": "{url}"},
    {f"OTEL_EXPORTER_OTLP_{of.upper()}_ENDPOINT": f"{{url}}/v1/{of}" for of in ("traces", "metrics", "logs")},
])  # fmt: skip
def test_the_endpoint_may_be_of_the_environment(variables, folder, server, monkeypatch):
    for name, value in variables.items():
        monkeypatch.setenv(name, value.format(url=server.url))
    assert run(folder) == 0
    assert (len(server.names()), server.items("metrics"), server.items("logs")) == (20, 3, 2)


def test_without_an_endpoint_for_a_signal_it_says_so(folder, server, monkeypatch, capsys):
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", f"{server.url}/v1/traces")
    assert run(folder) == 1
    assert "there are" in capsys.readouterr().err
    assert run(folder, "--endpoint", server.url) == 0
    assert (in_order(server), server.items("metrics"), server.items("logs")) == (ALL, 3, 2)


@pytest.mark.parametrize(
    ("case", "words"),
    [
        ("no folder", "is not a folder"),
        ("a file", "is not a folder"),
        ("nothing there", "nothing is recorded under"),
        ("no endpoint", "say where to send it"),
        ("no url", "not the URL of an OTLP endpoint"),
        ("nobody there", "does not take it (ConnectionError"),
        ("it fails", "does not take it (HTTP 503)"),
        ("it wants a password", "HTTP 401: check its URL, headers and certificates"),
        ("not TLS", "does not take it (SSLError"),
    ],
)
def test_what_is_in_the_way_is_said(case, words, folder, server, tmp_path, capsys):
    (tmp_path / "empty").mkdir()
    (tmp_path / "file").write_text("x")
    where = {"no folder": "nowhere", "a file": "file", "nothing there": "empty"}.get(case, "run-1")
    server.fault, server.retry_after = {"it fails": "503", "it wants a password": "401"}.get(case, ""), "0"
    url = {
        "no url": SECRET,
        "nobody there": f"http://user:{SECRET}@127.0.0.1:1/{SECRET}",
        "not TLS": f"https://127.0.0.1:{server.port}",
    }.get(case, server.url)
    start = time.monotonic()
    assert run(tmp_path / where, *(() if case == "no endpoint" else ("--endpoint", url))) == 1
    assert time.monotonic() - start < 5
    error = capsys.readouterr().err
    assert words in error
    assert SECRET not in error and "Traceback" not in error
    assert server.taken == []
    server.fault = ""
    if where == "run-1":  # nothing was taken as sent
        assert run(folder, "--endpoint", server.url) == 0
        assert in_order(server) == ALL


def test_it_goes_on_where_the_endpoint_stopped(folder, server, capsys):
    server.broken = lambda *_: len(server.taken) >= 7
    assert run(folder, "--endpoint", server.url) == 1
    assert "7 requests were sent" in capsys.readouterr().err
    server.broken = lambda *_: False
    assert run(folder, "--endpoint", server.url) == 0
    assert in_order(server) == ALL
    assert len(server.taken) == 22


def test_an_endpoint_that_is_overloaded_for_a_moment_is_tried_again(folder, server):
    server.retry_after = "0.01"
    server.fault = "429"
    threading.Timer(0.05, lambda: setattr(server, "fault", "")).start()
    assert run(folder, "--endpoint", server.url) == 0
    assert in_order(server) == ALL


def test_what_is_refused_is_counted_and_not_sent_again(folder, server, capsys):
    server.faults = {"metrics": "400"}
    assert run(folder, "--endpoint", server.url) == 1
    assert "sent 22 items in 21 requests; 0 requests were sent before, 3 items were refused" in capsys.readouterr().out
    server.faults = {}
    assert run(folder, "--endpoint", server.url) == 0
    assert server.items("metrics") == 0


def command(folder, url):
    return [sys.executable, "-c", "from verl_otel.cli import main; raise SystemExit(main())",
            "replay", str(folder), "--endpoint", url]  # fmt: skip


@pytest.mark.parametrize("signal", [signals.SIGINT, signals.SIGTERM, signals.SIGKILL])
def test_a_command_that_is_stopped_goes_on_later(signal, folder, server):
    server.fault, server.delay = "is slow", 0.05
    process = subprocess.Popen(command(folder, server.url), stderr=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    until(lambda: len(server.taken) >= 5)
    process.send_signal(signal)
    _, error = process.communicate(timeout=30)
    assert len(server.taken) < 20
    if signal is not signals.SIGKILL:
        assert process.returncode == 130
        assert "stopped; start the command again to go on" in error
    until(lambda: len(server.names()) + server.items("metrics") + server.items("logs") == sum(
        otlp_json.items_of_bytes(of, content) for of, content in server.taken))  # fmt: skip
    time.sleep(0.2)  # what was under way when it was killed
    server.fault = ""
    assert run(folder, "--endpoint", server.url) == 0
    assert sorted(set(server.names()), key=int) == ALL
    assert len(server.taken) <= 22 + (signal is signals.SIGKILL)  # the one whose answer it did not live to see


def test_two_commands_do_not_send_the_same(folder, server, capsys):
    descriptor = os.open(folder / "spool" / replay.LOCK, os.O_RDWR | os.O_CREAT, 0o600)
    fcntl.flock(descriptor, fcntl.LOCK_EX)
    assert run(folder, "--endpoint", server.url) == 1
    assert "another command replays" in capsys.readouterr().err
    os.close(descriptor)
    assert run(folder, "--endpoint", server.url) == 0


def test_where_it_cannot_note_how_far_it_came_nothing_is_sent(folder, server, monkeypatch, capsys):
    def read_only(*_):
        raise OSError(30, "Read-only file system")

    monkeypatch.setattr(Path, "write_text", read_only)
    assert run(folder, "--endpoint", server.url) == 1
    assert "copy the folder to where you may write" in capsys.readouterr().err
    assert server.tried == {}


def test_a_note_that_cannot_be_read_is_none(folder, server):
    (folder / "spool" / replay.STATE).write_text("{torn")
    assert run(folder, "--endpoint", server.url) == 0
    assert in_order(server) == ALL
    assert set(json.loads((folder / "spool" / replay.STATE).read_text())) == {
        path.name for path in folder.rglob("*.jsonl")
    }
    assert stat.S_IMODE((folder / "spool" / replay.STATE).stat().st_mode) == 0o600


def test_lines_that_cannot_be_read_are_counted_and_the_rest_is_sent(folder, server, capsys):
    path = sorted(folder.rglob("*.traces.*.jsonl"))[0]
    path.write_bytes(b"\0foreign\n\n" + path.read_bytes() + b'{"resourceSpans":[{"torn')
    assert run(folder, "--endpoint", server.url) == 0
    assert in_order(server) == ALL
    assert "2 lines cannot be read" in capsys.readouterr().out


def test_a_recorded_request_that_is_too_large_is_sent_in_parts(tmp_path, server, monkeypatch):
    monkeypatch.setattr(replay, "MAX_REQUEST", 2000)
    spool = Spool(str(tmp_path / "run" / "spool"), "a")
    spool.write("traces", spans(*map(str, range(100))))
    done = replay.replay(tmp_path / "run", server.url)
    assert done.items == 100 and done.requests > 2
    assert max(len(content) for _, content in server.taken) <= 2000
    assert server.names() == [str(i) for i in range(100)]


def test_progress_is_shown_on_a_terminal_only(folder, server, monkeypatch, capsys):
    assert run(folder, "--endpoint", server.url) == 0
    assert capsys.readouterr().err == ""
    shutil.rmtree(folder / "spool", ignore_errors=True)
    spool = Spool(str(folder / "spool"), "a")
    for i in range(5):
        spool.write("traces", spans(str(i)))
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True, raising=False)
    assert run(folder, "--endpoint", server.url) == 0
    shown = capsys.readouterr().err
    assert shown.endswith(f"\r[{'#' * 40}] 100 %\n")
    assert " 20 %" in shown


@settings(max_examples=25)
@given(
    names=st.lists(st.integers(0, 99).map(str), min_size=1, max_size=6),
    cuts=st.lists(st.integers(0, 3000), max_size=3),
)
def test_any_torn_recording_is_sent_as_far_as_it_is_whole(tmp_path_factory, names, cuts):
    folder = tmp_path_factory.mktemp("torn")
    spool = Spool(str(folder / "spool"), "a")
    for name in names:
        spool.write("traces", spans(name))
    spool.close()
    (path,) = folder.rglob("*.jsonl")
    whole = path.read_bytes()
    with Server() as server:
        for cut in [*sorted(cut % (len(whole) + 1) for cut in cuts), len(whole)]:  # the file grows between commands
            path.write_bytes(whole[:cut])
            replay.replay(folder, server.url)
            assert server.names() == names[: whole[:cut].count(b"\n")]


def test_it_raises_what_the_command_says(tmp_path):
    with pytest.raises(CannotReplay):
        replay.replay(tmp_path, "http://127.0.0.1:1")
