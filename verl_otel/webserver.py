"""What the HTTP servers of verl-otel share: who may send, and a body that is never larger than it may be.

For the extras that have Starlette; nothing that runs in a training process imports it.
"""

import hmac
import ipaddress
import zlib

from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response


class BadRequest(Exception):
    """A request that cannot be taken."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status = status


def is_authorized(request: Request, token: str) -> bool:
    """Whether a request brings `Authorization: Bearer <token>`; an empty token asks for nothing."""
    if not token:
        return True
    scheme, _, given = request.headers.get("authorization", "").partition(" ")
    # In constant time: how long it takes says nothing of how much of it was right.
    return hmac.compare_digest(given.strip().encode("latin-1"), token.encode()) and scheme.lower() == "bearer"


def unauthorized() -> Response:
    """Given before the body is read."""
    return PlainTextResponse("a bearer token is needed here\n", 401, {"WWW-Authenticate": "Bearer"})


async def read_body(request: Request, most: int) -> bytes:
    """The body, decompressed; `BadRequest` if it is no gzip, or has more than `most` bytes before or after."""
    encoding = request.headers.get("content-encoding", "").strip().lower()
    if encoding not in ("", "identity", "gzip"):
        raise BadRequest(415, f"content-encoding {encoding} is not supported; use gzip")
    gzip = Gunzip() if encoding == "gzip" else None
    body, came = bytearray(), 0
    try:
        async for chunk in request.stream():
            came += len(chunk)
            if came <= most:
                body += chunk if gzip is None else gzip.feed(chunk, most + 1 - len(body))
            if max(came, len(body)) > most:
                raise BadRequest(413, f"the request is larger than {most} bytes")
        if gzip is not None:
            gzip.finish()
    except zlib.error as error:
        raise BadRequest(400, f"the body is not gzip: {error}") from error
    return bytes(body)


class Gunzip:
    """Decompresses gzip, of one or more members, a chunk at a time and never more than asked for."""

    def __init__(self) -> None:
        self._member = zlib.decompressobj(wbits=31)

    def feed(self, chunk: bytes, most: int) -> bytes:
        """At most `most` decompressed bytes of what came so far (more means that the request is too large)."""
        out = bytearray()
        while chunk and len(out) < most:
            if self._member.eof:
                self._member = zlib.decompressobj(wbits=31)
            out += self._member.decompress(chunk, most - len(out))
            chunk = self._member.unused_data
        return bytes(out)

    def finish(self) -> None:
        """Raise `zlib.error` if the body ended in the middle."""
        if not self._member.eof:
            raise zlib.error("it ends in the middle")


def is_loopback(host: str) -> bool:
    """Whether only this machine can connect to `host`; a name other than localhost may be any address."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"
