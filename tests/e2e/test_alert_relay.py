"""A real run with faults -> Collector -> Prometheus' rules -> Alertmanager -> relay -> a stand-in for a robot, and back
to the run, which saves a checkpoint and pauses; then a person stops it, and it is resumed.

The robot alone is no real one: tests/testbed/robots.py, which checks its signature.
"""

import contextlib
import datetime
import json
import os
import re
import signal
import subprocess
import threading
import time
import urllib.request

import bed
import pytest
import yaml
from asking import eventually, prometheus
from robots import Robots

from verl_otel.alerts import rules, thresholds
from verl_otel.control.requests import Channel
from verl_otel.recording import reader
from verl_otel.stack.stack import Stack

pytestmark = [pytest.mark.run, pytest.mark.stack]

RUN = "alerted"
HANGS, NAN = (4, 5), 6
"""Steps."""

THRESHOLDS = {
    "run": {"min_steps": 2},
    "links": {"runbook": "http://runbooks/{alert}.md"},
    "alerts": {
        "VerlRunHung": {"for": "0s", "times_usual": 1.5, "at_least": "8s"},
        # As critical as the others: a warning of a run that has something critical is not told.
        "VerlThroughputLow": {"severity": "critical", "for": "0s", "window": "5s", "below_usual": 0.5},
    },
}
"""Limits for a run whose steps take seconds, and which hangs for 15."""

RELAY = """
robots:
  - name: on-call
    kind: dingtalk
    url: {env: ROBOT_URL}
    secret: {env: ROBOT_SECRET}
    match: {alertname: [VerlRunHung, VerlThroughputLow, VerlNonFinite]}
actions:
  - action: checkpoint-and-pause
    match: {alertname: VerlNonFinite}
"""


@contextlib.contextmanager
def changed(stack, name, change):
    """Prometheus or Alertmanager with a configuration that `change` has changed."""
    before = (stack.folder / f"{name}.yaml").read_text()
    change(settings := yaml.safe_load(before))
    try:
        _reload(stack, name, yaml.safe_dump(settings))
        yield
    finally:
        _reload(stack, name, before)


def _reload(stack, name, text):
    (stack.folder / f"{name}.yaml").write_text(text)
    stack.processes[name].send_signal(signal.SIGHUP)


def often(settings):
    """Prometheus that looks at its rules every two seconds."""
    settings["global"]["evaluation_interval"] = "2s"


def quickly(settings):
    """Alertmanager that tells changes of a group after seconds."""
    settings["route"] |= {"group_wait": "1s", "group_interval": "3s"}


@contextlib.contextmanager
def relay_of(stack, folder, configuration, environment):
    """The stack's relay, as `verl-otel up --relay FILE` starts it in this environment."""
    (folder / "relay.yaml").write_text(configuration)
    stack.relay = str(folder / "relay.yaml")
    with pytest.MonkeyPatch.context() as patch:
        for name, value in environment.items():
            patch.setenv(name, value)
        stack.restart("relay")
        try:
            yield
        finally:
            stack.stop(["relay"])


@pytest.fixture(scope="module")
def stack(tmp_path_factory):
    """What alerts need of the stack, with limits for this run."""
    folder = tmp_path_factory.mktemp("alerting")
    (folder / "thresholds.yaml").write_text(yaml.safe_dump(THRESHOLDS))
    (folder / "alerts.yaml").write_text(rules.generate(thresholds.load(folder / "thresholds.yaml")))
    stack = Stack(folder / "stack", rules=folder / "alerts.yaml")
    stack.services = ["prometheus", "alertmanager", "collector"]
    with stack, changed(stack, "prometheus", often), changed(stack, "alertmanager", quickly):
        yield stack


@pytest.fixture(scope="module")
def control(tmp_path_factory):
    """Environment variables of run control."""
    folder = tmp_path_factory.mktemp("control")
    (folder / "runs").mkdir()
    (folder / "token").write_bytes(os.urandom(16).hex().encode())
    (folder / "token").chmod(0o600)
    return {"VERL_OTEL_CONTROL": f"{folder}/runs", "VERL_OTEL_CONTROL_TOKEN_FILE": f"{folder}/token"}


def command(control, *arguments):
    """`verl-otel control`, as a person types it."""
    done = subprocess.run(
        [bed.PYTHON.parent / "verl-otel", "control", RUN, *arguments],
        env=bed.clean_environment(**control), capture_output=True, text=True, timeout=60,
    )  # fmt: skip
    return done.stdout + done.stderr


def run_of(stack, checkpoints, control, fork_server, **more):
    environment = {
        "OTEL_EXPORTER_OTLP_ENDPOINT": stack.url("otlp_http"),
        "OTEL_METRIC_EXPORT_INTERVAL": "1000",
        "OTEL_LOGS_EXPORTER": "otlp,verl_otel_file",
        "OTEL_TRACES_EXPORTER": "otlp,verl_otel_file",
        "VERL_OTEL_RUN_ID": RUN,
        **control,
        **more.pop("environment", {}),
    }
    arguments = [
        *("grpo", *bed.FAST_SAMPLER, "trainer.project_name=alerts", "trainer.experiment_name=faults"),
        *("trainer.test_freq=-1", "trainer.val_before_train=False", "trainer.resume_mode=auto"),
        f"trainer.default_local_dir={checkpoints}",
    ]
    return bed.run(arguments=arguments, fork_server=fork_server, environment=environment, **more)


@pytest.fixture(scope="module")
def robots():
    started = Robots()
    yield started
    started.stop()


@pytest.fixture(scope="module")
def alerted(tmp_path_factory, stack, fork_server, control, robots):
    """A run that hangs twice, and then has a loss that is not finite, until a person stops it."""
    folder = tmp_path_factory.mktemp("alerted")
    environment = {"ROBOT_URL": robots.url("dingtalk"), "ROBOT_SECRET": robots.secret, **control}
    asked = []

    def person():
        """Of another team, with a token of their own; and then who looks after the run, when it is paused."""
        Channel(Channel.from_environ(control).folder, b"a token of another team").ask(RUN, "stop", "mallory", "")
        if eventually(lambda: command(control, "status").startswith("paused"), 240):
            time.sleep(2)
            asked.append(command(control, "stop", "--reason", "the data is wrong"))

    threads = [threading.Thread(target=person)]

    def on_line(line):
        if "step:1 - " in line:
            threads[0].start()

    with relay_of(stack, folder, RELAY, environment):
        run = run_of(
            stack, folder / "checkpoints", control, fork_server,
            folder=folder / "run", steps=60, on_line=on_line, timeout=400,
            environment={
                "MODULES": "verl_cpu.register,loss_fault",
                "LOSS_FAULT": ",".join([*(f"hang@{step}" for step in HANGS), f"nan@{NAN}"]),
            },
        )  # fmt: skip
        threads[0].join(60)
        assert run.returncode == 0, run.output[-4000:]
        eventually(lambda: set(told(robots)) == {"VerlRunHung", "VerlThroughputLow", "VerlNonFinite"})
        eventually(lambda: over(robots))
    return run, asked


def told(robots):
    """Alert -> when the robot was first told that it fires, and the text."""
    found = {}
    for when, text in zip(robots.times, robots.texts(), strict=True):
        for name in re.findall(r"\*\*FIRING\*\* (\w+)", text):
            found.setdefault(name, (when, text))
    return found


def over(robots):
    return [text for text in robots.texts() if "**RESOLVED** VerlRunHung" in text]


@pytest.mark.parametrize(
    ("name", "fault"), [("VerlRunHung", "hang"), ("VerlThroughputLow", "hang"), ("VerlNonFinite", "nan")]
)
def test_a_robot_is_told_within_a_minute_of_the_fault(alerted, robots, name, fault):
    began = float(re.search(rf"loss_fault {fault} at ([\d.]+)", alerted[0].output)[1])
    when, text = told(robots)[name]
    assert began < when < began + 60
    assert robots.refused == []
    assert f"**FIRING** {name} (critical)" in text
    assert "project alerts, experiment faults, run alerted" in text
    assert f"[runbook](http://runbooks/{name}.md)" in text
    assert all(f"[{name}](http://" in text for name in ("Grafana", "Jaeger", "MLflow"))
    value = {"VerlRunHung": r"\d+\.?\d*s", "VerlThroughputLow": r"[\d.e+]+ tokens/s", "VerlNonFinite": r"\d+"}[name]
    assert re.search(rf"^value {value}\s*$", text, re.MULTILINE), text


def test_the_robot_is_told_of_a_stage_that_hangs_and_of_the_ranks_with_nan(alerted, robots):
    assert re.search(r"hangs in stage update\b", told(robots)["VerlRunHung"][1])
    assert re.search(r"verl\.loss in stage update on rank [01]: \d", told(robots)["VerlNonFinite"][1])


def test_the_robot_is_told_that_it_is_over_too(alerted, robots):
    assert over(robots)


def test_the_alert_pauses_the_run_with_a_checkpoint_and_a_person_stops_it(alerted):
    run, asked = alerted
    assert "the run has seen request" in asked[0]
    recorded = reader.load(run.telemetry)
    audit = [event.attributes for event in recorded.events_named("verl.control")]
    assert [(e["verl.control.action"], e["verl.control.result"]) for e in audit] == [
        *(("pause", "accepted"), ("pause", "paused"), ("pause", "replaced")),
        *(("stop", "accepted"), ("stop", "stopping"), ("stop", "stopped")),
    ]
    assert audit[0]["verl.control.by"] == "alert VerlNonFinite"
    (pause,) = [span for span in recorded.spans if span.name == "verl.pause"]
    assert pause.seconds > 2
    (finished,) = recorded.events_named("verl.run.finished")
    assert finished.attributes["verl.run.state"] == "stopped"


def test_a_request_with_another_token_does_nothing_but_count(stack, alerted):
    query = f'verl_control_requests_total{{verl_run_id="{RUN}",verl_control_result="wrong_token"}}'
    assert [series["value"][1] for series in eventually(lambda: prometheus(stack, query, alerted[0]))] == ["1"]


def test_the_run_goes_on_from_its_checkpoint(stack, alerted, control, fork_server):
    checkpoints = alerted[0].folder.parent / "checkpoints"
    saved = int((checkpoints / "latest_checkpointed_iteration.txt").read_text())
    assert NAN < saved < 60 and saved == max(alerted[0].printed())
    resumed = run_of(stack, checkpoints, control, fork_server, folder=checkpoints.parent / "resumed", steps=saved + 1)
    assert resumed.returncode == 0, resumed.output[-4000:]
    assert sorted(resumed.printed()) == [saved + 1]


# ---- without a run: what Alertmanager makes of several alerts

ROBOTS = """
robots:
  - {name: a, kind: wecom, url: {env: WECOM}, match: {verl_run_id: r9}}
  - {name: b, kind: dingtalk, url: {env: DINGTALK}, secret: {env: SECRET}, match: {verl_run_id: r9}}
  - {name: c, kind: feishu, url: {env: FEISHU}, secret: {env: SECRET}, match: {verl_run_id: r9}}
  - {name: d, kind: webhook, url: {env: WEBHOOK}, match: {verl_run_id: r9}}
"""


def post_alerts(stack, ends_in):
    now = datetime.datetime.now(datetime.timezone.utc)
    alerts = [
        {
            "labels": {"alertname": "VerlRankMissing", "severity": "critical", "verl_run_id": "r9", "rank": str(rank)},
            "annotations": {"summary": f"rank {rank} sends nothing any more"},
            "startsAt": (now - datetime.timedelta(seconds=30)).isoformat(),
            "endsAt": (now + datetime.timedelta(seconds=ends_in)).isoformat(),
        }
        for rank in range(3)
    ]
    headers = {"content-type": "application/json"}
    url = stack.url("alertmanager") + "/api/v2/alerts"
    with urllib.request.urlopen(urllib.request.Request(url, json.dumps(alerts).encode(), headers)) as response:
        assert response.status == 200


def test_a_group_of_alertmanager_is_one_message_to_each_kind_of_robot_and_one_when_it_is_over(stack, tmp_path):
    robots = Robots()
    urls = {kind.upper(): robots.url(kind) for kind in ("wecom", "dingtalk", "feishu", "webhook")}
    with relay_of(stack, tmp_path, ROBOTS, {"SECRET": robots.secret, **urls}):
        post_alerts(stack, ends_in=300)
        assert eventually(lambda: len(robots.taken) == 4)
        post_alerts(stack, ends_in=-1)
        assert eventually(lambda: len(robots.taken) == 8)
    robots.stop()
    for kind in ("wecom", "dingtalk", "feishu", "webhook"):
        firing, over = (text for (of, _), text in zip(robots.taken, robots.texts(), strict=True) if of == kind)
        assert firing.startswith("**3 firing: VerlRankMissing**") and firing.count("**FIRING**") == 3
        assert over.startswith("**3 resolved: VerlRankMissing**") and over.count("**RESOLVED**") == 3
    assert robots.refused == []
