"""The InfluxDB sink of the bridge on a real InfluxDB."""

import base64
import itertools
import math
import re
from pathlib import Path

import pytest
from bridge_runs import SECOND, START, VerlRun
from hypothesis import example, given, settings
from hypothesis import strategies as st
from influxdb import InfluxDB

from verl_otel.bridges import influx
from verl_otel.bridges.influx import InfluxSink
from verl_otel.bridges.sink import Refused, TryLater

pytestmark = pytest.mark.stack

ROOT = Path(__file__).resolve().parents[2]

_numbers = itertools.count(1)


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    server = InfluxDB(tmp_path_factory.mktemp("influxdb"))
    server.start()
    yield server
    server.kill()


@pytest.fixture(scope="module")
def sink(server):
    return InfluxSink(server.write_url)


@pytest.fixture
def verl():
    return VerlRun(f"run-{next(_numbers)}")


def points(server, verl, measurement="verl_step"):
    """The fields of a run's points, without those that it has not."""
    query = f"SELECT * FROM {measurement} WHERE verl_run_id = '{verl.run_id}' ORDER BY time"
    found = [row for _, rows in server.ask(query) for row in rows]
    return [{key: value for key, value in row.items() if value is not None} for row in found]


def test_a_step_is_a_point_with_its_tags_its_time_and_every_value(server, sink, verl):
    assert sink.handle([verl.step(3, **{"critic/score/mean": 0.1 + 0.2, "n": 7, "text": "none", "flag": True})]) == 0
    tags = {"verl_run_id": verl.run_id, "verl_run_attempt": "1"}
    names = {"verl_project_name": "gsm8k", "verl_experiment_name": "ppo-1"}
    fields = {"verl.step.number": 3, "critic/score/mean": 0.1 + 0.2, "n": 7.0}
    assert points(server, verl) == [{"time": START + 3 * SECOND, **tags, **names, **fields}]


def test_what_is_not_finite_is_kept_beside_the_other_values(server, sink, verl):
    sink.handle([verl.step(n, loss=value, a=1.0) for n, value in enumerate((math.nan, math.inf, -math.inf, 2.0), 1)])
    found = points(server, verl)
    assert [(point.get("loss"), point.get("loss.non_finite"), point["a"]) for point in found] == [
        (None, "nan", 1.0),
        (None, "inf", 1.0),
        (None, "-inf", 1.0),
        (2.0, None, 1.0),
    ]


def test_twice_in_any_order_is_as_once(server, sink, verl):
    events = [verl.started(lr=0.1), *(verl.step(n, a=n / 7) for n in range(1, 6)), verl.finished(state="failed")]
    sink.handle(events)
    once = points(server, verl), points(server, verl, "verl_run")
    assert [point["a"] for point in once[0]] == [n / 7 for n in range(1, 6)]
    assert [(point["state"], point.get("lr")) for point in once[1]] == [("running", "0.1"), ("failed", None)]
    sink.handle(events[::-1])
    assert (points(server, verl), points(server, verl, "verl_run")) == once


def test_a_key_may_be_whole_now_and_a_fraction_later(server, sink, verl):
    sink.handle([verl.step(1, a=1), verl.step(2, a=1.5)])
    assert [point["a"] for point in points(server, verl)] == [1.0, 1.5]


def test_what_is_not_for_it_is_counted(sink, verl):
    assert sink.handle([verl.event("verl.step", 1, {"a": 1.0}), verl.event("other", 1, {}), verl.step(1, a=1.0)]) == 2


def test_more_than_a_request_takes(server, sink, verl, monkeypatch):
    monkeypatch.setattr(influx, "MAX_BODY", 10_000)
    sink.handle([verl.step(n, **{f"key/{i}": float(i) for i in range(100)}) for n in range(1, 51)])
    assert [len(point) for point in points(server, verl)] == [106] * 50


def test_keys_with_our_names_are_kept_too(server, sink, verl):
    names = ("time", "state", "verl_run_id", "verl.step.number")
    sink.handle([verl.step(3, **dict.fromkeys(names, 1.5)), verl.started(**dict.fromkeys(names, "x"))])
    (step,), (run,) = points(server, verl), points(server, verl, "verl_run")
    assert step["verl.step.number"] == 3 and run["state"] == "running"
    assert [step[f"{name}_"] for name in names] == [1.5] * 4 and [run[f"{name}_"] for name in names] == ["x"] * 4


TEXTS = st.text(st.characters(codec="utf-8"), max_size=8)


@settings(max_examples=60, deadline=None, derandomize=True, database=None)
@given(st.dictionaries(TEXTS, st.floats() | st.integers(-(2**53), 2**53), max_size=4), TEXTS, TEXTS)
@example({"a\\": 1.0, 'b\nc,d=e f"': 2.0, "\\": 3.0}, "p\\", "x\ny\\")
def test_any_keys_and_names_are_taken_and_spoil_no_other_point(server, sink, body, project, experiment):
    strange = VerlRun(f"run-{next(_numbers)}", project, experiment)
    plain = VerlRun(f"run-{next(_numbers)}")
    strange_step = strange.event("verl.step", 1, body, **{"verl.step.number": 1})
    sink.handle([plain.step(1, a=1.0), strange.started(**{"x": project}), strange_step, plain.step(2, a=2.0)])
    assert [point["a"] for point in points(server, plain)] == [1.0, 2.0]
    (point,) = points(server, strange)
    finite = {value for value in strange_step.numbers().values() if math.isfinite(value)}
    assert finite <= {float(value) for value in point.values() if not isinstance(value, str)}


def test_the_documented_queries_give_what_they_say(server, sink):
    a, b = VerlRun("run-a"), VerlRun("run-b")
    of_ranks = {
        f"verl.ranks/update_actor/loss/{name}": float(n) for n, name in enumerate(("mean", "std", "min", "max"))
    }
    sink.handle([a.step(1, **{"critic/score/mean": 0.5}, **of_ranks), b.step(1, at=2, **{"critic/score/mean": 0.25})])
    document = (ROOT / "docs" / "databases.md").read_text()
    curve, by_rank, compared = map(
        server.ask, re.findall(r"^```influxql\n(.*?)^```", document, re.MULTILINE | re.DOTALL)
    )
    at = {"time": START + SECOND}
    assert curve == [({}, [{**at, "verl.step.number": 1, "critic/score/mean": 0.5}])]
    assert by_rank == [({}, [{**at, "verl.step.number": 1, **of_ranks}])]
    assert [(tags["verl_run_id"], rows[0]["critic/score/mean"]) for tags, rows in compared] == [
        ("run-a", 0.5),
        ("run-b", 0.25),
    ]


def test_a_database_that_is_not_there_yet_is_waited_for(server, verl):
    with pytest.raises(TryLater, match="database not found"):
        InfluxSink(f"{server.url}/write?db=later").handle([verl.step(1, a=1.0)])


def test_what_influxdb_can_never_take_is_refused(server, verl):
    server.ask('CREATE DATABASE "typed"', database="")
    sink = InfluxSink(f"{server.url}/write?db=typed")
    sink.handle([verl.step(1, **{"a.non_finite": 1.0})])
    with pytest.raises(Refused, match="partial write"):
        sink.handle([verl.step(2, a=math.nan)])


def test_a_server_with_a_password_that_was_away(tmp_path, verl):
    server = InfluxDB(tmp_path, password="Zq7secret")
    server.start()
    try:
        with pytest.raises(TryLater, match="401"):
            InfluxSink(server.write_url).handle([verl.step(1, a=1.0)])
        basic = "Basic " + base64.b64encode(b"verl:Zq7secret").decode()
        sink = InfluxSink(server.write_url, basic)
        sink.handle([verl.step(1, a=1.0)])
        server.kill()
        with pytest.raises(TryLater, match="cannot be reached") as away:
            sink.handle([verl.step(2, a=2.0)])
        assert "Zq7secret" not in str(away.value)
        server.start()
        sink.handle([verl.step(2, a=2.0)])
        assert [point["verl.step.number"] for point in points(server, verl)] == [1, 2]
    finally:
        server.kill()
