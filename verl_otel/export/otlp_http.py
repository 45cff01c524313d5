"""Posting OTLP requests over HTTP, as the `OTEL_EXPORTER_OTLP_*` variables say.

Bytes in, an outcome out: what is sent may come from this process or from a spool, which the SDK's own exporters, which
take its objects, could not send.
"""

import enum
import gzip
import math
import os
import zlib
from collections.abc import Mapping
from dataclasses import dataclass
from email.utils import parsedate_to_datetime
from importlib.metadata import entry_points
from time import time
from typing import Any
from urllib.parse import unquote, urlsplit

from verl_otel import border, config
from verl_otel.export import otlp_json

SIGNALS = ("traces", "metrics", "logs")

TIMEOUT = 10.0
"""Seconds for one request, where `OTEL_EXPORTER_OTLP_TIMEOUT` says nothing."""

_MAX_ANSWER = 64 << 10
"""Bytes of an answer that are read."""

_PROTOBUF = "application/x-protobuf"
_LATER = {408, 429, 502, 503, 504}
_CONFIGURATION = {401, 403, 404, 405, 407}
_CREDENTIALS = "CREDENTIAL_PROVIDER"


class Outcome(enum.Enum):
    """What became of a request."""

    DELIVERED = "delivered"
    LATER = "later"
    """It can be sent again: the endpoint is away, overloaded, or refuses us altogether, which can be mended."""
    REFUSED = "refused"
    """The endpoint will never take this request."""


@dataclass(frozen=True)
class Answer:
    """The outcome of a request; `wait` seconds are asked for before the next one; `reason` says why not.

    `status` is that of HTTP, 0 without an answer; `rejected` counts the items of a delivered request that were not
    taken (OTLP's partial success).
    """

    outcome: Outcome
    reason: str = ""
    wait: float | None = None
    status: int = 0
    rejected: int = 0


class Endpoint:
    """Where one signal goes. Used by one thread at a time; a forked child opens connections of its own.

    Args:
        url: the whole URL; by default from the environment.

    Raises:
        ValueError: the URL is none, or the credential provider that is asked for is not installed.
    """

    def __init__(self, signal: str, url: str = "", environ: Mapping[str, str] | None = None) -> None:
        env = os.environ if environ is None else environ

        def setting(name: str, prefix: str = "OTEL_EXPORTER_OTLP") -> str:
            return env.get(f"{prefix}_{signal.upper()}_{name}", "").strip() or env.get(f"{prefix}_{name}", "").strip()

        self._signal = signal
        self._url = url or env.get(f"OTEL_EXPORTER_OTLP_{signal.upper()}_ENDPOINT", "").strip()
        if not self._url:
            base = env.get("OTEL_EXPORTER_OTLP_ENDPOINT", "").strip() or "http://localhost:4318"
            self._url = f"{base.removesuffix('/')}/v1/{signal}"
        self.shown = _shown(self._url)
        """Scheme, host and port: the rest may hold secrets."""
        if not self.shown:
            raise ValueError(
                "the configured endpoint is not the URL of an OTLP endpoint, such as http://127.0.0.1:4318"
            )
        own_timeout = f"OTEL_EXPORTER_OTLP_{signal.upper()}_TIMEOUT"
        name = own_timeout if env.get(own_timeout, "").strip() else "OTEL_EXPORTER_OTLP_TIMEOUT"
        self._timeout = config.number(env, name, TIMEOUT, 0.001)
        self._compression = setting("COMPRESSION").lower()
        self._headers = {
            **headers_of(setting("HEADERS")),
            "content-type": _PROTOBUF,
            "user-agent": "verl-otel",
        }
        self._verify = setting("CERTIFICATE") or True
        certificate, key = setting("CLIENT_CERTIFICATE"), setting("CLIENT_KEY")
        self._certificate = ((certificate, key) if key else certificate) if certificate else None
        self._new_session = _session_factory(setting(_CREDENTIALS, "OTEL_PYTHON_EXPORTER_OTLP_HTTP"))
        self._session: Any = None
        self._pid = 0

    def post(self, request: bytes) -> Answer:
        """Send one request. Never raises; takes the configured timeout at most, for each of connecting and reading."""
        import requests

        try:
            headers = dict(self._headers)
            if self._compression == "gzip":
                request, headers["content-encoding"] = gzip.compress(request), "gzip"
            elif self._compression == "deflate":
                request, headers["content-encoding"] = zlib.compress(request), "deflate"
            try:
                return self._post(request, headers)
            except requests.Timeout:
                raise
            except requests.ConnectionError:  # a connection that was kept open may have been closed meanwhile
                return self._post(request, headers)
        except requests.RequestException as error:
            return Answer(Outcome.LATER, _without_url(error))
        except OSError:  # what requests makes of a file that is not there
            return Answer(Outcome.LATER, "a certificate or key file cannot be read")
        except Exception as error:  # what a transport below may raise
            return Answer(Outcome.LATER, type(error).__name__)

    def _post(self, request: bytes, headers: Mapping[str, str]) -> Answer:
        if self._session is None or self._pid != os.getpid():
            self._session, self._pid = self._make_session(), os.getpid()
        with self._session.post(
            self._url,
            data=request,
            headers=headers,
            timeout=self._timeout,
            allow_redirects=False,
            stream=True,
            verify=self._session.verify,  # said here, or REQUESTS_CA_BUNDLE would win
        ) as response:
            status = response.status_code
            content = next(response.iter_content(_MAX_ANSWER), b"") if 200 <= status < 300 else b""
        if 200 <= status < 300:
            return Answer(Outcome.DELIVERED, status=status, rejected=otlp_json.rejected(self._signal, content))
        if status in _LATER or status >= 500:
            return Answer(Outcome.LATER, f"HTTP {status}", _retry_after(response.headers), status)
        if status in _CONFIGURATION or 300 <= status < 400:
            return Answer(Outcome.LATER, f"HTTP {status}: check its URL, headers and certificates", status=status)
        return Answer(Outcome.REFUSED, f"HTTP {status}", status=status)

    def _make_session(self) -> Any:
        session = self._new_session()
        session.verify = self._verify
        if self._certificate:
            session.cert = self._certificate
        if session.auth is None:
            parts = urlsplit(self._url)
            if parts.username is not None:
                session.auth = (unquote(parts.username), unquote(parts.password or ""))
            else:
                session.auth = lambda prepared: prepared  # requests would put what ~/.netrc says over our headers
        return session

    def close(self) -> None:
        """Give up the connections that are idle."""
        if self._session is not None and self._pid == os.getpid():
            self._session.close()


def headers_of(text: str) -> dict[str, str]:
    """`name=value,...`, URL-encoded. OpenTelemetry's own parser logs what it cannot read, secrets included."""
    found = {}
    for part in filter(None, (part.strip() for part in text.split(","))):
        name, separator, value = part.partition("=")
        name, value = unquote(name).strip().lower(), unquote(value).strip()
        valid = separator and name.isascii() and name.replace("-", "").replace("_", "").isalnum()
        if valid and value.isprintable():
            found[name] = value.encode().decode("latin-1")  # as UTF-8 on the wire
        else:
            border.warn_once(
                "headers", "a part of OTEL_EXPORTER_OTLP_HEADERS is not name=value, and is left out (not shown here)"
            )
    return found


def _shown(url: str) -> str:
    """Scheme, host and port of a URL; empty if it is none."""
    try:
        parts = urlsplit(url)
        valid = parts.scheme in {"http", "https"} and parts.hostname and (parts.port is None or parts.port > 0)
    except ValueError:
        return ""
    return config.without_secrets(url) if valid else ""


def _session_factory(provider: str) -> Any:
    """What makes sessions: `requests`, or the credential provider that is asked for by name."""
    import requests

    if not provider:
        return requests.Session
    found = list(entry_points(group="opentelemetry_otlp_credential_provider", name=provider))
    if not found:
        raise ValueError(f"the credential provider {provider!r} is not installed")
    return found[0].load()


def _without_url(error: Exception) -> str:
    """What went wrong, without the URL, which may hold secrets."""
    cause: Any = error
    for _ in range(10):
        below = getattr(cause, "reason", None) or next(iter(getattr(cause, "args", ())), None)
        if not isinstance(below, Exception):
            break
        cause = below
    return f"{type(error).__name__} ({type(cause).__name__})" if cause is not error else type(error).__name__


def _retry_after(headers: Mapping[str, str]) -> float | None:
    """Seconds that `Retry-After` asks for, as a number or as a date."""
    value = headers.get("retry-after", "")
    try:
        seconds = float(value)
        return max(0.0, seconds) if math.isfinite(seconds) else None
    except ValueError:
        pass
    try:
        return max(0.0, parsedate_to_datetime(value).timestamp() - time())
    except (TypeError, ValueError, OverflowError):
        return None
