"""Trajectories as verl's agent loops run them: what the hooks do around what verl does."""

import asyncio
import contextlib
from types import SimpleNamespace

import pytest


def make(memory, per_step=4, run=None):
    with pytest.MonkeyPatch.context() as environ:
        environ.setenv("VERL_OTEL_TRAJECTORIES", str(per_step))
        return memory.process("agent_loop", run, worker_index="3").trajectories


@contextlib.contextmanager
def inside(t, opened):
    """What the hooks do around what verl does."""
    error = None
    try:
        yield opened
    except BaseException as e:
        error = e
        raise
    finally:
        t.leave(opened, error)


@contextlib.contextmanager
def trajectory(t, step=5, sample=0, validate=False, **about):
    with inside(t, t.enter_about(**about)), inside(t, t.enter(step, sample, 0, validate)) as opened:
        yield opened


CLIENT = SimpleNamespace(
    config=SimpleNamespace(
        actor_rollout_ref=SimpleNamespace(rollout=SimpleNamespace(name="vllm"), model=SimpleNamespace(path="org/tiny"))
    )
)
"""verl's client of the rollout servers, as far as its configuration is read."""


def output(tokens=3, reason="completed", **extra):
    """What is read of verl's `TokenOutput`."""
    return SimpleNamespace(token_ids=[7] * tokens, stop_reason=reason, extra_fields=extra)


@contextlib.contextmanager
def request(t, answer=None, prompt=(1, 2, 3, 4), **sampling):
    asked = {"prompt_ids": list(prompt), "sampling_params": sampling}
    with inside(t, t.enter_request(CLIENT, "request-1", asked)) as opened:
        yield opened
        t.answered(opened, asked["prompt_ids"], answer or output())


def generate(t):
    with request(t):
        pass


@contextlib.contextmanager
def tool(t, name="search", answer="found", known=True, arguments="{}"):
    with inside(t, t.enter_tool(name, "call-1", known)) as opened:
        yield opened
        t.answered(opened, arguments, answer)


def dropped(memory):
    return memory.values("verl.otel.dropped", "verl.otel.reason")


def run_of(t, clock, step, sample, seconds, error=None):
    with contextlib.suppress(RuntimeError, asyncio.CancelledError), trajectory(t, step, sample):
        generate(t)
        clock.now += seconds
        if error is not None:
            raise error
