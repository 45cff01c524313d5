"""What actors are asked for, also after this process has left Ray: asking must not start Ray again."""

import sys
from types import SimpleNamespace

import pytest

from verl_otel.hooks import ray_actors
from verl_otel.hooks.ray_actors import Answers


@pytest.fixture
def ray(monkeypatch):
    """As Ray's functions are: each starts Ray where it does not run."""
    ray = SimpleNamespace(started=0, running=True, exceptions=SimpleNamespace(RayActorError=KeyError))

    def start():
        if not ray.running:
            ray.started, ray.running = ray.started + 1, True

    def wait(references, num_returns, timeout):
        start()
        return [r for r in references if r.value is not None], [r for r in references if r.value is None]

    def get(reference):
        start()
        return reference.value

    class Actor:
        def __init__(self, value):
            def remote(*_):
                start()
                return SimpleNamespace(value=value)

            self.__ray_call__ = SimpleNamespace(remote=remote)

    ray.wait, ray.get, ray.is_initialized, ray.Actor = wait, get, lambda: ray.running, Actor
    monkeypatch.setitem(sys.modules, "ray", ray)
    return ray


def test_what_has_come_is_got_once(ray):
    answers = Answers.of([ray.Actor("a"), ray.Actor(None)], lambda actor: None)
    assert not answers.ready()
    assert (answers.get(), answers.get(), answers.dead()) == (["a"], [], False)


def test_after_ray_is_shut_down_nothing_is_waited_for_and_ray_is_not_started_again(ray):
    pending = Answers.of([ray.Actor("a"), ray.Actor(None)], lambda actor: None)
    ray.running = False
    assert (pending.ready(), pending.get(), pending.dead()) == (True, [], False)
    later = Answers.of([ray.Actor("a")], lambda actor: None)
    assert (later.ready(), later.get()) == (True, [])
    assert ray_actors.ask_for_values() is None
    ray_actors.flush_actors(1)
    ray_actors.end_run(None, 1)
    assert ray.started == 0


def test_without_ray_nothing_is_waited_for(monkeypatch):
    monkeypatch.delitem(sys.modules, "ray", raising=False)
    assert (Answers([object()]).ready(), Answers([object()]).get()) == (True, [])
