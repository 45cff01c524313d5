"""How far this machine's clock is from those of the servers, by the `Date` of their answers."""

import time
from collections.abc import Iterator, Mapping
from email.utils import parsedate_to_datetime
from typing import Any

from verl_otel.doctor.findings import Finding, ok, problem, warning

SECONDS = 4.0
TOLERATED = 3.0
"""Seconds. `Date` is in whole ones."""

TOO_FAR = 3600.0
"""Seconds from which on backends begin to refuse."""


def of_server(shown: str, tls: Mapping[str, Any]) -> Iterator[Finding]:
    """Ask a server for anything; nothing if it does not say the time.

    Args:
        shown: scheme, host and port.
        tls: the arguments of `requests` for TLS.
    """
    import requests

    before = time.time()
    try:
        with requests.get(f"{shown}/", timeout=SECONDS, allow_redirects=False, stream=True, **tls) as answer:
            date = answer.headers.get("Date", "")
    except (requests.RequestException, OSError):
        return
    found = skew(date, before, time.time())
    if found is not None:
        yield judged(shown, found, {"endpoint": shown})


def skew(date: str, before: float, after: float) -> float | None:
    """Seconds by which a server's clock is ahead of ours, 0 where that may be nothing; None if it is not known.

    Args:
        date: an HTTP date, of an answer that came between `before` and `after` (Unix time in seconds).
    """
    try:
        said = parsedate_to_datetime(date).timestamp()
    except (TypeError, ValueError, OverflowError):
        return None
    if said > after:
        return said - after
    return min(0.0, said + 1 - before)  # a whole second, cut


def judged(where: str, ahead: float, data: dict[str, Any]) -> Finding:
    """What a difference of clocks means. `ahead` is seconds by which the other's is ahead of ours."""
    data = {**data, "seconds": round(ahead, 3)}
    if abs(ahead) <= TOLERATED:
        return ok("VO-CLOCK", f"{where}: its clock agrees with this machine's", **data)
    what = f"the clock of {where} is {abs(ahead):.0f} s {'ahead of' if ahead > 0 else 'behind'} this machine's"
    fix = "let both synchronise their clocks (chrony, systemd-timesyncd): spans of a step would not fit together"
    if abs(ahead) < TOO_FAR:
        return warning("VO-CLOCK-SKEW", what, fix, **data)
    return problem("VO-CLOCK-SKEW", what, f"{fix}, and Prometheus refuses what is too old", **data)
