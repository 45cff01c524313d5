"""What actors are asked for, also while this process leaves Ray and after: asking must not start Ray again."""

import sys
import threading
from types import SimpleNamespace

import pytest

from verl_otel.hooks import ray_actors, ray_answers
from verl_otel.hooks.patches import Patches
from verl_otel.hooks.ray_answers import Answers


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


def test_ray_shuts_down_when_no_other_thread_uses_it_and_has_no_reference_of_ours(ray):
    """A thread is in `ray.wait` as the training thread shuts Ray down."""
    seen, in_wait, go_on = [], threading.Event(), threading.Event()
    asked, given_up = (Answers.of([ray.Actor(None)], lambda actor: None) for _ in range(2))
    wait = ray.wait

    def slow_wait(references, **options):
        in_wait.set()
        assert go_on.wait(10)
        seen.append("waited")
        return wait(references, **options)

    def disconnect():
        seen.append("shuts down")
        seen.append([asked.references, list(Answers._abandoned), asked.ready(), asked.get()])
        seen.append(Answers.of([ray.Actor("a")], lambda actor: None).references)
        ray.running = False

    module, patches = SimpleNamespace(disconnect=disconnect), Patches()
    ray_answers.install(module, patches)
    ray.wait = slow_wait
    ours = threading.Thread(target=asked.ready)
    ours.start()
    assert in_wait.wait(10)
    del given_up
    assert len(Answers._abandoned) == 1
    training = threading.Thread(target=module.disconnect)
    training.start()
    training.join(0.2)
    go_on.set()
    for thread in (ours, training):
        thread.join(10)
    assert seen == ["waited", "shuts down", [[], [], True, []], []]
    assert (ray.started, ray_answers.connected_ray()) == (0, None)
    ray.running = True  # it may be initialized again
    assert Answers.of([ray.Actor(None)], lambda actor: None).references != []
    patches.undo()
    assert module.disconnect is disconnect
