"""A forked child goes on, whatever locks other threads of its parent hold, and flushes what it has itself."""

import os
import signal
import sys
import threading
import time

import pytest

from verl_otel import border, telemetry
from verl_otel.export.lifetime import Flusher
from verl_otel.semconv import metrics as names


def assert_in_child(check):
    """`check()` passes in a forked child, within 20 seconds."""
    child = os.fork()
    if child == 0:
        signal.signal(signal.SIGALRM, signal.SIG_DFL)
        signal.alarm(20)
        try:
            check()
        except BaseException as error:
            print(repr(error), file=sys.stderr)
            os._exit(1)
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0


@pytest.fixture
def held_elsewhere():
    """Have another thread hold a lock until the end of the test."""
    over, threads = threading.Event(), []

    def hold(lock):
        holds = threading.Event()

        def run():
            with lock:
                holds.set()
                over.wait(60)

        threads.append(threading.Thread(target=run))
        threads[-1].start()
        assert holds.wait(10)

    yield hold
    over.set()
    for thread in threads:
        thread.join()


def caught():
    try:
        raise ValueError
    except ValueError:
        border.caught("a site of the child")
    assert border.failures()["a site of the child"] == 1


def test_a_failure_in_a_child_is_caught(held_elsewhere):
    held_elsewhere(border._lock)
    assert_in_child(caught)


def test_telemetry_is_asked_for_in_a_child(held_elsewhere, monkeypatch):
    held_elsewhere(telemetry._lock)
    monkeypatch.setattr(telemetry, "_enabled", True)
    monkeypatch.setattr(telemetry, "_given", {"no such": "argument"})
    assert_in_child(lambda: [telemetry.current() for _ in range(2)])


def test_numbers_that_a_child_logs_are_left_out_and_that_is_said(held_elsewhere, memory):
    process = memory.process("reward_worker")
    process.user.scalar("reward/mine", 1.0)
    memory.settle()
    held_elsewhere(process.user._lock)
    held_elsewhere(process.instruments._lock)

    def log():
        assert process.user.take() == []  # what was logged before is its parent's
        process.user.scalar("reward/mine", 2.0)
        assert process.background.drained(10)
        assert process.user.take() == [] and border.failures()["log in a child"] == 1
        process.instruments.set(names.RUN_END_TIME, {"rank": "all"}, 1.0)
        process.instruments.withdraw(names.RUN_END_TIME, {"rank": "all"})

    assert_in_child(log)


@pytest.mark.parametrize("part", ["workers", "trajectories._keeping", "samples", "servers._metrics"])
def test_no_lock_of_the_parent_is_held_in_a_child(held_elsewhere, memory, part):
    found = memory.process()
    for name in part.split("."):
        found = getattr(found, name)
    held_elsewhere(found._lock)

    def take():
        assert found._lock.acquire(timeout=5)

    assert_in_child(take)


class Provider:
    def __init__(self):
        self.flushes = 0

    def force_flush(self):
        self.flushes += 1


def test_a_child_flushes(held_elsewhere):
    provider = Provider()
    flusher = Flusher((provider,))
    assert flusher.wait(flusher.request(), 30)
    held_elsewhere(flusher._changed)

    def flush():
        started = time.monotonic()
        for _ in range(2):
            assert flusher.wait(flusher.request(), 10)
        assert provider.flushes == 3 and time.monotonic() - started < 5

    assert_in_child(flush)


def test_a_child_does_not_wait_for_what_its_parent_would_do(memory):
    process = memory.process()

    def flush():
        started = time.monotonic()
        process.flush(20)
        assert time.monotonic() - started < 5

    assert_in_child(flush)


def test_a_child_that_flushes_nothing_starts_no_thread():
    Flusher((Provider(),))

    def count():
        assert "verl-otel-flusher" not in {thread.name for thread in threading.enumerate()}

    assert_in_child(count)
