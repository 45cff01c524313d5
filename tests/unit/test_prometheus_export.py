"""Metrics that Prometheus scrapes from the processes themselves (`export/prometheus.py`)."""

import json
import logging
import os
import re
import signal
import socket
import stat
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from dataclasses import replace
from pathlib import Path

import pytest
from opentelemetry.metrics import Observation
from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.metrics.export import PeriodicExportingMetricReader
from opentelemetry.sdk.resources import Resource
from otlp_server import Server
from prometheus_client import REGISTRY
from prometheus_client.parser import text_string_to_metric_families

from verl_otel.export import otlp, prometheus, providers, targets
from verl_otel.export.prometheus import PrometheusReader

CHECKOUT = Path(__file__).resolve().parents[2]
ATTRIBUTES = {
    "verl.run.id": "run-1",
    "verl.run.attempt": 2,
    "verl.project.name": "alpha",
    "verl.experiment.name": '数学 "quoted"',
    "verl.process.role": "worker",
    "verl.worker.group": "WorkerDict",
    "service.instance.id": "0123456789abcdef",
    "host.name": "node-1",
}


@pytest.fixture(autouse=True)
def root(tmp_path, monkeypatch):
    folder = tmp_path / "recordings"
    monkeypatch.setenv("VERL_OTEL_FOLDER", str(folder))
    return folder


@pytest.fixture
def process(root):
    """Make a reader and its provider, as a process does. `process(...)` gives both, and the reader listens."""
    made = []

    def make(attributes=None, **options):
        resource = Resource({**ATTRIBUTES, **(attributes or {})})
        reader = PrometheusReader(resource, **options)
        made.append(MeterProvider([reader], resource, shutdown_on_exit=False))
        assert reader.address()
        return reader, made[-1]

    yield make
    for provider in made:
        if not provider._shutdown:
            provider.shutdown()


def get(address, path="/metrics"):
    with urllib.request.urlopen(f"http://{address}{path}", timeout=10) as response:
        return response.read().decode()


def samples(text):
    """Every sample as (name, labels) -> value; fails if one is there twice."""
    found = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            key = (sample.name, tuple(sorted(sample.labels.items())))
            assert key not in found, f"{key} is served twice"
            found[key] = sample.value
    return found


def values(text):
    return {name: value for (name, _), value in samples(text).items()}


def refused(address):
    host, port = address.rsplit(":", 1)
    try:
        socket.create_connection((host, int(port)), timeout=2).close()
    except ConnectionRefusedError:
        return True
    return False


def files(root):
    return sorted(root.glob("prometheus/*.json"))


def warnings_of(caplog):
    return [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]


# ---- what is served


def test_a_scrape_gives_the_names_that_the_collector_s_way_gives(process):
    reader, provider = process()
    meter = provider.get_meter("verl_otel", "1.0")
    meter.create_gauge("verl.training.step").set(7, {"rank": "all", "verl.key": "training/global_step"})
    meter.create_histogram("verl.stage.duration", "s").record(0.25, {"rank": "all"})
    meter.create_gauge("verl.throughput", "{token}/s").set(10)
    meter.create_gauge("verl.step.last_timestamp", "s").set(1.5)
    meter.create_counter("verl.metric.non_finite", "{value}").add(3)
    text = get(reader.address())
    found = values(text)
    assert {name: value for name, value in found.items() if "bucket" not in name} == {
        "target_info": 1,
        "verl_training_step": 7,
        "verl_stage_duration_seconds_count": 1,
        "verl_stage_duration_seconds_sum": 0.25,
        "verl_throughput_per_second": 10,
        "verl_step_last_timestamp_seconds": 1.5,
        "verl_metric_non_finite_total": 3,
    }
    (labels,) = [dict(labels) for name, labels in samples(text) if name == "verl_training_step"]
    assert labels["verl_key"] == "training/global_step" and labels["otel_scope_name"] == "verl_otel"


def test_flushes_between_scrapes_are_not_served_again(process):
    """The hooks ask for a flush at each step; the stock reader keeps what each of them collects until a scrape."""
    reader, provider = process()
    gauge = provider.get_meter("test").create_gauge("verl.training.step")
    for step in range(5):
        gauge.set(step)
        assert provider.force_flush()
    assert values(get(reader.address()))["verl_training_step"] == 4
    assert values(get(reader.address()))["verl_training_step"] == 4


def test_scrapes_at_the_same_time_get_each_series_once(process):
    """The stock collector has one queue for what is collected: a scrape could find that of another in it."""
    inside = [0]
    most = []

    def extend(data):
        inside[0] += 1
        most.append(inside[0])
        time.sleep(0.02)
        inside[0] -= 1
        return data

    reader, provider = process(extend=extend)
    provider.get_meter("test").create_gauge("verl.training.step").set(1)
    answers = []
    threads = [threading.Thread(target=lambda: answers.append(get(reader.address()))) for _ in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [values(answer)["verl_training_step"] for answer in answers] == [1] * 6
    assert most == [1] * 6


def test_a_scrape_is_on_daemon_threads_of_ours(process):
    reader, provider = process()
    threads = []

    def observe(_):
        threads.append(threading.current_thread())
        return [Observation(1)]

    provider.get_meter("test").create_observable_gauge("verl.here", [observe])
    provider.force_flush()
    assert threads == []
    get(reader.address())
    (thread,) = threads
    assert thread is not threading.main_thread() and thread.daemon


def test_nothing_of_ours_is_on_the_default_registry(process):
    before = {family.name for family in REGISTRY.collect()}
    _, provider = process()
    provider.get_meter("test").create_gauge("verl.training.step").set(1)
    assert {family.name for family in REGISTRY.collect()} == before


def test_what_is_made_elsewhere_can_be_added(process):
    def extend(data):
        (group,) = data.resource_metrics
        (scope,) = group.scope_metrics
        metric = replace(scope.metrics[0], name="verl.added")
        return replace(data, resource_metrics=[group, replace(group, scope_metrics=[replace(scope, metrics=[metric])])])

    reader, provider = process(extend=extend)
    provider.get_meter("test").create_gauge("verl.training.step").set(1)
    found = values(get(reader.address()))
    assert (found["verl_training_step"], found["verl_added"]) == (1, 1)


def test_what_cannot_be_added_costs_one_warning_and_itself(process, caplog):
    reader, provider = process(extend=lambda data: 1 / 0)
    provider.get_meter("test").create_gauge("verl.training.step").set(1)
    for _ in range(3):
        assert values(get(reader.address()))["verl_training_step"] == 1
    assert len(warnings_of(caplog)) == 1


def test_a_scrape_that_fails_is_an_error_for_prometheus_and_one_warning(process, caplog, capfd):
    reader, provider = process({"verl.experiment.name": "\udcff"})  # cannot be encoded
    provider.get_meter("test").create_gauge("verl.training.step").set(1)
    for _ in range(3):
        with pytest.raises(urllib.error.HTTPError) as raised:
            get(reader.address())
        assert raised.value.code == 500
    assert len(warnings_of(caplog)) == 1
    assert capfd.readouterr().err == ""


def test_a_scrape_that_never_ends_does_not_pile_up_others(process, monkeypatch):
    monkeypatch.setattr(prometheus, "CLIENT_TIMEOUT", 0.1)
    go_on, inside = threading.Event(), threading.Event()

    def extend(data):
        inside.set()
        go_on.wait(30)
        return data

    reader, provider = process(extend=extend)
    provider.get_meter("test").create_gauge("verl.training.step").set(1)
    first = threading.Thread(target=get, args=[reader.address()])
    first.start()
    assert inside.wait(10)
    with pytest.raises(urllib.error.HTTPError) as raised:
        get(reader.address())
    assert raised.value.code == 503
    go_on.set()
    first.join()
    assert values(get(reader.address()))["verl_training_step"] == 1


def test_a_client_that_goes_away_or_says_nothing_blocks_nobody_and_is_not_logged(process, monkeypatch, caplog, capfd):
    assert prometheus._Handler.timeout == prometheus.CLIENT_TIMEOUT
    monkeypatch.setattr(prometheus._Handler, "timeout", 0.5)
    reader, provider = process()
    gauge = provider.get_meter("test").create_gauge("verl.training.step")
    gauge.set(1)
    for number in range(80):
        gauge.set(1, {"verl.key": f"{number}" + "x" * 100_000})  # more than the buffers of a socket take
    host, port = reader.address().split(":")

    def connect():
        return socket.create_connection((host, int(port)))

    silent, away, unread = connect(), connect(), connect()
    unread.sendall(b"GET /metrics HTTP/1.1\r\n\r\n")
    away.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")  # closes with a reset
    away.close()
    assert len(samples(get(reader.address()))) == 82
    silent.settimeout(10)
    assert silent.recv(1) == b""  # after the timeout
    for thread in threading.enumerate():
        if "process_request_thread" in thread.name:
            thread.join(10)
    unread.close()
    silent.close()
    assert warnings_of(caplog) == []
    assert capfd.readouterr().err == ""


# ---- the port


def test_each_reader_has_a_free_port_on_loopback(process):
    addresses = {process()[0].address() for _ in range(2)}
    assert len(addresses) == 2
    assert {address.split(":")[0] for address in addresses} == {"127.0.0.1"}


def test_the_first_process_gets_the_port_that_is_asked_for_and_the_next_a_free_one(process, monkeypatch, caplog):
    with socket.create_server(("127.0.0.1", 0)) as s:
        port = s.getsockname()[1]
    monkeypatch.setenv("OTEL_EXPORTER_PROMETHEUS_PORT", str(port))
    first, second = process()[0], process()[0]
    assert first.address() == f"127.0.0.1:{port}"
    assert second.address() not in ("", first.address())
    assert warnings_of(caplog) == []


@pytest.mark.parametrize("port", ["70000", "-1", "http"])
def test_a_port_that_is_none_is_a_warning_and_a_free_one(process, monkeypatch, caplog, port):
    monkeypatch.setenv("OTEL_EXPORTER_PROMETHEUS_PORT", port)
    reader, _ = process()
    get(reader.address())
    (message,) = warnings_of(caplog)
    assert port in message


def test_all_interfaces_are_listened_on_only_if_asked_for(process, monkeypatch):
    reader, _ = process()
    assert reader._server.server_address[0] == "127.0.0.1"
    monkeypatch.setenv("OTEL_EXPORTER_PROMETHEUS_HOST", "0.0.0.0")
    monkeypatch.setattr(prometheus, "_node_address", lambda: "node-1.example")
    reader, _ = process()
    assert reader._server.server_address[0] == "0.0.0.0"
    assert reader.address() == f"node-1.example:{reader._server.server_port}"
    get(f"127.0.0.1:{reader._server.server_port}")


def test_ray_is_asked_for_the_address_of_the_node_where_it_is_loaded(monkeypatch):
    class Ray:
        class util:
            @staticmethod
            def get_node_ip_address():
                return "10.1.2.3"

    monkeypatch.setitem(sys.modules, "ray", Ray)
    assert prometheus._node_address() == "10.1.2.3"
    monkeypatch.delitem(sys.modules, "ray")
    assert prometheus._node_address() not in ("", "0.0.0.0")


@pytest.mark.skipif(not socket.has_ipv6, reason="no IPv6")
def test_ipv6(process, monkeypatch):
    monkeypatch.setenv("OTEL_EXPORTER_PROMETHEUS_HOST", "::1")
    try:
        socket.create_server(("::1", 0), family=socket.AF_INET6).close()
    except OSError:
        pytest.skip("no IPv6 on loopback")
    reader, _ = process()
    assert re.fullmatch(r"\[::1\]:\d+", reader.address())
    get(reader.address())


def test_an_address_of_another_host_is_one_warning_and_no_file(root, monkeypatch, caplog):
    monkeypatch.setenv("OTEL_EXPORTER_PROMETHEUS_HOST", "192.0.2.1")
    for _ in range(2):
        reader = PrometheusReader(Resource(ATTRIBUTES))
        assert reader.address() == ""
        reader.shutdown()
    (message,) = warnings_of(caplog)
    assert "OTEL_EXPORTER_PROMETHEUS_HOST" in message
    assert files(root) == []


def test_shutdown_closes_the_socket_and_ends_the_thread(process):
    reader, provider = process()
    address = reader.address()
    (thread,) = [t for t in threading.enumerate() if t.name == "verl-otel-prometheus" and not refused(address)]
    start = time.monotonic()
    provider.shutdown()
    assert time.monotonic() - start < 0.3
    assert refused(address)
    thread.join(5)
    assert not thread.is_alive()
    assert reader._server.socket.fileno() == -1
    reader.shutdown()  # once more does nothing


def test_a_shutdown_before_it_listens_leaves_nothing(root, monkeypatch):
    go_on = threading.Event()
    listen = prometheus._listen

    def late():
        go_on.wait(10)
        return listen()

    monkeypatch.setattr(prometheus, "_listen", late)
    reader = PrometheusReader(Resource(ATTRIBUTES))
    reader.shutdown()
    go_on.set()
    for thread in [t for t in threading.enumerate() if t.name == "verl-otel-prometheus"]:
        thread.join(10)
    assert reader._server is None
    assert files(root) == []


def test_a_forked_child_neither_serves_nor_holds_the_port_nor_removes_the_file(process, root):
    reader, provider = process()
    provider.get_meter("test").create_gauge("verl.training.step").set(1)
    address = reader.address()
    told, tell = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            provider.shutdown()
            os.write(tell, b"ready" if reader.address() == "" else b"still there")
            time.sleep(60)
        finally:
            os._exit(0)
    try:
        assert os.read(told, 100) == b"ready"
        assert len(files(root)) == 1
        assert values(get(address))["verl_training_step"] == 1
        provider.shutdown()
        assert refused(address), "the child holds the port"
    finally:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
        os.close(told)
        os.close(tell)


DIES = """
import os, signal, time
from opentelemetry.sdk.resources import Resource
from verl_otel.export.prometheus import PrometheusReader
reader = PrometheusReader(Resource({}))
address = reader.address(60)
if os.fork() == 0:
    print(address, os.getpid(), flush=True)
    time.sleep(60)
else:
    os.wait()
"""


def test_the_port_of_a_process_that_is_killed_is_not_held_by_its_forked_children(root):
    process = subprocess.Popen([sys.executable, "-c", DIES], stdout=subprocess.PIPE, text=True, cwd=CHECKOUT)
    address, child = process.stdout.readline().split()
    try:
        assert not refused(address)
        process.kill()
        process.wait()
        os.kill(int(child), 0)
        assert refused(address)
    finally:
        os.kill(int(child), signal.SIGKILL)
        process.stdout.close()


# ---- the file


def test_the_file_tells_prometheus_where_and_who(process, root):
    reader, provider = process()
    (path,) = files(root)
    assert path.relative_to(root) == Path(f"prometheus/run-1-worker-{os.uname().nodename}-{os.getpid()}.json")
    (target,) = json.loads(path.read_text())
    own_path = target["labels"].pop("__metrics_path__")
    assert target == {
        "targets": [reader.address()],
        "labels": {
            "verl_run_id": "run-1",
            "verl_run_attempt": "2",
            "verl_project_name": "alpha",
            "verl_experiment_name": '数学 "quoted"',
            "verl_process_role": "worker",
            "verl_worker_group": "WorkerDict",
            "host_name": "node-1",
            "service_instance_id": "0123456789abcdef",
        },
    }
    provider.get_meter("test").create_gauge("verl.training.step").set(1)
    assert values(get(reader.address(), own_path)) == values(get(reader.address()))


def test_what_a_process_is_not_is_no_label(root):
    reader = PrometheusReader(Resource({"verl.run.id": "run-1", "verl.process.role": "trainer"}))
    assert reader.address()
    (path,) = files(root)
    (target,) = json.loads(path.read_text())
    assert sorted(target["labels"]) == ["__metrics_path__", "verl_process_role", "verl_run_id"]
    reader.shutdown()


def test_the_port_of_a_dead_process_does_not_give_the_numbers_of_the_next(process, root, monkeypatch):
    reader, provider = process()
    (target,) = json.loads(files(root)[0].read_text())
    provider.shutdown()
    monkeypatch.setenv("OTEL_EXPORTER_PROMETHEUS_PORT", reader.address().split(":")[1])
    following, _ = process()
    assert following.address() == target["targets"][0]
    with pytest.raises(urllib.error.HTTPError) as raised:
        get(target["targets"][0], target["labels"]["__metrics_path__"])
    assert raised.value.code == 404


def test_the_file_goes_at_shutdown(process, root):
    _, provider = process()
    assert len(files(root)) == 1
    provider.shutdown()
    assert list((root / "prometheus").iterdir()) == []


def test_a_file_that_is_gone_already_does_not_matter(process, root, caplog):
    _, provider = process()
    files(root)[0].unlink()
    provider.shutdown()
    assert warnings_of(caplog) == []


@pytest.mark.parametrize("mask", [0o000, 0o077])
def test_prometheus_may_read_the_file_as_another_user_and_nobody_may_write_it(process, root, mask):
    before = os.umask(mask)
    try:
        process()
    finally:
        os.umask(before)
    (path,) = files(root)
    assert stat.S_IMODE(path.stat().st_mode) == 0o644
    assert stat.S_IMODE(path.parent.stat().st_mode) & ~0o022 == 0o755


@pytest.mark.parametrize("started_by_the_run", [False, True])
def test_the_launcher_s_end_is_the_end_of_its_run_s_targets(process, root, monkeypatch, started_by_the_run):
    """Ray kills its workers at the end. What one of them starts may look like a launcher, but the run goes on."""
    _, launcher = process({"verl.process.role": "launcher"})
    process()
    process({"verl.run.id": "run-1-worker"})
    process({"verl.run.attempt": 3, "verl.process.role": "trainer"})
    for name, text in (("run-1-x", '[{"targets": []}]'), ("run-1-y", "{}"), ("run-1-z", "[")):
        (root / "prometheus" / f"{name}.json").write_text(text)
    before = {path.name for path in files(root)}
    assert len(before) == 7
    if started_by_the_run:
        monkeypatch.setenv("VERL_OTEL_ACTIVE", "1")
    launcher.shutdown()
    me = f"{os.uname().nodename}-{os.getpid()}.json"
    gone = {f"run-1-launcher-{me}"} | ({f"run-1-worker-{me}"} if not started_by_the_run else set())
    assert before - {path.name for path in files(root)} == gone


def test_the_names_of_a_run_and_a_role_cannot_lead_out_of_the_folder(process, root):
    process({"verl.run.id": "../../x", "verl.process.role": "../y"})
    (path,) = files(root)
    assert not path.name.startswith(".")


def test_a_half_written_file_is_never_seen(process, root, monkeypatch):
    seen = []
    dump = json.dump

    def slow(value, file):
        seen.extend((root / "prometheus").glob("*.json"))  # also hidden ones, as Go's glob
        dump(value, file)

    monkeypatch.setattr(targets.json, "dump", slow)
    process()
    assert seen == []
    assert len(files(root)) == 1


def test_a_folder_that_cannot_be_written_is_one_warning_and_the_metrics_are_served(
    process, tmp_path, monkeypatch, caplog
):
    (tmp_path / "file").write_text("not a folder")
    monkeypatch.setenv("VERL_OTEL_FOLDER", str(tmp_path / "file" / "recordings"))
    for _ in range(2):
        reader, provider = process()
        provider.get_meter("test").create_gauge("verl.training.step").set(1)
        assert values(get(reader.address()))["verl_training_step"] == 1
    (message,) = warnings_of(caplog)
    assert "VERL_OTEL_FOLDER" in message and "127.0.0.1:" in message


# ---- the providers


def test_the_exporter_of_this_name_is_ours_and_knows_the_resource(root, monkeypatch):
    monkeypatch.setenv("OTEL_METRICS_EXPORTER", "prometheus")
    provider = providers._meter_provider(Resource(ATTRIBUTES))
    (reader,) = provider._metric_readers
    assert type(reader) is PrometheusReader
    assert reader.address()
    assert len(files(root)) == 1
    provider.shutdown()


def test_what_is_added_to_exports_is_scraped_too(root, monkeypatch):
    monkeypatch.setenv("OTEL_METRICS_EXPORTER", "prometheus")
    provider = providers._meter_provider(Resource(ATTRIBUTES))
    calls = []
    monkeypatch.setattr(providers, "_extend", lambda data: calls.append(data) or data)
    provider.get_meter("test").create_gauge("verl.training.step").set(1)
    get(provider._metric_readers[0].address())
    assert len(calls) == 1
    provider.shutdown()


def test_prometheus_and_otlp_both_get_the_metrics(monkeypatch):
    monkeypatch.setattr(otlp, "_outbox", None)
    with Server() as server:
        monkeypatch.setenv("OTEL_METRICS_EXPORTER", "otlp,prometheus")
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", server.url)
        provider = providers._meter_provider(Resource(ATTRIBUTES))
        # Prometheus' first: the shutdown of the other waits for a Collector that may be away.
        kinds = [type(reader) for reader in provider._metric_readers]
        assert kinds == [PrometheusReader, PeriodicExportingMetricReader]
        provider.get_meter("test").create_gauge("verl.training.step").set(1)
        assert values(get(provider._metric_readers[0].address()))["verl_training_step"] == 1
        provider.shutdown()
        otlp.close(10)
        assert server.items("metrics") > 0


def test_without_the_package_there_is_one_warning_that_says_what_to_install(monkeypatch, caplog):
    monkeypatch.setenv("OTEL_METRICS_EXPORTER", "prometheus,verl_otel_file")
    installed = providers.entry_points
    monkeypatch.setattr(providers, "entry_points", lambda **by: [] if by["name"] == "prometheus" else installed(**by))
    provider = providers._meter_provider(Resource(ATTRIBUTES))
    assert [type(reader) for reader in provider._metric_readers] == [PeriodicExportingMetricReader]
    provider.shutdown()
    (message,) = warnings_of(caplog)
    assert "pip install 'verl-otel[prometheus]'" in message


PROCESS = """
import sys
from opentelemetry.sdk.resources import Resource
from verl_otel.export import providers
resource = Resource({"verl.run.id": "run-1", "verl.process.role": "worker"})
provider = providers._meter_provider(resource)
provider.get_meter("test").create_gauge("verl.training.step").set(int(sys.argv[1]))
(reader,) = provider._metric_readers
print(reader.address(60), flush=True)
sys.stdin.read()
provider.shutdown()
"""


def test_eight_processes_with_the_same_environment_are_all_found_and_serve(root, monkeypatch):
    with socket.create_server(("127.0.0.1", 0)) as s:
        port = s.getsockname()[1]
    environment = {
        **os.environ,
        "OTEL_METRICS_EXPORTER": "prometheus",
        "OTEL_EXPORTER_PROMETHEUS_PORT": str(port),
        "VERL_OTEL_FOLDER": str(root),
    }
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", PROCESS, str(rank)],
            env=environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            cwd=CHECKOUT,
        )
        for rank in range(8)
    ]
    try:
        addresses = [process.stdout.readline().strip() for process in processes]
        targets = [target for path in files(root) for target in json.loads(path.read_text())]
        assert sorted(address for target in targets for address in target["targets"]) == sorted(addresses)
        assert f"127.0.0.1:{port}" in addresses
        for target in targets:
            get(target["targets"][0], target["labels"]["__metrics_path__"])
        assert [values(get(address))["verl_training_step"] for address in addresses] == list(range(8))
        processes[7].kill()
        processes[7].wait()
    finally:
        for process in processes[:7]:
            process.communicate("", timeout=30)
    assert [process.returncode for process in processes[:7]] == [0] * 7
    assert [json.loads(path.read_text())[0]["targets"] for path in files(root)] == [[addresses[7]]]
