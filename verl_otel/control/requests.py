"""Requests to a run: files in `<control folder>/<run>/`, signed with a token that both sides read from a file.

A request names its run, says until when it may be done, and has an id: it is done once, by that run only, and one that
was made before the run's present attempt began is not done at all. Used by `verl-otel control`, by the relay and by
the run; needs nothing but Python.
"""

import hashlib
import hmac
import json
import os
import secrets
import stat
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

from verl_otel import config
from verl_otel.export.files import run_folder

CHECKPOINT, PAUSE, RESUME, STOP = "checkpoint", "pause", "resume", "stop"
ACTIONS = (CHECKPOINT, PAUSE, RESUME, STOP)

VALID_FOR = 600.0
"""Seconds for which a request may be done."""

LONGEST = 3600.0
"""Seconds between the two times of a request; one with more is refused."""

SKEW = 30.0
"""Seconds by which the clocks of two machines may differ."""

MAX_BYTES = 16_384
MAX_TEXT = 500
SUFFIX = ".request.json"
STATUS = "status.json"


class NoControl(Exception):
    """Run control is not set up, or not as it has to be. The message says what to do."""


class Refused(Exception):
    """A request that is not done; the message is the reason, one of few."""


@dataclass(frozen=True)
class Request:
    """What a run is asked. Times are Unix seconds."""

    id: str
    run_id: str
    action: str
    by: str
    """Who asks: `alert VerlNonFinite`, or a person."""
    reason: str
    issued: float
    expires: float


@dataclass(frozen=True)
class Channel:
    """The folder of the requests, and the token."""

    folder: Path
    token: bytes

    @classmethod
    def from_environ(cls, environ: Mapping[str, str] | None = None) -> "Channel | None":
        """By `VERL_OTEL_CONTROL` and `VERL_OTEL_CONTROL_TOKEN_FILE`; None if run control is off.

        Raises `NoControl` if it is on and the token is not there, or others may read it.
        """
        env = os.environ if environ is None else environ
        folder = env.get(config.CONTROL, "").strip()
        if not folder:
            return None
        if not os.path.isabs(folder):
            raise NoControl(f"{config.CONTROL}={folder} is no absolute path, so that others look elsewhere: give one")
        file = env.get(config.CONTROL_TOKEN_FILE, "").strip()
        if not file:
            raise NoControl(f"{config.CONTROL} is set: set {config.CONTROL_TOKEN_FILE} too, to a file with a token")
        return cls(Path(folder), read_token(file))

    def of_run(self, run_id: str) -> Path:
        """The folder of a run's requests. The run makes it: where there is none, nobody listens."""
        return Path(run_folder(str(self.folder), run_id))

    def runs(self) -> list[str]:
        """The runs that can be asked."""
        try:
            return sorted(entry.name for entry in os.scandir(self.folder) if entry.is_dir())
        except OSError:
            return []

    def found(self, run_id: str) -> Path:
        """The same, of a run that has made it; `NoControl` says which have."""
        folder = self.of_run(run_id)
        if not folder.is_dir():
            raise NoControl(
                f"no run {run_id} listens in {self.folder}; these do: {', '.join(self.runs()) or '(none)'}. A run "
                f"listens if it was started with {config.CONTROL}={self.folder}"
            )
        return folder

    def ask(self, run_id: str, action: str, by: str, reason: str) -> Request:
        """Leave a request for a run. Raises `NoControl` if the run does not listen, or the folder cannot be written."""
        now = time.time()
        request = Request(secrets.token_hex(16), run_id, action, by[:MAX_TEXT], reason[:MAX_TEXT], now, now + VALID_FOR)
        folder = self.found(run_id)
        path = folder / f"{request.id}{SUFFIX}"
        try:
            write(path, self.signed(request))
        except OSError as error:
            raise NoControl(f"{folder} cannot be written: {error.strerror}") from error
        return request

    def signed(self, request: Request) -> dict[str, object]:
        """A request as it is written."""
        return {**asdict(request), "signature": self._signature(request)}

    def read(self, content: bytes, run_id: str, started: float, now: float) -> Request:
        """A request to `run_id`, whose attempt began at `started`; `Refused` says why it is none."""
        request, signature = _parsed(content)
        if not hmac.compare_digest(signature.encode(errors="replace"), self._signature(request).encode()):
            raise Refused("wrong_token")
        if request.run_id != run_id:
            raise Refused("other_run")
        if request.action not in ACTIONS:
            raise Refused("unknown_action")
        if now > request.expires or request.expires - request.issued > LONGEST or request.issued > now + SKEW:
            raise Refused("expired")
        if request.issued < started:
            raise Refused("before_start")
        return request

    def _signature(self, request: Request) -> str:
        text = json.dumps(asdict(request), sort_keys=True, separators=(",", ":"))
        return hmac.digest(self.token, b"verl-otel control 1\n" + text.encode(), hashlib.sha256).hex()


def _parsed(content: bytes) -> tuple[Request, str]:
    try:
        data = json.loads(content)
        signature = data.pop("signature")
        request = Request(**data)
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        raise Refused("malformed") from error
    texts = (signature, request.id, request.run_id, request.action, request.by, request.reason)
    times = (request.issued, request.expires)
    if not all(isinstance(text, str) for text in texts) or not all(isinstance(when, int | float) for when in times):
        raise Refused("malformed")
    return request, signature


def read_token(file: str) -> bytes:
    """The token in a file; `NoControl` if there is none of 16 bytes at least, or others may read it."""
    try:
        with open(file, "rb") as opened:
            others = stat.S_IMODE(os.fstat(opened.fileno()).st_mode) & 0o007
            token = opened.read(4096).strip()
    except OSError as error:
        raise NoControl(f"the token file {file} cannot be read: {error.strerror}") from error
    if others:
        raise NoControl(f"every user may read the token file {file}: chmod 600 {file}")
    if len(token) < 16:
        raise NoControl(f"the token in {file} is too short: openssl rand -hex 32 > {file}")
    return token


def write(path: Path, data: Mapping[str, object]) -> None:
    """Write a JSON file, whole or not at all."""
    written = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    written.write_text(json.dumps(data), encoding="utf-8")
    os.replace(written, path)
