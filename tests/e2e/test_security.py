"""TLS, client certificates, tokens and passwords, with the real Collector and a CA that is made here.

What the wrong credentials cannot deliver stays in the process's spool; the training ends as always, and no secret is in
what it or the Collector says or writes.
"""

import base64
import datetime
import gzip
import ipaddress
import json
import os
import re
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

import bed
import pytest
import yaml
from asking import eventually
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from verl_otel.stack.binaries import binary
from verl_otel.stack.ports import free_ports

pytestmark = pytest.mark.stack

COLLECTOR = bed.ROOT / "collector"
TRAINER = bed.ROOT / "tests" / "integration" / "small_trainer.py"
TOKEN, OLD_TOKEN, WRONG_TOKEN = "Zq7-planted-token-0001", "Zq7-planted-token-0000", "Zq7-planted-token-wrong"
USER, PASSWORD, WRONG_PASSWORD = "trainer", "Zq7-planted-password", "Zq7-planted-password-wrong"
SECRET = "Zq7-planted"
HASHED = "$2y$05$abcdefghijklmnopqrstuOhQ9wgWSF4tQis9XQ/6M3tF7y7MT6EZW"
"""PASSWORD as `htpasswd -B` writes it."""


class Authority:
    """A CA, and certificates of it, as PEM files."""

    def __init__(self, folder, name):
        self.folder = folder / name
        self.folder.mkdir()
        self._key = ec.generate_private_key(ec.SECP256R1())
        self._name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])
        certificate = self._builder(self._name, self._key).add_extension(x509.BasicConstraints(True, None), True)
        self.certificate = self._write("ca.crt", certificate.sign(self._key, hashes.SHA256()))

    def issue(self, name, usage):
        """(certificate, key) for `name` on loopback."""
        key = ec.generate_private_key(ec.SECP256R1())
        names = [x509.DNSName("localhost"), x509.IPAddress(ipaddress.ip_address("127.0.0.1"))]
        subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])
        certificate = (
            self._builder(subject, key)
            .add_extension(x509.SubjectAlternativeName(names), False)
            .add_extension(x509.ExtendedKeyUsage([usage]), False)
            .sign(self._key, hashes.SHA256())
        )
        pem = key.private_bytes(
            serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
        )
        path = self.folder / f"{name}.key"
        path.touch(0o600)
        path.write_bytes(pem)
        return self._write(f"{name}.crt", certificate), path

    def _builder(self, subject, key):
        now = datetime.datetime.now(datetime.timezone.utc)
        return (
            x509.CertificateBuilder()
            .subject_name(subject)
            .issuer_name(self._name)
            .public_key(key.public_key())
            .serial_number(x509.random_serial_number())
            .not_valid_before(now - datetime.timedelta(hours=1))
            .not_valid_after(now + datetime.timedelta(days=1))
        )

    def _write(self, name, certificate):
        path = self.folder / name
        path.write_bytes(certificate.public_bytes(serialization.Encoding.PEM))
        return path


@dataclass
class Keys:
    """What is given out: to the server, to the processes, and to somebody else."""

    server: Path
    ca: Path
    client: tuple[Path, Path]
    strange_ca: Path
    strange_client: tuple[Path, Path]
    tokens: Path
    htpasswd: Path


@pytest.fixture(scope="module")
def keys(tmp_path_factory):
    folder = tmp_path_factory.mktemp("keys")
    ours, theirs = Authority(folder, "ours"), Authority(folder, "theirs")
    server = folder / "server"
    server.mkdir()
    certificate, key = ours.issue("server", ExtendedKeyUsageOID.SERVER_AUTH)
    certificate.rename(server / "tls.crt")
    key.rename(server / "tls.key")
    (server / "ca.crt").write_bytes(ours.certificate.read_bytes())
    tokens, htpasswd = folder / "tokens", folder / "htpasswd"
    tokens.write_text(f"{TOKEN}\n{OLD_TOKEN}\n")
    htpasswd.write_text(f"{USER}:{HASHED}\n")
    return Keys(
        server,
        ours.certificate,
        ours.issue("client", ExtendedKeyUsageOID.CLIENT_AUTH),
        theirs.certificate,
        theirs.issue("stranger", ExtendedKeyUsageOID.CLIENT_AUTH),
        tokens,
        htpasswd,
    )


@dataclass
class Collector:
    """A running Collector that writes what it takes to a file."""

    folder: Path
    ports: dict[str, int]
    process: subprocess.Popen = field(repr=False)

    def url(self, scheme="https"):
        return f"{scheme}://127.0.0.1:{self.ports['http']}"

    @property
    def log(self):
        return (self.folder / "collector.log").read_text(errors="replace")

    def taken(self):
        """signal -> how many requests of it came through."""
        lines = (self.folder / "taken.jsonl").read_text().splitlines(keepends=True)
        return Counter(key for line in lines if line.endswith("\n") for key in json.loads(line))


# Where the base configurations send to, this writes to a file: only the way in is looked at.
TO_FILE = {
    "exporters": {"file": {"path": "taken.jsonl", "flush_interval": "100ms"}},
    "service": {
        "pipelines": {
            signal: {"receivers": ["otlp"], "processors": [], "exporters": ["file"]}
            for signal in ("traces", "metrics", "logs")
        }
    },
}


def start_collector(folder, files, more=None, **variables):
    """The Collector with these files of collector/ and the configuration `more`; None if it does not start."""
    folder.mkdir(parents=True, exist_ok=True)
    ports = free_ports(["grpc", "http", "health", "self"])
    command = [str(binary("verl-otelcol"))]
    for file in files:
        command += ["--config", str(COLLECTOR / file)]
    if more is not None:
        (folder / "more.yaml").write_text(yaml.safe_dump(more))
        command += ["--config", str(folder / "more.yaml")]
    environment = bed.clean_environment(
        VERL_OTEL_LISTEN_GRPC=f"127.0.0.1:{ports['grpc']}",
        VERL_OTEL_LISTEN_HTTP=f"127.0.0.1:{ports['http']}",
        VERL_OTEL_HEALTH=f"127.0.0.1:{ports['health']}",
        VERL_OTEL_SELF_PORT=str(ports["self"]),
        **{name: str(value) for name, value in variables.items()},
    )
    with (folder / "collector.log").open("wb") as log:
        process = subprocess.Popen(command, cwd=folder, env=environment, stdout=log, stderr=log)
    deadline = time.monotonic() + 30
    while time.monotonic() < deadline and process.poll() is None:
        try:
            urllib.request.urlopen(f"http://127.0.0.1:{ports['health']}", timeout=2).close()
            return Collector(folder, ports, process)
        except (OSError, urllib.error.URLError):
            time.sleep(0.05)
    process.kill()
    process.wait()
    return None


@pytest.fixture
def collector(tmp_path):
    """Start Collectors; they end with the test."""
    started = []

    def start(name, files, more=TO_FILE, **variables):
        found = start_collector(tmp_path / name, files, more, **variables)
        assert found is not None, (tmp_path / name / "collector.log").read_text()
        started.append(found)
        return found

    yield start
    for one in started:
        one.process.terminate()
    for one in started:
        one.process.wait(30)


def process_environment(**variables):
    """Without the CAs that a machine may have for all programs that use `requests`."""
    environment = bed.clean_environment(**{name: str(value) for name, value in variables.items()})
    for name in {"REQUESTS_CA_BUNDLE", "CURL_CA_BUNDLE"} - set(variables):
        environment.pop(name, None)
    return environment


def train(folder, **environment):
    """A small training that sends what it records; returns its output."""
    folder.mkdir(parents=True, exist_ok=True)
    command = [bed.INSTRUMENT, sys.executable, str(TRAINER)]
    done = subprocess.run(
        command,
        env=process_environment(VERL_FILE_LOGGER_ROOT=folder / "logs", VERL_OTEL_EXIT_TIMEOUT=3, **environment),
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0 and "trained\n" in done.stdout, done.stderr
    (logged,) = (folder / "logs").rglob("*.jsonl")
    assert len(logged.read_text().splitlines()) == 3
    return done.stdout + done.stderr


def written(*folders):
    """All that is in files below: of the process, and of the Collector."""
    texts = []
    for folder in folders:
        for path in folder.rglob("*"):
            if path.is_file() and path.name != "more.yaml":
                content = path.read_bytes()
                texts.append(content + (gzip.decompress(content) if content[:2] == b"\x1f\x8b" else b""))
    return b"\n".join(texts).decode(errors="replace")


def assert_no_secret(text):
    assert SECRET not in text
    for secret in (f"{USER}:{PASSWORD}", TOKEN, PASSWORD):
        assert base64.b64encode(secret.encode()).decode().rstrip("=") not in text
    assert "PRIVATE KEY" not in text


def spooled(folder):
    return Counter(key for path in (folder / "verl-otel").rglob("spool/*.jsonl")
                   for line in path.read_text().splitlines() for key in json.loads(line))  # fmt: skip


def bearer(token):
    return f"authorization=Bearer%20{token}"


def basic(password):
    return "authorization=Basic%20" + base64.b64encode(f"{USER}:{password}".encode()).decode()


CA, CERTIFICATE, KEY = (
    "OTEL_EXPORTER_OTLP_CERTIFICATE",
    "OTEL_EXPORTER_OTLP_CLIENT_CERTIFICATE",
    "OTEL_EXPORTER_OTLP_CLIENT_KEY",
)
HEADERS = "OTEL_EXPORTER_OTLP_HEADERS"

# variants -> (what a process needs, what others have)
CASES = {
    "tls": (
        ["tls"],
        lambda keys: {CA: keys.ca},
        lambda keys: [{}, {CA: keys.strange_ca}],
    ),
    "mtls": (
        ["mtls"],
        lambda keys: {CA: keys.ca, CERTIFICATE: keys.client[0], KEY: keys.client[1]},
        lambda keys: [
            {CA: keys.ca},
            {CA: keys.ca, CERTIFICATE: keys.strange_client[0], KEY: keys.strange_client[1]},
        ],
    ),
    "token": (
        ["tls", "auth"],
        lambda keys: {CA: keys.ca, HEADERS: bearer(TOKEN)},
        lambda keys: [{CA: keys.ca}, {CA: keys.ca, HEADERS: bearer(WRONG_TOKEN)}],
    ),
    "password": (
        ["tls", "basic-auth"],
        lambda keys: {CA: keys.ca, HEADERS: basic(PASSWORD)},
        lambda keys: [{CA: keys.ca}, {CA: keys.ca, HEADERS: basic(WRONG_PASSWORD)}],
    ),
}


def variables(keys):
    return {"VERL_OTEL_TLS": keys.server, "VERL_OTEL_TOKENS": keys.tokens, "VERL_OTEL_HTPASSWD": keys.htpasswd}


@pytest.mark.parametrize("case", CASES)
def test_only_who_has_the_credentials_delivers(case, keys, collector, tmp_path):
    variants, right, wrong = CASES[case]
    files = ["local.yaml", *(f"variants/{variant}.yaml" for variant in variants)]
    running = collector("collector", files, **variables(keys))
    said = ""
    for number, environment in enumerate(wrong(keys)):
        folder = tmp_path / f"wrong-{number}"
        output = train(folder, OTEL_EXPORTER_OTLP_ENDPOINT=running.url(), **environment)
        assert output.count("cannot be sent to") == 1, output
        assert set(spooled(folder)) == {"resourceSpans", "resourceMetrics", "resourceLogs"}
        said += output
    assert running.taken() == {}
    folder = tmp_path / "right"
    output = train(folder, OTEL_EXPORTER_OTLP_ENDPOINT=running.url(), **right(keys))
    assert "verl-otel:" not in output, output
    assert eventually(lambda: set(running.taken()) == {"resourceSpans", "resourceMetrics", "resourceLogs"})
    assert spooled(folder) == {}
    running.process.terminate()
    running.process.wait(30)
    assert_no_secret(said + output + written(tmp_path))


def test_the_configured_ca_wins_over_that_of_all_programs(keys, collector, tmp_path):
    running = collector("collector", ["local.yaml", "variants/tls.yaml"], **variables(keys))
    more = {CA: keys.ca, "REQUESTS_CA_BUNDLE": keys.strange_ca}
    output = train(tmp_path / "run", OTEL_EXPORTER_OTLP_ENDPOINT=running.url(), **more)
    assert "verl-otel:" not in output


def test_plain_text_is_refused_where_tls_is_asked_for(keys, collector, tmp_path):
    running = collector("collector", ["local.yaml", "variants/tls.yaml"], **variables(keys))
    train(tmp_path / "run", OTEL_EXPORTER_OTLP_ENDPOINT=running.url("http"))
    assert running.taken() == {}


def test_what_was_spooled_for_a_wrong_token_is_delivered_with_the_right_one(keys, collector, tmp_path):
    running = collector("collector", ["local.yaml", "variants/tls.yaml", "variants/auth.yaml"], **variables(keys))
    common = {"OTEL_EXPORTER_OTLP_ENDPOINT": running.url(), CA: str(keys.ca)}
    train(tmp_path / "run", **common, **{HEADERS: bearer(WRONG_TOKEN)})
    command = [sys.executable, "-m", "verl_otel.cli", "replay", str(tmp_path / "run" / "verl-otel")]
    environment = process_environment(**common, **{HEADERS: bearer(TOKEN)})
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stdout + done.stderr
    assert eventually(lambda: set(running.taken()) == {"resourceSpans", "resourceMetrics", "resourceLogs"})
    assert_no_secret(done.stdout + done.stderr)


@pytest.mark.parametrize("variant", ["tls", "mtls", "auth", "basic-auth"])
@pytest.mark.parametrize("value", [None, ""], ids=["unset", "empty"])
def test_a_collector_without_its_secrets_does_not_start(variant, value, tmp_path):
    """Rather than to be open to all."""
    names = ("VERL_OTEL_TLS", "VERL_OTEL_TOKENS", "VERL_OTEL_HTPASSWD")
    given = {} if value is None else dict.fromkeys(names, value)
    assert start_collector(tmp_path, ["local.yaml", f"variants/{variant}.yaml"], TO_FILE, **given) is None


def test_an_mtls_collector_without_the_clients_ca_does_not_start(keys, tmp_path):
    folder = tmp_path / "tls"
    folder.mkdir()
    for name in ("tls.crt", "tls.key"):
        (folder / name).write_bytes((keys.server / name).read_bytes())
    files = ["local.yaml", "variants/mtls.yaml"]
    assert start_collector(tmp_path / "collector", files, TO_FILE, VERL_OTEL_TLS=folder) is None


def send_a_span(url):
    """Without anything that protects: what a process of this node sends to its agent."""
    body = json.dumps({"resourceSpans": [{"scopeSpans": [{"spans": [{
        "traceId": "1" * 32, "spanId": "2" * 16, "name": "verl.step", "startTimeUnixNano": "1", "endTimeUnixNano": "2",
    }]}]}]})  # fmt: skip
    request = urllib.request.Request(f"{url}/v1/traces", body.encode(), {"content-type": "application/json"})
    urllib.request.urlopen(request, timeout=10).close()


def test_an_agent_reaches_a_gateway_that_asks_for_everything(keys, collector, tmp_path):
    """mTLS and a token between nodes; with the wrong token nothing arrives."""
    gateway = collector("gateway", ["gateway.yaml", "variants/mtls.yaml", "variants/auth.yaml"], **variables(keys))
    protected = {
        "VERL_OTEL_GATEWAY": f"127.0.0.1:{gateway.ports['grpc']}",
        "VERL_OTEL_GATEWAY_CA": keys.ca,
        "VERL_OTEL_GATEWAY_CERT": keys.client[0],
        "VERL_OTEL_GATEWAY_KEY": keys.client[1],
    }
    refused = collector(
        "refused", ["agent.yaml"], None, **protected, VERL_OTEL_GATEWAY_AUTHORIZATION=f"Bearer {WRONG_TOKEN}"
    )
    send_a_span(refused.url("http"))
    assert eventually(lambda: "Unauthenticated" in refused.log)
    assert gateway.taken() == {}
    agent = collector("agent", ["agent.yaml"], None, **protected, VERL_OTEL_GATEWAY_AUTHORIZATION=f"Bearer {TOKEN}")
    send_a_span(agent.url("http"))
    assert eventually(lambda: gateway.taken() == {"resourceSpans": 1})
    for one in (gateway, refused, agent):
        one.process.terminate()
        one.process.wait(30)
    assert_no_secret(written(tmp_path))


def test_the_backends_get_tls_and_their_own_credentials(keys, collector, tmp_path):
    """Another Collector stands for Jaeger (mTLS, a token); the real Prometheus has TLS and a password."""
    jaeger = collector("jaeger", ["gateway.yaml", "variants/mtls.yaml", "variants/auth.yaml"], **variables(keys))
    (port,) = free_ports(["prometheus"]).values()
    web = tmp_path / "web.yaml"
    web.write_text(
        yaml.safe_dump(
            {
                "tls_server_config": {
                    "cert_file": str(keys.server / "tls.crt"),
                    "key_file": str(keys.server / "tls.key"),
                },
                "basic_auth_users": {USER: HASHED},
            }
        )
    )
    with (tmp_path / "prometheus.log").open("wb") as log:
        prometheus = subprocess.Popen(
            [
                str(binary("prometheus")),
                f"--config.file={bed.ROOT / 'deploy' / 'prometheus' / 'prometheus.yaml'}",
                f"--storage.tsdb.path={tmp_path / 'prometheus'}",
                f"--web.listen-address=127.0.0.1:{port}",
                f"--web.config.file={web}",
                "--web.enable-otlp-receiver",
            ],
            stdout=log,
            stderr=log,
        )
    try:
        login = "Basic " + base64.b64encode(f"{USER}:{PASSWORD}".encode()).decode()
        local = collector(
            "local",
            ["local.yaml", "variants/secure-backends.yaml"],
            None,
            JAEGER_OTLP=f"127.0.0.1:{jaeger.ports['grpc']}",
            JAEGER_AUTHORIZATION=f"Bearer {TOKEN}",
            PROMETHEUS_URL=f"https://127.0.0.1:{port}",
            PROMETHEUS_AUTHORIZATION=login,
            VERL_OTEL_BACKENDS_CA=keys.ca,
            VERL_OTEL_BACKENDS_CERT=keys.client[0],
            VERL_OTEL_BACKENDS_KEY=keys.client[1],
        )
        train(tmp_path / "run", OTEL_EXPORTER_OTLP_ENDPOINT=local.url("http"))
        assert eventually(lambda: jaeger.taken()["resourceSpans"])
        import requests

        def found():
            answer = requests.get(
                f"https://127.0.0.1:{port}/api/v1/query",
                params={"query": "verl_training_step"},
                auth=(USER, PASSWORD),
                verify=str(keys.ca),
                timeout=10,
            )
            return answer.ok and answer.json()["data"]["result"]

        assert eventually(found)
        local.process.terminate()
        local.process.wait(30)
        assert_no_secret(written(local.folder, jaeger.folder, tmp_path / "run"))
    finally:
        prometheus.kill()
        prometheus.wait()


def test_the_examples_hold_no_secret():
    for path in (COLLECTOR / "variants").glob("*.yaml"):
        for line in path.read_text().splitlines():
            if re.search(
                r"(?i)^[^#]*\b(token|password|authorization|file|filename|ca_file|cert_file|key_file)s?:", line
            ):
                assert "${env:" in line, f"{path.name}: {line}"


def test_the_environment_of_the_tests_is_clean():
    assert not [name for name in os.environ if name.startswith("OTEL_EXPORTER_OTLP")]
