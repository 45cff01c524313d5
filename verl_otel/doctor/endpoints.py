"""Whether what the run sends arrives: each endpoint's name, port, TLS, and its answer to real test data."""

import socket
import ssl
import time
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from importlib.metadata import entry_points
from typing import Any
from urllib.parse import urlsplit

from verl_otel import config
from verl_otel.doctor import clock
from verl_otel.doctor.asked import Asked
from verl_otel.doctor.findings import Finding, note, ok, problem, warning
from verl_otel.doctor.gathering import Gathering
from verl_otel.export.otlp_http import SIGNALS, Answer, Endpoint, Outcome

SECONDS = 25.0
CONNECT = 4.0
"""Seconds for a connection, and for TLS on it."""

ANSWER = 5.0
"""Seconds for an answer to test data; a run waits as long as OTEL_EXPORTER_OTLP_TIMEOUT says."""

_DAY = 86400
_SOON = 14 * _DAY


def check(asked: Asked) -> Iterator[Finding]:
    """Send each signal's test data to where a run would send it."""
    delivered: set[str] = set()
    try:
        by_server = _servers(asked.environ)
        yield from (found for found in by_server.pop("", []) if isinstance(found, Finding))
        end = asked.until(SECONDS)
        servers = [
            (shown, signals, Gathering(partial(_of_server, asked, shown, signals, delivered)))
            for shown, signals in by_server.items()
        ]
        for shown, signals, gathering in servers:
            ended = gathering.wait(end)
            yield from list(gathering.found)
            if gathering.error is not None:
                raise gathering.error
            if not ended:
                yield problem(
                    "VO-ENDPOINT-SLOW",
                    f"{shown} ({', '.join(signals)}): looking at it takes longer than {SECONDS:g} s",
                    "look at the name server and the network: the run waits for it in the background, and spools",
                    endpoint=shown,
                )
    finally:
        asked.probe.sent(frozenset(delivered))


def _servers(environ: Mapping[str, str]) -> dict[str, list[Any]]:
    """Scheme, host and port -> the signals that go there by OTLP/HTTP; "" -> the findings about all others."""
    from verl_otel.export import providers  # needs the SDK, which may not come up: see the area settings

    servers: dict[str, list[Any]] = {"": []}
    exporters = {signal: providers.exporter_names(signal) for signal in SIGNALS}
    in_files = [signal for signal, names in exporters.items() if names == [providers.FILE_EXPORTER]]
    if in_files:
        what = f"{', '.join(in_files)} are recorded in files, and sent nowhere"
        fix = "to send them: export OTEL_EXPORTER_OTLP_ENDPOINT=http://<collector>:4318"
        servers[""].append(note("VO-NO-ENDPOINT", what, fix, signals=in_files))
    for signal, names in exporters.items():
        if providers.OTLP_HTTP in names:
            try:
                servers.setdefault(Endpoint(signal, environ=environ).shown, []).append(signal)
            except ValueError as error:
                fix = "set OTEL_EXPORTER_OTLP_ENDPOINT to a URL such as http://127.0.0.1:4318"
                servers[""].append(problem("VO-ENDPOINT-URL", f"{signal}: {error}", fix, signal=signal))
        for name in names:
            if name not in (providers.OTLP_HTTP, providers.FILE_EXPORTER):
                servers[""].append(_of_other(signal, name, environ))
    return servers


def _of_other(signal: str, exporter: str, environ: Mapping[str, str]) -> Finding:
    from verl_otel.export import providers

    data = {"signal": signal, "exporter": exporter}
    if exporter == providers.OTLP_GRPC:
        url = environ.get(f"OTEL_EXPORTER_OTLP_{signal.upper()}_ENDPOINT") or environ.get(
            "OTEL_EXPORTER_OTLP_ENDPOINT", "http://localhost:4317"
        )
        shown = config.without_secrets(url if "://" in url else f"http://{url}")
        failure = next((found for found in _network(shown, None, signal) if found.level != "ok"), None)
        return failure or note(
            "VO-ENDPOINT-GRPC",
            f"{signal}: {shown} takes connections; no test data was sent, since they go by gRPC",
            "http/protobuf is the default, spools what cannot be sent, and is tried by doctor",
            **data,
        )
    if exporter == providers.PROMETHEUS:
        if not list(entry_points(group="opentelemetry_metrics_exporter", name=exporter)):
            return problem(
                "VO-PROMETHEUS-MISSING",
                "metrics are to be scraped, and the package for it is not installed",
                "pip install 'verl-otel[prometheus]'",
                **data,
            )
        return note(
            "VO-SCRAPED",
            "metrics are scraped from the run's processes, not sent",
            "Prometheus needs the job deploy/prometheus/scrape-processes.yaml",
            **data,
        )
    what = f"{signal} go to the exporter {exporter!r}, which is not looked at here"
    return note("VO-EXPORTER-OTHER", what, "see its own documentation", **data)


def _of_server(asked: Asked, shown: str, signals: Sequence[str], delivered: set[str]) -> Iterator[Finding]:
    """The findings about one server, in the order in which a request gets there; the first failure ends it."""
    proxy = _proxy(shown)
    if proxy:
        yield note(
            "VO-ENDPOINT-PROXY",
            f"{shown} is reached through the proxy {config.without_secrets(proxy)}",
            f"if it is on the same network: export NO_PROXY={urlsplit(shown).hostname}",
            endpoint=shown,
        )
    else:
        for found in _network(shown, _tls_of(signals[0], asked.environ), ", ".join(signals)):
            yield found
            if found.level == "problem":
                return
    for signal in signals:
        started = time.monotonic()
        answer = Endpoint(signal, environ=_impatient(asked.environ)).post(asked.probe.request(signal))
        if answer.outcome is Outcome.DELIVERED:
            delivered.add(signal)
        yield _judged(shown, signal, answer, time.monotonic() - started)
    if not proxy:
        yield from clock.of_server(shown, _tls_of(signals[0], asked.environ).of_requests)


def _impatient(environ: Mapping[str, str]) -> dict[str, str]:
    """The environment with a shorter wait for answers."""
    own = {name: value for name, value in environ.items() if not name.endswith("_TIMEOUT")}
    asked_for = config.number(environ, "OTEL_EXPORTER_OTLP_TIMEOUT", ANSWER, 0.001)
    return {**own, "OTEL_EXPORTER_OTLP_TIMEOUT": str(min(ANSWER, asked_for))}


def _proxy(shown: str) -> str:
    from requests.utils import get_environ_proxies, select_proxy

    return select_proxy(shown, get_environ_proxies(shown)) or ""


# ---- the network ----------------------------------------------------------------------------------------------------


class Tls:
    """What TLS to an endpoint is checked with: paths of PEM files, empty for those of the system, or none."""

    def __init__(self, authority: str, certificate: str, key: str) -> None:
        self.authority, self.certificate, self.key = authority, certificate, key

    def context(self) -> ssl.SSLContext:
        """Raises what `ssl` does of files that cannot be used."""
        from requests.utils import DEFAULT_CA_BUNDLE_PATH

        context = ssl.create_default_context(cafile=self.authority or DEFAULT_CA_BUNDLE_PATH)
        if self.certificate:
            context.load_cert_chain(self.certificate, self.key or None)
        return context

    @property
    def of_requests(self) -> dict[str, Any]:
        """As `requests` takes it."""
        cert = ((self.certificate, self.key) if self.key else self.certificate) if self.certificate else None
        return {"verify": self.authority or True, "cert": cert}


def _tls_of(signal: str, environ: Mapping[str, str]) -> Tls:
    def setting(name: str) -> str:
        own = environ.get(f"OTEL_EXPORTER_OTLP_{signal.upper()}_{name}", "").strip()
        return own or environ.get(f"OTEL_EXPORTER_OTLP_{name}", "").strip()

    return Tls(setting("CERTIFICATE"), setting("CLIENT_CERTIFICATE"), setting("CLIENT_KEY"))


def _network(shown: str, tls: Tls | None, signals: str) -> Iterator[Finding]:
    """Name, port and TLS of a server."""
    parts = urlsplit(shown)
    host, port = parts.hostname or "", parts.port or (443 if parts.scheme == "https" else 80)
    data = {"endpoint": shown, "signals": signals}
    try:
        addresses = sorted({entry[4][0] for entry in socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)})
    except OSError as error:
        yield problem(
            "VO-ENDPOINT-DNS",
            f"{shown} ({signals}): the name {host} is not known here ({error.strerror or error})",
            "correct the name in OTEL_EXPORTER_OTLP_ENDPOINT; in Kubernetes it is <service>.<namespace>.svc",
            **data,
        )
        return
    try:
        with socket.create_connection((host, port), CONNECT) as connection:
            if parts.scheme == "https" and tls is not None:
                found = _handshake(connection, host, shown, tls)
                yield found
                if found.level == "problem":
                    return
            elif parts.scheme == "https":
                return
    except ConnectionRefusedError:
        yield problem(
            "VO-ENDPOINT-REFUSED",
            f"{shown} ({signals}): nothing listens on port {port} of {host} ({', '.join(map(str, addresses))})",
            f"start the Collector, or correct OTEL_EXPORTER_OTLP_ENDPOINT; one that listens on 127.0.0.1 only is not "
            f"reached from other nodes (VERL_OTEL_LISTEN_HTTP=0.0.0.0:{port})",
            **data,
        )
    except (TimeoutError, OSError) as error:
        yield problem(
            "VO-ENDPOINT-UNREACHABLE",
            f"{shown} ({signals}): no connection within {CONNECT:g} s ({_named(error)})",
            f"look at firewalls and NetworkPolicies between here and port {port} of {host}",
            **data,
        )


def _handshake(connection: socket.socket, host: str, shown: str, tls: Tls) -> Finding:
    data = {"endpoint": shown}
    try:
        context = tls.context()
    except (OSError, ssl.SSLError) as error:  # SSLError is an OSError of files with something else in them
        return problem(
            "VO-ENDPOINT-CERTIFICATE-FILE",
            f"{shown}: a file of OTEL_EXPORTER_OTLP_CERTIFICATE, _CLIENT_CERTIFICATE or _CLIENT_KEY cannot be used "
            f"({_named(error)})",
            "each has to be a PEM file that this user can read, and the key that of the certificate",
            **data,
        )
    try:
        with context.wrap_socket(connection, server_hostname=host) as secured:
            peer, version = secured.getpeercert() or {}, secured.version()
    except ssl.SSLCertVerificationError as error:
        return problem(
            "VO-ENDPOINT-TLS-CERTIFICATE",
            f"{shown}: its certificate is not accepted ({error.verify_message})",
            _FIX_OF_CERTIFICATE.get(error.verify_code, _FIX_OF_AUTHORITY),
            **data,
        )
    except (ssl.SSLError, OSError) as error:
        reason = getattr(error, "reason", None) or _named(error)
        return problem(
            "VO-ENDPOINT-NOT-TLS",
            f"{shown}: no TLS is spoken there, or not ours ({reason})",
            "if the Collector has no TLS, its URL begins with http://; if it wants a client certificate, set "
            "OTEL_EXPORTER_OTLP_CLIENT_CERTIFICATE and _CLIENT_KEY",
            **data,
        )
    left = ssl.cert_time_to_seconds(str(peer["notAfter"])) - time.time() if "notAfter" in peer else _SOON
    if left < _SOON:
        return warning(
            "VO-ENDPOINT-CERTIFICATE-ENDS",
            f"{shown}: its certificate ends in {left / _DAY:.0f} days",
            "renew it before: what cannot be sent then waits in the spools",
            days=round(left / _DAY),
            **data,
        )
    return ok("VO-ENDPOINT-TLS", f"{shown}: {version}, its certificate is accepted", **data)


_FIX_OF_AUTHORITY = "set OTEL_EXPORTER_OTLP_CERTIFICATE to the CA that has signed it (PEM)"
_FIX_OF_CERTIFICATE = {
    9: "it is not valid yet: look at the clock of this machine",
    10: "it has ended: renew the Collector's certificate",
    62: "use a name that is in the certificate, in OTEL_EXPORTER_OTLP_ENDPOINT",
    64: "use an address that is in the certificate, or a name, in OTEL_EXPORTER_OTLP_ENDPOINT",
}
"""By OpenSSL's X509_V_ERR_*."""


def _named(error: OSError) -> str:
    return error.strerror or type(error).__name__


# ---- the answer -----------------------------------------------------------------------------------------------------

_WHAT = {"traces": "span", "metrics": "metric", "logs": "event"}


def _judged(shown: str, signal: str, answer: Answer, seconds: float) -> Finding:
    data = {"endpoint": shown, "signal": signal, "status": answer.status, "seconds": round(seconds, 3)}
    test = f"{shown}: the test {_WHAT[signal]}"
    if answer.outcome is Outcome.DELIVERED and not answer.rejected:
        return ok("VO-ENDPOINT", f"{test} was taken (HTTP {answer.status}, {seconds * 1000:.0f} ms)", **data)
    if answer.outcome is Outcome.DELIVERED:
        return warning(
            "VO-ENDPOINT-REJECTED",
            f"{test} was rejected in an answer of success (OTLP's partial success)",
            "look at the endpoint's log: it takes requests, and leaves out what they have",
            **data,
        )
    id, fix = _FAILURES.get(answer.status) or _FAILURES[_kind(answer)]
    reason = f"HTTP {answer.status}" if answer.status else answer.reason
    return problem(id, f"{test} was not taken ({reason})", fix.format(signal=signal), **data)


def _kind(answer: Answer) -> int:
    """What stands for all that have no status of their own in `_FAILURES`."""
    if not answer.status:
        return _NO_TLS if "SSL" in answer.reason else _HANGS if "Timeout" in answer.reason else _NO_HTTP
    return answer.status // 100 * 100


_HANGS, _NO_HTTP, _NO_TLS = 0, 1, 2
_AUTHORIZATION = (
    "VO-ENDPOINT-UNAUTHORIZED",
    "set OTEL_EXPORTER_OTLP_HEADERS=authorization=Bearer%20<token>, the spaces as %20, or ask for a new token",
)
_PATH = (
    "VO-ENDPOINT-PATH",
    "is it a Collector's OTLP/HTTP port (4318)? The path there is /v1/{signal}, and a proxy in front may have another",
)
_FAILURES = {
    401: _AUTHORIZATION,
    403: _AUTHORIZATION,
    407: ("VO-ENDPOINT-UNAUTHORIZED", "the proxy wants credentials: put them into HTTPS_PROXY, or set NO_PROXY"),
    404: _PATH,
    405: _PATH,
    413: ("VO-ENDPOINT-REFUSES", "raise the limit of a request's size in what is in front of the Collector"),
    415: ("VO-ENDPOINT-REFUSES", "it takes no protobuf: send through a Collector"),
    429: ("VO-ENDPOINT-BUSY", "it is overloaded, and asks to come later: give the Collector more memory, or add one"),
    503: (
        "VO-ENDPOINT-BUSY",
        "it is overloaded or starting: look at the Collector's log for memory_limiter and queues",
    ),
    _HANGS: (
        "VO-ENDPOINT-HANGS",
        "it takes connections and does not answer: look at the Collector's log, and its load",
    ),
    _NO_HTTP: (
        "VO-ENDPOINT-NOT-HTTP",
        "what listens there does not speak HTTP as OTLP does: 4317 is OTLP/gRPC, 4318 OTLP/HTTP",
    ),
    _NO_TLS: (
        "VO-ENDPOINT-TLS-REFUSED",
        "it wants a client certificate: set OTEL_EXPORTER_OTLP_CLIENT_CERTIFICATE and _CLIENT_KEY",
    ),
    300: ("VO-ENDPOINT-REDIRECTS", "redirects are not followed: set the endpoint to where it leads, https:// perhaps"),
    400: ("VO-ENDPOINT-REFUSES", "look at the endpoint's log: it will never take this"),
    500: ("VO-ENDPOINT-FAILS", "look at the log of the Collector, or of the proxy in front of it"),
}
"""Status, its hundreds, or one of the three above -> (id, what to do)."""
