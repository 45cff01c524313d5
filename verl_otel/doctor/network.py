"""The way to a server, as far as TLS: its name, its port, its certificate."""

import socket
import ssl
import time
from collections.abc import Iterator, Mapping
from typing import Any
from urllib.parse import urlsplit

from verl_otel.doctor.findings import PROBLEM, Finding, ok, problem, warning

CONNECT = 4.0
"""Seconds for a connection, and for TLS on it."""

_DAY = 86400
_SOON = 14 * _DAY


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


def tls_of(signal: str, environ: Mapping[str, str]) -> Tls:
    def setting(name: str) -> str:
        own = environ.get(f"OTEL_EXPORTER_OTLP_{signal.upper()}_{name}", "").strip()
        return own or environ.get(f"OTEL_EXPORTER_OTLP_{name}", "").strip()

    return Tls(setting("CERTIFICATE"), setting("CLIENT_CERTIFICATE"), setting("CLIENT_KEY"))


def reach(shown: str, tls: Tls | None, signals: str) -> Iterator[Finding]:
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
                if found.level == PROBLEM:
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
