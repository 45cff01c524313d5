"""Run control (`control/`): what a run is asked, who may ask, and what becomes of it.

The loop here has verl's own conditions, of its two trainers; a real run is asked in tests/e2e/test_alert_relay.py.
"""

import json
import os
import threading
import time
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from omegaconf import OmegaConf
from waiting import until

from verl_otel import border
from verl_otel.cli import control as command
from verl_otel.cli import main
from verl_otel.control import requests
from verl_otel.control import run as run_module
from verl_otel.control.requests import Channel, NoControl, Refused

TOKEN = b"0123456789abcdef0123456789abcdef"


@pytest.fixture
def channel(tmp_path, monkeypatch):
    """The folder and the token, known to the run and to who asks."""
    monkeypatch.setattr(run_module, "POLL", 0.01)
    monkeypatch.setattr(run_module, "LOOK", 0.005)
    token = tmp_path / "token"
    token.write_bytes(TOKEN + b"\n")
    token.chmod(0o600)
    (tmp_path / "control").mkdir()
    monkeypatch.setenv("VERL_OTEL_CONTROL", str(tmp_path / "control"))
    monkeypatch.setenv("VERL_OTEL_CONTROL_TOKEN_FILE", str(token))
    return Channel(tmp_path / "control", TOKEN)


class Verl:
    """A trainer of verl with what run control touches, and the hooks around it.

    Args:
        at: step -> what happens while its first stage runs.
    """

    def __init__(self, process, at=None, v1=True, steps=6, save_freq=-1, full_disk_at=()):
        self.process, self.at, self.v1, self.full_disk_at = process, at or {}, v1, full_disk_at
        self.config = OmegaConf.create({"trainer": {"save_freq": save_freq}})
        self.total_training_steps = steps
        self.global_steps = 0
        self.trained, self.saved = [], []

    def fit(self):
        self.process.steps.follow(self)
        self.process.take_requests(self)
        try:
            self._loop()
        except Exception as error:
            self.process.run_finished(error)
            raise
        else:
            self.process.run_finished(None)
        finally:
            self.process.finish()

    def _loop(self):
        self.global_steps += 1
        while not self.v1 or self.global_steps <= self.total_training_steps:
            is_last_step = self.global_steps >= self.total_training_steps
            with self._time("gen"):
                self.at.get(self.global_steps, lambda: None)()
            with self._time("update_actor"):
                self.trained.append(self.global_steps)
            save_freq = self.config.trainer.save_freq
            if save_freq > 0 and (is_last_step or self.global_steps % save_freq == 0):
                with self._time("save_checkpoint"):
                    self._saving()
            self._logged()
            self.global_steps += 1
            if is_last_step:
                return

    def _time(self, timer):
        if self.process.control is not None:
            self.process.control.stage_begins()
        steps = self.process.steps

        class Scope:
            def __enter__(self):
                self.scope = steps.enter(timer)

            def __exit__(self, kind, error, trace):
                steps.leave(self.scope, error)

        return Scope()

    def _saving(self):
        control = self.process.control
        control.saving(self._save_checkpoint) if control is not None else self._save_checkpoint()

    def _save_checkpoint(self):
        if self.global_steps in self.full_disk_at:
            raise OSError("no space left on device")
        self.saved.append(self.global_steps)

    def _logged(self):
        if self.process.control is not None:
            self.process.control.logged()


@pytest.fixture
def ask(channel):
    """Ask the run something, and wait until it has seen that."""

    def ask(action, by="alice", reason="a test"):
        folder = channel.of_run("run-1")
        until(folder.is_dir)
        request = channel.ask("run-1", action, by, reason)
        until(lambda: not (folder / f"{request.id}.request.json").exists())
        time.sleep(0.02)
        return request

    return ask


def audit(memory):
    events = [event for event in memory.events if event.event_name == "verl.control"]
    return [(event.attributes["verl.control.action"], event.attributes["verl.control.result"]) for event in events]


def state(memory):
    (event,) = [event for event in memory.events if event.event_name == "verl.run.finished"]
    return event.attributes["verl.run.state"]


def in_a_thread(work):
    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    return thread


def status(channel):
    try:
        return json.loads((channel.of_run("run-1") / "status.json").read_text())["state"]
    except FileNotFoundError:
        return ""


# ---- what a run does


def test_a_checkpoint_is_saved_in_the_step_that_runs_and_training_goes_on(memory, ask):
    verl = Verl(memory.process(), {2: lambda: ask("checkpoint", "alert VerlNonFinite", "a loss is not finite")})
    verl.fit()
    assert (verl.saved, verl.trained) == ([2], [1, 2, 3, 4, 5, 6])
    assert verl.config.trainer.save_freq == -1
    assert audit(memory) == [("checkpoint", "accepted"), ("checkpoint", "saved")]
    event = next(event for event in memory.events if event.event_name == "verl.control")
    assert event.attributes["verl.control.by"] == "alert VerlNonFinite" and event.attributes["verl.step.number"] == 2
    assert event.body == {"reason": "a loss is not finite"}
    assert memory.values("verl.control.requests", "verl.control.action", "verl.control.result") == {
        ("checkpoint", "accepted"): 1
    }
    assert state(memory) == "finished"


@pytest.mark.parametrize("v1", [True, False], ids=["V1", "RayPPOTrainer"])
def test_a_pause_saves_waits_after_the_step_and_goes_on_when_it_is_told(memory, ask, channel, v1):
    def resume():
        until(lambda: status(channel) == "paused")
        assert (verl.saved, verl.trained) == ([2], [1, 2])
        ask("resume", "bob")

    verl = Verl(memory.process(), {2: lambda: (ask("pause"), in_a_thread(resume))}, v1=v1)
    verl.fit()
    assert (verl.saved, verl.trained) == ([2], [1, 2, 3, 4, 5, 6])
    assert audit(memory) == [
        *(("pause", "accepted"), ("pause", "paused"), ("pause", "resumed"), ("resume", "accepted"))
    ]
    pause = memory.span("verl.pause")
    assert pause.attributes["verl.stage.wait"] is True and pause.attributes["stage"] == "other"


def test_a_pause_ends_by_itself_and_training_goes_on(memory, ask, monkeypatch):
    monkeypatch.setenv("VERL_OTEL_CONTROL_MAX_PAUSE", "0.05")
    verl = Verl(memory.process(), {1: lambda: ask("pause")})
    verl.fit()
    assert verl.trained == [1, 2, 3, 4, 5, 6]
    assert audit(memory)[-1] == ("pause", "resumed")
    assert [e.body.get("message") for e in memory.events if e.event_name == "verl.control"][-1] == (
        "after 0.05 s, the longest pause"
    )


@pytest.mark.parametrize(("v1", "trained"), [(True, [1, 2]), (False, [1, 2, 3])], ids=["V1", "RayPPOTrainer"])
def test_a_stop_saves_and_ends_verls_own_loop(memory, ask, v1, trained):
    verl = Verl(memory.process(), {2: lambda: ask("stop")}, v1=v1)
    verl.fit()
    assert (verl.saved, verl.trained) == ([2], trained)
    assert audit(memory) == [("stop", "accepted"), ("stop", "stopping"), ("stop", "stopped")]
    assert state(memory) == "stopped"


def test_a_paused_run_can_be_stopped(memory, ask, channel):
    def stop():
        until(lambda: status(channel) == "paused")
        ask("stop")

    verl = Verl(memory.process(), {2: lambda: (ask("pause"), in_a_thread(stop))})
    verl.fit()
    assert (verl.saved, verl.trained) == ([2], [1, 2])
    assert audit(memory)[-4:] == [
        *(("pause", "replaced"), ("stop", "accepted"), ("stop", "stopping"), ("stop", "stopped"))
    ]


def test_what_asks_for_less_than_is_asked_already_changes_nothing(memory, ask):
    verl = Verl(memory.process(), {2: lambda: (ask("stop"), ask("stop"), ask("checkpoint"))})
    verl.fit()
    assert verl.trained == [1, 2]
    assert audit(memory).count(("stop", "nothing_to_do")) == audit(memory).count(("checkpoint", "nothing_to_do")) == 1


def test_what_was_asked_can_be_taken_back(memory, ask):
    verl = Verl(memory.process(), {2: lambda: (ask("stop"), ask("resume"))})
    verl.fit()
    assert (verl.saved, verl.trained) == ([], [1, 2, 3, 4, 5, 6])


def test_a_checkpoint_that_cannot_be_saved_costs_the_request_and_not_the_run(memory, ask):
    verl = Verl(memory.process(), {2: lambda: ask("stop")}, full_disk_at=[2])
    verl.fit()
    assert verl.trained == [1, 2, 3, 4, 5, 6] and verl.config.trainer.save_freq == -1
    assert audit(memory) == [("stop", "accepted"), ("stop", "failed")]


def test_a_checkpoint_that_verl_would_have_saved_fails_as_ever(memory, ask):
    verl = Verl(memory.process(), {2: lambda: ask("checkpoint")}, save_freq=2, full_disk_at=[2])
    with pytest.raises(OSError, match="no space left"):
        verl.fit()
    assert state(memory) == "failed"


def test_a_checkpoint_of_verls_own_schedule_is_as_good(memory, ask):
    verl = Verl(memory.process(), {2: lambda: ask("pause"), 3: lambda: None}, save_freq=2)
    in_a_thread(lambda: (until(lambda: verl.saved == [2]), ask("resume")))
    verl.fit()
    assert (verl.saved, verl.config.trainer.save_freq) == ([2, 4, 6], 2)


@pytest.mark.parametrize("action", ["pause", "stop"])
def test_a_run_in_its_last_step_does_not_pause(memory, ask, action):
    verl = Verl(memory.process(), {6: lambda: ask(action)})
    verl.fit()
    assert (verl.saved, verl.trained) == ([6], [1, 2, 3, 4, 5, 6])
    assert audit(memory) == [(action, "accepted"), (action, "ended_before")]
    assert state(memory) == "finished"


def test_off_it_is_not_there_and_costs_nothing(memory, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    process = memory.process()
    Verl(process).fit()
    assert process.control is None and list(tmp_path.iterdir()) == []
    assert "verl-otel-control" not in {thread.name for thread in threading.enumerate()}


def test_at_the_end_the_folder_is_gone(memory, channel, ask):
    Verl(memory.process(), {1: lambda: ask("checkpoint")}).fit()
    until(lambda: list(channel.folder.iterdir()) == [])


@pytest.mark.parametrize("what", ["no token", "others read it", "short", "relative", "no folder"])
def test_a_wrong_set_up_is_said_and_the_run_goes_on_without(memory, channel, monkeypatch, tmp_path, caplog, what):
    if what == "no token":
        monkeypatch.delenv("VERL_OTEL_CONTROL_TOKEN_FILE")
    elif what == "others read it":
        (tmp_path / "token").chmod(0o644)
    elif what == "short":
        (tmp_path / "token").write_text("short")
    elif what == "relative":
        monkeypatch.setenv("VERL_OTEL_CONTROL", "control")
    else:
        (tmp_path / "file").write_text("")
        monkeypatch.setenv("VERL_OTEL_CONTROL", str(tmp_path / "file" / "x"))
    verl = Verl(memory.process(), {2: lambda: time.sleep(0.05)})
    verl.fit()
    assert verl.trained == [1, 2, 3, 4, 5, 6]
    until(lambda: "the run takes no requests" in caplog.text)
    assert "Traceback" not in caplog.text


def test_only_the_training_thread_pauses(memory, ask):
    """verl's logger and timers may be used by other threads, too."""

    def at():
        ask("pause")
        for name in ("stage_begins", "logged"):
            thread = in_a_thread(getattr(verl.process.control, name))
            thread.join(10)
            assert not thread.is_alive() and verl.config.trainer.save_freq == -1
        verl.process.control._saved = True
        thread = in_a_thread(verl.process.control.logged)
        thread.join(10)
        assert not thread.is_alive()
        ask("resume")

    verl = Verl(memory.process(), {2: at})
    verl.fit()
    assert verl.trained == [1, 2, 3, 4, 5, 6]


def test_a_trainer_whose_settings_cannot_be_changed_goes_on(memory, ask, caplog):
    verl = Verl(memory.process(), {2: lambda: ask("stop")})
    OmegaConf.set_readonly(verl.config, True)
    verl.fit()
    assert verl.trained == [1, 2, 3, 4, 5, 6] and audit(memory)[-1] == ("stop", "failed")


# ---- who may ask


def put(channel, request, name="x", **changed):
    path = channel.of_run("run-1") / f"{name}.request.json"
    requests.write(path, {**channel.signed(request), **changed})
    return path


def a_request(action="stop", **changed):
    now = time.time()
    return requests.Request(**{
        **{"id": "1" * 32, "run_id": "run-1", "action": action, "by": "eve", "reason": ""},
        **{"issued": now, "expires": now + 60},
        **changed,
    })  # fmt: skip


REFUSED = {
    "wrong_token": lambda channel: put(replace(channel, token=b"another token of eve's"), a_request()),
    "expired": lambda channel: put(channel, a_request(issued=time.time() - 60, expires=time.time() - 1)),
    "other_run": lambda channel: put(channel, a_request(run_id="run-2")),
    "unknown_action": lambda channel: put(channel, a_request("reboot")),
    "before_start": lambda channel: put(channel, a_request(issued=time.time() - 3000)),
    "malformed": lambda channel: (channel.of_run("run-1") / "x.request.json").write_text("{"),
}
CHANGED = {
    "another action": {"action": "stop"},
    "a longer time": {"expires": 4e9},
    "another run": {"run_id": "run-1"},
    "no signature": {"signature": ""},
    "a signature that is no text": {"signature": 3},
}


def tried(memory, channel, leave):
    """What a run makes of a file that someone leaves in its folder."""

    def at():
        until(channel.of_run("run-1").is_dir)
        leave(channel)
        until(lambda: not list(channel.of_run("run-1").glob("*.request.json")))
        time.sleep(0.02)

    verl = Verl(memory.process(), {2: at})
    verl.fit()
    assert (verl.saved, verl.trained) == ([], [1, 2, 3, 4, 5, 6])
    assert audit(memory) == []
    return memory.values("verl.control.requests", "verl.control.action", "verl.control.result")


@pytest.mark.parametrize("why", REFUSED)
def test_what_may_not_be_done_does_nothing_but_count(memory, channel, why):
    assert tried(memory, channel, REFUSED[why]) == {("unknown", why): 1}


@pytest.mark.parametrize("what", CHANGED)
def test_a_signed_request_cannot_be_changed(memory, channel, what):
    original = a_request("checkpoint", run_id="run-2" if what == "another run" else "run-1")
    (counted,) = tried(memory, channel, lambda channel: put(channel, original, **CHANGED[what]))
    assert counted[1] in {"wrong_token", "malformed"}


def test_a_request_is_done_once_also_if_its_file_comes_back(memory, channel):
    made = []

    def leave():
        until(channel.of_run("run-1").is_dir)
        made.append(made[0] if made else a_request("checkpoint"))
        path = put(channel, made[0], str(time.monotonic_ns()))
        until(lambda: not path.exists())
        time.sleep(0.02)

    verl = Verl(memory.process(), {2: leave, 4: leave})
    verl.fit()
    assert verl.saved == [2]
    found = memory.values("verl.control.requests", "verl.control.action", "verl.control.result")
    assert found == {("checkpoint", "accepted"): 1, ("unknown", "replayed"): 1}


def test_a_link_a_pipe_and_a_large_file_are_no_requests(memory, channel, tmp_path):
    def leave(channel):
        folder = channel.of_run("run-1")
        requests.write(tmp_path / "elsewhere", channel.signed(a_request()))
        os.symlink(tmp_path / "elsewhere", folder / "a.request.json")
        os.mkfifo(folder / "b.request.json")
        (folder / "c.request.json").write_bytes(json.dumps(channel.signed(a_request())).encode().rjust(1 << 20))

    assert tried(memory, channel, leave) == {("unknown", "malformed"): 3}


@given(st.binary(max_size=200) | st.dictionaries(
    st.sampled_from(["id", "run_id", "action", "by", "reason", "issued", "expires", "signature"]),
    st.none() | st.text(max_size=5) | st.integers() | st.floats() | st.lists(st.none(), max_size=1),
).map(lambda data: json.dumps(data).encode()))  # fmt: skip
def test_whatever_is_in_a_file_is_refused(content):
    with pytest.raises(Refused):
        Channel(None, TOKEN).read(content, "run-1", 0.0, time.time())


# ---- the command


def test_the_command_asks_a_run_that_listens(memory, channel, capsys):
    seen = []

    def at():
        until(channel.of_run("run-1").is_dir)
        seen.append(main(["control", "run-1", "stop", "--reason", "enough"]))
        time.sleep(0.02)

    verl = Verl(memory.process(), {2: at})
    verl.fit()
    assert seen == [0] and verl.trained == [1, 2]
    assert "the run has seen request" in capsys.readouterr().out
    (accepted, *_) = [event for event in memory.events if event.event_name == "verl.control"]
    assert accepted.body == {"reason": "enough"} and "@" in accepted.attributes["verl.control.by"]


@pytest.mark.parametrize("action", ["stop", "status"])
def test_the_command_says_which_runs_listen(action, channel, capsys):
    (channel.folder / "run-7").mkdir()
    assert main(["control", "../run-1", action]) == 2
    assert "these do: run-7" in capsys.readouterr().err
    assert main(["control", "run-7", "status"]) == 0
    assert capsys.readouterr().out == "the run does not listen\n"


def test_the_command_says_if_nobody_looks(channel, capsys, monkeypatch):
    monkeypatch.setattr(command, "WAIT", 0.1)
    (channel.folder / "run-7").mkdir()
    assert main(["control", "run-7", "pause"]) == 1
    assert "has not looked at the request" in capsys.readouterr().err


def test_the_command_needs_folder_and_token(channel, capsys, monkeypatch):
    monkeypatch.delenv("VERL_OTEL_CONTROL")
    assert main(["control", "run-1", "stop"]) == 2
    assert "set VERL_OTEL_CONTROL" in capsys.readouterr().err


def test_a_channel_without_a_setting_is_off():
    assert Channel.from_environ({}) is None
    with pytest.raises(NoControl, match="set VERL_OTEL_CONTROL_TOKEN_FILE"):
        Channel.from_environ({"VERL_OTEL_CONTROL": "/x"})
    assert border.failures() == {}
