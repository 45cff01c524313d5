"""What goes wrong for people between Ray and OpenTelemetry (group R of ../CASES.md), on one local cluster.

Run by test_ray_cases.py under `opentelemetry-instrument`. Arguments: Ray's temporary folder, and one with a `verl_otel`
that cannot be imported. Prints what the driver got, as one line of JSON.
"""

import json
import os
import sys
import time

import ray
import ray_case_actors as actors
from opentelemetry.instrumentation import auto_instrumentation
from ray.util.queue import Queue
from verl.utils.profiler import marked_timer

RAY_FOLDER, BROKEN = sys.argv[1:]
AUTO = os.path.dirname(auto_instrumentation.__file__)


def remote(cls, env_vars=None, **options):
    return ray.remote(cls).options(num_cpus=0, runtime_env={"env_vars": env_vars or {}}, **options).remote()


class Plain:
    """An actor of the user's own, with nothing of ours or verl's in it."""

    def answer(self, x):
        try:
            import verl_otel
        except ImportError as error:
            return x + 1, str(error)
        return x + 1, verl_otel.__file__


ray.init(num_cpus=64, include_dashboard=False, object_store_memory=100_000_000, _temp_dir=RAY_FOLDER,
         logging_level="ERROR")  # fmt: skip
got = {}

# Made first and all at once, since each imports verl.
without_endpoint = remote(actors.Answering, {"OTEL_EXPORTER_OTLP_ENDPOINT": "not a url"})
without_package = remote(Plain, {"PYTHONPATH": f"{BROKEN}:{AUTO}"})
supervisor, user = remote(actors.Supervisor), remote(actors.User)
tasks = [actors.task.remote(number) for number in range(8)]

got["R1"] = ray.get([without_endpoint.answer.remote(1), without_package.answer.remote(1)])
got["R5"] = ray.get(user.environment.remote("OF_THE_JOB", "OTEL_SERVICE_NAME"))

actors.ready(supervisor, "supervise")
with marked_timer("step", {}), marked_timer("supervised", {}):
    got["R3"] = ray.get(supervisor.supervise.remote())

ray.get(user.say.remote(0))
calls = []
with marked_timer("step", {}):
    for stage in range(5):
        with marked_timer(f"concurrent_{stage}", {}):
            calls += [user.say.remote(10 * stage + number) for number in range(10)]
got["R6"] = ray.get(calls)
with marked_timer("step", {}), marked_timer("generated", {}):
    items = user.count.options(num_returns="streaming").remote(10_000)
    got["R6 items"] = [ray.get(next(items)) for _ in range(2)]
    got["R6 stage"] = actors.span_here()
    ray.cancel(items)
    del items
got["R6 after"] = ray.get(user.after.remote())

with marked_timer("step", {}), marked_timer("fixed", {}):
    got["R7"] = ray.get(
        [
            *(user.positional.remote(1, 2), user.default.remote(1), user.waiting.remote(1, timeout=2)),
            *(user.registered.remote(1, b=2), user.registered.remote(1, b=3)),
        ]
    )
    queue = Queue(maxsize=3, actor_options={"num_cpus": 0})
    for item in "abc":
        queue.put(item, timeout=10)
    got["R7 queue"] = [queue.full(), *(queue.get(timeout=10) for _ in range(3)), queue.empty()]
    queue.shutdown()

with marked_timer("step", {}), marked_timer("doomed", {}):
    ray.get(user.registered.remote(1, b=2))
time.sleep(1)
ray.kill(user)

got["R13"] = ray.get(tasks)
time.sleep(1)
print("got", json.dumps(got), flush=True)
