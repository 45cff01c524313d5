"""50 steps against each misbehaving endpoint, and how long the process then takes to end. Aim: within 5 % of the time
without telemetry; 5 s.

These machines are not the same for a minute, so all trainings, and two without telemetry among them, take turns of
five steps; a turn is compared with the mean of those two in the same round, and the ratio is the median of the rounds.
The two beside each other say how far from 1 a ratio is without any cause. The CPU time is that of telemetry's own
threads, in the turns of the others too, in which they go on exporting every ten seconds.

Argument: seconds of a step (default 1; all then take a quarter of an hour). Most real ones are longer.
"""

import atexit
import contextlib
import json
import os
import statistics
import sys
import tempfile
import threading
import time
from collections import Counter
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "testbed"))
os.environ["OMP_NUM_THREADS"] = "1"
os.environ["OPENBLAS_NUM_THREADS"] = "1"
import numpy as np
from otlp_server import FAULTS, Server

STEPS, TURN = 50, 5
"""Steps of a training, and how many of them are a turn."""

MATRIX = np.random.default_rng(0).random((160, 160))
PRODUCT = np.empty_like(MATRIX)
"""Made once: whether the allocator gives the memory of each back to the system, a fifth of the time, is luck."""


def compute(repeat):
    for _ in range(repeat):
        np.tanh(np.matmul(MATRIX, MATRIX, out=PRODUCT), out=PRODUCT)
        sum(i * i for i in range(2000))  # what needs the interpreter


def train(repeat, turns, done):
    """Steps of one stage and 100 values, five of them for each byte that comes.

    Prints the seconds of each turn, and at the end what became of its telemetry.
    """
    from verl.utils.profiler import marked_timer
    from verl.utils.tracking import Tracking

    def print_end():
        otlp = sys.modules.get("verl_otel.export.otlp")
        counts = otlp.counts() if otlp is not None else {}
        print(json.dumps({"left": time.time(), "counts": [[*key, n] for key, n in counts.items()]}), flush=True)

    atexit.register(print_end)
    tracking = Tracking("bench", "faults", default_backend=[], config={})
    values = {f"group_{i % 7}/metric_{i}": float(i) for i in range(100)}
    seconds, before = [], None
    for first in range(1, STEPS + 1, TURN):
        os.read(turns, 1)
        before = cpu_of_others() if first > 1 and before is None else before
        start = time.perf_counter()
        for step in range(first, first + TURN):
            timing = {}
            with marked_timer("step", timing), marked_timer("update_actor", timing):
                compute(repeat)
            tracking.log(data={"training/global_step": step, **values}, step=step)
        seconds.append(time.perf_counter() - start)
        os.write(done, b".")
    os.read(turns, 1)
    print(json.dumps({"seconds": seconds, "cpu": cpu_of_others() - before, "end": time.time()}), flush=True)


def cpu_of_others():
    """Seconds of CPU of all threads but this one."""
    others = [thread for thread in threading.enumerate() if thread is not threading.current_thread()]
    return sum(time.clock_gettime(time.pthread_getcpuclockid(thread.ident)) for thread in others)


class Training:
    """A training in a forked process, which has imported verl already."""

    def __init__(self, output, repeat, endpoint):
        """`endpoint` None: without telemetry."""
        self.output = output
        turns, self._turns = os.pipe()
        self._done, done = os.pipe()
        self._pid = os.fork()
        if self._pid == 0:
            os.close(self._turns)  # so that it ends with the parent
            atexit._clear()  # what is registered is the parent's
            for descriptor in (1, 2):
                os.dup2(os.open(self.output, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_APPEND), descriptor)
            os.chdir(output.parent)
            if endpoint is not None:
                os.environ["OTEL_EXPORTER_OTLP_ENDPOINT"] = endpoint
                from verl_otel import VerlInstrumentor

                VerlInstrumentor().instrument(skip_dep_check=True)
            train(repeat, turns, done)
            atexit._run_exitfuncs()  # as at the end of any process; the server of the parent is not ours to close
            os._exit(0)
        os.close(turns)
        os.close(done)

    def turn(self):
        """The next steps, or after the last the end."""
        os.write(self._turns, b".")
        os.read(self._done, 1)

    def end(self):
        os.write(self._turns, b".")
        os.waitpid(self._pid, 0)
        found = {}
        for line in self.output.read_text().splitlines():
            if line.startswith("{"):
                with contextlib.suppress(ValueError):
                    found.update(json.loads(line))
        if "left" not in found:
            raise SystemExit(f"{self.output}: {self.output.read_text()}")
        return found


WITHOUT = ("no telemetry", "no telemetry either")


def main(work):
    import verl.utils.profiler
    import verl.utils.tracking  # noqa: F401

    start = time.perf_counter()
    compute(2000)
    repeat = max(1, round(2000 * work / (time.perf_counter() - start)))
    names = ["", *FAULTS]
    names.insert(3, WITHOUT[0])  # as far from the first as the other is from the last
    names.insert(-3, WITHOUT[1])
    with contextlib.ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        trainings = {}
        for name in names:
            endpoint = None if name in WITHOUT else stack.enter_context(Server()).url_of(name)
            trainings[name] = Training(folder / f"{name.replace(' ', '_')}.output", repeat, endpoint)
        for turn in range(STEPS // TURN):
            print(f"\rround {turn + 1} of {STEPS // TURN}", end="", flush=True)
            for name in names if turn % 2 else reversed(names):
                trainings[name].turn()
        found = {name: training.end() for name, training in trainings.items()}
    base = [statistics.mean(both) for both in zip(*(found[name]["seconds"] for name in WITHOUT), strict=True)]
    columns = (("s/step", 9), ("ratio", 8), ("cpu ms/step", 13), ("exit s", 8))
    columns += (("delivered", 11), ("spooled", 9), ("dropped", 9))
    print(f"\r{'endpoint':<20}" + "".join(f"{name:>{width}}" for name, width in columns), flush=True)
    for name, one in found.items():
        ratios = [its / of_base for its, of_base in zip(one["seconds"], base, strict=True)]
        counts = Counter()
        for _, outcome, _, items in one["counts"]:
            counts[outcome] += items
        row = (
            f"{statistics.median(one['seconds']) / TURN:.3f}",
            f"{statistics.median(ratios):.3f}",
            f"{1000 * one['cpu'] / (STEPS - TURN):.1f}",
            f"{one['left'] - one['end']:.2f}",
        )
        row += (counts["delivered"], counts["spooled"] - counts["replayed"], counts["dropped"])
        print(f"{name or 'well':<20}" + "".join(f"{x:>{width}}" for x, (_, width) in zip(row, columns, strict=True)))


if __name__ == "__main__":
    main(float(sys.argv[1]) if len(sys.argv) > 1 else 1.0)
