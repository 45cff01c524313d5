"""What each kind of group robot wants: its request, its signature, its limits, and what its answer means.

Sources: the documentation of WeCom (developer.work.weixin.qq.com/document/path/91770), of DingTalk
(open.dingtalk.com/document/robots/custom-robot-access) and of Feishu
(open.feishu.cn/document/client-docs/bot-v3/add-custom-bot).
A robot answers 200 also when it refuses: the number in the body says so.
"""

import base64
import hashlib
import hmac
import json
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar
from urllib.parse import quote_plus, urlsplit

from verl_otel.alerts.relay.message import Message, is_link
from verl_otel.webserver import is_loopback

DELIVERED, LATER, TOO_MANY, REFUSED = "delivered", "later", "too_many", "refused"


@dataclass(frozen=True)
class Answer:
    """What became of a request: `outcome` is one of the above, `why` has no secrets in it."""

    outcome: str
    why: str = ""


@dataclass(frozen=True)
class Robot(ABC):
    """A group robot. The URL has its key in it, and is as secret as `secret`."""

    url: str = field(repr=False)
    secret: str = field(default="", repr=False)
    mentions: tuple[str, ...] = ()

    kind: ClassVar[str] = ""
    most_bytes: ClassVar[int] = 0
    """Bytes of a text."""
    line_end: ClassVar[str] = "\n"
    rates: ClassVar[tuple[tuple[int, float], ...]] = ()
    """(messages, seconds in which no more may be sent)."""
    signs: ClassVar[bool] = False

    _code: ClassVar[str] = "errcode"
    _later: ClassVar[frozenset[int]] = frozenset({-1})
    _too_many: ClassVar[frozenset[int]] = frozenset()

    def problem(self) -> str:
        """What is wrong with the configuration, empty if nothing is."""
        parts = urlsplit(self.url)
        if not is_link(self.url):
            return "its URL is not one of http:// or https://"
        if parts.scheme == "http" and self._needs_https() and not is_loopback(parts.hostname or ""):
            return "its URL has a key in it and must be https://"
        if self.secret and not self.signs:
            return f"a robot of kind {self.kind} has no secret"
        return ""

    def _needs_https(self) -> bool:
        return True

    def size(self, text: str) -> int:
        """The bytes that a text takes of `most_bytes`."""
        return len(text.encode())

    def fits(self, message: Message) -> bool:
        """Whether a message goes whole into one request."""
        return message.fits(self.line_end, self._room(message), self.size)

    @abstractmethod
    def request(self, message: Message, now: float) -> tuple[str, dict[str, Any]]:
        """The URL, and the JSON to post there at `now` (Unix time in seconds)."""

    def _text(self, message: Message) -> str:
        text = message.text(self.line_end, self._room(message), self.size)
        mentions = self._mentions(message)
        return f"{text}{self.line_end}{mentions}" if mentions else text

    def _room(self, message: Message) -> int:
        return self.most_bytes - self.size(self.line_end + self._mentions(message))

    def _mentions(self, message: Message) -> str:
        return ""

    def answer(self, status: int, body: bytes) -> Answer:
        """What an answer means."""
        if status == 429:
            return Answer(TOO_MANY, "status 429")
        if status >= 500 or status == 408:
            return Answer(LATER, f"status {status}")
        if not 200 <= status < 300:
            return Answer(REFUSED, f"status {status}")
        return self._read(body)

    def _read(self, body: bytes) -> Answer:
        try:
            data = json.loads(body)
            code = int(data.get(self._code, data.get("StatusCode", 0)))
        except (ValueError, TypeError, AttributeError, RecursionError):
            return Answer(LATER, "an answer that is not JSON of a robot")
        if code == 0:
            return Answer(DELIVERED)
        why = f"{self._code} {code}"
        if code in self._too_many:
            return Answer(TOO_MANY, why)
        return Answer(LATER if code in self._later else REFUSED, why)


class WeCom(Robot):
    """A group robot of WeCom: markdown."""

    kind = "wecom"
    most_bytes = 4096
    rates = ((20, 60.0),)
    _too_many = frozenset({45009, 45033})

    def request(self, message: Message, now: float) -> tuple[str, dict[str, Any]]:
        return self.url, {"msgtype": "markdown", "markdown": {"content": self._text(message)}}

    def _mentions(self, message: Message) -> str:
        return "".join(f"<@{who}>" for who in self.mentions) if message.urgent else ""


class DingTalk(Robot):
    """A group robot of DingTalk: markdown, signed in the URL if it has a secret."""

    kind = "dingtalk"
    most_bytes = 19_000
    """Of the 20000 bytes of a request, the rest is for what is around the text."""
    line_end = "  \n"
    rates = ((20, 60.0),)
    signs = True
    _too_many = frozenset({130101, 410100})

    def size(self, text: str) -> int:
        return len(json.dumps(text, ensure_ascii=False).encode())

    def request(self, message: Message, now: float) -> tuple[str, dict[str, Any]]:
        url = self.url
        if self.secret:
            stamp = str(round(now * 1000))
            sign = _base64(hmac.digest(self.secret.encode(), f"{stamp}\n{self.secret}".encode(), hashlib.sha256))
            url += f"{'&' if '?' in url else '?'}timestamp={stamp}&sign={quote_plus(sign)}"
        who = [who for who in self.mentions if who != "all"] if message.urgent else []
        at = {"atMobiles": who, "isAtAll": message.urgent and "all" in self.mentions}
        text = {"title": message.title[:100], "text": self._text(message)}
        return url, {"msgtype": "markdown", "markdown": text, "at": at}

    def _mentions(self, message: Message) -> str:
        return " ".join(f"@{who}" for who in self.mentions if who != "all") if message.urgent else ""


class Feishu(Robot):
    """A group robot of Feishu or Lark: a card, signed in the body if it has a secret."""

    kind = "feishu"
    most_bytes = 18_500
    """Of the 20 KB of a request, the rest is for what is around the text."""
    rates = ((100, 60.0), (5, 1.0))
    signs = True
    _code = "code"
    _later = frozenset({-1, 10002, 10003})
    _too_many = frozenset({9499, 11232, 11233, 99991400})
    _colours: ClassVar[Mapping[str, str]] = {"critical": "red", "warning": "orange", "resolved": "green"}

    def size(self, text: str) -> int:
        return len(json.dumps(text, ensure_ascii=False).encode())

    def request(self, message: Message, now: float) -> tuple[str, dict[str, Any]]:
        body: dict[str, Any] = {}
        if self.secret:
            stamp = str(round(now))
            body = {
                "timestamp": stamp,
                "sign": _base64(hmac.digest(f"{stamp}\n{self.secret}".encode(), b"", hashlib.sha256)),
            }
        header = {
            "title": {"tag": "plain_text", "content": message.title[:100]},
            "template": self._colours.get(message.severity, "blue"),
        }
        card = {"header": header, "elements": [{"tag": "markdown", "content": self._text(message)}]}
        return self.url, {**body, "msg_type": "interactive", "card": card}

    def _mentions(self, message: Message) -> str:
        return "".join(f"<at id={who}></at>" for who in self.mentions) if message.urgent else ""


class Webhook(Robot):
    """Any other receiver: title, severity and text as JSON; a status of 2xx says that it was taken."""

    kind = "webhook"
    most_bytes = 250_000
    rates = ((100, 60.0),)

    def _needs_https(self) -> bool:
        return False

    def request(self, message: Message, now: float) -> tuple[str, dict[str, Any]]:
        return self.url, {"title": message.title, "severity": message.severity, "text": self._text(message)}

    def _read(self, body: bytes) -> Answer:
        return Answer(DELIVERED)


KINDS: dict[str, type[Robot]] = {robot.kind: robot for robot in (WeCom, DingTalk, Feishu, Webhook)}


def _base64(digest: bytes) -> str:
    return base64.b64encode(digest).decode()
