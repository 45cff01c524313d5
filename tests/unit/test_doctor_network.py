"""What `verl-otel doctor` says of endpoints and backends, by servers that do each thing wrong; no secret is in it.

Certificates are made here, by a CA of the test's own.
"""

import base64
import datetime
import http.server
import ipaddress
import json
import ssl
import threading
from urllib.parse import quote

import otlp_server
import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID
from hypothesis import HealthCheck, example, given, settings
from otlp_server import FAULTS, Server
from test_security import SECRETS, assert_not_in, environment, url

from verl_otel.doctor import activation, endpoints, labels, network, readback, rendering, runs, series
from verl_otel.doctor import settings as doctors_settings
from verl_otel.doctor.asked import Asked
from verl_otel.doctor.examination import Area, examine
from verl_otel.doctor.findings import NOTE, OK, PROBLEM, WARNING, Finding
from verl_otel.doctor.secrets import Secrets
from verl_otel.export import otlp_json
from verl_otel.semconv import attributes as attr


@pytest.fixture(autouse=True)
def impatient(monkeypatch):
    """An endpoint that hangs is given up soon, and no proxy of the machine is in between."""
    monkeypatch.setattr(endpoints, "ANSWER", 1.0)
    monkeypatch.setattr(readback, "ARRIVES", 0.6)
    for name in ("http_proxy", "https_proxy", "HTTP_PROXY", "HTTPS_PROXY", "all_proxy", "ALL_PROXY"):
        monkeypatch.delenv(name, raising=False)


def asked(address, **more):
    return Asked({"OTEL_EXPORTER_OTLP_ENDPOINT": address, **more})


def found(asked, area=endpoints):
    by_id = {}
    for finding in area.check(asked):
        by_id.setdefault(finding.id, []).append(finding)
    return by_id


def only(by_id, id):
    (finding,) = by_id[id]
    return finding


# ---- what is sent


def test_the_test_data_is_marked_and_of_no_run():
    with Server() as server:
        question = asked(server.url)
        assert found(question).keys() == {"VO-ENDPOINT", "VO-CLOCK"}
    assert question.probe.delivered(0) == {"traces", "metrics", "logs"}
    assert sorted(signal for signal, _ in server.taken) == ["logs", "metrics", "traces"]
    for signal, content in server.taken:
        request = otlp_json.from_bytes(signal, content)
        text = str(request)
        assert otlp_json.items(signal, request) == 1
        assert attr.RUN_ID not in text and "verl-otel-doctor" in text
        assert (question.probe.id in text) == (signal != "metrics")
    assert server.names() == [attr.SPAN_DOCTOR]


def test_with_the_headers_of_a_run():
    with Server() as server:
        found(asked(server.url, OTEL_EXPORTER_OTLP_HEADERS="authorization=Bearer%20t"))
    assert {headers["authorization"] for headers in server.headers} == {"Bearer t"}


@pytest.mark.parametrize(
    ("environ", "id"),
    [
        ({"OTEL_SDK_DISABLED": "true"}, "VO-ENDPOINTS-OFF"),
        ({"VERL_OTEL_MODE": "disabled"}, "VO-ENDPOINTS-OFF"),
        ({"VERL_OTEL_MODE": "offline"}, "VO-NO-ENDPOINT"),
    ],
)
def test_what_is_off_sends_nothing(environ, id):
    with Server() as server:
        assert found(asked(server.url, **environ)).keys() == {id}
    assert not server.tried


def test_without_an_endpoint_nothing_is_sent_and_each_exporter_is_told():
    question = Asked({"OTEL_METRICS_EXPORTER": "prometheus,console", "OTEL_LOGS_EXPORTER": "none"})
    by_id = found(question)
    assert by_id.keys() == {"VO-NO-ENDPOINT", "VO-SCRAPED", "VO-EXPORTER-OTHER"}
    assert only(by_id, "VO-NO-ENDPOINT").data["signals"] == ["traces"]
    assert question.probe.delivered(0) == frozenset()


# ---- what can be wrong with an endpoint


@pytest.mark.parametrize(
    ("fault", "id"),
    [
        ("hangs", "VO-ENDPOINT-HANGS"),
        ("is slow", "VO-ENDPOINT-HANGS"),
        ("resets", "VO-ENDPOINT-NOT-HTTP"),
        ("garbage", "VO-ENDPOINT-NOT-HTTP"),
        ("301", "VO-ENDPOINT-REDIRECTS"),
        ("400", "VO-ENDPOINT-REFUSES"),
        ("401", "VO-ENDPOINT-UNAUTHORIZED"),
        ("403", "VO-ENDPOINT-UNAUTHORIZED"),
        ("404", "VO-ENDPOINT-PATH"),
        ("405", "VO-ENDPOINT-PATH"),
        ("413", "VO-ENDPOINT-REFUSES"),
        ("415", "VO-ENDPOINT-REFUSES"),
        ("429", "VO-ENDPOINT-BUSY"),
        ("500", "VO-ENDPOINT-FAILS"),
        ("502", "VO-ENDPOINT-FAILS"),
        ("503", "VO-ENDPOINT-BUSY"),
        ("600", "VO-ENDPOINT-NOT-HTTP"),
        ("not TLS", "VO-ENDPOINT-NOT-TLS"),
        ("is not there", "VO-ENDPOINT-REFUSED"),
    ],
)
def test_each_fault_of_an_endpoint_is_a_problem_of_its_own_with_what_to_do(fault, id):
    with Server() as server:
        question = asked(server.url_of(fault))
        by_id = found(question)
    finding = only(by_id, id)
    assert finding.level == PROBLEM and finding.fix
    assert {f.level for of_id in by_id.values() for f in of_id} <= {OK, PROBLEM}
    assert question.probe.delivered(0) == frozenset()


def test_no_fault_of_the_servers_list_is_left_out():
    tried = test_each_fault_of_an_endpoint_is_a_problem_of_its_own_with_what_to_do.pytestmark[0].args[1]
    assert set(FAULTS) <= {fault for fault, _ in tried}


def test_each_signal_has_an_answer_of_its_own():
    with Server() as server:
        server.faults = {"traces": "404"}
        question = asked(server.url)
        by_id = found(question)
    assert only(by_id, "VO-ENDPOINT").data["signals"] == ["metrics", "logs"]
    assert "test metric and event were taken" in only(by_id, "VO-ENDPOINT").what
    assert "test span was not taken (HTTP 404)" in only(by_id, "VO-ENDPOINT-PATH").what
    assert question.probe.delivered(0) == {"metrics", "logs"}


def test_signals_with_endpoints_of_their_own_are_tried_there():
    with Server() as one, Server("503") as other:
        by_id = found(asked(one.url, OTEL_EXPORTER_OTLP_LOGS_ENDPOINT=f"{other.url}/v1/logs"))
    assert only(by_id, "VO-ENDPOINT").data["signals"] == ["traces", "metrics"]
    assert only(by_id, "VO-ENDPOINT-BUSY").data["endpoint"] == other.url


def test_a_partial_success_is_told():
    with Server() as server:
        server.rejected = 1
        assert only(found(asked(server.url)), "VO-ENDPOINT-REJECTED").level == WARNING


@pytest.mark.parametrize("address", ["collector:4318", "ftp://collector", "http://c:x"])
def test_what_is_no_url_is_told_for_each_signal(address):
    assert [f.data["signal"] for f in found(asked(address))["VO-ENDPOINT-URL"]] == ["traces", "metrics", "logs"]


def test_a_name_that_is_not_known_is_told():
    assert "collector.invalid" in only(found(asked("http://collector.invalid:4318")), "VO-ENDPOINT-DNS").what


def test_what_cannot_be_connected_to_is_told(monkeypatch):
    def fails(*_):
        raise TimeoutError

    monkeypatch.setattr(network.socket, "create_connection", fails)
    assert only(found(asked("http://127.0.0.1:4318")), "VO-ENDPOINT-UNREACHABLE").level == PROBLEM


def test_an_examination_that_does_not_end_is_told_and_sends_the_readers_on(monkeypatch):
    monkeypatch.setattr(endpoints, "SECONDS", 0.2)
    monkeypatch.setattr(network.socket, "getaddrinfo", lambda *_, **__: threading.Event().wait())
    question = asked("http://127.0.0.1:4318")
    assert only(found(question), "VO-ENDPOINT-SLOW").level == PROBLEM
    assert question.probe.delivered(0) == frozenset()


def test_a_proxy_in_between_is_told(monkeypatch):
    with Server() as server:
        monkeypatch.setenv("HTTP_PROXY", f"http://user:Zq7secret@127.0.0.1:{server.port}")
        monkeypatch.setenv("NO_PROXY", "")
        finding = only(found(asked("http://collector.invalid:4318")), "VO-ENDPOINT-PROXY")
    assert finding.level == NOTE and "Zq7secret" not in finding.what


@pytest.mark.parametrize(("shown", "id"), [("", "VO-ENDPOINT-GRPC"), ("http://127.0.0.1:1", "VO-ENDPOINT-REFUSED")])
def test_of_grpc_the_connection_is_tried(shown, id):
    with Server() as server:
        environ = {"OTEL_EXPORTER_OTLP_PROTOCOL": "grpc", "OTEL_EXPORTER_OTLP_ENDPOINT": shown or server.url}
        by_id = found(Asked(environ))
    assert by_id.keys() == {id} and len(by_id[id]) == 3
    assert not server.tried


def test_a_clock_that_is_wrong_is_told(monkeypatch):
    original = otlp_server._Handler.date_time_string
    later = lambda self, timestamp=None: original(self, 4_000_000_000)  # noqa: E731
    monkeypatch.setattr(otlp_server._Handler, "date_time_string", later)
    with Server() as server:
        finding = only(found(asked(server.url)), "VO-CLOCK-SKEW")
    assert finding.level == PROBLEM and "ahead of" in finding.what


# ---- TLS


class Authority:
    """A CA, and what it has signed, as PEM files."""

    def __init__(self, folder):
        self.folder, self.key = folder, ec.generate_private_key(ec.SECP256R1())
        self.name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, folder.name)])
        folder.mkdir()
        self.certificate, _ = self.issue("ca", days=1000, ca=True)

    def issue(self, name, address="127.0.0.1", days=100, ca=False):
        key = self.key if ca else ec.generate_private_key(ec.SECP256R1())
        now = datetime.datetime.now(datetime.timezone.utc)
        subject = self.name if ca else x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])
        builder = (
            x509.CertificateBuilder()
            .subject_name(subject)
            .issuer_name(self.name)
            .public_key(key.public_key())
            .serial_number(x509.random_serial_number())
            .not_valid_before(now - datetime.timedelta(days=200))
            .not_valid_after(now + datetime.timedelta(days=days))
            .add_extension(x509.BasicConstraints(ca, None), True)
            .add_extension(x509.SubjectAlternativeName([x509.IPAddress(ipaddress.ip_address(address))]), False)
            .add_extension(x509.SubjectKeyIdentifier.from_public_key(key.public_key()), False)
            .add_extension(x509.AuthorityKeyIdentifier.from_issuer_public_key(self.key.public_key()), False)
        )
        if ca:
            usage = x509.KeyUsage(True, False, False, False, False, True, True, False, False)
            builder = builder.add_extension(usage, True)
        paths = self.folder / f"{name}.crt", self.folder / f"{name}.key"
        paths[0].write_bytes(builder.sign(self.key, hashes.SHA256()).public_bytes(serialization.Encoding.PEM))
        private = key.private_bytes(
            serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
        )
        paths[1].write_bytes(private)
        return paths


def secured(server, certificate, key, authority=None, in_handshake=False):
    """Let a server speak TLS; with a CA, only to clients with a certificate of it."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(certificate, key)
    if in_handshake:  # from TLS 1.3 on, a client learns afterwards that its certificate was not taken
        context.maximum_version = ssl.TLSVersion.TLSv1_2
    if authority is not None:
        context.load_verify_locations(authority)
        context.verify_mode = ssl.CERT_REQUIRED
    # The handshake is the handler's thread's: one that fails must not end the server.
    server.socket = context.wrap_socket(server.socket, server_side=True, do_handshake_on_connect=False)
    return f"https://127.0.0.1:{server.port}"


@pytest.fixture(scope="module")
def authorities(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tls")
    return Authority(folder / "ours"), Authority(folder / "theirs")


@pytest.mark.parametrize(
    ("case", "id"),
    [
        ("good", "VO-ENDPOINT-TLS"),
        ("ends soon", "VO-ENDPOINT-CERTIFICATE-ENDS"),
        ("has ended", "VO-ENDPOINT-TLS-CERTIFICATE"),
        ("of another address", "VO-ENDPOINT-TLS-CERTIFICATE"),
        ("of an unknown CA", "VO-ENDPOINT-TLS-CERTIFICATE"),
        ("no file", "VO-ENDPOINT-CERTIFICATE-FILE"),
        ("no PEM", "VO-ENDPOINT-CERTIFICATE-FILE"),
        ("wants a client certificate", "VO-ENDPOINT-TLS-REFUSED"),
        ("gets a client certificate", "VO-ENDPOINT-TLS"),
    ],
)
def test_tls_is_tried_as_a_run_would_and_each_way_to_fail_is_told(case, id, authorities, tmp_path):
    ours, theirs = authorities
    issued = ours.issue(
        "server",
        "127.0.0.9" if case == "of another address" else "127.0.0.1",
        {"ends soon": 5, "has ended": -1}.get(case, 100),
    )
    environ = {"OTEL_EXPORTER_OTLP_CERTIFICATE": str(theirs.certificate if "unknown" in case else ours.certificate)}
    if case == "no file":
        environ["OTEL_EXPORTER_OTLP_CERTIFICATE"] = str(tmp_path / "nowhere.crt")
    if case == "no PEM":
        environ["OTEL_EXPORTER_OTLP_CERTIFICATE"] = __file__
    if case == "gets a client certificate":
        certificate, key = ours.issue("client")
        environ["OTEL_EXPORTER_OTLP_CLIENT_CERTIFICATE"] = str(certificate)
        environ["OTEL_EXPORTER_OTLP_CLIENT_KEY"] = str(key)
    with Server() as server:
        address = secured(server, *issued, ours.certificate if "client" in case else None, case.startswith("gets"))
        by_id = found(asked(address, **environ))
    assert id in by_id, by_id
    well = id in ("VO-ENDPOINT-TLS", "VO-ENDPOINT-CERTIFICATE-ENDS")
    assert ("VO-ENDPOINT" in by_id) == well == ("VO-CLOCK" in by_id) or case == "wants a client certificate"
    expected = {"has ended": "renew", "of another address": "address", "of an unknown CA": "OTEL_EXPORTER_OTLP_CERT"}
    assert expected.get(case, "") in only(by_id, id).fix


# ---- backends that cannot be asked


class Answers(http.server.BaseHTTPRequestHandler):
    """Always the same; the server has `status` and `body`."""

    def do_GET(self):
        self.server.asked.append(dict(self.headers))
        body = self.server.body.encode()
        self.send_response(self.server.status)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_):
        pass


@pytest.fixture
def backend():
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Answers)
    server.daemon_threads = True
    server.status, server.body, server.asked = 200, "{}", []
    threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True).start()
    yield server
    server.shutdown()
    server.server_close()


BACKENDS = ("jaeger", "prometheus", "mlflow")


@pytest.mark.parametrize("name", BACKENDS)
@pytest.mark.parametrize(
    ("status", "body", "said"),
    [(401, "", "wants credentials"), (404, "", "HTTP 404"), (500, "", "HTTP 500"), (200, "<html>", "with JSON")],
)
def test_a_backend_that_cannot_be_asked_is_a_problem(name, status, body, said, backend):
    backend.status, backend.body = status, body
    question = Asked({}, **{name: f"http://127.0.0.1:{backend.server_port}"})
    question.probe.sent(frozenset({"traces", "metrics", "logs"}))
    finding = only(found(question, readback), "VO-BACKEND-NO-ANSWER")
    assert finding.level == PROBLEM and said in finding.what and finding.fix
    if name == "prometheus":
        assert list(series.check(question)) == []  # said once


@pytest.mark.parametrize("name", BACKENDS)
def test_what_is_not_there_after_a_while_is_a_problem_and_what_was_not_sent_is_not(name, backend):
    address = f"http://127.0.0.1:{backend.server_port}"
    question = Asked({}, **{name: address})
    question.probe.sent(frozenset({"traces", "metrics", "logs"}))
    finding = only(found(question, readback), "VO-READ-BACK-MISSING")
    assert finding.level == PROBLEM and "otelcol_exporter_send_failed" in finding.fix
    question = Asked({}, **{name: address})
    question.probe.sent(frozenset())
    assert only(found(question, readback), "VO-READ-BACK-NOTHING").level == NOTE


def test_a_backend_that_is_away_is_a_problem():
    question = Asked({}, jaeger="http://127.0.0.1:1")
    question.probe.sent(frozenset({"traces"}))
    assert "cannot be asked (ConnectionError)" in only(found(question, readback), "VO-BACKEND-NO-ANSWER").what


@pytest.mark.parametrize(
    ("name", "environ", "sent"),
    [
        ("jaeger", {"JAEGER_AUTHORIZATION": "Bearer a"}, "Bearer a"),
        ("prometheus", {"PROMETHEUS_AUTHORIZATION": "Basic b"}, "Basic b"),
        ("mlflow", {"MLFLOW_TRACKING_TOKEN": "c"}, "Bearer c"),
        (
            "mlflow",
            {"MLFLOW_TRACKING_USERNAME": "u", "MLFLOW_TRACKING_PASSWORD": "p"},
            f"Basic {base64.b64encode(b'u:p').decode()}",
        ),
    ],
)
def test_credentials_come_from_the_environment(name, environ, sent, backend):
    question = Asked(environ, **{name: f"http://127.0.0.1:{backend.server_port}"})
    question.probe.sent(frozenset())
    found(question, readback)
    given_to = [headers.get("authorization", headers.get("Authorization")) for headers in backend.asked]
    assert sent in given_to


def test_an_mlflow_that_is_too_old_is_told(backend):
    backend.body = "3.9.1"
    question = Asked({}, mlflow=f"http://127.0.0.1:{backend.server_port}")
    question.probe.sent(frozenset())
    assert only(found(question, readback), "VO-MLFLOW-OLD").level == WARNING


# ---- secrets

QUICK = tuple(
    Area(area.__name__.rpartition(".")[2], area.check, 20)
    for area in (activation, labels, endpoints, readback, series, runs)
)


def texts(question, areas):
    examined = examine(question, areas)
    return rendering.as_text(examined, colour=False), rendering.as_json(examined, strict=True)


@settings(max_examples=25, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(secret=SECRETS)
def test_no_secret_is_in_what_is_said_of_an_environment_and_its_urls(secret, tmp_path):
    environ = {**environment(secret), "VERL_OTEL_FOLDER": str(tmp_path), "OTEL_RESOURCE_ATTRIBUTES": f"token {secret}"}
    question = Asked(environ, url(secret), url(secret), url(secret))
    assert_not_in(secret, *texts(question, QUICK))


@pytest.mark.parametrize("secret", ["Zq7-planted/+=", "Zq7planted"])
def test_nor_in_what_a_process_of_the_run_says_of_its_settings(secret, tmp_path):
    environ = {
        **environment(secret),
        "OTEL_EXPORTER_OTLP_HEADERS": f"authorization: Bearer {secret}, {secret}",
        "OTEL_RESOURCE_ATTRIBUTES": f"token {secret}",
        "OTEL_BSP_MAX_QUEUE_SIZE": "x",
        "OTEL_EXPORTER_OTLP_ENDPOINT": f"nonsense://user:{quote(secret, safe='')}@host",
        "OTEL_TRACES_SAMPLER": f"http://{quote(secret, safe='')}@host",
        "VERL_OTEL_FOLDER": str(tmp_path),
    }
    text, content = texts(Asked(environ), (Area("settings", doctors_settings.check, 60),))
    assert "VO-SETTING-MALFORMED" in text
    assert_not_in(secret, text, content)


def test_nor_in_what_an_answer_of_an_endpoint_brings():
    with Server("401") as server:
        environ = {"OTEL_EXPORTER_OTLP_HEADERS": "authorization=Bearer%20Zq7planted"}
        assert_not_in("Zq7planted", *texts(asked(server.url, **environ), QUICK[2:3]))


@settings(max_examples=100)
@given(secret=SECRETS)
@example(secret="Zq7$&")
def test_whoever_puts_a_secret_into_a_finding_it_is_taken_out(secret):
    hidden = Secrets({"MY_TOKEN": secret, "OTEL_EXPORTER_OTLP_HEADERS": f"a=Bearer {quote(secret)}"}, [url(secret)])
    made = Finding("VO-A", PROBLEM, f"it is {secret}!", f"{quote(secret, safe='')}", {secret: [{"a": (secret, 1)}]})
    left = hidden.without(made)
    assert_not_in(secret, left.what, left.fix, json.dumps(left.data))
    assert left.what.startswith("it is ") and left.data[next(iter(left.data))][0]["a"][1] == 1


def test_no_finding_of_an_area_and_no_error_of_it_brings_a_secret_out():
    def check(asked):
        yield Finding("VO-A", PROBLEM, "a token: Zq7planted", "use Zq7planted", {"token": "Zq7planted"})
        raise ValueError("Zq7planted")

    text, content = texts(Asked({"MY_TOKEN": "Zq7planted"}), (Area("an area", check, 10),))
    assert "a token: ..." in text and "VO-CHECK-FAILED" in text
    assert_not_in("Zq7planted", text, content)


@pytest.mark.parametrize("given", ["environment", "command line"])
def test_each_part_of_a_url_that_may_be_secret_is_taken_out(given):
    address = "https://Zq7user:Zq7password@host/v1/Zq7-a-token-in-a-path?key=Zq7query#Zq7fragment"
    hidden = Secrets({"SOME_URL": address}) if given == "environment" else Secrets({}, [address])
    told = hidden.hide("Zq7user Zq7password Zq7-a-token-in-a-path Zq7query Zq7fragment host v1 key")
    assert told == "... ... ... ... ... host v1 key"


def test_words_that_are_no_secrets_stay():
    environ = {"PATH": "/usr/bin", "PWD": "/usr/bin", "OLDPWD": "/usr", "A_KEY": "x", "B_TOKEN": "", "AUTH": "True"}
    more = {"TOKENIZERS_PARALLELISM": "false", "VERL_OTEL_UNKNOWN_KEYS": "prefix"}
    text = "/usr/bin of x at http://host:9090/prefix/api is true, or false"
    assert Secrets({**environ, **more}, ["http://host:9090/prefix/"]).hide(text) == text
