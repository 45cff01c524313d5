"""On a real Ray cluster: context through worker groups, and Ray itself left alone."""

import re
import shutil
import socket
import subprocess
import sys
import tempfile
import urllib.request
from pathlib import Path
from signal import SIGINT, SIGTERM, default_int_handler, signal

import bed
import pytest

from verl_otel.recording import reader

HERE = Path(__file__).parent


@pytest.fixture
def ray_folder():
    folder = tempfile.mkdtemp(prefix="vo", dir="/tmp")
    yield folder
    shutil.rmtree(folder, ignore_errors=True)


def test_every_rank_of_every_kind_of_worker_group_is_under_the_stage_that_called_it(tmp_path, ray_folder):
    result = subprocess.run(
        [bed.INSTRUMENT, bed.LAUNCHER, HERE / "worker_groups.py", ray_folder],
        env=bed.clean_environment(
            VERL_OTEL_FOLDER=str(tmp_path), PYTHONPATH=bed.HERE.python_path(HERE), GLOO_SOCKET_IFNAME="lo"
        ),
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert result.returncode == 0, result.stderr[-3000:]
    assert "the trainer got: RayTaskError(ValueError) ValueError: rank 1 has no memory left" in result.stdout
    assert "Failed to detach context" not in result.stderr + result.stdout

    spans = reader.load(tmp_path).spans
    by_id = {span.span_id: span for span in spans}
    under: dict[str, list] = {}
    for span in spans:
        if span.name.startswith("verl.worker."):
            parent = by_id.get(span.parent_id)
            row = (span.name, *(span.attributes[key] for key in ("rank", "stage", "model_type")))
            under.setdefault(parent.name if parent else "-", []).append(row)
    assert {stage: sorted(rows) for stage, rows in under.items()} == {
        # before any stage: in the run's own trace
        "verl.run": [("verl.worker.update_critic", rank, "other", "none") for rank in "01"],
        "verl.update_actor": [("verl.worker.update_actor", rank, "update", "actor") for rank in "01"],
        "verl.update_critic": sorted(
            [("verl.worker.update_critic", rank, "update", "critic") for rank in "01"] * 2  # fused and plain
        ),
        "verl.weight_sync": [("verl.worker.update_weights", rank, "weight_sync", "rollout") for rank in "01"],
        "verl.reward": [("verl.worker.fail", rank, "reward", "reward") for rank in "01"],
    }
    failed = {(s.name, s.attributes["rank"]): s.error for s in spans if s.error}
    assert "rank 1 has no memory left" in failed.pop(("verl.worker.fail", "1"))
    assert sorted(name for name, _ in failed) == ["verl.reward", "verl.step"]
    services = {s.resource["service.name"] for s in spans}
    assert services == {"verl-launcher", "verl-worker"}


RAY_METRICS = """
import ray, sys, time
ray.init(num_cpus=1, include_dashboard=False, object_store_memory=100_000_000, _temp_dir=sys.argv[1],
         _metrics_export_port=int(sys.argv[2]), logging_level="ERROR")

@ray.remote
def work():
    import verl.utils.tracking  # a worker of ours
    return 1

ray.get(work.remote())
print("ready", flush=True)
sys.stdin.read()
"""


def families_served_by_ray(folder, telemetry, *launch):
    """Names of the metric families that Ray's own Prometheus endpoint serves."""
    with socket.create_server(("127.0.0.1", 0)) as s:
        port = s.getsockname()[1]
    process = subprocess.Popen(
        [*launch, sys.executable, "-c", RAY_METRICS, folder, str(port)],
        env=bed.clean_environment(VERL_OTEL_FOLDER=str(telemetry)),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    )
    try:
        for line in process.stdout:
            if line.strip() == "ready":
                break
        seen: set[str] = set()
        unchanged = 0
        import time

        for _ in range(40):  # Ray reports every 10 s or so
            with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=10) as response:
                now = set(re.findall(r"^# TYPE (\S+)", response.read().decode(), re.M))
            unchanged = unchanged + 1 if now <= seen and len(seen) > 60 else 0
            seen |= now
            if unchanged >= 8:
                break
            time.sleep(1)
        return seen
    finally:
        process.stdin.close()
        process.wait(60)


def test_ray_serves_its_own_metrics_as_it_does_without_us(tmp_path, ray_folder):
    with_us = families_served_by_ray(ray_folder, tmp_path, bed.INSTRUMENT)
    other = tempfile.mkdtemp(prefix="vo", dir="/tmp")
    try:
        without_us = families_served_by_ray(other, tmp_path)
    finally:
        shutil.rmtree(other, ignore_errors=True)
    assert len(without_us) > 60
    assert len(with_us & without_us) > 0.9 * len(without_us), sorted(without_us - with_us)
    assert not [line for path in tmp_path.rglob("*.jsonl") for line in path.open() if '"ray_' in line]


ENDS_RAY = """
import ray, sys, threading, time
import verl.utils.tracking
from verl_otel.hooks.ray_answers import Answers

ray.init(num_cpus=1, include_dashboard=False, object_store_memory=100_000_000, _temp_dir=sys.argv[1],
         logging_level="ERROR")

@ray.remote
class Rank:
    def train(self):
        time.sleep(600)

rank = Rank.remote()
rank.train.remote()
waiting = {"asked": Answers.of([rank], print), "given up": Answers.of([rank], print)}

def another_thread():
    del waiting["given up"]
    print("answers:", waiting["asked"].ready(), waiting["asked"].get(), Answers.of([rank], print).get())
    waiting.clear()

class WithATurnForOurThread:
    def __init__(self, ray_itself):
        self.ray_itself = ray_itself
    def __getattr__(self, name):
        return getattr(self.ray_itself, name)
    def shutdown_driver(self):
        self.ray_itself.shutdown_driver()
        thread = threading.Thread(target=another_thread)
        thread.start()
        thread.join()

worker = ray._private.worker.global_worker
worker.core_worker = WithATurnForOurThread(worker.core_worker)
ray.shutdown()
print("the training goes on", ray.is_initialized())
"""


def test_a_thread_of_ours_does_not_end_a_process_that_shuts_ray_down(tmp_path, ray_folder):
    """Ray ends the process at once for a thread that uses it, or lets go of a reference, in that moment."""
    result = subprocess.run(
        [bed.INSTRUMENT, sys.executable, "-c", ENDS_RAY, ray_folder],
        env=bed.clean_environment(VERL_OTEL_FOLDER=str(tmp_path)), capture_output=True, text=True, timeout=120,
    )  # fmt: skip
    assert result.returncode == 0, result.stdout + result.stderr
    assert "answers: True [] []" in result.stdout
    assert "the training goes on False" in result.stdout


INTERRUPTED = """
import ray, sys, time
from verl.utils.tracking import Tracking
ray.init(num_cpus=1, include_dashboard=False, object_store_memory=100_000_000, _temp_dir=sys.argv[1],
         logging_level="ERROR")

@ray.remote
class TaskRunner:
    def run(self):
        tracking = Tracking("project", "experiment", default_backend=["console"], config={"trainer": {"nnodes": 1}})
        tracking.log({"actor/loss": 1.0}, step=1)
        print("trains", flush=True)
        time.sleep(600)

ray.get(TaskRunner.remote().run.remote())
"""


@pytest.mark.parametrize(("number", "what"), [(SIGINT, "KeyboardInterrupt"), (SIGTERM, "Terminated")])
def test_a_run_whose_launcher_is_ended_has_ended(tmp_path, ray_folder, number, what):
    """Ray kills the trainer with it, which mostly can say nothing any more."""
    process = subprocess.Popen(
        [bed.INSTRUMENT, sys.executable, "-c", INTERRUPTED, ray_folder],
        env=bed.clean_environment(VERL_OTEL_FOLDER=str(tmp_path), PYTHONUNBUFFERED="1"),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        preexec_fn=lambda: signal(SIGINT, default_int_handler),
    )
    try:
        assert any("trains" in line for line in process.stdout)
        process.send_signal(number)
        process.communicate(timeout=60)
    finally:
        process.kill()
    recording = reader.load(tmp_path)
    ends = recording.events_named("verl.run.finished")
    (end,) = [end for end in ends if end.resource["verl.process.role"] == "launcher"]
    assert end.attributes["verl.run.state"] == "killed" and end.body["exception.type"] == what
    (run,) = [span for span in recording.spans if span.name == "verl.run"]
    assert run.error.startswith(what)
