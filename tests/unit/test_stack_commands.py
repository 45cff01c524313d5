"""`verl-otel up`, `status` and `down`, with small real processes in place of the backends (`small_stack.py`).

With the backends themselves: tests/e2e/test_up.py.
"""

import io
import json
import os
import re
import signal
import socket
import subprocess
import sys
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import dataclass
from pathlib import Path

import pytest
import small_stack
import yaml
from waiting import until

from verl_otel import cli
from verl_otel.stack import StackError, binaries, ports, state
from verl_otel.stack.configuration import for_this_machine
from verl_otel.stack.processes import Process
from verl_otel.stack.services import SERVICES
from verl_otel.stack.stack import Stack

ALERTMANAGER, PROMETHEUS, RELAY = SERVICES["alertmanager"], SERVICES["prometheus"], SERVICES["relay"]
SMALL_STACK = Path(__file__).with_name("small_stack.py")
NAMES = tuple(name for name in small_stack.SMALL if name != "relay")


@dataclass
class Done:
    returncode: int
    stdout: str
    stderr: str


class Commands:
    """The commands of a stack in a folder."""

    def __init__(self, folder):
        self.folder = folder

    def __call__(self, command, *options):
        """In this process, which is quicker."""
        with redirect_stdout(io.StringIO()) as stdout, redirect_stderr(io.StringIO()) as stderr:
            try:
                status = cli.main([command, "--folder", str(self.folder), *options])
            except SystemExit as end:  # argparse
                status = end.code
        return Done(int(status or 0), stdout.getvalue(), stderr.getvalue())

    def line(self, command, *options):
        """What to give to a shell."""
        return [sys.executable, "-u", SMALL_STACK, command, "--folder", self.folder, *options]

    def pids(self):
        content = json.loads((self.folder / "state.json").read_text())
        return {name: pid for name, (pid, _) in content["processes"].items()}

    def left(self):
        """Pids of programs that were started here."""
        found = []
        for cwd in Path("/proc").glob("[0-9]*/cwd"):
            try:
                if cwd.readlink() == self.folder:
                    found.append(int(cwd.parent.name))
            except OSError:
                continue
        return found


@pytest.fixture
def verl_otel(tmp_path, monkeypatch):
    handlers = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGHUP)}
    for name in list(SERVICES):
        monkeypatch.delitem(SERVICES, name)
    for name, service in small_stack.SMALL.items():
        monkeypatch.setitem(SERVICES, name, service)
    monkeypatch.setattr(binaries, "find", lambda program, report: Path(os.devnull))
    commands = Commands(tmp_path / "stack")
    yield commands
    for pid in commands.left():
        os.kill(pid, signal.SIGKILL)
    for number, handler in handlers.items():
        signal.signal(number, handler)


def lines_of(done, *names):
    """The first words after the name of a service, in the table that was printed."""
    table = dict(re.findall(r"^(\w+) +(runs|has ended|does not answer) ", done.stdout, re.MULTILINE))
    return {name: table.get(name) for name in names or NAMES}


def crash(pid):
    os.kill(pid, signal.SIGKILL)
    until(lambda: not Path(f"/proc/{pid}").exists())


def test_up_leaves_the_programs_running_and_status_finds_them(verl_otel):
    done = verl_otel("up", "--free-ports")
    assert done.returncode == 0, done.stderr
    assert lines_of(done) == dict.fromkeys(NAMES, "runs")
    assert sorted(verl_otel.left()) == sorted(verl_otel.pids().values())
    (endpoint,) = re.findall(r"export OTEL_EXPORTER_OTLP_ENDPOINT=(\S+)", done.stdout)
    status = subprocess.run(verl_otel.line("status"), capture_output=True, text=True, timeout=60)
    assert status.returncode == 0
    for name in NAMES:
        assert str(verl_otel.pids()[name]) in status.stdout and str(verl_otel.folder / f"{name}.log") in status.stdout
    assert endpoint in status.stdout


def test_a_second_up_does_nothing_and_says_so(verl_otel):
    verl_otel("up", "--free-ports")
    before = verl_otel.pids()
    again = verl_otel("up")
    assert again.returncode == 0 and "runs already" in again.stdout
    assert verl_otel.pids() == before and sorted(verl_otel.left()) == sorted(before.values())
    other = verl_otel("up", "--port", "jaeger=1234")
    assert other.returncode == 1 and "verl-otel down first" in other.stderr
    assert verl_otel.pids() == before


def test_status_shows_what_has_crashed_and_up_starts_only_that(verl_otel):
    verl_otel("up", "--free-ports")
    before = verl_otel.pids()
    crash(before["jaeger"])
    os.kill(before["prometheus"], signal.SIGSTOP)
    status = verl_otel("status")
    assert status.returncode == 1
    assert lines_of(status) == {"jaeger": "has ended", "prometheus": "does not answer", "collector": "runs"}
    assert "hello from jaeger" in status.stdout, "the end of its log"
    assert "hello from collector" not in status.stdout
    os.kill(before["prometheus"], signal.SIGCONT)
    assert verl_otel("up").returncode == 0
    after = verl_otel.pids()
    assert {name for name in NAMES if before[name] != after[name]} == {"jaeger"}
    assert verl_otel("status").returncode == 0


def test_down_stops_the_collector_first_and_keeps_what_there_is(verl_otel):
    verl_otel("up", "--free-ports")
    done = verl_otel("down")
    assert done.returncode == 0 and str(verl_otel.folder) in done.stdout
    assert verl_otel.left() == []
    ended = (verl_otel.folder / "ended").read_text().split()
    assert ended[0] == "collector" and sorted(ended) == sorted(NAMES)
    assert "hello from jaeger" in (verl_otel.folder / "jaeger.log").read_text()
    assert verl_otel("status").returncode == 1
    again = verl_otel("down")
    assert again.returncode == 0 and "nothing runs" in again.stdout


def test_what_cannot_start_takes_the_rest_with_it_and_its_log_is_shown(verl_otel, monkeypatch):
    monkeypatch.setenv("FAILS", "prometheus")
    done = verl_otel("up", "--free-ports")
    assert done.returncode == 1
    assert "prometheus has ended" in done.stderr and "no, says prometheus" in done.stderr
    assert verl_otel.left() == [] and not (verl_otel.folder / "state.json").exists()


def test_a_failed_repair_leaves_alone_what_ran_before(verl_otel, monkeypatch):
    verl_otel("up", "--free-ports")
    before = verl_otel.pids()
    crash(before.pop("prometheus"))
    monkeypatch.setenv("FAILS", "prometheus")
    assert verl_otel("up").returncode == 1
    assert sorted(verl_otel.left()) == sorted(before.values())
    assert lines_of(verl_otel("status"))["prometheus"] == "has ended"


@pytest.mark.parametrize("end", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupted_up_leaves_nothing(verl_otel, end):
    command = verl_otel.line("up", "--free-ports")
    with subprocess.Popen(command, env={**os.environ, "SLOW": "jaeger"}, stdout=subprocess.DEVNULL) as up:
        until(lambda: len(verl_otel.left()) == len(NAMES))
        assert (busy := verl_otel("down")).returncode == 1 and "wait for it" in busy.stderr
        up.send_signal(end)
        assert up.wait(30) != 0
    assert verl_otel.left() == []


def test_ctrl_c_just_when_a_program_begins_leaves_nothing(verl_otel, monkeypatch):
    """The signal comes between the program's beginning and our knowing it."""
    started = Process.start

    def start_and_interrupt(*arguments):
        process = started(*arguments)
        signal.raise_signal(signal.SIGINT)
        return process

    monkeypatch.setattr(Process, "start", start_and_interrupt)
    assert verl_otel("up", "--free-ports").returncode == 130
    assert verl_otel.left() == []


def test_in_the_foreground_it_stays_tells_of_a_crash_and_stops_everything(verl_otel):
    command = verl_otel.line("up", "--free-ports", "--foreground")
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as up:
        assert up.stdout is not None
        lines = iter(up.stdout.readline, "")
        assert any("Ctrl-C" in line for line in lines)
        crash(verl_otel.pids()["jaeger"])
        assert any("jaeger has ended" in line for line in lines)
        assert len(verl_otel.left()) == len(NAMES) - 1
        up.send_signal(signal.SIGINT)
        assert up.wait(30) == 0
    assert verl_otel.left() == []


def test_a_taken_port_is_said_before_anything_starts(verl_otel):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        done = verl_otel("up", "--free-ports", "--port", f"prometheus={port}")
    assert done.returncode == 1
    assert f"port {port}, for prometheus, is taken by {comm()}, pid {os.getpid()}" in done.stderr
    (other,) = re.findall(r"--port prometheus=(\d+)", done.stderr)
    assert int(other) != port and "--free-ports" in done.stderr
    assert verl_otel.left() == [] and not (verl_otel.folder / "jaeger.log").exists()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--port", "prometeus=9091"), "prometheus=9091"),
        (("--port", "prometheus"), "NAME=NUMBER"),
        (("--port", "prometheus=99999"), "NAME=NUMBER"),
        (("--free-ports", "--port", "jaeger=7777", "--port", "prometheus=7777"), "cannot have the same port"),
        (("--free-ports", "--rules", "nowhere.yaml"), "there is no such file"),
    ],
)
def test_a_wrong_option_is_said_in_words(verl_otel, options, message):
    done = verl_otel("up", *options)
    assert done.returncode != 0 and message in done.stderr and "Traceback" not in done.stderr
    assert verl_otel.left() == []


def test_a_folder_that_cannot_be_written_is_said(tmp_path):
    (tmp_path / "file").write_text("")
    up = Commands(tmp_path / "file")("up")
    assert (up.returncode, up.stdout) == (1, "")
    assert up.stderr == f"verl-otel: {tmp_path}/file cannot be written (File exists): give another with --folder\n"


def test_how_it_was_started_is_remembered(verl_otel, tmp_path):
    rules, robots = tmp_path / "rules.yaml", tmp_path / "robots.yaml"
    rules.write_text("groups: []\n")
    robots.write_text("robots: []\n")
    assert verl_otel("up", "--free-ports", "--rules", str(rules), "--relay", str(robots)).returncode == 0
    assert set(verl_otel.pids()) == {*NAMES, "relay"}
    started = Stack.started_in(verl_otel.folder)
    crash(verl_otel.pids()["relay"])
    assert verl_otel("up").returncode == 0
    again = Stack.started_in(verl_otel.folder)
    for stack in (started, again):
        assert (stack.rules, stack.relay, stack.traces_on_disk) == (rules, str(robots), True)
    assert started.ports == again.ports and set(verl_otel.pids()) == {*NAMES, "relay"}
    other = verl_otel("up", "--relay", str(rules))
    assert other.returncode == 1 and "verl-otel down first" in other.stderr


def test_as_in_tests_one_is_killed_and_started_again_where_it_was(verl_otel, tmp_path):
    with Stack(tmp_path / "stack", program=Path) as stack:
        before = stack.processes["jaeger"]
        stack.kill("jaeger")
        assert not stack.runs("jaeger") and not stack.answers("jaeger") and stack.answers("collector")
        stack.restart("jaeger")
        assert stack.answers("jaeger") and stack.processes["jaeger"] != before
    assert verl_otel.left() == []


def test_one_robot_is_said_by_variables_and_its_secrets_are_the_relays_only(verl_otel, monkeypatch):
    monkeypatch.setenv("VERL_OTEL_RELAY_URL", "https://example.com/planted")
    monkeypatch.setenv("VERL_OTEL_RELAY_TOKEN", "planted")
    assert verl_otel("up", "--free-ports").returncode == 0
    for name, pid in verl_otel.pids().items():
        assert b"planted" not in Path(f"/proc/{pid}/environ").read_bytes(), name
    _, variables = RELAY.start(Stack.started_in(verl_otel.folder))
    assert variables.keys() == {"VERL_OTEL_RELAY_URL", "VERL_OTEL_RELAY_TOKEN"}
    assert variables["VERL_OTEL_RELAY_URL"] == "https://example.com/planted"
    assert all(b"planted" not in path.read_bytes() for path in verl_otel.folder.rglob("*") if path.is_file())


def test_alertmanager_is_told_where_the_relay_is_and_its_token(tmp_path):
    stack = Stack(tmp_path, program=Path)
    ALERTMANAGER.start(stack)
    (receiver,) = yaml.safe_load((tmp_path / "alertmanager.yaml").read_text())["receivers"]
    (hook,) = receiver["webhook_configs"]
    assert hook["url"] == f"{stack.url('relay')}/alerts"
    token = Path(hook["http_config"]["authorization"]["credentials_file"])
    assert token.stat().st_mode & 0o777 == 0o600 and len(token.read_text()) == 64
    assert RELAY.start(stack)[1]["VERL_OTEL_RELAY_TOKEN"] == token.read_text()


def test_the_relay_may_ask_runs_where_run_control_is_set_up(tmp_path, monkeypatch):
    asking = {"VERL_OTEL_CONTROL": str(tmp_path), "VERL_OTEL_CONTROL_TOKEN_FILE": str(tmp_path / "token")}
    for name, value in asking.items():
        monkeypatch.setenv(name, value)
    _, variables = RELAY.start(Stack(tmp_path, program=Path, relay="relay.yaml"))
    assert variables.items() >= asking.items()


def test_prometheus_is_told_where_the_others_are(tmp_path):
    stack = Stack(tmp_path, rules=Path("/some/rules.yaml"), program=Path)
    PROMETHEUS.start(stack)
    settings = yaml.safe_load((tmp_path / "prometheus.yaml").read_text())
    assert settings["rule_files"] == ["/some/rules.yaml"]
    targets = [t for job in settings["scrape_configs"] for static in job["static_configs"] for t in static["targets"]]
    assert targets == [stack.address("collector_self"), stack.address("alertmanager")]
    (alertmanagers,) = settings["alerting"]["alertmanagers"]
    assert alertmanagers["static_configs"] == [{"targets": [stack.address("alertmanager")]}]


def test_a_state_that_cannot_be_read_is_said_and_not_guessed(verl_otel):
    verl_otel.folder.mkdir()
    for content in (
        "",
        "[]",
        '{"ports": {}, "traces_on_disk": true, "rules": "", "relay": null, "processes": {"jaeger": 7}}',
    ):
        (verl_otel.folder / "state.json").write_text(content)
        for command in ("up", "status", "down"):
            done = verl_otel(command)
            assert done.returncode == 1 and "state.json" in done.stderr and "Traceback" not in done.stderr


# --- processes


def comm():
    return Path("/proc/self/comm").read_text().strip()


def test_a_pid_that_was_given_to_another_program_is_not_taken_for_ours(tmp_path):
    """As after a restart of the machine: the number is there, the program is another one."""
    other = Process.start(["sleep", "60"], {}, tmp_path, tmp_path / "log")
    ours = Process(other.pid, other.started - 1)
    assert other.alive() and not ours.alive()
    ours.send_signal(signal.SIGKILL)
    ours.kill()
    assert not other.wait(0.5)
    other.kill()
    assert not other.alive()


def test_what_a_program_has_started_ends_with_it(tmp_path):
    shell = Process.start(
        ["sh", "-c", "sleep 60 & echo $!; exec sleep 60"], dict(os.environ), tmp_path, tmp_path / "log"
    )
    until(lambda: (tmp_path / "log").read_text().strip())
    child = int((tmp_path / "log").read_text())
    os.kill(shell.pid, signal.SIGKILL)  # only itself
    assert shell.wait(10) and Path(f"/proc/{child}").exists()
    shell.kill()
    until(lambda: not Path(f"/proc/{child}").exists())


def test_an_ended_process_is_no_zombie(tmp_path):
    ended = Process.start(["true"], dict(os.environ), tmp_path, tmp_path / "log")
    assert ended.wait(10)
    until(lambda: not Path(f"/proc/{ended.pid}").exists())


def test_only_one_command_at_a_time_starts_or_stops(tmp_path):
    with state.alone(tmp_path), pytest.raises(StackError, match="wait for it"), state.alone(tmp_path):
        pass
    with state.alone(tmp_path):
        pass


def test_ports_of_other_users_programs_are_named_as_such(monkeypatch):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        monkeypatch.setattr(ports, "_listening", lambda port: set())
        assert ports.taken({"jaeger": taken.getsockname()[1]}) == {"jaeger": "a program of another user"}
    assert ports.taken(ports.free_ports(["jaeger"])) == {}


# --- programs


def program(folder, name, says):
    path = folder / name
    path.write_text(f"#!/bin/sh\necho '{says}'\n")
    path.chmod(0o755)
    return path


@pytest.fixture
def only_here_on_path(tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", f"{tmp_path}")
    monkeypatch.setattr(binaries, "CACHE", tmp_path / "cache")
    return tmp_path


@pytest.mark.parametrize(
    ("wanted", "name", "says"),
    [
        ("prometheus", "prometheus", "prometheus, version 3.5.0 (branch: HEAD, revision: 8be3a94)"),
        ("prometheus", "prometheus", "prometheus, version  (branch: , revision: unknown)"),
        ("verl-otelcol", "otelcol-contrib", "otelcol-contrib version 0.155.0"),
        ("jaeger", "jaeger", '{"gitCommit":"c4","gitVersion":"v2.13.0","buildDate":""}'),
        ("alertmanager", "alertmanager", "alertmanager, version 0.31.0 (branch: HEAD)"),
    ],
)
def test_a_program_on_path_is_taken(only_here_on_path, wanted, name, says):
    path = program(only_here_on_path, name, says)
    assert binaries.find(wanted, pytest.fail) == path


def test_one_that_is_too_old_is_not_and_without_go_that_is_said(only_here_on_path):
    program(only_here_on_path, "prometheus", "prometheus, version 2.42.0 (branch: HEAD)")
    said = []
    with pytest.raises(StackError, match=r"Go, to build it.*go\.dev.*compose\.yaml"):
        binaries.find("prometheus", said.append)
    assert len(said) == 1 and "older than 3.5" in said[0]


# --- configurations


def test_names_of_containers_become_addresses_of_this_machine(tmp_path):
    file = tmp_path / "file"
    file.write_text("url: http://relay:4321/alerts\n")
    assert for_this_machine(file, {"relay:4321": "127.0.0.1:1"}) == "url: http://127.0.0.1:1/alerts\n"
