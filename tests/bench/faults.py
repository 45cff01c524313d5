"""50 steps against each misbehaving endpoint, and how long the process then takes to end. Aim: within 5 % of the time
without telemetry; 5 s.

These machines are not the same for a minute, so each training has a twin without telemetry beside it, and the two take
turns of five steps; the ratio is the median of those of the turns. What telemetry costs in CPU time, in all threads and
in the turns of the twin as well, stands beside it: it does not depend on how long a step is.

Argument: seconds of a step (default 0.8; all endpoints then take eighteen minutes). Real steps are longer.
"""

import atexit
import contextlib
import json
import os
import statistics
import sys
import tempfile
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

WITHOUT = "without telemetry"
MATRIX = np.random.default_rng(0).random((160, 160))


def compute(repeat):
    for _ in range(repeat):
        np.tanh(MATRIX @ MATRIX)
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
    seconds, cpu = [], 0.0
    for first in range(1, STEPS + 1, TURN):
        os.read(turns, 1)
        cpu = cpu or time.process_time()
        start = time.perf_counter()
        for step in range(first, first + TURN):
            timing = {}
            with marked_timer("step", timing), marked_timer("update_actor", timing):
                compute(repeat)
            tracking.log(data={"training/global_step": step, **values}, step=step)
        seconds.append(time.perf_counter() - start)
        os.write(done, b".")
    os.read(turns, 1)
    print(json.dumps({"seconds": seconds, "cpu": time.process_time() - cpu, "end": time.time()}), flush=True)


class Training:
    """A training in a forked process, which has imported verl already."""

    def __init__(self, folder, repeat, endpoint):
        """`endpoint` None: without telemetry."""
        self.output = Path(folder) / ("with" if endpoint is not None else "without")
        turns, self._turns = os.pipe()
        self._done, done = os.pipe()
        self._pid = os.fork()
        if self._pid == 0:
            os.close(self._turns)  # so that it ends with the parent
            atexit._clear()  # what is registered is the parent's
            for descriptor in (1, 2):
                os.dup2(os.open(self.output, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_APPEND), descriptor)
            os.chdir(folder)
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


def measure(fault, folder, repeat):
    """What a training said at its end, with this endpoint and without telemetry."""
    with Server() as server:
        without, with_it = Training(folder, repeat, None), Training(folder, repeat, server.url_of(fault))
        for turn in range(STEPS // TURN):
            for training in (without, with_it) if turn % 2 else (with_it, without):
                training.turn()
        return without.end(), with_it.end()


def main(work):
    import verl.utils.profiler
    import verl.utils.tracking  # noqa: F401

    start = time.perf_counter()
    compute(2000)
    repeat = max(1, round(2000 * work / (time.perf_counter() - start)))
    columns = (("s/step", 9), ("with", 9), ("ratio", 8), ("+ cpu ms", 10), ("exit s", 8))
    columns += (("delivered", 11), ("spooled", 9), ("dropped", 9))
    print(f"\n{'endpoint':<20}" + "".join(f"{name:>{width}}" for name, width in columns), flush=True)
    for fault in ("", *FAULTS):
        with tempfile.TemporaryDirectory() as folder:
            without, with_it = measure(fault, folder, repeat)
        ratios = [one / base for base, one in zip(without["seconds"], with_it["seconds"], strict=True)]
        counts = Counter()
        for _, outcome, _, items in with_it["counts"]:
            counts[outcome] += items
        row = [f"{statistics.median(one['seconds']) / TURN:.3f}" for one in (without, with_it)]
        row += [
            f"{statistics.median(ratios):.3f}",
            f"{1000 * (with_it['cpu'] - without['cpu']) / STEPS:.1f}",
            f"{with_it['left'] - with_it['end']:.2f}",
        ]
        row += [counts["delivered"], counts["spooled"] - counts["replayed"], counts["dropped"]]
        print(
            f"{fault or 'well':<20}" + "".join(f"{x:>{width}}" for x, (_, width) in zip(row, columns, strict=True)),
            flush=True,
        )


if __name__ == "__main__":
    main(float(sys.argv[1]) if len(sys.argv) > 1 else 0.8)
