"""What may be a secret never gets into a finding, whoever has put it into a message."""

import base64
import re
from collections.abc import Iterable, Mapping
from typing import Any
from urllib.parse import quote, unquote, urlsplit

from verl_otel import config
from verl_otel.doctor.findings import Finding

HIDDEN = "..."

_NAMES = re.compile(
    r"(^|_)(API)?(KEY|TOKEN|AUTH|CREDENTIALS?|COOKIE|PASS)(_|$)|_PWD$|SECRET|PASSW|AUTHORIZATION|HEADERS$",
    re.IGNORECASE,
)
_NO_SECRETS = {"true", "false", "none", "null"}
_PLAIN = 4
"""What is shorter than this is no secret, and may be a part of any word."""


class Secrets:
    """The secrets of an environment, and of URLs that were given: they are left out of every text.

    Args:
        environ: variables whose names say that they hold secrets; of those that hold URLs, what may be secret in one.
        urls: such as `--prometheus`.
    """

    def __init__(self, environ: Mapping[str, str], urls: Iterable[str] = ()) -> None:
        found: set[str] = set()
        for name, value in environ.items():
            if name.endswith("HEADERS"):
                for part in value.split(","):
                    found.update(_words(part.partition("=")[2] or part))
            elif _NAMES.search(name):
                found.update(_words(value))
            if "://" in value:
                found.update(_of_url(value))
        for url in urls:
            found.update(_of_url(url))
        forms = {form for secret in found for form in _forms(secret) if _may_be_secret(form)}
        self._pattern = re.compile("|".join(map(re.escape, sorted(forms, key=len, reverse=True)))) if forms else None

    def hide(self, text: str) -> str:
        """The text without them."""
        text = config.without_credentials(text)
        return self._pattern.sub(HIDDEN, text) if self._pattern is not None else text

    def without(self, finding: Finding) -> Finding:
        """The finding without them."""
        what, fix, data = self.hide(finding.what), self.hide(finding.fix), self._hide_in(finding.data)
        return Finding(finding.id, finding.level, what, fix, data)

    def _hide_in(self, value: Any) -> Any:
        if isinstance(value, str):
            return self.hide(value)
        if isinstance(value, Mapping):
            return {self.hide(str(key)): self._hide_in(item) for key, item in value.items()}
        return [self._hide_in(item) for item in value] if isinstance(value, list | tuple) else value


def _of_url(url: str) -> Iterable[str]:
    """User, password, path and query of a URL."""
    try:
        parts = urlsplit(url)
        user, password = unquote(parts.username or ""), unquote(parts.password or "")
    except ValueError:
        return [url]
    query = [piece.partition("=")[2] or piece for piece in parts.query.split("&")]
    path = [piece for piece in parts.path.split("/") if len(piece) > _LONGEST_WORD_OF_A_PATH]
    return [user, password, *query, *path, parts.fragment]


_LONGEST_WORD_OF_A_PATH = 16
"""`v1`, `traces`, `api` and the like are no secrets; a token in a path is longer."""


def _may_be_secret(form: str) -> bool:
    return len(form) >= _PLAIN and form.lower() not in _NO_SECRETS


def _words(text: str) -> Iterable[str]:
    """`Bearer abc` -> both, and the whole."""
    text = unquote(text).strip()
    scheme, _, rest = text.partition(" ")
    return [rest.strip() or scheme, *([text] if rest else [])]


def _forms(secret: str) -> Iterable[str]:
    """As it may be written: as it is, encoded for a URL, by Basic authentication, cut by `repr`."""
    encoded = base64.b64encode(secret.encode()).decode().rstrip("=")
    return {secret, secret.strip(), unquote(secret), quote(secret), quote(secret, safe=""), encoded, repr(secret)[1:-1]}
