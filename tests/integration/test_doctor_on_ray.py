"""`verl-otel doctor` on a real Ray cluster of two nodes, and inside a worker of an instrumented run."""

import json
import os
import subprocess
import sys
import textwrap
from pathlib import Path

import bed
import pytest

from verl_otel import hooks
from verl_otel.doctor import cluster
from verl_otel.doctor.asked import Asked

DRIVER = {"RAY_AUTH_MODE": "token"}
"""What a driver needs to join the test bed's clusters."""

INSIDE = """
import json, os, subprocess, sys
import ray

ray.init(sys.argv[1])

@ray.remote(num_cpus=0, resources={"node:__internal_head__": 0.01})  # the node of this version
class Worker:
    def look(self):
        instrument = os.path.join(os.path.dirname(sys.executable), "opentelemetry-instrument")  # not inherited
        command = [instrument, sys.executable, "-m", "verl_otel.cli", "doctor", "--json"]
        return subprocess.run(command, capture_output=True, text=True).stdout

print(json.dumps(json.loads(ray.get(Worker.remote().look.remote()))))
"""


def free_port():
    import socket

    with socket.create_server(("127.0.0.1", 0)) as s:
        return s.getsockname()[1]


@pytest.fixture(scope="module")
def two_nodes(tmp_path_factory):
    """The address of a cluster; its second node has an older verl-otel, as far as its metadata say."""
    folder = tmp_path_factory.mktemp("old")
    metadata = folder / "verl_otel-0.0.1.dist-info" / "METADATA"
    metadata.parent.mkdir()
    metadata.write_text("Metadata-Version: 2.1\nName: verl-otel\nVersion: 0.0.1\n")
    with bed.cluster(free_port(), nodes=("A=1", f"PYTHONPATH={folder}")) as address:
        yield address


def test_each_node_is_asked_what_it_has(two_nodes):
    found = {}
    for finding in cluster.check(Asked(bed.clean_environment(**DRIVER), ray=two_nodes)):
        found.setdefault(finding.id, []).append(finding)
    assert found.keys() == {"VO-RAY-NODE", "VO-RAY-NODE-VERSIONS", "VO-CLOCK"}, found
    (well,), (other,) = found["VO-RAY-NODE"], found["VO-RAY-NODE-VERSIONS"]
    assert bed.SECOND_NODE in other.data["node"] and bed.SECOND_NODE not in well.data["node"]
    assert "verl-otel 0.0.1 (here " in other.what
    assert len(found["VO-CLOCK"]) == 2  # one machine, one clock


def test_a_cluster_that_is_not_there_is_a_problem():
    (finding,) = cluster.check(Asked(bed.clean_environment(), ray=f"127.0.0.1:{free_port()}", timeout=5))
    assert finding.id in ("VO-RAY-UNREACHABLE", "VO-RAY-UNFINISHED") and finding.fix  # Ray tries for half a minute


def test_a_cluster_that_wants_a_token_is_told(two_nodes):
    (finding,) = cluster.check(Asked(bed.clean_environment(), ray=two_nodes))
    assert finding.id == "VO-RAY-UNREACHABLE" and "RAY_AUTH_MODE=token" in finding.what


def test_without_being_asked_nothing_is_started(monkeypatch):
    monkeypatch.setattr(cluster.child, "run", lambda *_: pytest.fail("a process was started"))
    assert list(cluster.check(Asked({"RAY_ADDRESS": "127.0.0.1:1"}))) == []


def test_inside_a_worker_it_sees_that_it_is_part_of_the_run(two_nodes, tmp_path):
    program = tmp_path / "inside.py"
    program.write_text(textwrap.dedent(INSIDE))
    disabled = ",".join(sorted({hook.name for hook in hooks.HOOKS} - {"ray_init"}))  # it carries the environment
    env = bed.clean_environment(
        VERL_OTEL_DISABLED_HOOKS=disabled,
        VERL_OTEL_FOLDER=str(tmp_path / "runs"),
        VERL_OTEL_RUN_ID="inside",
        **DRIVER,
    )
    command = [bed.INSTRUMENT, sys.executable, str(program), two_nodes]
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stderr[-3000:]
    content = json.loads(done.stdout.splitlines()[-1])
    found = {finding["id"]: finding for finding in content["findings"]}
    assert found["VO-ACTIVE"]["data"] == {"active": True, "worker": True}
    settings = [finding["what"] for finding in content["findings"] if finding["id"] == "VO-SETTING"]
    assert "VERL_OTEL_RUN_ID=inside" in settings and f"VERL_OTEL_FOLDER={tmp_path / 'runs'}" in settings
    assert found["VO-HOOKS-ON"]["data"]["seams"] == ["ray_init on ray"]
    assert content["counts"]["problem"] == 0
    assert not list(Path(tmp_path, "runs").rglob("*worker*")), "doctor is no process of the run"


NODE = {"node": "a (1)", "ahead": 0.0}


@pytest.mark.parametrize(
    ("there", "id"),
    [
        (None, "VO-RAY-NODE-NO-ANSWER"),
        ({"versions": dict.fromkeys(cluster.PACKAGES, ""), "executable": "/usr/bin/python"}, "VO-RAY-NODE-WITHOUT"),
    ],
)
def test_a_node_without_us_or_without_an_answer_is_a_problem(there, id, monkeypatch):
    told = [{"here": {"versions": {"verl-otel": "1"}}}, {**NODE, "there": there, "reason": "GetTimeoutError"}]
    monkeypatch.setattr(cluster.child, "run", lambda *_: iter([*told, {"ended": ""}]))
    found = [finding for finding in cluster.check(Asked(dict(os.environ), ray="")) if finding.id != "VO-CLOCK"]
    assert [(finding.id, finding.level) for finding in found] == [(id, "problem")]
