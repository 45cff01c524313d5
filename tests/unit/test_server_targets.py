"""How Prometheus finds the rollout servers' own metrics (`export/server_targets.py`, `hooks/rollout_replica.py`)."""

import asyncio
import importlib
import json
import os
import stat
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import ModuleType, SimpleNamespace

import pytest

from verl_otel import border, telemetry
from verl_otel.export import server_targets
from verl_otel.export.server_targets import ServerTargets
from verl_otel.hooks import rollout_replica
from verl_otel.hooks.patches import Patches
from verl_otel.identity import Identity

IDENTITY = Identity("run-1", 2, "trainer", project="alpha", experiment="数学")


@pytest.fixture(autouse=True)
def impatient(monkeypatch):
    monkeypatch.setattr(server_targets, "PAUSE", 0.01)
    monkeypatch.setattr(server_targets, "TIMEOUT", 0.5)


@pytest.fixture
def serve():
    """Start a server that gives one answer to every request; gives its address and the paths asked for."""
    running = []

    def start(status=200, kind="text/plain; version=0.0.4; charset=utf-8", fail_first=0):
        asked = []

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self):
                asked.append(self.path)
                if len(asked) <= fail_first:
                    self.connection.close()
                    return
                self.send_response(status)
                self.send_header("Content-Type", kind)
                self.end_headers()

            def log_message(self, *arguments):
                pass

        server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
        running.append(server)
        return f"127.0.0.1:{server.server_port}", asked

    yield start
    for server in running:
        server.shutdown()
        server.server_close()


def replica(address, rank=0, **more):
    """Like verl's `RolloutReplica`."""
    return SimpleNamespace(server_address=address, replica_rank=rank, config=SimpleNamespace(name="vllm"), **more)


def announce(targets, *replicas):
    for one in replicas:
        targets.launched(one)
    for thread in threading.enumerate():
        if thread.name == "verl-otel-server-targets":
            thread.join(10)


def files(folder):
    found = folder / "rollout-servers"
    return {path.name: json.loads(path.read_text()) for path in found.iterdir()} if found.exists() else {}


def test_a_server_with_metrics_is_a_target_with_the_labels_of_its_run(tmp_path, serve):
    address, asked = serve()
    announce(ServerTargets(IDENTITY, str(tmp_path)), replica(address, rank=3))
    assert files(tmp_path) == {
        "run-1-rollout-3.json": [
            {
                "targets": [address],
                "labels": {
                    "verl_run_id": "run-1",
                    "verl_run_attempt": "2",
                    "verl_project_name": "alpha",
                    "verl_experiment_name": "数学",
                    "verl_process_role": "rollout_server",
                    "verl_replica": "3",
                    "gen_ai_provider_name": "vllm",
                    "model_type": "rollout",
                    "host_name": "127.0.0.1",
                },
            }
        ]
    }
    assert asked == ["/metrics"]
    assert stat.S_IMODE(os.stat(tmp_path / "rollout-servers" / "run-1-rollout-3.json").st_mode) == 0o644


def test_the_node_has_the_name_that_ray_knows(tmp_path, serve, monkeypatch):
    ray = ModuleType("ray")
    ray.nodes = lambda: [{"NodeManagerAddress": "127.0.0.1", "NodeManagerHostname": "gpu-node-17"}]  # type: ignore[attr-defined]
    monkeypatch.setitem(__import__("sys").modules, "ray", ray)
    announce(ServerTargets(IDENTITY, str(tmp_path)), replica(serve()[0]))
    ((target,),) = files(tmp_path).values()
    assert target["labels"]["host_name"] == "gpu-node-17"


def test_servers_of_reward_models_and_teachers_are_told_apart(tmp_path, serve):
    address, _ = serve()
    announce(
        ServerTargets(IDENTITY, str(tmp_path)),
        replica(address),
        replica(address, is_reward_model=True),
        replica(address, is_teacher_model=True),
    )
    assert {name: target["labels"]["model_type"] for name, (target,) in files(tmp_path).items()} == {
        "run-1-rollout-0.json": "rollout",
        "run-1-reward-0.json": "reward",
        "run-1-teacher-0.json": "teacher",
    }


@pytest.mark.parametrize("answer", [{"status": 404}, {"kind": "application/json"}, {"status": 500}])
def test_a_server_without_metrics_is_no_target(tmp_path, serve, caplog, answer):
    """SGLang without `enable_metrics`; TRT-LLM, whose `/metrics` is JSON."""
    announce(ServerTargets(IDENTITY, str(tmp_path)), replica(serve(**answer)[0]))
    assert files(tmp_path) == {} and "rollout server" not in caplog.text


@pytest.mark.parametrize("address", ["127.0.0.1:my_server_0_0", "127.0.0.1:1", "", "None", "no such host:80"])
def test_an_address_that_is_none_is_no_target_and_no_complaint(tmp_path, caplog, address):
    announce(ServerTargets(IDENTITY, str(tmp_path)), replica(address))
    assert files(tmp_path) == {} and "rollout server" not in caplog.text and border.failures() == {}


def test_a_server_that_is_busy_is_asked_again(tmp_path, serve):
    address, asked = serve(fail_first=2)
    announce(ServerTargets(IDENTITY, str(tmp_path)), replica(address))
    assert len(files(tmp_path)) == 1 and len(asked) == 3


def test_a_proxy_of_the_environment_is_not_asked(tmp_path, serve, monkeypatch):
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:1")
    fresh = importlib.reload(server_targets)
    announce(fresh.ServerTargets(IDENTITY, str(tmp_path)), replica(serve()[0]))
    assert len(files(tmp_path)) == 1


def test_verl_does_not_wait_for_a_server_that_does_not_answer(tmp_path):
    import socket

    with socket.create_server(("127.0.0.1", 0)) as silent:
        start = time.monotonic()
        targets = ServerTargets(IDENTITY, str(tmp_path))
        targets.launched(replica(f"127.0.0.1:{silent.getsockname()[1]}"))
        assert time.monotonic() - start < 0.2
        targets.remove()
        assert time.monotonic() - start < 0.4


def test_at_the_end_the_files_of_this_attempt_go_and_others_stay(tmp_path, serve):
    address, _ = serve()
    others = [
        ServerTargets(Identity("run-1", 1, "trainer"), str(tmp_path)),
        ServerTargets(Identity("run-1-b", 2, "trainer"), str(tmp_path)),
    ]
    ours = ServerTargets(IDENTITY, str(tmp_path))
    announce(ours, replica(address, 0), replica(address, 1))
    announce(others[1], replica(address, 0))
    (tmp_path / "rollout-servers" / "run-1-notes.json").write_text("not ours")
    ours.remove()
    assert sorted(path.name for path in (tmp_path / "rollout-servers").iterdir()) == [
        "run-1-b-rollout-0.json",
        "run-1-notes.json",
    ]
    announce(others[0], replica(address, 0))
    ours.remove()
    assert "run-1-rollout-0.json" in {path.name for path in (tmp_path / "rollout-servers").iterdir()}


def test_nothing_is_written_after_the_end(tmp_path, serve):
    targets = ServerTargets(IDENTITY, str(tmp_path))
    targets.remove()
    announce(targets, replica(serve()[0]))
    assert files(tmp_path) == {}


def test_a_folder_that_cannot_be_written_is_one_warning(tmp_path, serve, caplog):
    (tmp_path / "rollout-servers").write_text("a file")
    address, _ = serve()
    announce(ServerTargets(IDENTITY, str(tmp_path)), replica(address, 0), replica(address, 1))
    assert caplog.text.count("VERL_OTEL_FOLDER") == 1


def test_a_replica_that_is_none_costs_nothing(tmp_path):
    ServerTargets(IDENTITY, str(tmp_path)).launched(object())
    assert border.failures() == {"announcing a rollout server": 1}


# ---- when the servers run


@pytest.fixture
def hooked(monkeypatch):
    module, patches, told = ModuleType("verl.workers.rollout.replica"), Patches(), []

    class RolloutReplica:
        async def init_hybrid(self, worker_group):
            await self.launch_servers()
            return worker_group

        async def init_standalone(self):
            await self.launch_servers()

    module.RolloutReplica = RolloutReplica  # type: ignore[attr-defined]
    rollout_replica.install(module, patches)
    process = SimpleNamespace(server_launched=lambda found: told.append((found, found.launched)))
    monkeypatch.setattr(telemetry, "_current", process)

    class MyReplica(RolloutReplica):
        launched = False

        async def launch_servers(self):
            await asyncio.sleep(0)
            self.launched = True

    yield MyReplica, told
    patches.undo()


def test_it_is_told_when_the_servers_of_any_backend_run(hooked):
    replica_class, told = hooked
    one, other = replica_class(), replica_class()
    assert asyncio.run(one.init_hybrid("workers")) == "workers"
    asyncio.run(other.init_standalone())
    assert told == [(one, True), (other, True)]


def test_servers_that_do_not_start_are_not_told(hooked):
    replica_class, told = hooked

    class Failing(replica_class):
        async def launch_servers(self):
            raise RuntimeError("no GPU")

    with pytest.raises(RuntimeError, match="no GPU"):
        asyncio.run(Failing().init_standalone())
    assert told == []


def test_a_version_without_this_seam_turns_the_hook_off():
    module = ModuleType("verl.workers.rollout.replica")
    module.RolloutReplica = object  # type: ignore[attr-defined]
    with pytest.raises(AttributeError):
        rollout_replica.install(module, Patches())


@pytest.mark.parametrize(("variable", "value"), [("OTEL_METRICS_EXPORTER", "none"), ("VERL_OTEL_LEVELS", "server=off")])
def test_who_wants_no_metrics_gets_no_targets(memory, monkeypatch, tmp_path, serve, variable, value):
    monkeypatch.setenv("VERL_OTEL_FOLDER", str(tmp_path))
    monkeypatch.setenv(variable, value)
    announce(SimpleNamespace(launched=memory.process("trainer").server_launched), replica(serve()[0]))
    assert files(tmp_path) == {}


def test_the_end_of_training_and_of_the_launcher_remove_the_targets(memory, monkeypatch, tmp_path, serve):
    monkeypatch.setenv("VERL_OTEL_FOLDER", str(tmp_path))
    address, _ = serve()
    for role, end in (("trainer", "finish"), ("launcher", "close")):
        made = memory.process(role)
        announce(SimpleNamespace(launched=made.server_launched), replica(address))
        assert len(files(tmp_path)) == 1
        getattr(made, end)()
        memory.settle()
        assert files(tmp_path) == {}


def test_a_launcher_inside_a_run_leaves_the_targets(memory, monkeypatch, tmp_path, serve):
    monkeypatch.setenv("VERL_OTEL_FOLDER", str(tmp_path))
    monkeypatch.setenv("VERL_OTEL_ACTIVE", "1")
    made = memory.process("launcher")
    announce(SimpleNamespace(launched=made.server_launched), replica(serve()[0]))
    made.close()
    memory.settle()
    assert len(files(tmp_path)) == 1
