"""Flushing and the end of the process (`export/lifetime.py`): nobody waits longer than agreed."""

import threading
import time

import pytest

from verl_otel import border
from verl_otel.export.lifetime import Budget, Flusher


class Provider:
    """Counts its flushes; hangs in them until `gate` is open."""

    def __init__(self, gate=None):
        self.flushes = 0
        self.in_flush = threading.Event()
        self._gate = gate

    def force_flush(self):
        self.in_flush.set()
        if self._gate is not None:
            self._gate.wait(60)
        self.flushes += 1


@pytest.fixture
def gate():
    """Closed until the test is over, at the latest."""
    gate = threading.Event()
    yield gate
    gate.set()


def test_every_provider_is_flushed_on_request():
    providers = (Provider(), Provider(), object())  # the last one has nothing to flush
    flusher = Flusher(providers)
    assert flusher.wait(flusher.request(), 30)
    assert [provider.flushes for provider in providers[:2]] == [1, 1]


def test_a_request_returns_at_once_while_a_provider_hangs(gate):
    hanging = Provider(gate)
    flusher = Flusher((hanging,))
    flusher.request()
    assert hanging.in_flush.wait(30)
    started = time.monotonic()
    for _ in range(1000):
        flusher.request()
    assert time.monotonic() - started < 10
    assert hanging.flushes == 0


def test_a_wait_for_a_hanging_provider_is_bounded(gate):
    flusher = Flusher((Provider(gate),))
    started = time.monotonic()
    assert not flusher.wait(flusher.request(), 0.1)
    assert 0.1 <= time.monotonic() - started < 10


def test_a_wait_is_for_a_flush_that_began_after_the_request():
    turns, flushing = threading.Semaphore(0), threading.Semaphore(0)

    class Provider:
        def force_flush(self):
            flushing.release()
            turns.acquire(timeout=60)

    flusher = Flusher((Provider(),))
    first = flusher.request()
    assert flushing.acquire(timeout=30)
    second = flusher.request()  # the flush that is running may not have seen what this one is for
    turns.release()
    assert flusher.wait(first, 30)
    assert flushing.acquire(timeout=30)
    assert not flusher.wait(second, 0.1)
    turns.release()
    assert flusher.wait(second, 30)


def test_many_requests_during_a_flush_are_one_more_flush(gate):
    hanging = Provider(gate)
    flusher = Flusher((hanging,))
    flusher.request()
    assert hanging.in_flush.wait(30)
    numbers = [flusher.request() for _ in range(100)]
    gate.set()
    assert all(flusher.wait(number, 30) for number in numbers)
    assert hanging.flushes == 2


def test_a_provider_that_fails_does_not_keep_the_others_from_flushing(caplog):
    class Failing:
        def force_flush(self):
            raise RuntimeError("no")

    good = Provider()
    flusher = Flusher((Failing(), good))
    for _ in range(3):
        assert flusher.wait(flusher.request(), 30)
    assert good.flushes == 3
    assert border.failures() == {"flushing": 3}
    assert caplog.text.count("flushing failed") == 1


def test_the_flusher_does_not_keep_the_process_alive():
    assert Flusher(())._thread.daemon


def test_the_budget_is_shared_by_all_waits():
    budget, given = Budget(1.0), []

    def wait(timeout):
        given.append(timeout)
        time.sleep(min(timeout, 0.2))

    for _ in range(3):
        budget.spend(1.0, wait)
    assert given[0] == 1.0
    assert given[1] <= 0.8
    assert given[2] <= 0.6


def test_a_share_is_of_what_is_left():
    budget, given = Budget(8.0), []
    budget.spend(0.5, given.append)
    budget.spend(0.25, given.append)
    assert given[0] == 4.0
    assert 1.5 < given[1] <= 2.0


def test_a_budget_that_is_used_up_gives_no_time():
    budget, given = Budget(0.01), []
    budget.spend(1.0, lambda timeout: time.sleep(0.05))
    budget.spend(1.0, given.append)
    assert given == [0.0]


def test_the_end_of_a_run_with_a_hanging_provider_is_bounded_by_the_budget(gate):
    flusher, budget = Flusher((Provider(gate),)), Budget(0.3)
    started = time.monotonic()
    for _ in range(5):
        budget.spend(0.6, lambda timeout: flusher.wait(flusher.request(), timeout))
    assert time.monotonic() - started < 3


def test_waits_of_several_threads_share_the_budget():
    budget, given = Budget(0.4), []

    def wait(timeout):
        given.append(timeout)
        time.sleep(timeout)

    threads = [threading.Thread(target=budget.spend, args=(1.0, wait)) for _ in range(4)]
    started = time.monotonic()
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert time.monotonic() - started < 4
    assert sorted(given, reverse=True)[0] == 0.4
    assert sum(given) < 0.5
