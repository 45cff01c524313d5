"""`verl-otel alert-relay`: what robots are told, and what becomes of what they cannot take.

The robots are stand-ins (tests/testbed/robots.py), which check signatures and limits.
"""

import contextlib
import gzip
import json
import socket
import time
import warnings

import pytest
from hypothesis import given
from hypothesis import strategies as st
from robots import Robots

from verl_otel.alerts.relay import delivery, server
from verl_otel.alerts.relay.delivery import Delivery
from verl_otel.alerts.relay.message import Message, message_of, plain
from verl_otel.alerts.relay.metrics import Metrics
from verl_otel.alerts.relay.notification import Malformed, parse
from verl_otel.alerts.relay.robots import KINDS, DingTalk, Feishu, Webhook, WeCom
from verl_otel.alerts.relay.sent import Sent
from verl_otel.alerts.relay.settings import BadSettings, Matcher, RobotRoute, Settings
from verl_otel.cli import main
from verl_otel.control.requests import Channel

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # starlette prefers another client from some version on
    from starlette.testclient import TestClient

TOKEN = {"authorization": "Bearer relay-token"}
LINKS = {
    "dashboard_url": "http://grafana/d/run?var-run=r1",
    "trace_url": "http://jaeger/trace/abc",
    "mlflow_url": "http://mlflow/#/experiments/1",
    "runbook_url": "https://docs/alerts/VerlNonFinite.md",
}


def alert(name="VerlNonFinite", status="firing", number=1, severity="critical", labels=None, annotations=None):
    """An alert as Alertmanager sends it."""
    return {
        "status": status,
        "labels": {
            "alertname": name,
            "severity": severity,
            "verl_run_id": "r1",
            "verl_project_name": "alpha",
            "verl_experiment_name": "ppo",
            "stage": "update",
            "rank": str(number),
            **(labels or {}),
        },
        "annotations": {"summary": "a loss is not finite", "value": "3", **LINKS, **(annotations or {})},
        "startsAt": "2026-11-30T01:02:03.456Z",
        "endsAt": "2026-11-30T01:12:03Z" if status == "resolved" else "0001-01-01T00:00:00Z",
        "generatorURL": "http://prometheus/graph",
        "fingerprint": f"{name}-{number}",
    }


def notification(*alerts, **more):
    return json.dumps({"version": "4", "groupKey": "{}", "status": "firing", "alerts": list(alerts), **more}).encode()


def messages(*alerts):
    return message_of(parse(notification(*alerts)).alerts)


@pytest.fixture
def robots():
    started = Robots()
    yield started
    started.stop()


def route(robots, kind, mentions=(), **match):
    cls = KINDS[kind]
    robot = cls(robots.url(kind), robots.secret if cls.signs else "", tuple(mentions))
    return RobotRoute(kind, robot, Matcher({label: frozenset(values) for label, values in match.items()}))


def eventually(check, seconds=10):
    deadline = time.monotonic() + seconds
    while not check() and time.monotonic() < deadline:
        time.sleep(0.01)
    assert check()


def counted(metrics, name, *labels):
    prefix = f"verl_otel_relay_{name}_total{{" + ",".join(labels)
    return sum(float(line.split()[-1]) for line in metrics.text().decode().splitlines() if line.startswith(prefix))


@contextlib.contextmanager
def delivering(route, sent=None, **more):
    metrics = Metrics()
    way = Delivery(route, sent or Sent(), metrics, **more)
    way.start()
    yield way, metrics
    way.stop(0)
    way.join()


# ---- the text


def test_a_message_says_what_where_how_much_since_when_and_where_to_look():
    """The whole message, as a person reads it."""
    ranks = {"description": "Since the start: verl.loss in stage update on rank 1: 3;"}
    text = messages(
        alert(annotations=ranks), alert("VerlStageSlow", "resolved", severity="warning", annotations={"value": ""})
    )
    assert text.severity == "critical"
    assert text.text("\n", 4096, len) == (
        "**1 firing, 1 resolved: VerlNonFinite, VerlStageSlow**\n\n"
        "**FIRING** VerlNonFinite (critical)\n"
        "project alpha, experiment ppo, run r1, stage update, rank 1\n"
        "a loss is not finite\n"
        "Since the start: verl.loss in stage update on rank 1: 3;\n"
        "value 3\n"
        "since 2026-11-30 01:02:03 UTC\n"
        "[Grafana](http://grafana/d/run?var-run=r1) [Jaeger](http://jaeger/trace/abc) "
        "[MLflow](http://mlflow/#/experiments/1) [runbook](https://docs/alerts/VerlNonFinite.md)\n\n"
        "**RESOLVED** VerlStageSlow (warning)\n"
        "project alpha, experiment ppo, run r1, stage update, rank 1\n"
        "a loss is not finite\n"
        "since 2026-11-30 01:02:03 UTC, until 2026-11-30 01:12:03 UTC\n"
        "[Grafana](http://grafana/d/run?var-run=r1) [Jaeger](http://jaeger/trace/abc) "
        "[MLflow](http://mlflow/#/experiments/1) [runbook](https://docs/alerts/VerlNonFinite.md)"
    )


def test_the_worst_that_fires_comes_first():
    found = messages(alert(status="resolved"), alert("B", severity="info"), alert("A", severity="critical"))
    assert [block[0].split()[1] for block in found.blocks] == ["A", "B", "VerlNonFinite"]


def test_what_a_run_calls_itself_mentions_nobody_and_links_nowhere():
    hostile = {"verl_experiment_name": "<at id=all></at><@all> @all [x](http://evil)\n**FIRING** fake"}
    (block,) = messages(alert(labels=hostile, annotations={"trace_url": "javascript:alert(1)"})).blocks
    text = "\n".join(block)
    assert "<" not in text and "@" not in text and "[x]" not in text and "javascript" not in text
    assert len(block) == 6  # no line of its own


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("value", ["x" * 200, "损失不是有限的" * 40, '"\\\t' * 90])
def test_a_long_group_is_cut_to_the_robots_limit_and_says_how_much_is_left_out(robots, kind, value):
    many = [alert(number=number, labels={"verl_experiment_name": value}) for number in range(800)]
    with delivering(route(robots, kind, ["13800000000"] * 5)) as (way, _):
        way.offer(parse(notification(*many, truncatedAlerts=11)))
        eventually(lambda: robots.taken or robots.refused)
    assert robots.refused == []
    (text,) = robots.texts()
    shown, rest = text.count("**FIRING**"), int(text.partition("... and ")[2].split()[0])
    assert shown >= 1 and shown + rest == 811


@given(st.lists(st.text(max_size=400), min_size=1, max_size=30), st.integers(200, 5000))
def test_no_text_is_longer_than_asked(values, most):
    blocks = tuple(tuple(plain(value) for value in (value, value)) for value in values)
    text = Message("a title " * 20, blocks, "info", 3).text("\n", most, WeCom("").size)
    assert len(text.encode()) <= most


# ---- robots


@pytest.mark.parametrize("kind", KINDS)
def test_each_kind_of_robot_takes_a_message_with_its_signature(robots, kind):
    with delivering(route(robots, kind)) as (way, metrics):
        way.offer(parse(notification(alert())))
        eventually(lambda: robots.taken or robots.refused)
        assert robots.refused == [] and "**FIRING** VerlNonFinite (critical)" in robots.texts()[0]
        eventually(lambda: counted(metrics, "messages", 'outcome="delivered"') == 1)


def test_a_wrong_secret_is_refused_and_counted_and_the_alert_told_when_it_comes_again(robots, caplog):
    wrong = RobotRoute("ding", DingTalk(robots.url("dingtalk"), "another"), Matcher({}))
    with delivering(wrong) as (way, metrics):
        for expected in (1, 2):
            way.offer(parse(notification(alert())))
            eventually(lambda n=expected: counted(metrics, "alerts", 'outcome="dropped_refused"') == n)
    assert len(robots.refused) == 2 and "errcode 310000" in caplog.text
    assert "ding-token" not in caplog.text and "another" not in caplog.text


def test_people_are_mentioned_for_what_is_critical_only(robots):
    with delivering(route(robots, "dingtalk", ["13800000000", "all"])) as (way, _):
        way.offer(parse(notification(alert())))
        eventually(lambda: len(robots.taken) == 1)
        way.offer(parse(notification(alert(number=2, severity="warning"))))
        eventually(lambda: len(robots.taken) == 2)
    first, second = (body for _, body in robots.taken)
    assert (
        first["at"] == {"atMobiles": ["13800000000"], "isAtAll": True} and "@13800000000" in first["markdown"]["text"]
    )
    assert second["at"] == {"atMobiles": [], "isAtAll": False} and "@" not in second["markdown"]["text"]


def test_feishu_and_wecom_mention_in_the_text():
    urgent = messages(alert())
    card = Feishu("http://127.0.0.1/x", "s", ("ou_1",)).request(urgent, 1.0)[1]
    assert card["card"]["elements"][0]["content"].endswith("<at id=ou_1></at>")
    assert card["card"]["header"]["template"] == "red"
    text = WeCom("http://127.0.0.1/x", "", ("zhang",)).request(urgent, 1.0)[1]
    assert text["markdown"]["content"].endswith("<@zhang>")


# ---- delivery


def test_nothing_is_told_twice_but_that_it_is_over_and_that_it_began_again(robots):
    again = {**alert(), "startsAt": "2026-11-30T03:00:00Z"}
    with delivering(route(robots, "wecom")) as (way, metrics):
        for number, found in enumerate((alert(), alert(), alert(status="resolved"), again, again), 1):
            way.offer(parse(notification(found)))
            told = {1: 1, 2: 1, 3: 2, 4: 3, 5: 3}[number]
            eventually(lambda n=told: counted(metrics, "messages", 'outcome="delivered"') == n)
        assert counted(metrics, "alerts", 'outcome="repeated"') == 2
    assert ["RESOLVED" in text for text in robots.texts()] == [False, True, False]


def test_a_restarted_relay_knows_what_was_told(robots, tmp_path):
    state = str(tmp_path / "sent.json")
    with delivering(route(robots, "wecom"), Sent(state)) as (way, metrics):
        way.offer(parse(notification(alert())))
        eventually(lambda: counted(metrics, "messages", 'outcome="delivered"') == 1)
    with delivering(route(robots, "wecom"), Sent(state)) as (way, metrics):
        way.offer(parse(notification(alert(), alert(number=2))))
        eventually(lambda: counted(metrics, "messages", 'outcome="delivered"') == 1)
    assert "rank 2" in robots.texts()[1] and "rank 1" not in robots.texts()[1]


@pytest.mark.parametrize("content", [b"{", b"3", b'{"a": 1}', b"\xff"])
def test_a_state_file_that_cannot_be_read_costs_nothing_but_a_repeat(tmp_path, content):
    (tmp_path / "sent.json").write_bytes(content)
    assert Sent(str(tmp_path / "sent.json")).begin("x")


LATER = [
    ("wecom", 200, {"errcode": 45009}),
    ("wecom", 200, {"errcode": -1}),
    ("dingtalk", 200, {"errcode": 130101}),
    ("feishu", 200, {"code": 11232}),
    ("feishu", 429, {}),
    ("webhook", 503, {}),
    ("wecom", 200, "what a proxy says"),
]


@pytest.mark.parametrize(("kind", "status", "body"), LATER)
def test_what_a_robot_cannot_take_now_is_sent_again(robots, monkeypatch, kind, status, body):
    monkeypatch.setattr(delivery, "LONGEST_PAUSE", 0.05)
    robots.answers = [(status, body)] * 2
    with delivering(route(robots, kind), pause=0.01) as (way, metrics):
        way.offer(parse(notification(alert())))
        eventually(lambda: counted(metrics, "messages", 'outcome="delivered"') == 1)
        assert counted(metrics, "messages", 'outcome="retried"') == 2
    assert len(robots.taken) == 1


def test_a_robot_that_does_not_answer_is_tried_until_it_does_and_its_url_is_not_logged(robots, caplog):
    with socket.create_server(("127.0.0.1", 0)) as unused:
        port = unused.getsockname()[1]
    tries = []

    def send(url, body):
        tries.append(url)
        return delivery.post(url if len(tries) > 2 else f"http://127.0.0.1:{port}/?key=secret-key", body)

    with delivering(route(robots, "wecom"), send=send, pause=0.01) as (way, _):
        way.offer(parse(notification(alert())))
        eventually(lambda: robots.taken)
    assert len(tries) == 3 and "ConnectionError" in caplog.text and "key" not in caplog.text


def test_what_waits_is_merged_into_one_message(robots):
    """With 20 messages a minute, 60 groups are 20 messages and what waits: one, as soon as there is room."""
    with delivering(route(robots, "wecom")) as (way, metrics):
        for number in range(19):
            way.offer(parse(notification(alert(number=number))))
            eventually(lambda n=number: len(robots.taken) == n + 1)
        way._times[0].append(time.monotonic())  # a twentieth
        way._times[0][0] = time.monotonic() - 59  # the first is a minute old in a second
        for number in range(19, 24):
            way.offer(parse(notification(alert(number=number))))
        eventually(lambda: len(robots.taken) == 20)
        assert counted(metrics, "messages", 'outcome="merged"') == 4
    assert all(f"rank {number}" in robots.texts()[-1] for number in range(19, 24))


def test_more_than_the_rate_is_never_sent(robots):
    with delivering(route(robots, "wecom")) as (way, _):
        for number in range(25):
            way.offer(parse(notification(alert(number=number))))
            eventually(lambda n=number: len(robots.taken) >= min(20, n + 1))
        assert way._until_allowed() > 50
        assert len(robots.taken) == 20


def test_what_is_too_much_is_dropped_and_counted(robots, monkeypatch):
    monkeypatch.setattr(delivery, "MAX_WAITING", 3)
    way = Delivery(route(robots, "wecom"), Sent(), metrics := Metrics())
    for number in range(5):
        way.offer(parse(notification(alert(number=number))))
    assert counted(metrics, "alerts", 'outcome="dropped_queue_full"') == 2


def test_what_cannot_be_sent_before_the_end_is_counted_and_told_after_a_restart(robots, tmp_path):
    state = str(tmp_path / "sent.json")
    robots.answers = [(503, {})] * 1000
    way = Delivery(route(robots, "wecom"), Sent(state), metrics := Metrics())
    way.start()
    way.offer(parse(notification(alert())))
    eventually(lambda: counted(metrics, "messages", 'outcome="retried"') >= 1)
    way.stop(0.2)
    way.join()
    assert counted(metrics, "alerts", 'outcome="dropped_stopped"') == 1
    robots.answers = []
    with delivering(route(robots, "wecom"), Sent(state)) as (way, _):
        way.offer(parse(notification(alert())))
        eventually(lambda: robots.taken)


def test_at_the_end_what_waits_is_sent(robots):
    with delivering(route(robots, "wecom")) as (way, _):
        way.offer(parse(notification(alert())))
        way.stop(5)
        way.join()
    assert len(robots.taken) == 1


# ---- the server


def settings(robots, *kinds, **more):
    return Settings(tuple(route(robots, kind) for kind in kinds), token="relay-token", **more)


@pytest.fixture
def relay(robots):
    with TestClient(server.app(settings(robots, "wecom", "dingtalk", "feishu", "webhook"))) as client:
        yield client


def test_a_notification_gets_to_every_robot(robots, relay):
    assert relay.post("/alerts", content=notification(alert()), headers={**TOKEN, **JSON}).status_code == 200
    eventually(lambda: len(robots.taken) == 4)
    assert {kind for kind, _ in robots.taken} == set(KINDS)


JSON = {"content-type": "application/json"}
GZIP = {**JSON, "content-encoding": "gzip"}
REFUSED = [
    (notification(alert()), JSON, 401),
    (notification(alert()), {**JSON, "authorization": "Bearer wrong"}, 401),
    (notification(alert()), {**JSON, "authorization": "Basic relay-token"}, 401),
    (notification(alert()), {**TOKEN, "content-type": "text/plain"}, 415),
    (b"{", {**JSON, **TOKEN}, 400),
    (b"[" * 100_000, {**JSON, **TOKEN}, 400),
    (b"\xff\xfe", {**JSON, **TOKEN}, 400),
    (b"[]", {**JSON, **TOKEN}, 400),
    (b'{"alerts": 3}', {**JSON, **TOKEN}, 400),
    (b'{"alerts": [3]}', {**JSON, **TOKEN}, 400),
    (notification({**alert(), "labels": []}), {**JSON, **TOKEN}, 400),
    (notification({**alert(), "status": "x"}), {**JSON, **TOKEN}, 400),
    (notification(alert(), version="5"), {**JSON, **TOKEN}, 400),
    (b"no gzip", {**GZIP, **TOKEN}, 400),
    (gzip.compress(notification(alert()))[:-9], {**GZIP, **TOKEN}, 400),
    (gzip.compress(b" " * (server.MAX_BODY + 1)), {**GZIP, **TOKEN}, 413),
    (gzip.compress(b"") * (server.MAX_BODY // 20 + 1), {**GZIP, **TOKEN}, 413),
    (b" " * (server.MAX_BODY + 1), {**JSON, **TOKEN}, 413),
    (b"x", {**JSON, **TOKEN, "content-encoding": "br"}, 415),
]


@pytest.mark.parametrize(("body", "headers", "status"), REFUSED, ids=range(len(REFUSED)))
def test_what_cannot_be_taken_is_refused_and_the_next_one_taken(robots, relay, body, headers, status):
    assert relay.post("/alerts", content=body, headers=headers).status_code == status
    assert relay.post("/alerts", content=notification(alert()), headers={**TOKEN, **JSON}).status_code == 200
    eventually(lambda: len(robots.taken) == 4)
    assert f'verl_otel_relay_requests_total{{status="{status}"}} 1.0' in relay.get("/metrics").text


def test_what_fails_unforeseen_is_refused_and_logged_without_secrets(robots, relay, monkeypatch, caplog):
    def broken(body):
        raise LookupError(f"{len(body)} bytes for http://user:Zq7planted@host/?token=Zq7planted")

    with monkeypatch.context() as patched:
        patched.setattr(server, "parse", broken)
        answer = relay.post("/alerts", content=notification(alert()), headers={**TOKEN, **JSON})
    assert answer.status_code == 400
    assert "bytes for http://" in caplog.text
    assert "Zq7planted" not in caplog.text + answer.text
    assert relay.post("/alerts", content=notification(alert()), headers={**TOKEN, **JSON}).is_success
    eventually(lambda: len(robots.taken) == 4)


@given(st.binary(max_size=300) | st.recursive(
    st.none() | st.booleans() | st.floats(allow_nan=False) | st.text(max_size=20),
    lambda inner: st.lists(inner, max_size=3)
    | st.dictionaries(st.sampled_from(["alerts", "status", "labels", "annotations", "startsAt", "version"]), inner),
).map(lambda data: json.dumps(data).encode()))  # fmt: skip
def test_whatever_is_posted_is_a_notification_or_malformed(body):
    with contextlib.suppress(Malformed):
        message_of(parse(body).alerts).text("\n", 4096, len)


def test_a_robot_that_hangs_delays_neither_the_answer_nor_the_other_robots(robots):
    with socket.create_server(("127.0.0.1", 0)) as hanging:
        url = f"http://127.0.0.1:{hanging.getsockname()[1]}/?key=x"
        two = (RobotRoute("hangs", WeCom(url), Matcher({})), route(robots, "feishu"))
        relay = server.app(Settings(two, token="relay-token"))
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(delivery, "TIMEOUT", 3.0)
            patch.setattr(server, "STOP_SECONDS", 0.0)
            with TestClient(relay) as client:
                started = time.monotonic()
                assert client.post("/alerts", content=notification(alert()), headers={**TOKEN, **JSON}).is_success
                eventually(lambda: robots.taken)
                assert time.monotonic() - started < 2.5
                assert client.get("/healthz").status_code == 200


# ---- what runs are asked


@pytest.fixture
def channel(tmp_path):
    (tmp_path / "control" / "r1").mkdir(parents=True)
    return Channel(tmp_path / "control", b"0123456789abcdef")


def asked(channel):
    files = sorted(channel.of_run("r1").glob("*.request.json"))
    return [channel.read(file.read_bytes(), "r1", 0, time.time()) for file in files]


def load(tmp_path, text, **env):
    (tmp_path / "relay.yaml").write_text(text)
    return Settings.load(str(tmp_path / "relay.yaml"), env)


ACTION = "actions: [{action: checkpoint-and-pause, match: {alertname: VerlNonFinite, severity: critical}}]\n"


def with_actions(tmp_path):
    token = tmp_path / "token"
    token.write_bytes(b"0123456789abcdef")
    token.chmod(0o600)
    return {
        "VERL_OTEL_RELAY_TOKEN": "relay-token",
        "VERL_OTEL_CONTROL": str(tmp_path / "control"),
        "VERL_OTEL_CONTROL_TOKEN_FILE": str(token),
    }


def test_an_alert_asks_its_run_once_and_only_if_it_fires_and_fits(tmp_path, channel):
    relay = server.app(load(tmp_path, ACTION, **with_actions(tmp_path)))
    with TestClient(relay) as client:
        for found in (alert("Other"), alert(severity="warning"), alert(status="resolved"), alert(), alert()):
            assert client.post("/alerts", content=notification(found), headers={**TOKEN, **JSON}).is_success
        eventually(lambda: asked(channel))
        metrics = client.get("/metrics").text
    (request,) = asked(channel)
    assert (request.action, request.by, request.reason) == ("pause", "alert VerlNonFinite", "a loss is not finite")
    assert 'verl_otel_relay_actions_total{action="pause",outcome="asked"} 1.0' in metrics


def test_an_alert_of_a_run_that_does_not_listen_is_counted(tmp_path, channel, caplog):
    relay = server.app(load(tmp_path, ACTION, **with_actions(tmp_path)))
    elsewhere = alert(labels={"verl_run_id": "../r2"})
    with TestClient(relay) as client:
        assert client.post("/alerts", content=notification(elsewhere), headers={**TOKEN, **JSON}).is_success
        eventually(lambda: 'actions_total{action="pause",outcome="failed"} 1.0' in client.get("/metrics").text)
    assert "these do: r1" in caplog.text
    assert sorted(path.name for path in tmp_path.rglob("*.request.json")) == []


# ---- configuration

ONE = "robots: [{name: a, kind: wecom, url: {env: U}}]\n"
WRONG = [
    ("robots: [{kind: wecom, url: 'https://x/?key=SECRET'}]", "url is {env: NAME} or {file: PATH}"),
    ("robots: [{kind: wecom, url: {env: V}}]", "the variable V is not set"),
    ("robots: [{kind: slack, url: {env: U}}]", "known are wecom, dingtalk, feishu, webhook"),
    ("robots: [{kind: wecom, url: {env: U}, urls: 3}]", "urls, which is not known"),
    ("robots: [{kind: wecom, url: {env: PLAIN}}]", "must be https://"),
    ("robots: [{kind: wecom, url: {env: U}, secret: {env: U}}]", "has no secret"),
    ("robots: [{kind: wecom, url: {file: /nowhere}}]", "/nowhere cannot be read"),
    ("robots: [{kind: wecom, url: {env: FTP}}]", "not one of http:// or https://"),
    ("robots: [{name: a, kind: wecom, url: {env: U}}, {name: a, kind: wecom, url: {env: U}}]", "the same name"),
    ("robots: []", "neither robots nor actions"),
    ("robots: {", "is not YAML, see line 1"),
    ("- 3", "is not a map"),
    (ACTION, "set VERL_OTEL_RELAY_TOKEN"),
    ("actions: [{action: reboot}]", "known are checkpoint-and-pause, checkpoint-and-stop"),
    ("actions: [{action: checkpoint-and-stop}]", "for which alertname"),
]


@pytest.mark.parametrize(("text", "says"), WRONG, ids=range(len(WRONG)))
def test_a_wrong_configuration_says_what_to_do_and_shows_no_secret(tmp_path, text, says):
    with pytest.raises(BadSettings) as caught:
        load(tmp_path, text, U="https://robot/?key=SECRET", PLAIN="http://robot/?key=SECRET", FTP="ftp://robot")
    assert says in str(caught.value) and "SECRET" not in str(caught.value)


@pytest.mark.parametrize(
    ("missing", "says"),
    [
        ("VERL_OTEL_CONTROL", "set VERL_OTEL_CONTROL to the folder"),
        ("VERL_OTEL_CONTROL_TOKEN_FILE", "set VERL_OTEL_CONTROL_TOKEN_FILE"),
    ],
)
def test_actions_need_a_folder_and_its_token(tmp_path, missing, says):
    env = with_actions(tmp_path)
    del env[missing]
    with pytest.raises(BadSettings, match=says):
        load(tmp_path, ACTION, **env)


def test_secrets_are_read_from_files_and_never_shown(tmp_path):
    (tmp_path / "url").write_text("https://robot/?key=SECRET\n")
    found = load(
        tmp_path, f"robots: [{{kind: dingtalk, url: {{file: {tmp_path}/url}}, secret: {{env: S}}}}]", S="SECRET"
    )
    assert found.robots[0].robot.url == "https://robot/?key=SECRET" and found.robots[0].robot.secret == "SECRET"
    assert "SECRET" not in repr(found)


def test_one_robot_needs_no_file():
    found = Settings.load("", {"VERL_OTEL_RELAY_KIND": "webhook", "VERL_OTEL_RELAY_URL": "http://chat/hook"})
    assert isinstance(found.robots[0].robot, Webhook) and found.token == ""
    with pytest.raises(BadSettings, match="give --config"):
        Settings.load("", {})


def test_check_says_what_goes_where(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("U", "https://robot/?key=SECRET")
    (tmp_path / "relay.yaml").write_text(
        "robots: [{name: a, kind: wecom, url: {env: U}, match: {severity: [critical]}}]"
    )
    assert main(["alert-relay", "--config", str(tmp_path / "relay.yaml"), "--check"]) == 0
    assert capsys.readouterr().out == "robot a: wecom, severity critical\n"
    monkeypatch.delenv("U")
    assert main(["alert-relay", "--config", str(tmp_path / "relay.yaml"), "--check"]) == 2
    assert "the variable U is not set" in capsys.readouterr().err


def test_a_state_that_cannot_be_kept_is_said_before_the_first_alert(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("U", "https://robot/")
    robot = "robots: [{name: a, kind: webhook, url: {env: U}}]\n"
    (tmp_path / "relay.yaml").write_text(f"{robot}state: {tmp_path}/none/relay.json")
    assert main(["alert-relay", "--config", str(tmp_path / "relay.yaml"), "--check"]) == 2
    assert f"state: {tmp_path}/none is not there" in capsys.readouterr().err
    (tmp_path / "none").mkdir()
    assert main(["alert-relay", "--config", str(tmp_path / "relay.yaml"), "--check"]) == 0


def test_a_test_message_shows_what_a_robot_answers(robots, tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("GOOD", robots.url("wecom"))
    monkeypatch.setenv("BAD", robots.url("wecom").replace("wecom-key", "old-key"))
    (tmp_path / "relay.yaml").write_text(
        "robots: [{name: a, kind: wecom, url: {env: GOOD}}, {name: b, kind: wecom, url: {env: BAD}}]"
    )
    assert main(["alert-relay", "--config", str(tmp_path / "relay.yaml"), "--test"]) == 1
    assert capsys.readouterr().out == "robot a: delivered\nrobot b: refused (errcode 93000)\n"


def test_beyond_loopback_a_token_is_needed(monkeypatch, capsys):
    monkeypatch.setenv("VERL_OTEL_RELAY_KIND", "webhook")
    monkeypatch.setenv("VERL_OTEL_RELAY_URL", "http://127.0.0.1:1/")
    monkeypatch.delenv("VERL_OTEL_RELAY_TOKEN", raising=False)
    assert main(["alert-relay", "--host", "0.0.0.0"]) == 2
    assert "set VERL_OTEL_RELAY_TOKEN" in capsys.readouterr().err
