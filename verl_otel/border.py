"""The border between verl's code and ours: the one place where our exceptions stop.

Every hook calls `caught(site)` in its `except` branch. A failure of ours is counted, reported once per site with what
to do, and never reaches verl. Must never raise itself.
"""

import logging
import sys
from collections import Counter

from verl_otel import forks
from verl_otel.redaction import traceback_of

logger = logging.getLogger("verl_otel")

MAX_SITES = 200
"""Sites that are told apart, each with a line in the log and a label in Prometheus: some have a name of the user's."""

_OTHERS = "others"

_lock = forks.lock(sys.modules[__name__], "_lock")
_counts: Counter[str] = Counter()


def caught(site: str) -> None:
    """Count the exception being handled and report it, the first time that it happens at `site`."""
    if _is_first(site):
        logger.warning(
            "verl-otel: %s failed; the run goes on, this part of its telemetry is lost\n%s",
            site,
            traceback_of(sys.exc_info()[1]),
        )


def warn_once(site: str, message: str, *args: object) -> None:
    """Log `message` as a warning, the first time that it is asked for at `site` in this process."""
    if _is_first(site):
        logger.warning("verl-otel: " + message, *args)


def _is_first(site: str) -> bool:
    with _lock:
        if site not in _counts and len(_counts) >= MAX_SITES:
            site = _OTHERS
        _counts[site] += 1
        return _counts[site] == 1


def failures() -> dict[str, int]:
    """How often each site failed or warned in this process."""
    with _lock:
        return dict(_counts)
