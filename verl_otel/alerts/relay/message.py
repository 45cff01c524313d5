"""The text of a message: a title, and for each alert a block of short lines.

Values come from labels and annotations, which a run names itself: they are shown as text, and can neither mention
people nor make links of their own.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from datetime import datetime, timezone
from urllib.parse import urlsplit

from verl_otel.alerts.relay.notification import FIRING, Alert

MAX_VALUE, MAX_DESCRIPTION = 300, 1000
"""Characters of one value in a message; of an alert's description, which lists ranks and stages."""

_WIDE = {ord(character): ord(character) + 0xFEE0 for character in "<>[]@"}
"""To Unicode's full-width forms, which look the same and mean nothing in markdown."""
_NEUTRAL = {**_WIDE, ord("`"): "'", ord("\n"): " ", ord("\r"): " "}

_WHERE = (
    ("project", "verl_project_name"),
    ("experiment", "verl_experiment_name"),
    ("run", "verl_run_id"),
    ("stage", "stage"),
    ("rank", "rank"),
)
_LINKS = (
    ("Grafana", "dashboard_url"),
    ("Jaeger", "trace_url"),
    ("MLflow", "mlflow_url"),
    ("runbook", "runbook_url"),
)
_SEVERITIES = ("critical", "warning", "info")


@dataclass(frozen=True)
class Message:
    """What a robot is to say. `left_out`: alerts that are not among the blocks."""

    title: str
    blocks: tuple[tuple[str, ...], ...]
    severity: str
    """The worst of those that fire; `resolved` if none does."""
    left_out: int = 0

    @property
    def urgent(self) -> bool:
        """Whether people are to be mentioned."""
        return self.severity == "critical"

    def text(self, line_end: str, most: int, size: Callable[[str], int]) -> str:
        """The message in `most` bytes: as many blocks as fit, and how many are left out.

        Args:
            line_end: what ends a line in this kind of markdown.
            size: the bytes that a text takes in the request.
        """
        title = f"**{_cut(self.title, most // 2, size)}**"
        fits, too_many = 0, len(self.blocks) + 1
        while too_many - fits > 1:
            shown = (fits + too_many) // 2
            fits, too_many = (shown, too_many) if size(self._whole(title, shown, line_end)) <= most else (fits, shown)
        if fits:
            return self._whole(title, fits, line_end)
        # Not even one alert fits: its first line says which it is.
        first = _cut(self.blocks[0][0], max(0, most // 4), size) if self.blocks else ""
        rest = self.left_out + max(0, len(self.blocks) - 1)
        return line_end.join(filter(None, (title, first, _and_more(rest))))

    def fits(self, line_end: str, most: int, size: Callable[[str], int]) -> bool:
        """Whether nothing has to be left out."""
        return size(self._whole(f"**{self.title}**", len(self.blocks), line_end)) <= most

    def _whole(self, title: str, shown: int, line_end: str) -> str:
        parts = [title, *(line_end.join(block) for block in self.blocks[:shown])]
        left_out = self.left_out + len(self.blocks) - shown
        return "\n\n".join([*parts, _and_more(left_out)] if left_out else parts)


def message_of(alerts: Sequence[Alert], left_out: int = 0) -> Message:
    """The message for some alerts, those that fire and are worst first."""
    ordered = sorted(alerts, key=_urgency)
    firing = [alert for alert in ordered if alert.status == FIRING]
    counts = [(len(firing), "firing"), (len(ordered) - len(firing), "resolved")]
    names = list(dict.fromkeys(alert.name for alert in ordered))
    shown = ", ".join(map(plain, names[:3])) + (" ..." if len(names) > 3 else "")
    title = f"{', '.join(f'{n} {what}' for n, what in counts if n)}: {shown}"
    severity = _severity(firing[0]) if firing else "resolved"
    return Message(title, tuple(_block(alert) for alert in ordered), severity, left_out)


def plain(value: str, most: int = MAX_VALUE) -> str:
    """A value as text of `most` characters, whatever is in it."""
    value = value.translate(_NEUTRAL)
    return value if len(value) <= most else value[: most - 3] + "..."


def _block(alert: Alert) -> tuple[str, ...]:
    labels, annotations = alert.labels, alert.annotations
    where = [f"{what} {plain(labels[label])}" for what, label in _WHERE if labels.get(label)]
    lines = [
        f"**{alert.status.upper()}** {plain(alert.name)} ({plain(labels.get('severity') or 'no severity')})",
        ", ".join(where),
        plain(annotations.get("summary", "")),
        plain(annotations.get("description", ""), MAX_DESCRIPTION),
        f"value {plain(annotations['value'])}" if annotations.get("value") else "",
        f"since {_time(alert.starts_at)}" + ("" if alert.status == FIRING else f", until {_time(alert.ends_at)}"),
        " ".join(_links(alert)),
    ]
    return tuple(filter(None, lines))


def _links(alert: Alert) -> Iterable[str]:
    for name, annotation in _LINKS:
        url = alert.annotations.get(annotation, "")
        if is_link(url):
            yield f"[{name}]({url})"


def is_link(url: str) -> bool:
    """Whether a URL may be a link in markdown."""
    try:
        parts = urlsplit(url)
    except ValueError:
        return False
    unsafe = any(character in url for character in "()<>[]\\ \t\r\n")
    return parts.scheme in ("http", "https") and bool(parts.netloc) and not unsafe and len(url) <= 2000


def _time(text: str) -> str:
    """`2026-11-30T01:02:03.456Z` -> `2026-11-30 01:02:03 UTC`."""
    try:
        moment = datetime.fromisoformat(text[:19] + "+00:00" if text.endswith("Z") else text)
    except ValueError:
        return plain(text)
    return f"{moment.astimezone(timezone.utc):%Y-%m-%d %H:%M:%S} UTC"


def _severity(alert: Alert) -> str:
    found = alert.labels.get("severity", "")
    return found if found in _SEVERITIES else "info"


def _urgency(alert: Alert) -> tuple[bool, int]:
    return alert.status != FIRING, _SEVERITIES.index(_severity(alert))


def _and_more(count: int) -> str:
    return f"... and {count} more left out" if count else ""


def _cut(text: str, most: int, size: Callable[[str], int]) -> str:
    if size(text) <= most:
        return text
    low, high = 0, len(text)
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if size(text[:middle] + "...") <= most else (low, middle - 1)
    return text[:low] + "..."
