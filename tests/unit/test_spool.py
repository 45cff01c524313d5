"""The spool (`export/spool.py`): what could not be sent is on disk, whole, in order, and only its owner's."""

import os
import stat
import threading

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from otlp_server import points, records, spans

from verl_otel.export import otlp_json, spool
from verl_otel.export.spool import FAILED, FULL, NotKept, Spool
from verl_otel.recording import reader


@pytest.fixture
def folder(tmp_path):
    return tmp_path / "run" / "spool"


@pytest.fixture
def made(folder):
    made = Spool(str(folder), "trainer-host")
    yield made
    made.close()


def name_of(record):
    return otlp_json.from_bytes("traces", record.content).resource_spans[0].scope_spans[0].spans[0].name


def drain(spool, signal="traces"):
    names = []
    while (record := spool.peek(signal)) is not None:
        names.append(name_of(record))
        assert spool.done(record.kept)
    return names


def files(folder):
    return sorted(folder.rglob("*.jsonl"))


def test_what_is_written_is_sent_in_order_and_then_gone(made, folder):
    contents = [spans(str(i)) for i in range(5)]
    for content in contents:
        made.write("traces", content)
    assert made.pending("traces") and not made.pending("logs")
    for content in contents:
        record = made.peek("traces")
        assert (record.content, record.items) == (content, 1)
        assert made.peek("traces") == record  # until it is done
        assert made.done(record.kept)
    assert made.peek("traces") is None
    assert not made.pending("traces")
    assert files(folder) == []


def test_each_signal_is_sent_on_its_own(made):
    made.write("metrics", points(3))
    made.write("traces", spans("a"))
    made.write("logs", records(2))
    assert [made.peek(signal).items for signal in ("traces", "metrics", "logs")] == [1, 3, 2]
    assert drain(made) == ["a"]
    assert made.peek("metrics").items == 3


def test_a_spool_can_be_read_as_a_recording(made, folder):
    made.write("traces", spans("a", "b"))
    made.write("logs", records(1))
    recording = reader.load(folder)
    assert [span.name for span in recording.spans] == ["a", "b"]
    assert len(recording.events) == 1
    made.done(made.peek("traces").kept)  # blanked or removed, it can still be read
    assert reader.load(folder).unreadable_lines == 0


def test_files_and_folders_are_their_owners(made, folder):
    mask = os.umask(0)
    try:
        made.write("traces", spans("a"))
    finally:
        os.umask(mask)
    assert [stat.S_IMODE(path.stat().st_mode) for path in files(folder)] == [0o600]
    assert [stat.S_IMODE(path.stat().st_mode) for path in (folder, folder.parent)] == [0o700] * 2


def test_a_part_that_was_sent_is_removed_and_the_next_one_begun_in_time(made, folder, monkeypatch):
    monkeypatch.setattr(spool, "PART", 1000)
    for i in range(30):
        made.write("traces", spans(str(i)))
    parts = files(folder)
    assert len(parts) > 3 and all(path.stat().st_size <= 1000 for path in parts)
    sent = 0
    while files(folder) == parts:
        sent += made.done(made.peek("traces").kept)
    assert files(folder) == parts[1:]
    assert drain(made) == [str(i) for i in range(sent, 30)]
    assert files(folder) == []


def test_a_record_that_was_sent_is_not_there_for_anybody_else(made, folder):
    kept = [made.write("traces", spans(str(i))) for i in range(4)]
    assert made.done(kept[2])  # as when a request that was under way has arrived after all
    assert not made.done(kept[2])
    assert made.done(made.peek("traces").kept)
    assert [span.name for span in reader.load(folder).spans] == ["1", "3"]  # as after a kill
    assert drain(made) == ["1", "3"]


def test_when_all_records_were_sent_out_of_order_nothing_is_left(made, folder):
    kept = [made.write("traces", spans(str(i))) for i in range(3)]
    for one in reversed(kept):
        assert made.done(one)
    assert not made.pending("traces")
    assert files(folder) == []


def test_a_record_that_is_left_stays_on_disk_and_the_others_are_sent(made, folder):
    for i in range(3):
        made.write("traces", spans(str(i)))
    made.leave(made.peek("traces").kept)
    assert drain(made) == ["1", "2"]
    assert [span.name for span in reader.load(folder).spans] == ["0"]
    made.write("traces", spans("3"))
    assert drain(made) == ["3"]


def test_it_is_bounded(folder, caplog):
    made = Spool(str(folder), "trainer", max_bytes=1000)
    kept = 0
    with pytest.raises(NotKept, match=FULL):
        while True:
            made.write("traces", spans("a"))
            kept += 1
    assert kept > 1
    assert sum(path.stat().st_size for path in files(folder)) <= 1000
    with pytest.raises(NotKept, match=FULL):
        made.write("traces", spans("a"))
    assert caplog.text.count("takes no more") == 1
    assert len(drain(made)) == kept
    made.write("traces", spans("there is room again"))


def test_a_folder_that_cannot_be_written_is_one_warning_and_used_as_soon_as_it_can(tmp_path, caplog):
    (tmp_path / "run").write_text("not a folder")
    made = Spool(str(tmp_path / "run" / "spool"), "trainer")
    for _ in range(3):
        with pytest.raises(NotKept, match=FAILED):
            made.write("traces", spans("a"))
    assert caplog.text.count("cannot be kept either") == 1
    assert "VERL_OTEL_FOLDER" in caplog.text
    assert not made.pending("traces") and made.peek("traces") is None
    (tmp_path / "run").unlink()
    made.write("traces", spans("b"))
    assert drain(made) == ["b"]


class FullDisk:
    """A file on a disk that takes only some more bytes."""

    def __init__(self, file, room):
        self._file, self._room = file, room

    def write(self, content):
        if self._room == 0:
            raise OSError(28, "No space left on device")
        taken = self._file.write(content[: self._room])
        self._room -= taken
        return taken

    def __getattr__(self, name):
        return getattr(self._file, name)


@pytest.mark.parametrize("room", [0, 1, 150])
def test_on_a_full_disk_nothing_is_torn(made, folder, room):
    made.write("traces", spans("before"))
    (part,) = made._queues["traces"].parts
    part.file, file = FullDisk(part.file, room), part.file
    for _ in range(2):
        with pytest.raises(NotKept, match=FAILED):
            made.write("traces", spans("lost", text="x" * 200))
    part.file = file
    made.write("traces", spans("after"))
    recording = reader.load(folder)
    assert ([span.name for span in recording.spans], recording.unreadable_lines) == (["before", "after"], 0)
    assert len(files(folder)) == 1
    assert drain(made) == ["before", "after"]


def test_a_part_that_cannot_be_read_now_is_not_lost(made, folder, monkeypatch):
    made.write("traces", spans("a"))

    def no_files_left(*_):
        raise OSError(24, "Too many open files")

    with monkeypatch.context() as broken:
        broken.setattr("builtins.open", no_files_left)
        with pytest.raises(OSError):
            made.peek("traces")
    assert drain(made) == ["a"]


def test_a_part_that_somebody_has_removed_is_passed_over(made, folder):
    made.write("traces", spans("a"))
    (path,) = files(folder)
    path.unlink()
    assert made.peek("traces") is None
    assert not made.pending("traces")
    made.write("traces", spans("b"))
    assert drain(made) == ["b"]


@settings(max_examples=60)
@given(
    names=st.lists(st.text("abc奖", max_size=8), min_size=1, max_size=8),
    cut=st.integers(0, 10_000),
    noise=st.binary(max_size=30).filter(lambda b: b"\n" not in b),
)
def test_a_torn_part_loses_only_the_torn_record(tmp_path_factory, names, cut, noise):
    folder = tmp_path_factory.mktemp("torn")
    made = Spool(str(folder / "run" / "spool"), "trainer")
    for name in names:
        made.write("traces", spans(name))
    made.close()
    (path,) = files(folder)
    content = path.read_bytes()
    cut = cut % (len(content) + 1)
    whole = content[:cut].count(b"\n")
    path.write_bytes(content[:cut] + noise)
    found = [otlp_json.from_line(line) for line in path.read_bytes().splitlines(keepends=True)]
    read = [request.resource_spans[0].scope_spans[0].spans[0].name for _, request in filter(None, found)]
    assert read[:whole] == names[:whole]
    assert len(read) <= whole + (not noise and cut == len(content) - 1) + (not noise)
    assert drain(made)[:whole] == names[:whole]  # and so does the process that wrote it


@given(st.binary(max_size=60) | st.text('{}[]:,"resourcSpanl1', max_size=60).map(str.encode))
def test_any_line_is_a_request_or_none(line):
    found = otlp_json.from_line(line)
    assert found is None or otlp_json.items(*found) >= 0


def test_a_forked_child_has_a_spool_of_its_own(made, folder):
    made.write("traces", spans("parent"))
    holds = threading.Event()

    def hold():
        with made._lock:
            holds.set()
            threading.Event().wait(1)

    threading.Thread(target=hold, daemon=True).start()
    holds.wait()
    child = os.fork()  # while another thread holds the lock
    if child == 0:
        try:
            assert not made.pending("traces")
            made.write("traces", spans("child"))
            assert len(files(folder)) == 2
            assert drain(made) == ["child"]
        except BaseException:
            os._exit(1)
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0
    assert drain(made) == ["parent"]


def test_a_process_with_the_pid_of_another_one_does_not_touch_its_files(made, folder):
    made.write("traces", spans("of a process that was killed"))
    made.close()
    left = files(folder)
    again = Spool(str(folder), "trainer-host")
    again.write("traces", spans("of the next one"))
    assert drain(again) == ["of the next one"]
    assert files(folder) == left


def test_what_is_written_after_closing_is_kept_too(made, folder):
    made.write("traces", spans("a"))
    made.close()
    made.write("traces", spans("b"))
    assert sorted(span.name for span in reader.load(folder).spans) == ["a", "b"]


def test_many_threads_lose_nothing(made, monkeypatch):
    monkeypatch.setattr(spool, "PART", 5000)
    seen = []

    def write(thread):
        for i in range(40):
            made.write("traces", spans(f"{thread}-{i}"))

    def read():
        while len(seen) < 160:
            record = made.peek("traces")
            if record is not None and made.done(record.kept):
                seen.append(name_of(record))

    threads = [threading.Thread(target=write, args=(i,)) for i in range(4)] + [threading.Thread(target=read)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert sorted(seen) == sorted(f"{thread}-{i}" for thread in range(4) for i in range(40))
    assert made._bytes == 0
