"""Kafka between agent and gateway: a real broker is killed for some seconds during a run, and nothing is lost."""

import collections
import os
import time

import pytest
import requests
from asking import eventually
from bridge_runs import VerlRun, log_request
from collectors import TO_FILES, Collector
from kafka_broker import Kafka
from steady import PER_SECOND, steady_trainer

pytestmark = [pytest.mark.run, pytest.mark.stack]

AWAY = float(os.environ.get("VERL_OTEL_TEST_AWAY", 10))
"""Seconds for which the broker is away; 60 for the full measurement."""

GIVES_UP = 15.0
"""Seconds after which a Kafka client that was never connected has given up: the `timeout` of to-kafka.yaml is 10."""


@pytest.fixture(scope="module")
def kafka(tmp_path_factory):
    kafka = Kafka(tmp_path_factory.mktemp("kafka"))
    kafka.start()
    yield kafka
    kafka.kill()


@pytest.fixture(scope="module")
def gateway(kafka, tmp_path_factory):
    folder = tmp_path_factory.mktemp("gateway")
    files = ("gateway.yaml", "variants/from-kafka.yaml")
    with Collector(folder, *files, more=TO_FILES, KAFKA_BROKERS=f"[{kafka.address}]") as gateway:
        yield gateway


@pytest.fixture(scope="module")
def agent(kafka, tmp_path_factory):
    folder = tmp_path_factory.mktemp("agent")
    with Collector(folder, "agent.yaml", "variants/to-kafka.yaml", KAFKA_BROKERS=f"[{kafka.address}]") as agent:
        yield agent


@pytest.fixture(scope="module")
def steps(kafka, agent, gateway, tmp_path_factory):
    """Number of steps of a run during which the broker was killed and came back."""
    folder = tmp_path_factory.mktemp("steady")
    with steady_trainer(folder, agent.url) as end:
        assert eventually(lambda: step_events(gateway), 240), (folder / "run.log").read_text() + agent.log + gateway.log
        kafka.kill()
        time.sleep(AWAY)
        kafka.start()
        time.sleep(2)
        steps = end()
    assert steps > AWAY * PER_SECOND / 2
    eventually(
        lambda: steps in step_events(gateway) and len(traces(gateway)) >= steps and steps in values(gateway), 120
    )
    return steps


def step_events(gateway):
    """How often the event of each step has come."""
    records = [record for request in gateway.received("logs") for resource in request.resource_logs
               for scope in resource.scope_logs for record in scope.log_records]  # fmt: skip
    return collections.Counter(number(r.attributes) for r in records if r.event_name == "verl.step")


def traces(gateway):
    """The names of the spans of each trace with a step."""
    found = collections.defaultdict(set)
    for span in gateway.spans():
        found[span.trace_id].add(span.name)
    return [names for names in found.values() if "verl.step" in names]


def number(attributes):
    return next(a.value.int_value for a in attributes if a.key == "verl.step.number")


def test_every_step_event_has_come(gateway, steps):
    assert sorted(step_events(gateway)) == list(range(1, steps + 1))


def test_every_trace_has_come_whole(gateway, steps):
    assert traces(gateway) == [{"verl.step", "verl.update_actor"}] * steps


def test_the_points_have_come_in_order_of_their_time(gateway, steps):
    points = list(dict.fromkeys(training_step(gateway)))
    assert points == sorted(points)
    seen = values(gateway)
    assert steps in seen and len(seen) > 0.9 * steps  # a gauge has one value at each export


def training_step(gateway):
    """The points of the gauge as they came: time and value."""
    return [
        (point.time_unix_nano, point.as_double or point.as_int)
        for request in gateway.received("metrics")
        for resource in request.resource_metrics
        for scope in resource.scope_metrics
        for metric in scope.metrics
        if metric.name == "verl.training.step"
        for point in metric.gauge.data_points
    ]


def values(gateway):
    return {int(value) for _, value in training_step(gateway)}


def test_another_group_reads_all_of_it_again_in_order(kafka, gateway, steps, tmp_path):
    """What came twice to the gateway it has read twice, after the outage; in Kafka at most one batch is there twice."""
    files = ("gateway.yaml", "variants/from-kafka.yaml")
    variables = {"KAFKA_BROKERS": f"[{kafka.address}]", "KAFKA_GROUP": "replay"}
    with Collector(tmp_path, *files, more=TO_FILES, **variables) as again:
        eventually(lambda: len(step_events(again)) == steps and steps in values(again))
        found, points = step_events(again), training_step(again)
    print("events twice in Kafka:", found.total() - steps, "at the gateway:", step_events(gateway).total() - steps)
    assert sorted(found) == list(range(1, steps + 1)) and found.total() - steps <= PER_SECOND
    assert list(dict.fromkeys(points)) == sorted(set(points))


def test_a_gateway_that_is_killed_goes_on_where_it_was(kafka, agent, gateway, steps):
    gateway.kill()
    send_events(agent, range(10_001, 10_011))
    gateway.start()
    assert arrived(gateway, 10_000) == list(range(10_001, 10_011))


def test_a_message_that_nobody_can_read_holds_up_nothing(kafka, agent, gateway, steps):
    arguments = ["--bootstrap-server", kafka.address, "--topic", "verl_events"]
    kafka.tool("org.apache.kafka.tools.ConsoleProducer", *arguments, send=b"no OTLP\n" * 30)
    send_events(agent, range(20_001, 20_011))
    assert arrived(gateway, 20_000) == list(range(20_001, 20_011))


def test_an_agent_that_starts_while_kafka_is_away_loses_nothing(kafka, agent, gateway, steps):
    """A client that has begun to send waits by itself for ever; one that never could gives up: the agent retries."""
    kafka.kill()
    agent.kill()
    agent.start()
    send_events(agent, range(30_001, 30_011))
    time.sleep(GIVES_UP)
    kafka.start()
    assert arrived(gateway, 30_000) == list(range(30_001, 30_011))


def arrived(gateway, above):
    """The numbers of the ten step events above `above`, as soon as they are there."""
    eventually(lambda: len([n for n in step_events(gateway) if n > above]) == 10)
    return sorted(n for n in step_events(gateway) if n > above)


def send_events(agent, numbers):
    run = VerlRun("steady")
    content = log_request(*(run.step(number, a=1.0) for number in numbers)).SerializeToString()
    headers = {"content-type": "application/x-protobuf"}
    assert requests.post(f"{agent.url}/v1/logs", data=content, headers=headers, timeout=10).status_code == 200
