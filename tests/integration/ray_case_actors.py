"""Actors and tasks of ray_cases.py, in a module of their own, as users have theirs: Ray pickles them by reference."""

import asyncio
import os

import ray
from opentelemetry import trace
from verl.single_controller.base.decorator import Dispatch, register
from verl.utils.profiler import marked_timer

from verl_otel.tracing.propagation import with_carrier


def span_here():
    """Id of the current span."""
    return f"{trace.get_current_span().get_span_context().span_id:016x}"


class Answering:
    """R1: a worker's class."""

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def answer(self, x):
        return x + 1


class Leaf:
    """R3, third level."""

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def leaf(self):
        return "leaf"


class Middle:
    """R3, second level."""

    def __init__(self):
        self.leaf = ready(ray.remote(Leaf).options(num_cpus=0).remote(), "leaf")

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def middle(self):
        return ["middle", ray.get(self.leaf.leaf.remote())]


class Supervisor:
    """R3, first level: its actor makes actors."""

    def __init__(self):
        self.middle = ready(ray.remote(Middle).options(num_cpus=0).remote(), "middle")

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def supervise(self):
        return ["supervisor", *ray.get(self.middle.middle.remote())]


def ready(actor, method):
    """The actor, after a first call, which asks it whether it takes the context."""
    ray.get(getattr(actor, method).remote())
    return actor


class User:
    """R6, R7, R9: an actor of the user's own, with methods of every kind, which take exactly what they say."""

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    async def say(self, x):
        await asyncio.sleep(0.3)  # all calls are open at the same time
        return x

    @with_carrier
    async def count(self, n):
        for i in range(n):
            await asyncio.sleep(0.01)
            yield i, span_here()

    async def after(self):
        return span_here()

    def positional(self, a, b, /):
        return a, b

    def default(self, a, b=2):
        return a, b

    async def waiting(self, item, timeout=None):
        return item, timeout

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def registered(self, a, /, *, b):
        return a, b

    def environment(self, *names):
        return [os.environ.get(name) for name in names]


@ray.remote(num_cpus=64)  # the whole cluster: one process does all tasks, since each process imports verl
def task(number):
    """R13: three spans inside."""
    for timer in ("first", "second", "third"):
        with marked_timer(f"{timer}_of_task", {}):
            pass
    return number
