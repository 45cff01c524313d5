"""Runs and services that several tests look at: each is started once, by the first test that needs it."""

import shutil
import socket
import subprocess
import sys
import tempfile
from pathlib import Path

import bed
import pytest

from verl_otel.stack.stack import Stack

ROOT = Path(__file__).resolve().parents[2]
sys.path.append(str(ROOT / "tests" / "unit"))  # bridge_runs


@pytest.fixture(scope="session")
def fork_server():
    server = bed.ForkServer.start()
    yield server
    server.stop()


@pytest.fixture(scope="session")
def stack(tmp_path_factory):
    """The Collector, Jaeger, Prometheus, Alertmanager, MLflow and the bridge."""
    stack = Stack(tmp_path_factory.mktemp("stack"))
    stack.start()
    yield stack
    stack.stop()


@pytest.fixture(scope="session")
def ppo_run(tmp_path_factory, stack, fork_server):
    """PPO with critic and reference, 2 ranks, 3 steps, through the stack, beside verl's own loggers."""
    folder = tmp_path_factory.mktemp("ppo")
    run = bed.run(
        folder,
        [
            *bed.PPO_WITH_CRITIC_AND_REFERENCE,
            *bed.FAST_SAMPLER,
            "trainer.logger=[console,tensorboard,file,mlflow]",
            "trainer.project_name=alpha",
            "trainer.experiment_name=ppo",
            "trainer.save_freq=2",
        ],
        fork_server=fork_server,
        environment={
            "OTEL_EXPORTER_OTLP_ENDPOINT": stack.url("otlp_http"),
            "OTEL_METRIC_EXPORT_INTERVAL": "1000",  # else workers may export once in so short a run: a rate needs two
            "VERL_OTEL_RUN_ID": "ppo-run",
            "TENSORBOARD_DIR": str(folder / "tensorboard"),
            "VERL_FILE_LOGGER_ROOT": str(folder / "file"),
            "MLFLOW_TRACKING_URI": f"sqlite:///{folder}/own-mlflow.db",  # verl's own logger; ours goes to the stack
        },
    )
    assert run.returncode == 0, run.output[-4000:]
    return run


@pytest.fixture(scope="session")
def demo(tmp_path_factory):
    """`make demo`: the main job as a user types it, its own Ray cluster, no fork server, nothing configured."""
    folder = tmp_path_factory.mktemp("demo") / "output"
    command = ["make", "demo", f"DEMO=--folder {folder}"]
    result = subprocess.run(command, cwd=ROOT, env=bed.clean_environment(), capture_output=True, text=True, timeout=600)
    assert result.returncode == 0, result.stdout[-3000:] + result.stderr[-3000:]
    return result.stdout, bed.Run(0, folder, folder / "run.log", 0.0)


@pytest.fixture(scope="session")
def plain_run(demo):
    """The run of the demo: GRPO, 2 ranks, 4 steps."""
    return demo[1]


@pytest.fixture(scope="session")
def joined_run(tmp_path_factory, fork_server):
    """A run on a Ray cluster that was started before, without any of our settings."""
    with socket.create_server(("127.0.0.1", 0)) as s:
        port = s.getsockname()[1]
    with bed.cluster(port) as address:
        folder = tmp_path_factory.mktemp("joined")
        run = bed.run(
            folder,
            [*bed.PPO_WITH_CRITIC_AND_REFERENCE, *bed.FAST_SAMPLER],
            steps=2,
            cluster=address,
            fork_server=fork_server,
        )
    assert run.returncode == 0, run.output[-4000:]
    return run


@pytest.fixture
def short_folder():
    folder = tempfile.mkdtemp(prefix="vo", dir="/tmp")
    yield folder
    shutil.rmtree(folder, ignore_errors=True)
