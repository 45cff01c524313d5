"""The outbox (`export/outbox.py`): nobody waits for the network, nothing is lost, and the counts add up."""

import os
import signal as signals
import socket
import threading
import time
from collections import Counter

import pytest
from otlp_server import FAULTS, Server, points, records, spans
from waiting import until

from verl_otel.export import otlp_json, outbox
from verl_otel.export.otlp_http import Endpoint
from verl_otel.export.outbox import Outbox, Request
from verl_otel.export.spool import Spool
from verl_otel.recording import reader, replay

SECRET = "s3cr3t-7731"


@pytest.fixture(autouse=True)
def quickly(monkeypatch):
    monkeypatch.setattr(outbox, "STALLED", 0.2)
    monkeypatch.setattr(outbox, "FIRST_PAUSE", 0.1)
    monkeypatch.setattr(outbox, "LONGEST_PAUSE", 0.4)


class Process:
    """An outbox, what was handed over to it, and what it counted."""

    def __init__(self, folder, url, max_bytes=32 << 20, spool_bytes=1 << 30, timeout=5, **variables):
        self.counts, self.given, self._lock = Counter(), Counter(), threading.Lock()
        self.folder = folder / "run" / "spool"
        environ = {
            "OTEL_EXPORTER_OTLP_ENDPOINT": url, "OTEL_EXPORTER_OTLP_TIMEOUT": str(timeout), **variables
        }  # fmt: skip
        endpoints = {of: Endpoint(of, environ=environ) for of in ("traces", "metrics", "logs")}
        spool = Spool(str(self.folder), "trainer-host", spool_bytes)
        self.outbox = Outbox(endpoints, spool, self._count, max_bytes)

    def _count(self, of, outcome, items, reason):
        with self._lock:
            self.counts[of, outcome, reason] += items

    def put(self, content, of="traces"):
        items = otlp_json.items_of_bytes(of, content)
        with self._lock:
            self.given[of] += items
        start = time.monotonic()
        self.outbox.put(Request(of, content, items))
        return time.monotonic() - start

    def total(self, outcome, of=None, reason=None):
        with self._lock:
            return sum(
                items
                for (its, became, why), items in self.counts.items()
                if became == outcome and of in {None, its} and reason in {None, why}
            )

    def adds_up(self):
        pending = self.outbox.pending()
        for of in ("traces", "metrics", "logs"):
            delivered, spooled, replayed, dropped = (
                self.total(outcome, of) for outcome in ("delivered", "spooled", "replayed", "dropped")
            )
            if delivered + spooled - replayed + dropped + pending[of] != self.given[of]:
                return False
        return True

    def spooled_names(self):
        if not any(self.folder.rglob("*.jsonl")):
            return []
        return [span.name for span in reader.load(self.folder).spans]


@pytest.fixture
def process(tmp_path, server):
    made = []

    def make(url=None, **options):
        made.append(Process(tmp_path, url or server.url, **options))
        return made[-1]

    yield make
    server.ended.set()
    for one in made:
        one.outbox.close(0)


def test_what_is_handed_over_is_delivered_in_order(process, server):
    p = process()
    for i in range(20):
        p.put(spans(str(i)))
    p.put(points(3), "metrics")
    p.put(records(2), "logs")
    assert p.outbox.flush(10)
    assert server.names() == [str(i) for i in range(20)]
    assert (server.items("metrics"), server.items("logs")) == (3, 2)
    assert p.counts == {("traces", "delivered", ""): 20, ("metrics", "delivered", ""): 3, ("logs", "delivered", ""): 2}
    until(p.adds_up, 2)
    assert not p.folder.exists()


@pytest.mark.parametrize("fault", FAULTS)
def test_with_every_fault_nobody_waits_and_nothing_is_lost(fault, process, server, caplog):
    p = process(server.url_of(fault))
    longest = 0
    for i in range(12):
        longest = max(longest, p.put(spans(str(i))), p.put(points(2), "metrics"), p.put(records(1), "logs"))
        time.sleep(0.03)
    assert longest < 0.5
    start = time.monotonic()
    p.outbox.close(1.0)
    assert time.monotonic() - start < 1.5
    until(p.adds_up, 2)
    assert p.outbox.pending() == {"traces": 0, "metrics": 0, "logs": 0}
    assert p.total("delivered") == 0
    if fault == "400":
        assert p.total("dropped", reason="refused") == 12 * 4
        assert "does not take all" in caplog.text
        return
    assert p.total("dropped") == 0
    assert sorted(p.spooled_names(), key=int) == [str(i) for i in range(12)]
    taken = len(server.taken)
    server.fault = ""
    done = replay.replay(p.folder, server.url)
    assert done.items == 12 * 4
    assert sorted(server.names()[taken:], key=int) == [str(i) for i in range(12)]


@pytest.mark.parametrize("fault", ["is not there", "hangs", "resets", "429", "503", "404"])
def test_when_the_endpoint_is_back_the_spool_is_sent_oldest_first(fault, tmp_path, server):
    server.retry_after = "0.1"
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    p = Process(tmp_path, f"http://127.0.0.1:{port}" if fault == "is not there" else server.url, timeout=0.3)
    server.fault = "" if fault == "is not there" else fault
    for i in range(10):
        p.put(spans(str(i)))
    until(lambda: p.total("spooled") == 10)
    back = Server(port=port) if fault == "is not there" else server
    back.fault = ""
    until(lambda: p.total("replayed") == 10)
    assert back.names() == [str(i) for i in range(10)]
    until(p.adds_up, 2)
    assert not list(p.folder.rglob("*.jsonl"))
    p.outbox.close(1)
    back.close()


def test_fresh_data_does_not_wait_for_the_spool(process, server, monkeypatch):
    monkeypatch.setattr(outbox, "STALLED", 2)
    p = process()
    server.fault = "503"
    server.retry_after = "0.3"
    for i in range(40):
        p.put(spans(f"old {i}"))
    until(lambda: p.total("spooled") == 40)
    server.fault, server.delay = "is slow", 0.02
    until(lambda: server.names())
    for i in range(10):
        p.put(spans(f"fresh {i}"))
    until(lambda: p.total("delivered") == 50)
    names = server.names()
    fresh = [names.index(f"fresh {i}") for i in range(10)]
    assert fresh[0] < 10 and fresh[-1] < 30  # one of the spool after each
    assert [name for name in names if name.startswith("old")] == [f"old {i}" for i in range(40)]


def test_what_waits_longer_than_agreed_is_on_disk(process, server):
    p = process()
    server.fault = "hangs"
    for i in range(3):
        p.put(spans(str(i)))
    until(lambda: sorted(p.spooled_names()) == ["0", "1", "2"], 2)  # the one under way included
    p.put(spans("3"))  # at once now
    assert sorted(p.spooled_names()) == ["0", "1", "2", "3"]
    until(p.adds_up, 2)


def test_a_killed_process_leaves_what_it_could_not_send(tmp_path, server):
    server.fault = "hangs"
    child = os.fork()
    if child == 0:
        p = Process(tmp_path, server.url)
        for i in range(200):
            p.put(spans(str(i)))
            time.sleep(0.01)
        os._exit(0)
    time.sleep(1.5)
    os.kill(child, signals.SIGKILL)
    os.waitpid(child, 0)
    found = sorted(int(span.name) for span in reader.load(tmp_path).spans)
    assert len(found) > 20
    last = 100 * outbox.STALLED  # spans of so many seconds; and some that are just being written
    assert set(range(int(found[-1] - last - 10))) <= set(found)
    assert len(set(found)) == len(found)


def test_a_request_that_was_spooled_and_arrives_after_all_is_not_sent_again(process, server):
    p = process()
    server.fault, server.delay = "is slow", 0.6
    p.put(spans("late"))
    until(lambda: p.total("spooled") == 1)
    until(lambda: p.total("replayed") == 1)
    server.fault = ""
    p.put(spans("next"))
    until(lambda: p.total("delivered") == 2)
    assert server.names() == ["late", "next"]
    until(p.adds_up, 2)
    assert p.spooled_names() == []


def test_flush_spools_what_is_not_sent_in_time(process, server, monkeypatch):
    monkeypatch.setattr(outbox, "STALLED", 60)
    p = process()
    server.fault = "hangs"
    for i in range(5):
        p.put(spans(str(i)))
    start = time.monotonic()
    assert p.outbox.flush(1.0)  # it is on disk
    assert 0.5 < time.monotonic() - start < 1.2
    assert sorted(p.spooled_names()) == [str(i) for i in range(5)]
    until(p.adds_up, 2)


def test_flush_waits_no_longer_than_agreed_also_when_the_disk_hangs(process, server, monkeypatch):
    p = process()
    server.fault = "hangs"
    gate = threading.Event()
    write = Spool.write
    monkeypatch.setattr(Spool, "write", lambda *args: gate.wait(20) and write(*args))
    p.put(spans("a"))
    start = time.monotonic()
    assert not p.outbox.flush(0.5)
    p.outbox.close(0.5)
    assert time.monotonic() - start < 1.5
    assert p.total("dropped", reason="unsent") == 1
    gate.set()
    time.sleep(0.1)
    until(p.adds_up, 2)  # also when it is written after all


def test_memory_is_bounded_and_the_rest_is_spooled(process, server, monkeypatch):
    monkeypatch.setattr(outbox, "STALLED", 60)
    p = process(max_bytes=10_000)
    server.fault = "hangs"
    for i in range(100):
        p.put(spans(str(i), text="x" * 900))
        assert p.outbox._bytes <= 10_000 + 1000
    assert sum(p.outbox.pending().values()) == 100 - p.total("spooled", reason="full")
    assert 85 <= p.total("spooled", reason="full") < 100
    until(p.adds_up, 2)
    p.outbox.flush(0.3)
    assert p.outbox._bytes == 0


def test_a_spool_that_is_full_is_a_counted_loss(process, server):
    p = process(spool_bytes=1000)
    server.fault = "503"
    for _ in range(50):
        p.put(spans("a"))
        time.sleep(0.002)
    p.outbox.flush(1)
    assert p.total("spooled") > 0
    assert p.total("dropped", reason="spool_full") == 50 - p.total("spooled") > 0
    until(p.adds_up, 2)


def test_without_a_disk_what_the_endpoint_takes_late_is_delivered(process, server, caplog):
    p = process()
    p.folder.parent.write_text("not a folder")
    server.fault, server.delay = "is slow", 0.7
    p.put(spans("a"))  # overdue, cannot be spooled, arrives
    until(lambda: p.total("delivered") == 1)
    server.fault = "503"
    p.put(spans("b"))
    until(lambda: p.total("dropped", reason="spool_failed") == 1)
    until(p.adds_up, 2)
    assert caplog.text.count("cannot be kept either") == 1


def test_one_signal_that_is_not_taken_does_not_hold_up_the_others(process, server):
    p = process()
    server.faults = {"metrics": "404", "logs": "hangs"}
    for i in range(20):
        p.put(spans(str(i)))
        p.put(points(1), "metrics")
        p.put(records(1), "logs")
        time.sleep(0.02)
    until(lambda: p.total("delivered", "traces") == 20, 2)
    assert p.total("spooled", "traces") == 0
    until(lambda: p.total("spooled", "metrics") == 20 and p.total("spooled", "logs") == 20)


def test_a_request_that_breaks_the_endpoint_is_left_and_the_others_go_on(process, server):
    p = process()
    poison = spans("poison")
    server.broken = lambda signal, content: content == poison
    p.put(poison)
    until(lambda: p.total("spooled") == 1)
    sent = 0
    while server.names().count("fresh") < 100 or p.total("spooled") - p.total("replayed") > 1:
        p.put(spans("fresh"))
        sent += 1
        time.sleep(0.02)
        assert sent < 1000, "the spool is not sent"
    until(lambda: p.spooled_names() == ["poison"], 2)
    until(p.adds_up, 2)


def test_after_a_request_that_breaks_the_endpoint_fresh_ones_show_that_it_works(process, server, monkeypatch):
    monkeypatch.setattr(outbox, "LONGEST_PAUSE", 10)
    p = process()
    poison = spans("poison")
    server.broken = lambda signal, content: content == poison
    p.put(poison)
    until(lambda: p.total("spooled") == 1)
    for i in range(12):  # seldom, so that the endpoint is always to be tried again before
        time.sleep(0.45)
        p.put(spans(str(i)))
    until(lambda: len(server.names()) == 12, 5)
    assert server.names() == [str(i) for i in range(12)]
    assert p.spooled_names() == ["poison"]


def test_what_the_endpoint_refuses_of_the_spool_is_lost_once(process, server):
    p = process()
    server.fault = "503"
    server.retry_after = "0.2"
    p.put(spans("a", "b"))
    until(lambda: p.total("spooled") == 2)
    server.fault = "400"
    until(lambda: p.total("dropped", reason="refused") == 2)
    until(p.adds_up, 2)
    assert p.spooled_names() == []


def test_a_partial_success_is_counted(process, server, caplog):
    p = process()
    server.rejected = 1
    p.put(spans("a", "b", "c"))
    assert p.outbox.flush(5)
    until(lambda: p.total("dropped") == 1)
    assert p.counts == {("traces", "delivered", ""): 2, ("traces", "dropped", "rejected"): 1}
    until(p.adds_up, 2)
    assert "rejected 1" in caplog.text


def test_retry_after_is_respected(process, server):
    p = process()
    server.fault, server.retry_after = "429", "1"
    p.put(spans("a"))
    until(lambda: server.tried["traces"] == 1)
    server.fault = ""
    time.sleep(0.5)
    assert server.tried["traces"] == 1
    until(lambda: server.names() == ["a"], 3)


@pytest.mark.parametrize("fault", ["", "503", "resets", "is slow"])
def test_many_threads_that_flush_and_put_count_each_item_once(fault, process, server):
    p = process()
    server.fault, server.delay, server.retry_after = fault, 0.25, "0.05"
    stop = threading.Event()

    def put(thread):
        for i in range(50):
            p.put(spans(f"{thread}-{i}"))
            time.sleep(0.004)

    def flush():
        while not stop.is_set():
            p.outbox.flush(0.05)

    putting = [threading.Thread(target=put, args=(i,)) for i in range(4)]
    flushing = [threading.Thread(target=flush) for _ in range(2)]
    for thread in putting + flushing:
        thread.start()
    for thread in putting:
        thread.join(30)
    stop.set()
    for thread in flushing:
        thread.join(30)
    server.fault = ""
    until(lambda: p.total("delivered") == 200)
    until(p.adds_up, 2)
    assert set(server.names()) == {f"{thread}-{i}" for thread in range(4) for i in range(50)}
    if fault != "is slow":
        assert len(server.names()) == 200


def test_a_forked_child_sends_its_own_and_nothing_of_its_parent(process, server):
    p = process()
    server.fault = "hangs"
    p.put(spans("parent"))
    until(lambda: server.tried["traces"] == 1)
    server.fault = ""
    child = os.fork()
    if child == 0:
        p.put(spans("child"))
        os._exit(0 if p.outbox.flush(10) else 1)
    assert os.waitpid(child, 0)[1] == 0
    assert server.names() == ["child"]


def test_put_never_raises(process, server, monkeypatch):
    p = process()
    p.outbox.put(Request("no such signal", b"", 1))
    server.fault = "503"

    def broken(*_):
        raise MemoryError

    monkeypatch.setattr(Spool, "write", broken)
    p.put(spans("a"))
    until(lambda: p.total("dropped", reason="failed") == 1)
    p.put(spans("b"))
    until(p.adds_up, 2)


def test_after_closing_everything_is_spooled(process, server):
    p = process()
    p.put(spans("before"))
    p.outbox.close(5)
    assert server.names() == ["before"]
    p.put(spans("after"))
    assert p.spooled_names() == ["after"]
    until(p.adds_up, 2)


def test_its_threads_end(process):
    def ours():
        return {thread for thread in threading.enumerate() if thread.name.startswith("verl-otel-")}

    before = ours()
    p = process()
    p.put(spans("a"))
    assert len(ours() - before) == 4
    p.outbox.close(5)
    until(lambda: not ours() - before, 5)


@pytest.mark.parametrize("fault", FAULTS)
def test_no_secret_is_in_any_message_or_file(fault, process, server, tmp_path, caplog):
    url = server.url_of(fault).replace("://", f"://user:{SECRET}@") + f"/{SECRET}?token={SECRET}"
    variables = {f"OTEL_EXPORTER_OTLP_{of}_ENDPOINT": url for of in ("TRACES", "METRICS", "LOGS")}
    headers = f"authorization=Bearer {SECRET},x-api-key={SECRET},{SECRET}"
    with caplog.at_level("INFO"):
        p = process(url, timeout=0.3, OTEL_EXPORTER_OTLP_HEADERS=headers, **variables)
        p.put(spans("a"))
        p.put(points(1), "metrics")
        until(lambda: not sum(p.outbox.pending().values()))
        p.outbox.close(1)
    assert caplog.text
    assert SECRET not in caplog.text
    assert SECRET not in "".join(record.getMessage() + str(record.exc_text) for record in caplog.records)
    for path in tmp_path.rglob("*"):
        assert SECRET not in path.name
        assert path.is_dir() or SECRET not in path.read_text()
