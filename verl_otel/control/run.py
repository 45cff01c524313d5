"""Run control in the trainer's process: a thread reads the requests, the training thread does them at its own places.

The training thread only looks at an attribute. A checkpoint is saved where verl saves its own, by making verl's own
condition true for one step; a pause waits after verl has logged a step; a stop makes verl's loop end. A checkpoint
that cannot be saved only because it was asked for costs the request, not the run.
"""

import os
import shutil
import stat
import threading
import time
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

from opentelemetry._logs import Logger, SeverityNumber

from verl_otel import border, events
from verl_otel.control import requests
from verl_otel.control.requests import CHECKPOINT, PAUSE, RESUME, STOP, Channel, NoControl, Refused, Request
from verl_otel.identity import Identity
from verl_otel.metrics.instruments import Instruments
from verl_otel.semconv import attributes as attr
from verl_otel.semconv import metrics as names
from verl_otel.semconv.stages import PAUSE_TIMER
from verl_otel.tracing.steps import Steps

POLL = 1.0
"""Seconds between two looks at the folder."""

LOOK = 0.1
"""Seconds between two looks of a paused training thread at whether it may go on."""

MAX_AT_ONCE = 100
"""Files that are read in one look; the others wait for the next."""

MAX_REMEMBERED = 10_000
"""Requests that are remembered until they expire; when it are more, none is done."""

_STRONGER = {CHECKPOINT: 0, PAUSE: 1, STOP: 2}

_T = TypeVar("_T")


class RunControl:
    """See the module. The methods never raise, but for what verl's own checkpoint raises.

    Args:
        trainer: verl's trainer, whose `fit` begins.
        on_event: called when an event is there to be sent.
        max_pause: seconds after which a pause ends by itself.
    """

    def __init__(
        self,
        trainer: Any,
        identity: Identity,
        steps: Steps,
        logger: Logger,
        instruments: Instruments,
        on_event: Callable[[], Any],
        max_pause: float,
    ) -> None:
        self._trainer = trainer
        self._identity = identity
        self._steps = steps
        self._logger = logger
        self._instruments = instruments
        self._on_event = on_event
        self._max_pause = max_pause
        self._started = time.time()
        self._training = threading.get_ident()
        self._seen: dict[str, float] = {}
        """Id -> when it expires."""
        self._closed = threading.Event()
        self._lock = threading.Lock()
        self._wanted: Request | None = None
        self._save_freq: Any = None
        """verl's own `save_freq`, while it is another one for us."""
        self._saved = False
        """Whether there is a checkpoint since the request came."""
        self.stopping = False
        """Whether the run ends because it was asked to."""
        self._state = "running"
        self._thread = threading.Thread(target=self._watch, name="verl-otel-control", daemon=True)
        self._thread.start()

    # ---- on the training thread -------------------------------------------------------------------------------------

    def stage_begins(self) -> None:
        """At each of verl's timers: if a checkpoint is asked for, let verl's next look at `save_freq` say yes."""
        if (self._wanted is None and self._save_freq is None) or threading.get_ident() != self._training:
            return
        try:
            if self._wanted is None or self._saved:
                self._restore()
            elif self._save_freq is None:
                settings = self._trainer.config.trainer
                before = settings.save_freq
                settings.save_freq = 1
                self._save_freq = before
        except Exception:
            self._end("failed", "verl's save_freq cannot be set")
            border.caught("asking verl for a checkpoint")

    def saving(self, save: Callable[[], _T]) -> _T | None:
        """Around verl's `_save_checkpoint`. What it raises is only let through if verl saves here by itself, too."""
        asked = self._save_freq is not None and not self._verl_saves_too()
        try:
            result = save()
        except Exception as error:
            self._restore()
            if not asked:
                raise
            border.caught("saving the checkpoint that was asked for")
            self._end("failed", f"the checkpoint could not be saved: {type(error).__name__}")
            return None
        self._restore()
        with self._lock:
            request = self._wanted
            self._saved = request is not None
        if request is not None and request.action == CHECKPOINT:
            self._end("saved")
        return result

    def logged(self) -> None:
        """After verl has logged a step: the place where a run pauses, or is told that this was its last step."""
        request = self._wanted
        if request is None or not self._saved or threading.get_ident() != self._training:
            return
        try:
            if (self._steps.number() or 0) >= self._trainer.total_training_steps:
                return  # it ends anyway
            if request.action == PAUSE:
                self._wait(request)
                request = self._wanted
            if request is not None and request.action == STOP and not self.stopping:
                self.stopping = True
                # verl looks at this before each step: V1 begins no other, RayPPOTrainer one more as its last.
                self._trainer.total_training_steps = self._steps.number() or 0
                self._state = "stopping"
                self._tell(request, "stopping")
        except Exception:
            border.caught("pausing or stopping the run")

    def close(self) -> None:
        """At the end of `fit`: nothing is taken any more."""
        with self._lock:
            request, self._wanted = self._wanted, None
        if request is not None:
            self._tell(request, "stopped" if self.stopping else "ended_before")
        self._closed.set()

    def _wait(self, request: Request) -> None:
        self._state = "paused"
        self._tell(request, "paused")
        end = time.monotonic() + self._max_pause
        scope = self._steps.enter(PAUSE_TIMER)
        try:
            while self._wanted is request and not self._closed.is_set() and time.monotonic() < end:
                time.sleep(LOOK)
        finally:
            self._steps.leave(scope)
            self._state = "running"
        if self._wanted is request:
            self._end("resumed", f"after {self._max_pause:g} s, the longest pause")

    def _verl_saves_too(self) -> bool:
        own, step = self._save_freq, self._steps.number() or 0
        return own > 0 and (step % own == 0 or step >= self._trainer.total_training_steps)

    def _restore(self) -> None:
        if self._save_freq is not None:
            self._trainer.config.trainer.save_freq = self._save_freq
            self._save_freq = None

    # ---- on the thread that reads -----------------------------------------------------------------------------------

    def _watch(self) -> None:
        try:
            channel = Channel.from_environ()
            if channel is None:
                return
            folder = channel.of_run(self._identity.run_id)
            _make(folder)
        except (NoControl, OSError) as error:
            border.warn_once("run control", "%s; the run takes no requests", error)
            return
        shown: dict[str, Any] = {}
        while True:
            over = self._closed.wait(POLL if shown else 0)
            try:
                for path in [] if over else _waiting(folder):
                    self._take(channel, path)
                now = {"state": self._state, "request": self._wanted and self._wanted.id, "step": self._steps.number()}
                if now != shown:
                    shown = now
                    requests.write(folder / requests.STATUS, now)
            except OSError as error:  # it may be back later
                border.warn_once("run control", "requests to the run cannot be read: %s", error)
            except Exception:
                border.caught("looking for requests to the run")
            if over:
                shutil.rmtree(folder, ignore_errors=True)
                return

    def _take(self, channel: Channel, path: str) -> None:
        try:
            content = _read(path)
            os.unlink(path)
        except FileNotFoundError:  # another process of this run has it
            return
        try:
            now = time.time()
            request = channel.read(content, self._identity.run_id, self._started, now)
            self._seen = {known: expires for known, expires in self._seen.items() if expires >= now}
            if request.id in self._seen:
                raise Refused("replayed")
            if len(self._seen) >= MAX_REMEMBERED:
                raise Refused("too_many")
            self._seen[request.id] = request.expires
        except Refused as refused:
            self._count("", str(refused))
            border.warn_once(f"run control {refused}", "a request to the run was refused: %s", refused)
            return
        self._count(request.action, "accepted")
        self._begin(request)

    def _begin(self, request: Request) -> None:
        with self._lock:
            before = self._wanted
            if request.action == RESUME:
                late = self.stopping or before is None
                if not late:
                    self._wanted = None
            else:
                late = before is not None and _STRONGER[before.action] >= _STRONGER[request.action]
                if not late:
                    self._saved = self._saved and before is not None
                    self._wanted = request
        if late:
            self._tell(request, "nothing_to_do")
            return
        if before is not None:
            self._tell(before, "resumed" if request.action == RESUME else "replaced", request.by)
        self._tell(request, "accepted")

    # ---- both -------------------------------------------------------------------------------------------------------

    def _end(self, result: str, why: str = "") -> None:
        with self._lock:
            request, self._wanted = self._wanted, None
        if request is not None:
            self._tell(request, result, why)

    def _count(self, action: str, result: str) -> None:
        labels = names.all_ranks(names.CONTROL_REQUESTS)
        self._instruments.add(
            names.CONTROL_REQUESTS, {**labels, attr.CONTROL_ACTION: action or "unknown", attr.CONTROL_RESULT: result}
        )

    def _tell(self, request: Request, result: str, why: str = "") -> None:
        """The audit: an event for each thing that became of a request."""
        try:
            attributes: dict[str, Any] = {
                attr.RUN_ID: self._identity.run_id,
                attr.RUN_ATTEMPT: self._identity.attempt,
                attr.CONTROL_ACTION: request.action,
                attr.CONTROL_RESULT: result,
                attr.CONTROL_BY: request.by,
                attr.CONTROL_REQUEST: request.id,
            }
            number = self._steps.number()
            if number is not None:
                attributes[attr.STEP_NUMBER] = number
            body: Mapping[str, str] = {"reason": request.reason, **({"message": why} if why else {})}
            context = self._steps.current_context()
            events.emit(
                self._logger, attr.EVENT_CONTROL, body, attributes, context=context, severity=SeverityNumber.WARN
            )
            self._on_event()
        except Exception:
            border.caught("telling what became of a request to the run")


def _make(folder: os.PathLike[str]) -> None:
    """Make the folder of the run's requests, for the same users as the one that it is in."""
    os.makedirs(folder, exist_ok=True)
    mode = stat.S_IMODE(os.stat(os.path.dirname(folder)).st_mode)
    if stat.S_IMODE(os.stat(folder).st_mode) != mode:
        os.chmod(folder, mode)


def _waiting(folder: os.PathLike[str]) -> list[str]:
    with os.scandir(folder) as entries:
        found = (entry.path for entry in entries if entry.name.endswith(requests.SUFFIX))
        return [path for path, _ in zip(found, range(MAX_AT_ONCE), strict=False)]


def _read(path: str) -> bytes:
    """A file's beginning, empty for what is no plain file: the folder may be writable by others."""
    try:
        file = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
    except FileNotFoundError:
        raise
    except OSError:
        return b""
    try:
        return os.read(file, requests.MAX_BYTES) if stat.S_ISREG(os.fstat(file).st_mode) else b""
    finally:
        os.close(file)
