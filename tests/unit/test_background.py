"""The background thread (`background.py`): in order, never blocking who hands over, and nothing stops it."""

import threading
import time

import pytest
from opentelemetry.sdk.trace.export import BatchSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from verl_otel import background as background_module
from verl_otel import border
from verl_otel.background import Background


@pytest.fixture
def dropped():
    return []


@pytest.fixture
def background(dropped):
    return Background(dropped.append)


@pytest.fixture
def gate(background):
    """Keeps the thread busy until it is opened."""
    gate, entered = threading.Event(), threading.Event()

    def work():
        entered.set()
        gate.wait(60)

    background.defer(work)
    assert entered.wait(30)
    yield gate
    gate.set()


def test_work_is_done_in_the_order_in_which_it_was_handed_over(background):
    done = []
    for number in range(1000):
        background.defer(done.append, number)
    assert background.drained(30)
    assert done == list(range(1000))


def test_work_is_not_done_by_the_thread_that_hands_it_over(background):
    threads = []
    background.defer(lambda: threads.append(threading.current_thread().name))
    assert background.drained(30)
    assert threads == ["verl-otel-recorder"]


def test_handing_over_does_not_wait_for_work_that_hangs(background, gate):
    started = time.monotonic()
    for _ in range(1000):
        background.defer(lambda: None)
    assert time.monotonic() - started < 10
    assert not background.drained(0.02)
    gate.set()
    assert background.drained(30)


def test_what_is_too_much_is_dropped_and_counted(background, gate, dropped, monkeypatch):
    monkeypatch.setattr(background_module, "MAX_PENDING", 3)
    done = []
    for number in range(5):
        background.defer(done.append, number)
    gate.set()
    assert background.drained(30)
    assert done == [0, 1, 2]  # the first ones
    assert dropped == ["queue_full", "queue_full"]
    background.defer(done.append, 5)
    assert background.drained(30)
    assert done[-1] == 5


def test_work_that_fails_is_counted_and_the_rest_is_done(background, caplog):
    done = []
    background.defer(lambda: 1 / 0)
    background.defer(done.append, 1)
    background.defer(background.hold, lambda: True, 10, lambda: 1 / 0)
    background.defer(done.append, 2)
    assert background.drained(30)
    assert done == [1, 2]
    assert border.failures() == {"recording in the background": 2}


def test_held_work_waits_until_it_is_ready(background):
    ready, done = threading.Event(), []
    background.defer(background.hold, ready.is_set, 60, done.append, "held")
    background.defer(done.append, "other")
    assert not background.drained(0.05)
    assert done == ["other"]
    ready.set()
    assert background.drained(30)
    assert done == ["other", "held"]


def test_held_work_is_done_once(background):
    done = []
    background.defer(background.hold, lambda: True, 0, done.append, 1)
    assert background.drained(30)
    time.sleep(0.02)
    assert done == [1]


def test_held_work_is_done_at_its_deadline_at_the_latest(background):
    done, started = [], time.monotonic()
    background.defer(background.hold, lambda: False, 0.1, lambda: done.append(time.monotonic() - started))
    assert background.drained(30)
    assert 0.1 <= done[0] < 10


def test_held_work_that_cannot_be_asked_is_done(background, caplog):
    done = []
    background.defer(background.hold, lambda: 1 / 0, 60, done.append, 1)
    assert background.drained(10)
    assert done == [1]
    assert border.failures() == {"asking whether work in the background can go on": 1}


def test_what_is_held_last_comes_after_all_that_is_held(background):
    first, second, done = threading.Event(), threading.Event(), []
    background.defer(background.hold, first.is_set, 60, done.append, "first")
    background.defer(background.hold, second.is_set, 60, done.append, "second")
    background.defer(background.hold_last, 60, done.append, "last")
    second.set()
    assert not background.drained(0.05)
    assert done == ["second"]
    first.set()
    assert background.drained(30)
    assert done == ["second", "first", "last"]


def test_what_is_held_last_does_not_wait_for_what_is_held_later(background):
    first, done = threading.Event(), []
    background.defer(background.hold, first.is_set, 60, done.append, "first")
    background.defer(background.hold_last, 60, done.append, "last")
    background.defer(background.hold, lambda: "last" in done, 60, done.append, "later")
    first.set()
    assert background.drained(30)
    assert done == ["first", "last", "later"]


def test_what_is_held_last_has_a_deadline_too(background):
    done, started, never = [], time.monotonic(), threading.Event()
    background.defer(background.hold, never.is_set, 60, done.append, "never")
    background.defer(background.hold_last, 0.1, done.append, "last")
    assert not background.drained(0.3)
    assert done == ["last"] and time.monotonic() - started < 30
    never.set()
    assert background.drained(30)


def test_drained_means_that_held_work_is_done_and_what_it_handed_over_too(background):
    done = []
    background.defer(background.hold, lambda: True, 10, background.defer, done.append, 1)
    assert background.drained(30)
    deadline = time.monotonic() + 30
    while not done and time.monotonic() < deadline:
        time.sleep(0.002)
    assert done == [1]


def test_drained_gives_up_after_its_time(background, gate):
    started = time.monotonic()
    assert not background.drained(0.05)
    assert 0.05 <= time.monotonic() - started < 10


def test_an_idle_thread_is_drained_at_once(background):
    started = time.monotonic()
    assert background.drained(30)
    assert time.monotonic() - started < 10


def test_the_thread_does_not_keep_the_process_alive(background):
    assert background._thread.daemon


def test_what_is_there_is_sent_also_where_something_is_still_held(memory):
    """A dead rank may be waited for longer than `flush` may take: the step's metrics leave all the same."""
    exporter = InMemorySpanExporter()
    memory.tracer_provider.add_span_processor(BatchSpanProcessor(exporter, schedule_delay_millis=3_600_000))
    process, never = memory.process(), threading.Event()
    process.background.defer(process.background.hold, never.is_set, 60, lambda: None)
    process.tracer.start_span("waiting").end()
    started = time.monotonic()
    process.flush(0.4)
    assert time.monotonic() - started < 10
    assert [span.name for span in exporter.get_finished_spans()] == ["waiting"]
    never.set()
    memory.tracer_provider.shutdown()


def test_what_is_held_is_done_at_once_when_the_process_ends(background):
    done = []
    background.defer(background.hold, lambda: False, 60, done.append, 1)
    background.defer(background.hold_last, 60, done.append, 2)
    assert not background.drained(0.1)
    background.release()
    assert background.drained(10)
    background.defer(background.hold, lambda: False, 60, done.append, 3)
    assert background.drained(10)
    assert done == [1, 2, 3]
