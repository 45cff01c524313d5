"""The names that metrics get in Prometheus.

What Prometheus' OTLP endpoint does with `translation_strategy: UnderscoreEscapingWithSuffixes`, for the names and units
of this project; see `metric_namer.go` and `unit_namer.go` of github.com/prometheus/otlptranslator. Documents,
dashboards and alert rules are checked with it, and it is itself checked against a real Prometheus.
"""

import re

_UNITS = {
    **{"d": "days", "h": "hours", "min": "minutes", "s": "seconds", "ms": "milliseconds", "us": "microseconds"},
    **{"ns": "nanoseconds", "By": "bytes", "KiBy": "kibibytes", "MiBy": "mebibytes", "GiBy": "gibibytes"},
    **{"TiBy": "tibibytes", "KBy": "kilobytes", "MBy": "megabytes", "GBy": "gigabytes", "TBy": "terabytes"},
    **{"m": "meters", "V": "volts", "A": "amperes", "J": "joules", "W": "watts", "g": "grams", "Cel": "celsius"},
    **{"Hz": "hertz", "1": "", "%": "percent"},
}
_PER_UNITS = {"s": "second", "m": "minute", "h": "hour", "d": "day", "w": "week", "mo": "month", "y": "year"}


def prometheus_name(name: str, unit: str, instrument: str) -> str:
    """The name of a metric in Prometheus; of a histogram the base of `_bucket`, `_sum` and `_count`.

    Args:
        instrument: `gauge`, `counter`, `updowncounter` or `histogram`, as in the registry.
    """
    words = [word for word in re.split(r"[^a-zA-Z0-9:]+", name) if word]
    main, _, per = unit.partition("/")
    main, per = _unit(main, _UNITS), _unit(per, _PER_UNITS)
    per = f"per_{per}" if per else ""
    words += [suffix for suffix in (main, per) if suffix and suffix not in words]
    if instrument == "counter":
        words = [word for word in words if word != "total"] + ["total"]
    if instrument == "gauge" and unit == "1":
        words = [word for word in words if word != "ratio"] + ["ratio"]
    joined = "_".join(words)
    return f"_{joined}" if joined[:1].isdigit() else joined


def prometheus_label(attribute: str) -> str:
    """The name of an attribute as a label."""
    return re.sub(r"[^a-zA-Z0-9_]", "_", attribute)


def _unit(unit: str, words: dict[str, str]) -> str:
    """The suffix for one part of a unit; none for an annotation such as `{token}`."""
    unit = unit.strip()
    if not unit or "{" in unit or "}" in unit:
        return ""
    return re.sub(r"[^a-zA-Z0-9:]+", "_", words.get(unit, unit)).strip("_")
