"""What telemetry adds on a training thread: `Tracking.log`, a stage span, a call to a Ray worker.

Each line compares with and without us in one process, interleaved, on real verl; medians in microseconds. Telemetry
goes where it goes by default (local files). For comparison: what TensorBoard and W&B (offline) add to `Tracking.log`.
"""

import contextlib
import os
import random
import shutil
import statistics
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "testbed"))

FOLDER = Path(tempfile.mkdtemp(prefix="vb", dir="/tmp"))
os.environ.update(
    VERL_OTEL_FOLDER=str(FOLDER / "verl-otel"),
    TENSORBOARD_DIR=str(FOLDER / "tensorboard"),
    WANDB_MODE="offline",
    WANDB_DIR=str(FOLDER),
    WANDB_SILENT="true",
    RAY_USAGE_STATS_ENABLED="0",
)

from verl_otel import VerlInstrumentor  # noqa: E402

METRICS = {f"group_{i % 7}/metric_{i}": random.random() for i in range(100)}


def medians(variants, rounds, calls=1, warm_up=20):
    """Median duration of a call of each variant in microseconds; the variants in turn, `calls` at a time."""
    times = {name: [] for name in variants}
    for round_ in range(rounds + warm_up):
        for name, call in variants.items():
            start = time.perf_counter()
            for _ in range(calls):
                call(round_)
            if round_ >= warm_up:
                times[name].append((time.perf_counter() - start) * 1e6 / calls)
            time.sleep(0.002)  # a step takes longer: background threads get their turn
    return {name: statistics.median(found) for name, found in times.items()}


def tracking_log():
    from verl.utils.tracking import Tracking

    none = Tracking("bench", "bench", default_backend=[])
    boards = Tracking("bench", "bench", default_backend=["tensorboard"])
    wandb = Tracking("bench", "bench", default_backend=["wandb"])
    original = Tracking.log.__wrapped__
    return medians(
        {
            "without": lambda step: original(none, METRICS, step),
            "verl-otel": lambda step: none.log(METRICS, step),
            "tensorboard": lambda step: original(boards, METRICS, step),
            "wandb offline": lambda step: original(wandb, METRICS, step),
        },
        rounds=200,
    )


def stage_span():
    from verl.utils.profiler import performance

    ours = contextlib.contextmanager(performance._timer)
    original = contextlib.contextmanager(performance._timer.__wrapped__)

    def timed(timer):
        def call(_):
            with timer("update_actor", {}):
                pass

        return call

    with ours("step", {}):
        return medians({"without": timed(original), "verl-otel": timed(ours)}, rounds=500, calls=10)  # a step has ten


def worker_call(instrumentor):
    import ray
    from bench_workers import make_group

    ray.init(
        num_cpus=64,
        include_dashboard=False,
        object_store_memory=100_000_000,
        logging_level="ERROR",
        _temp_dir=str(FOLDER / "ray"),
        runtime_env={"env_vars": {"PYTHONPATH": str(Path(__file__).parent)}},
    )
    instrumented = make_group("with", {})
    instrumentor.uninstrument()
    untouched = make_group("without", {"OTEL_SDK_DISABLED": "true", "VERL_USE_EXTERNAL_PLUGINS": "none"})
    instrumentor.instrument(skip_dep_check=True)
    from verl.utils.profiler import marked_timer

    with marked_timer("step", {}), marked_timer("update_actor", {}):
        result = medians(
            {
                "without": lambda step: untouched.update_actor({"global_steps": step}),
                "verl-otel": lambda step: instrumented.update_actor({"global_steps": step}),
            },
            rounds=100,
            calls=10,
        )
    ray.shutdown()
    return result


def main():
    instrumentor = VerlInstrumentor()
    instrumentor.instrument(skip_dep_check=True)
    rows = [
        ("Tracking.log, 100 metrics", tracking_log(), 100),
        ("stage span", stage_span(), 60),
        ("Ray worker call, both sides", worker_call(instrumentor), 200),
    ]
    instrumentor.uninstrument()
    print(f"\n{'median, microseconds':<30}{'without':>10}{'with':>10}{'added':>10}{'aim':>8}   others add")
    for name, found, aim in rows:
        base, ours = found.pop("without"), found.pop("verl-otel")
        others = ", ".join(f"{other} {value - base:.0f}" for other, value in found.items())
        print(f"{name:<30}{base:>10.1f}{ours:>10.1f}{ours - base:>10.1f}{aim:>8}   {others}")


if __name__ == "__main__":
    try:
        main()
    finally:
        shutil.rmtree(FOLDER, ignore_errors=True)
