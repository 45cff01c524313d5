"""Texts that others have written, without what looks like a secret: messages of exceptions, prompts, what tools answer.

A long text is cut before it is searched, and no pattern goes back over what it has seen: what a text costs is bounded.
"""

import re
import traceback

GAP = " [...] "

MAX_MESSAGE = 4096
"""Characters of a message or a traceback that are kept: the beginning and the end."""

_REDACTED = "[redacted]"
_LONGEST_WORD = 256

_URL = re.compile(r"(?<![a-zA-Z0-9+.-])([a-zA-Z0-9+.-]+://)([^\s\"'<>]+)")
_USER = re.compile(r"[^/]*@|[^/:]*:(?!\d*(?:[/?#]|$)).*@")
"""At the beginning of what follows `://`: user and password, which may have a slash that should have been encoded."""

_PARAMETER = re.compile(r"(?<=[?&;])([\w.%\[\]-]{1,100}=)[^\s&;\"'<>)]+")
_SECRET_PARAMETER = re.compile(
    r"(?i)key|token|secret|passw|pwd|auth|credential|session|signature|ticket|jwt|^(?:sig|code)="
)

_SECRETS = re.compile(
    r"""
    (?P<name>(?i:
        (?:(?:api|access|private|account)[_-]?key|token|secret|passw(?:or)?d|pwd|cookie|authorization)
        ["']?\s*[:=]\s*["']?(?:(?:bearer|basic|token|digest)\s+)?
        | bearer\s+
      ))[^\s"',;]{6,}
    | \b(?:sk|pk|rk)-[A-Za-z0-9_-]{16,} | \bhf_[A-Za-z0-9]{16,} | \bgh[pousr]_[A-Za-z0-9]{16,}
    | \bxox[abprs]-[A-Za-z0-9-]{10,} | \bAKIA[A-Z0-9]{16}\b | \bAIza[A-Za-z0-9_-]{20,}
    | (?<![\w-])eyJ[\w-]{10,}\.[\w-]{10,}[\w.-]*                            # a JSON web token
    | -----BEGIN[ ][A-Z ]*PRIVATE[ ]KEY-----.*?(?:-----END[ ][A-Z ]*PRIVATE[ ]KEY-----|\Z)
    """,
    re.VERBOSE | re.DOTALL,
)


def redacted(text: str, size: int, *, queries: bool = False) -> str:
    """A text without what looks like a secret, of which `size` characters at its beginning and its end may be shown.

    Args:
        queries: whether the values of all parameters of a URL are left out, whatever their names are.
    """
    if len(text) > 4 * size:  # patterns look only at what may be shown, and a little around it
        first, last = text[: 2 * size], text[-2 * size :]
        text = first[: len(first) - _word(first[::-1])] + GAP + last[_word(last) :]

    def url(match: re.Match[str]) -> str:
        user = _USER.match(match[2])
        rest = match[2] if user is None else f"{_REDACTED}@{match[2][user.end() :]}"
        if queries:
            rest = re.sub(r"(?<=[?#]).+", _REDACTED, rest, count=1)
        return match[1] + rest

    def parameter(match: re.Match[str]) -> str:
        return match[1] + _REDACTED if queries or _SECRET_PARAMETER.search(match[1]) else match[0]

    text = _PARAMETER.sub(parameter, _URL.sub(url, text))
    return _SECRETS.sub(lambda match: (match["name"] or "") + _REDACTED, text)


def kept(message: str) -> str:
    """What may be kept of a message, at most `MAX_MESSAGE` characters."""
    return shortened(redacted(message, MAX_MESSAGE, queries=True), MAX_MESSAGE)


def shown(message: str) -> str:
    """What may be shown of a message; of a long one the beginning and the end, since Ray puts the cause at the end."""
    text = kept(message)
    return text if len(text) <= 500 else f"{text[:150]} ... {text[-340:]}"


def traceback_of(error: BaseException | None) -> str:
    """An exception and what it was caused by, as Python prints them, without what looks like a secret. Never raises:
    the exception may be of a class that cannot be printed."""
    try:
        return kept("".join(traceback.format_exception(error)).rstrip())
    except Exception:
        return type(error).__name__


def _word(text: str) -> int:
    """Characters at the beginning that may be the rest of a secret."""
    found = re.match(rf"\S{{0,{_LONGEST_WORD}}}", text)
    return found.end() if found is not None else 0


def shortened(text: str, size: int) -> str:
    """The beginning and the end of a text that is longer than `size`."""
    half = (size - len(GAP)) // 2
    return text if len(text) <= size else text[:half] + GAP + text[-half:]
