"""50 steps against each misbehaving endpoint, and how long the process then takes to end. Aim: within 5 % of the time
without telemetry; 5 s.

Each training is a process of its own; every third one is without telemetry. The ratio is that of the medians of all
steps; what a step costs more does not depend on how long it is. Argument: number of rounds (default 1; each takes
seven minutes).
"""

import atexit
import contextlib
import json
import os
import statistics
import sys
import tempfile
import time
from collections import Counter, defaultdict
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "testbed"))
os.environ["OMP_NUM_THREADS"] = "1"
os.environ["OPENBLAS_NUM_THREADS"] = "1"
import numpy as np
from otlp_server import FAULTS, Server

STEPS, WORK = 50, 0.5
"""Steps of a training, and the seconds that each computes, still less than real ones."""

WITHOUT = "without telemetry"
MATRIX = np.random.default_rng(0).random((160, 160))


def compute(repeat):
    for _ in range(repeat):
        np.tanh(MATRIX @ MATRIX)
        sum(i * i for i in range(2000))  # what needs the interpreter


def train(repeat):
    """50 steps of one stage and 100 values; prints how long each took, and at the end what became of its telemetry."""
    from verl.utils.profiler import marked_timer
    from verl.utils.tracking import Tracking

    def print_end():
        otlp = sys.modules.get("verl_otel.export.otlp")
        counts = otlp.counts() if otlp is not None else {}
        print(json.dumps({"left": time.time(), "counts": [[*key, n] for key, n in counts.items()]}), flush=True)

    atexit.register(print_end)
    tracking = Tracking("bench", "faults", default_backend=[], config={})
    values = {f"group_{i % 7}/metric_{i}": float(i) for i in range(100)}
    seconds = []
    for step in range(1, STEPS + 1):
        start = time.perf_counter()
        timing = {}
        with marked_timer("step", timing), marked_timer("update_actor", timing):
            compute(repeat)
        tracking.log(data={"training/global_step": step, **values}, step=step)
        seconds.append(time.perf_counter() - start)
    print(json.dumps({"seconds": seconds, "end": time.time()}), flush=True)


class Seen:
    """What was seen of one endpoint, in all rounds."""

    def __init__(self):
        self.seconds, self.exits, self.counts = [], [], Counter()


def run(fault, folder, repeat, seen):
    """Train in a forked process, which has imported verl already."""
    output = Path(folder) / "output"
    with Server() as server:
        child = os.fork()
        if child == 0:
            atexit._clear()  # what is registered is the parent's
            for descriptor in (1, 2):
                os.dup2(os.open(output, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_APPEND), descriptor)
            os.chdir(folder)
            if fault != WITHOUT:
                os.environ["OTEL_EXPORTER_OTLP_ENDPOINT"] = server.url_of(fault)
                from verl_otel import VerlInstrumentor

                VerlInstrumentor().instrument(skip_dep_check=True)
            train(repeat)
            atexit._run_exitfuncs()  # as at the end of any process; the server of the parent is not ours to close
            os._exit(0)
        server.url_of(fault if fault != WITHOUT else "")
        os.waitpid(child, 0)
    found = {}
    for line in output.read_text().splitlines():
        if line.startswith("{"):
            with contextlib.suppress(ValueError):
                found.update(json.loads(line))
    if "left" not in found:
        raise SystemExit(f"{fault}: {output.read_text()}")
    seen.seconds += found["seconds"]
    seen.exits.append(found["left"] - found["end"])
    for _, outcome, _, items in found["counts"]:
        seen.counts[outcome] += items


def main(rounds):
    import verl.utils.profiler
    import verl.utils.tracking  # noqa: F401

    start = time.perf_counter()
    compute(200)
    repeat = max(1, round(200 * WORK / (time.perf_counter() - start)))
    seen = defaultdict(Seen)
    endpoints = ["", *FAULTS]
    with tempfile.TemporaryDirectory() as folder:
        for _ in range(rounds):
            for i, fault in enumerate(endpoints):
                if i % 3 == 0:  # the machine may not be the same all the time
                    run(WITHOUT, folder, repeat, seen[WITHOUT])
                run(fault, folder, repeat, seen[fault])
    base = statistics.median(seen[WITHOUT].seconds)
    columns = (("50 steps s", 11), ("ratio", 8), ("+ ms/step", 11), ("exit s", 8))
    columns += (("delivered", 11), ("spooled", 9), ("dropped", 9))
    print(f"\n{'endpoint':<20}" + "".join(f"{name:>{width}}" for name, width in columns))
    for fault in (WITHOUT, *endpoints):
        one = seen[fault]
        middle = statistics.median(one.seconds)
        kept = one.counts["spooled"] - one.counts["replayed"]
        row = (
            f"{middle * STEPS:.2f}",
            f"{middle / base:.3f}",
            f"{1000 * (middle - base):.1f}",
            f"{max(one.exits):.2f}",
        )
        row += (one.counts["delivered"], kept, one.counts["dropped"])
        print(f"{fault or 'well':<20}" + "".join(f"{x:>{width}}" for x, (_, width) in zip(row, columns, strict=True)))


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 1)
