"""What telemetry adds on a training thread: `Tracking.log`, a stage span, a call to a Ray worker; and what the
background thread does for a step.

Each line compares with and without us in one process, interleaved, on real verl; medians in microseconds. Telemetry
goes where it goes by default (local files). For comparison: what TensorBoard and W&B (offline) add to `Tracking.log`,
measured last, since their threads go on working while others are measured.
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

DATA = Path(__file__).resolve().parents[1] / "unit" / "data"
KEYS_OF_A_STEP = (DATA / "metric_keys_gae_step.txt").read_text().split()
SAMPLES, TOKENS = 1024, 512


def metrics(count):
    """Values for so many keys: those of a real step first, then keys that nobody knows."""
    keys = [*KEYS_OF_A_STEP[:count], *(f"group_{i % 7}/metric_{i}" for i in range(count - len(KEYS_OF_A_STEP)))]
    return {key: random.random() for key in keys}


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


def tracking_log(values):
    from verl.utils.tracking import Tracking

    none = Tracking("bench", "bench", default_backend=[])
    original = Tracking.log.__wrapped__
    return medians(
        {"without": lambda step: original(none, values, step), "verl-otel": lambda step: none.log(values, step)},
        rounds=200,
    )


def other_loggers(values):
    from verl.utils.tracking import Tracking

    none = Tracking("bench", "bench", default_backend=[])
    boards = Tracking("bench", "bench", default_backend=["tensorboard"])
    wandb = Tracking("bench", "bench", default_backend=["wandb"])
    original = Tracking.log.__wrapped__
    return medians(
        {
            "without": lambda step: original(none, values, step),
            "TensorBoard": lambda step: original(boards, values, step),
            "W&B offline": lambda step: original(wandb, values, step),
        },
        rounds=100,
    )


def background():
    """Milliseconds that the background thread works for a step: 300 keys, distributions of 1024 samples, groups."""
    import numpy
    import torch
    from opentelemetry.context import Context

    from verl_otel import telemetry
    from verl_otel.metrics.recorder import Logged

    t = telemetry.current()
    values = metrics(300)
    per_token = ("token_level_scores", "token_level_rewards", "advantages", "returns")
    tensors = {name: torch.rand(SAMPLES, TOKENS) for name in per_token}
    tensors["response_mask"] = torch.ones(SAMPLES, TOKENS, dtype=torch.int64)
    tensors.update({f"{what}_length": torch.randint(1, TOKENS, (SAMPLES,)).float() for what in ("response", "prompt")})
    turns, groups = numpy.ones(SAMPLES), numpy.repeat(numpy.arange(SAMPLES // 8), 8)

    spent = []
    for step in range(200):
        start = time.thread_time()
        t.samples._record_groups(tensors["token_level_rewards"], groups, None, step)
        t.samples._record_batch(tensors, turns, step)
        t.recorder._record(Logged(values, step, time.time_ns(), Context()))
        spent.append(time.thread_time() - start)
        time.sleep(0.002)
    return statistics.median(spent) * 1000


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


def trajectories():
    """A trajectory of three turns with a tool call each, as the agent loop runs it; all but the first are left out."""
    from types import SimpleNamespace

    from verl.utils import rollout_trace
    from verl.utils.profiler import performance

    from verl_otel import telemetry

    original = contextlib.contextmanager(performance._timer.__wrapped__)
    t = telemetry.current().trajectories
    asked = {"prompt_ids": list(range(1024)), "sampling_params": {"temperature": 1.0, "top_p": 1.0, "top_k": -1}}
    answer = SimpleNamespace(token_ids=list(range(512)), stop_reason="completed", extra_fields={})

    def without(_):
        with rollout_trace.rollout_trace_attr.__wrapped__(sample_index=0, step=1, rollout_n=0):
            for _ in range(3):
                with original("generate_sequences", {}):
                    pass
                with original("tool_calls", {}):
                    pass

    def ours(_):
        with rollout_trace.rollout_trace_attr(sample_index=0, step=1, rollout_n=0):
            for _ in range(3):
                with performance.simple_timer("generate_sequences", {}):
                    request = t.enter_request(None, "request", asked)
                    t.answered(request, asked["prompt_ids"], answer)
                    t.leave(request)
                with performance.simple_timer("tool_calls", {}):
                    t.leave(t.enter_tool("search", "call"))

    return medians({"without": without, "verl-otel": ours}, rounds=300)


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
        ("Tracking.log, 100 keys", tracking_log(metrics(100)), 100),
        ("Tracking.log, 300 keys", tracking_log(metrics(300)), 100),
        ("stage span", stage_span(), 60),
        ("trajectory, three turns", trajectories(), 400),
    ]
    in_background = background()
    rows.append(("Ray worker call, both sides", worker_call(instrumentor), 200))
    others = other_loggers(metrics(300))
    instrumentor.uninstrument()
    print(f"\n{'median, microseconds':<30}{'without':>10}{'with':>10}{'added':>10}{'aim':>8}")
    for name, found, aim in rows:
        base, ours = found["without"], found["verl-otel"]
        print(f"{name:<30}{base:>10.1f}{ours:>10.1f}{ours - base:>10.1f}{aim:>8}")
    base = others.pop("without")
    print("\nadded to Tracking.log, 300 keys, by " + ", ".join(f"{name} {x - base:.0f}" for name, x in others.items()))
    print(f"background thread, a step of 300 keys and 10 distributions: {in_background:.1f} ms (aim 10)")


if __name__ == "__main__":
    try:
        main()
    finally:
        shutil.rmtree(FOLDER, ignore_errors=True)
