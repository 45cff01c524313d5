"""Whether what the run sends arrives: each endpoint's name, port, TLS, and its answer to real test data."""

from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from urllib.parse import urlsplit

from verl_otel import config
from verl_otel.doctor import clock
from verl_otel.doctor.asked import Asked
from verl_otel.doctor.findings import PROBLEM, Finding, note, ok, problem, warning
from verl_otel.doctor.gathering import Gathering
from verl_otel.doctor.network import reach, tls_of
from verl_otel.export.otlp_http import SIGNALS, Answer, Endpoint, Outcome
from verl_otel.export.providers import FILE_EXPORTER, OTLP_GRPC, OTLP_HTTP, PROMETHEUS, exporter_names

SECONDS = 25.0
ANSWER = 5.0
"""Seconds for an answer to test data; a run waits as long as OTEL_EXPORTER_OTLP_TIMEOUT says."""


def check(asked: Asked) -> Iterator[Finding]:
    """Send each signal's test data to where a run would send it."""
    delivered: set[str] = set()
    try:
        if config.sdk_disabled(asked.environ):
            yield note("VO-ENDPOINTS-OFF", "no test data is sent, since telemetry is off", "see under activation")
            return
        exporters = {signal: exporter_names(signal, asked.environ) for signal in SIGNALS}
        yield from _of_others(exporters, asked.environ)
        servers, malformed = _servers(exporters, asked.environ)
        yield from malformed
        yield from _send(asked, servers, delivered)
    finally:
        asked.probe.sent(frozenset(delivered))


def _servers(
    exporters: Mapping[str, Sequence[str]], environ: Mapping[str, str]
) -> tuple[dict[str, list[str]], list[Finding]]:
    """Scheme, host and port -> the signals that go there by OTLP/HTTP; and findings about what is no URL."""
    servers: dict[str, list[str]] = {}
    malformed = []
    for signal in (signal for signal, names in exporters.items() if OTLP_HTTP in names):
        try:
            servers.setdefault(Endpoint(signal, environ=environ).shown, []).append(signal)
        except ValueError as error:
            fix = "set OTEL_EXPORTER_OTLP_ENDPOINT to a URL such as http://127.0.0.1:4318"
            malformed.append(problem("VO-ENDPOINT-URL", f"{signal}: {error}", fix, signal=signal))
    return servers, malformed


def _send(asked: Asked, servers: Mapping[str, Sequence[str]], delivered: set[str]) -> Iterator[Finding]:
    end = asked.until(SECONDS)
    gatherings = {
        shown: Gathering(partial(_of_server, asked, shown, signals, delivered)) for shown, signals in servers.items()
    }
    for shown, gathering in gatherings.items():
        ended = gathering.wait(end)
        yield from list(gathering.found)
        if gathering.error is not None:
            raise gathering.error
        if not ended:
            yield problem(
                "VO-ENDPOINT-SLOW",
                f"{shown} ({', '.join(servers[shown])}): looking at it takes longer than {SECONDS:g} s",
                "look at the name server and the network; a run waits in the background, and spools",
                endpoint=shown,
            )


def _of_others(exporters: Mapping[str, Sequence[str]], environ: Mapping[str, str]) -> Iterator[Finding]:
    """About what does not go by OTLP/HTTP."""
    in_files = [signal for signal, names in exporters.items() if names == [FILE_EXPORTER]]
    if in_files:
        what = f"{', '.join(in_files)} are recorded in files, and sent nowhere"
        fix = "to send them: export OTEL_EXPORTER_OTLP_ENDPOINT=http://<collector>:4318"
        yield note("VO-NO-ENDPOINT", what, fix, signals=in_files)
    for signal, names in exporters.items():
        for name in names:
            if name not in (OTLP_HTTP, FILE_EXPORTER):
                yield _of_other(signal, name, environ)


def _of_other(signal: str, exporter: str, environ: Mapping[str, str]) -> Finding:
    data = {"signal": signal, "exporter": exporter}
    if exporter == OTLP_GRPC:
        url = environ.get(f"OTEL_EXPORTER_OTLP_{signal.upper()}_ENDPOINT") or environ.get(
            "OTEL_EXPORTER_OTLP_ENDPOINT", "http://localhost:4317"
        )
        shown = config.without_secrets(url if "://" in url else f"http://{url}")
        failure = next((found for found in reach(shown, None, signal) if found.level == PROBLEM), None)
        return failure or note(
            "VO-ENDPOINT-GRPC",
            f"{signal}: {shown} takes connections; no test data was sent, since they go by gRPC",
            "http/protobuf is the default, spools what cannot be sent, and is tried by doctor",
            **data,
        )
    if exporter == PROMETHEUS:
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
        for found in reach(shown, tls_of(signals[0], asked.environ), ", ".join(signals)):
            yield found
            if found.level == PROBLEM:
                return
    answers = {signal: Gathering(partial(_post, asked, signal)) for signal in signals}
    alike: dict[tuple[str, str], dict[str, str]] = {}
    for signal, gathering in answers.items():
        gathering.wait(asked.until(SECONDS))
        if gathering.error is not None:
            raise gathering.error
        for answer in gathering.found:
            if answer.outcome is Outcome.DELIVERED:
                delivered.add(signal)
            alike.setdefault(_judged(answer, shown), {})[signal] = _reason(answer)
    for (id, fix), reasons in alike.items():
        yield _told(shown, list(reasons), id, " or ".join(dict.fromkeys(reasons.values())), fix)
    if not proxy:
        yield from clock.of_server(shown, tls_of(signals[0], asked.environ).of_requests)


def _post(asked: Asked, signal: str) -> Iterator[Answer]:
    yield Endpoint(signal, environ=_impatient(asked.environ)).post(asked.probe.request(signal))


def _impatient(environ: Mapping[str, str]) -> dict[str, str]:
    """The environment with a shorter wait for answers."""
    own = {name: value for name, value in environ.items() if not name.endswith("_TIMEOUT")}
    asked_for = config.number(environ, "OTEL_EXPORTER_OTLP_TIMEOUT", ANSWER, 0.001)
    return {**own, "OTEL_EXPORTER_OTLP_TIMEOUT": str(min(ANSWER, asked_for))}


def _proxy(shown: str) -> str:
    from requests.utils import get_environ_proxies, select_proxy

    return select_proxy(shown, get_environ_proxies(shown)) or ""


TAKEN = "VO-ENDPOINT"
_WHAT = {"traces": "span", "metrics": "metric", "logs": "event"}


def _told(shown: str, signals: Sequence[str], id: str, reason: str, fix: str) -> Finding:
    *others, last = (_WHAT[signal] for signal in signals)
    test = f"{shown}: the test {' and '.join(filter(None, (', '.join(others), last)))}"
    verb, data = "were" if others else "was", {"endpoint": shown, "signals": list(signals), "reason": reason}
    if id == TAKEN:
        return ok(id, f"{test} {verb} taken ({reason})", **data)
    if id == "VO-ENDPOINT-REJECTED":
        return warning(id, f"{test} {verb} rejected in an answer of success (OTLP's partial success)", fix, **data)
    return problem(id, f"{test} {verb} not taken ({reason})", fix, **data)


def _reason(answer: Answer) -> str:
    return f"HTTP {answer.status}" if answer.status else answer.reason


def _judged(answer: Answer, shown: str) -> tuple[str, str]:
    """(id, what to do)"""
    if answer.outcome is Outcome.DELIVERED:
        return ("VO-ENDPOINT-REJECTED", _REJECTED) if answer.rejected else (TAKEN, "")
    return _FAILURES.get(answer.status) or _FAILURES[_kind(answer, shown)]


def _kind(answer: Answer, shown: str) -> int:
    """What stands for all that have no status of their own in `_FAILURES`."""
    if answer.status:
        hundreds = answer.status // 100 * 100
        return hundreds if hundreds in _FAILURES else _NO_HTTP
    if "Timeout" in answer.reason:
        return _HANGS
    return _NO_TLS if shown.startswith("https:") else _NO_HTTP  # the handshake was well, see `network`


_HANGS, _NO_HTTP, _NO_TLS = -1, -2, -3
_REJECTED = "look at the endpoint's log: it takes requests, and leaves out what they have"
_AUTHORIZATION = (
    "VO-ENDPOINT-UNAUTHORIZED",
    "set OTEL_EXPORTER_OTLP_HEADERS=authorization=Bearer%20<token>, the spaces as %20, or ask for a new token",
)
_PATH = (
    "VO-ENDPOINT-PATH",
    "is it a Collector's OTLP/HTTP port (4318), with /v1/traces, /v1/metrics, /v1/logs? A proxy may have other paths",
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
        "what listens there ends the connection, or speaks no HTTP: 4317 is OTLP/gRPC, 4318 OTLP/HTTP",
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
