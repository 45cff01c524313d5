"""verl's metric values -> numbers. A value that cannot be read as a number is not guessed."""

from typing import Any

_MAX_INT = 2**63 - 1  # OTLP's integers have 64 bits


def to_number(value: Any) -> float | int | None:
    """The number in a Python, numpy or torch scalar or a one-element array; None if there is none.

    Integers stay integers, bool becomes 0 or 1; NaN and infinities are numbers. Strings are not read as numbers.
    """
    try:
        if not isinstance(value, int | float) and hasattr(value, "item"):
            value = value.item()  # numpy scalars and arrays, torch tensors; raises for more than one element
        if isinstance(value, int):
            return int(value) if -_MAX_INT <= value <= _MAX_INT else float(value)
        if value is None or isinstance(value, str | bytes) or not hasattr(value, "__float__"):
            return None
        return float(value)  # also numpy.float64, Decimal, Fraction
    except Exception:  # whatever a foreign type raises: not a number
        return None


def kind_of(value: Any) -> str:
    """What a value is that is not a number, for counting: `none`, `text`, `array`, `mapping`, `table`, `media`,
    `other`."""
    if value is None:
        return "none"
    if isinstance(value, str | bytes):
        return "text"
    name = type(value).__name__.lower()
    if "table" in name or "frame" in name:
        return "table"
    if any(word in name for word in ("image", "video", "audio", "figure", "html")):
        return "media"
    if isinstance(value, dict):
        return "mapping"
    return "array" if hasattr(value, "__len__") else "other"
