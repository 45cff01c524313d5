"""Real verl training runs on the CPU test bed, for the tests and the demo.

Nothing of verl is edited or mocked: `verl_cpu` registers a CPU platform, engines and a rollout server through verl's
own registries (see README.md here).
"""

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

BED = Path(__file__).resolve().parent
ROOT = BED.parents[1]
PYTHON = Path(sys.executable)
INSTRUMENT = str(PYTHON.parent / "opentelemetry-instrument")

FAST_SAMPLER = (
    f"trainer.v1.sampler.custom_sampler.path={BED}/fast_sampler.py",
    "trainer.v1.sampler.custom_sampler.name=FastReplayBuffer",
)
"""verl's replay buffer looks for finished rollouts every 2 s; with this, every 0.1 s."""

PPO_WITH_CRITIC_AND_REFERENCE = ("gae", "actor_rollout_ref.actor.use_kl_loss=True")


def clean_environment(**extra: str) -> dict[str, str]:
    """This process's environment without anything that configures telemetry, plus `extra`."""
    dropped = ("OTEL_", "VERL_OTEL_", "TRACEPARENT", "TRACESTATE", "RAY_", "MLFLOW_", "PYTHONPATH")
    return {**{k: v for k, v in os.environ.items() if not k.startswith(dropped)}, **extra}


def assets() -> Path:
    """The tiny model, tokenizer and data, made once per environment."""
    folder = Path(sys.prefix) / "testbed-assets"
    if not (folder / "sft.parquet").exists():  # the last one that is made
        subprocess.run([PYTHON, BED / "make_assets.py", folder], check=True, stdout=subprocess.DEVNULL)
    return folder


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
    fork_server: "ForkServer | None" = None,
    cluster: str = "",
    environment: dict[str, str] | None = None,
    on_line: Callable[[str], None] = lambda _: None,
    timeout: float = 600,
) -> Run:
    """Run verl in `folder`, which becomes its working directory.

    Args:
        arguments: `grpo` or `gae`, then overrides of verl's configuration.
        cluster: address of a running Ray cluster to join; by default the run starts its own.
        on_line: called with each line of output.
    """
    folder.mkdir(parents=True, exist_ok=True)
    ray_folder = Path(tempfile.mkdtemp(prefix="vo", dir="/tmp"))  # short: Ray puts Unix sockets under it
    env = clean_environment(
        PYTHON=str(PYTHON),
        ASSETS=str(assets()),
        OUT=str(folder),
        RAY_TMP=str(ray_folder),
        RANKS=str(ranks),
        STEPS=str(steps),
        LAUNCH=INSTRUMENT,
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
    def start(cls) -> "ForkServer":
        folder = Path(tempfile.mkdtemp(prefix="vz", dir="/tmp"))
        socket = folder / "z"
        output = subprocess.run(
            [BED / "fork" / "start.sh", PYTHON, socket], check=True, capture_output=True, text=True, timeout=180,
            env=clean_environment(),
        )  # fmt: skip
        return cls(socket, int(output.stdout.split()[-1]), folder)

    def stop(self) -> None:
        try:
            os.kill(self.pid, signal.SIGTERM)
        except ProcessLookupError:
            pass
        shutil.rmtree(self.folder, ignore_errors=True)


@contextmanager
def cluster(port: int) -> Iterator[str]:
    """A Ray cluster that was started before, without any of our settings. Gives its address."""
    folder = Path(tempfile.mkdtemp(prefix="vc", dir="/tmp"))
    env = clean_environment(PYTHON=str(PYTHON), RAY_TMP=str(folder), PORT=str(port))
    subprocess.run([BED / "cluster.sh", "start"], env=env, check=True, stdout=subprocess.DEVNULL, timeout=180)
    try:
        yield f"127.0.0.1:{port}"
    finally:
        subprocess.run([BED / "cluster.sh", "stop"], env=env, check=False, stdout=subprocess.DEVNULL, timeout=60)
        shutil.rmtree(folder, ignore_errors=True)
