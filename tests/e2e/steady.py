"""A trainer that logs steps at an even pace for as long as a test wants: what has arrived of them can be counted."""

import contextlib
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import bed

PER_SECOND = 5

_TRAINER = """
import os, sys, time
from verl.utils.profiler import marked_timer
from verl.utils.tracking import Tracking

tracking = Tracking("outages", "steady", default_backend=["file"], config={"trainer": {"nnodes": 1}})
step = 0
while not os.path.exists("enough"):
    step, timing = step + 1, {}
    with marked_timer("step", timing), marked_timer("update_actor", timing):
        time.sleep(float(sys.argv[1]))
    tracking.log(data={"training/global_step": step, "actor/loss": step / 7}, step=step)
print("steps", step, flush=True)
"""


@contextlib.contextmanager
def steady_trainer(
    folder: Path, endpoint: str, run_id: str = "steady", per_second: float = PER_SECOND
) -> Iterator[Callable[[], int]]:
    """Gives a function that ends the training, and says how many steps it took."""
    (folder / "trainer.py").write_text(_TRAINER)
    environment = bed.clean_environment(
        OTEL_EXPORTER_OTLP_ENDPOINT=endpoint,
        VERL_OTEL_RUN_ID=run_id,
        VERL_OTEL_PROJECT="outages",  # as a whole trainer puts them there
        VERL_OTEL_EXPERIMENT="steady",
        VERL_FILE_LOGGER_ROOT=str(folder / "logs"),
    )
    with (folder / "run.log").open("wb") as log:
        command = [bed.INSTRUMENT, sys.executable, "trainer.py", str(1 / per_second)]
        trainer = subprocess.Popen(command, cwd=folder, env=environment, stdout=log, stderr=log)

    def end() -> int:
        (folder / "enough").touch()
        assert trainer.wait(60) == 0, (folder / "run.log").read_text()
        (last,) = [line for line in (folder / "run.log").read_text().splitlines() if line.startswith("steps ")]
        return int(last.split()[1])

    try:
        yield end
    finally:
        trainer.kill()
        trainer.wait()
