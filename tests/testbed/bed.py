"""Real verl training runs on the CPU test bed, for the tests and the demo.

Nothing of verl is edited or mocked: `verl_cpu` registers a CPU platform, engines and a rollout server through verl's
own registries (see README.md here).
"""

import atexit
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from environments import HERE, Environment

BED = Path(__file__).resolve().parent
ROOT = BED.parents[1]
PYTHON = Path(sys.executable)
INSTRUMENT = str(PYTHON.parent / "opentelemetry-instrument")
LAUNCHER = os.environ.get("ZYGOTE_LAUNCHER") or sys.executable
"""What starts a Python process: the fork server's stand-in, if there is one for this environment."""

FAST_SAMPLER = (
    f"trainer.v1.sampler.custom_sampler.path={BED}/fast_sampler.py",
    "trainer.v1.sampler.custom_sampler.name=FastReplayBuffer",
)
"""verl's replay buffer looks for finished rollouts every 2 s; with this, every 0.1 s."""

PPO_WITH_CRITIC_AND_REFERENCE = ("gae", "actor_rollout_ref.actor.use_kl_loss=True")

PROCESSES = {
    ("launcher", ""): 1,
    ("trainer", "TaskRunnerV1"): 1,
    ("worker", "WorkerDict"): 2,
    ("rollout_server", "HFCpuServer"): 2,
    ("agent_loop", "AgentLoopWorkerTQ"): 1,
    ("reward_worker", "RewardLoopWorker"): 1,
    ("other", "GlobalRequestLoadBalancer"): 1,
}
"""(role, class of the actor) -> how many processes of a GRPO run with 2 ranks have telemetry."""


def clean_environment(**extra: str) -> dict[str, str]:
    """This process's environment without anything that configures telemetry, plus `extra`."""
    dropped = ("OTEL_", "VERL_OTEL_", "TRACEPARENT", "TRACESTATE", "RAY_", "MLFLOW_", "PYTHONPATH")
    kept = {k: v for k, v in os.environ.items() if not k.startswith(dropped)}
    return {**kept, **HERE.variables, **extra}


def assets() -> Path:
    """The tiny model, tokenizer and data of this environment."""
    return HERE.assets


@dataclass
class Run:
    """A finished run."""

    returncode: int
    folder: Path
    log: Path
    seconds: float

    @property
    def output(self) -> str:
        return self.log.read_text(errors="replace")

    @property
    def telemetry(self) -> Path:
        """The folder with the recorded telemetry (of the one run in it)."""
        (found,) = (self.folder / "verl-otel").iterdir()
        return found

    def printed(self) -> dict[int, dict[str, float]]:
        """What verl's console logger printed: step -> key -> value."""
        steps: dict[int, dict[str, float]] = {}
        for line in self.output.splitlines():
            _, marker, rest = line.partition("step:")
            parts = rest.split(" - ")
            if marker and parts[0].strip().isdigit() and len(parts) > 1:
                for part in parts[1:]:
                    key, _, text = part.rpartition(":")
                    number = re.fullmatch(r"(?:np\.\w+\()?([-+.\dA-Za-z]+)\)?", text.strip())
                    steps.setdefault(int(parts[0]), {})[key] = float(number[1])  # type: ignore[index]
        return steps


def run(
    folder: Path,
    arguments: Sequence[str],
    *,
    ranks: int = 2,
    steps: int = 3,
    script: str = "run_ppo.sh",
    verl: Environment = HERE,
    fork_server: "ForkServer | None" = None,
    cluster: str = "",
    environment: dict[str, str] | None = None,
    on_line: Callable[[str], None] = lambda _: None,
    timeout: float = 600,
) -> Run:
    """Run verl in `folder`, which becomes its working directory.

    Args:
        arguments: `grpo` or `gae`, then overrides of verl's configuration.
        verl: the environment of another version of verl (`environments.environment`).
        fork_server: one that was started for the same environment.
        cluster: address of a running Ray cluster to join; by default the run starts its own.
        on_line: called with each line of output.
    """
    folder.mkdir(parents=True, exist_ok=True)
    ray_folder = Path(tempfile.mkdtemp(prefix="vo", dir="/tmp"))  # short: Ray puts Unix sockets under it
    env = clean_environment(
        PYTHON=str(verl.python),
        ASSETS=str(verl.assets),
        OUT=str(folder),
        RAY_TMP=str(ray_folder),
        RANKS=str(ranks),
        STEPS=str(steps),
        LAUNCH=verl.instrument,
        **verl.variables,
    )
    if fork_server is not None:
        env["ZYGOTE"] = str(fork_server.socket)
    if cluster:
        env["CLUSTER"] = cluster
    env.update(environment or {})
    log = folder / "run.log"
    start = time.monotonic()
    process = subprocess.Popen(
        [BED / script, *arguments],
        env=env,
        cwd=folder,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        stdin=subprocess.DEVNULL,
        text=True,
        errors="replace",
        start_new_session=True,
    )
    try:
        assert process.stdout is not None
        with log.open("w") as copy:
            for line in process.stdout:
                copy.write(line)
                on_line(line)
                if time.monotonic() - start > timeout:
                    raise TimeoutError(f"the run takes longer than {timeout:.0f} s; see {log}")
        process.wait(timeout=60)
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        shutil.rmtree(ray_folder, ignore_errors=True)
    return Run(process.returncode, folder, log, time.monotonic() - start)


@dataclass
class ForkServer:
    """A process that has torch and the like loaded and forks Ray's workers: a run costs a third (see README.md)."""

    socket: Path
    pid: int
    folder: Path = field(repr=False)

    @classmethod
    def start(cls, python: Path = PYTHON) -> "ForkServer":
        folder = Path(tempfile.mkdtemp(prefix="vz", dir="/tmp"))
        socket = folder / "z"
        output = subprocess.run(
            [BED / "fork" / "start.sh", python, socket], check=True, capture_output=True, text=True, timeout=180,
            env=clean_environment(),
        )  # fmt: skip
        return cls(socket, int(output.stdout.split()[-1]), folder)

    def variables(self, python: Path = PYTHON) -> dict[str, str]:
        """Environment variables with which `LAUNCHER`, and Ray's workers in tests that use it, are forked."""
        launcher = str(BED / "fork" / "zpython")
        return {"ZYGOTE": str(self.socket), "ZYGOTE_PYTHON": str(python), "ZYGOTE_LAUNCHER": launcher}

    def stop(self) -> None:
        try:
            os.kill(self.pid, signal.SIGTERM)
        except ProcessLookupError:
            pass
        shutil.rmtree(self.folder, ignore_errors=True)


_servers: dict[Path, ForkServer] = {}


def fork_server(python: Path) -> ForkServer:
    """The fork server of an environment, started when it is first needed, until this process ends."""
    if python not in _servers:
        server = _servers[python] = ForkServer.start(python)
        atexit.register(server.stop)
    return _servers[python]


SECOND_NODE = "127.0.0.2"


@contextmanager
def cluster(port: int, dashboard: int | None = None, nodes: Sequence[str] = ("",)) -> Iterator[str]:
    """A Ray cluster that was started before, without any of our settings. Gives its address.

    Args:
        dashboard: port of the dashboard, which takes jobs; None for none.
        nodes: one or two, each by the variables of its own, `A=1 B=2`; of two, each has one logical GPU.
    """
    folder = Path(tempfile.mkdtemp(prefix="vc", dir="/tmp"))
    env = clean_environment(PYTHON=str(PYTHON), RAY_TMP=str(folder), PORT=str(port), GPUS=str(2 // len(nodes)))
    if dashboard is not None:
        env["DASHBOARD_PORT"] = str(dashboard)
    try:
        for command, own in zip(("start", "join"), nodes, strict=False):
            node = {**env, "NODE": SECOND_NODE, "NODE_ENV": own}
            subprocess.run([BED / "cluster.sh", command], env=node, check=True, stdout=subprocess.DEVNULL, timeout=180)
        yield f"127.0.0.1:{port}"
    finally:
        subprocess.run([BED / "cluster.sh", "stop"], env=env, check=False, stdout=subprocess.DEVNULL, timeout=60)
        shutil.rmtree(folder, ignore_errors=True)
