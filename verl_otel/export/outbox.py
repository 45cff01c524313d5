"""What leaves this process over OTLP/HTTP: a bounded queue for each signal, a thread that sends it, and a spool on disk
for what cannot be sent now.

`put` is what exporters call: it never waits for the network. What is not sent within a second is spooled by one more
thread, so that a process that is killed loses no more than that; and so is, at once, what comes while an endpoint is
away or does not answer. When it is back, the spool is sent, oldest first, one request of it after each fresh one. Each
signal is on its own: an endpoint that takes only traces takes all of them.

What was handed over is what was delivered, spooled and dropped, less what was taken out of the spool again (replayed),
and what is still pending.
"""

import threading
import time
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from opentelemetry.instrumentation.utils import suppress_instrumentation

from verl_otel import border, forks
from verl_otel.export.otlp_http import Answer, Endpoint, Outcome
from verl_otel.export.spool import Kept, NotKept, Spool

STALLED = 1.0
"""Seconds after which a request that waits, or is under way, is spooled."""

FIRST_PAUSE, LONGEST_PAUSE, LONGEST_WAIT = 1.0, 30.0, 300.0
"""Seconds before an endpoint that is away is tried again: at first, and at most, doubled each time; and at most if it
says itself how long (`Retry-After`)."""

TRIES = 3
"""How often the endpoint may fail on a spooled request while it takes others; then it is left to `replay`."""

LEAST_CLOSE = 0.25
"""Seconds that `close` has at least, to spool what is pending."""

DELIVERED, SPOOLED, REPLAYED, DROPPED = "delivered", "spooled", "replayed", "dropped"
REFUSED, REJECTED = "refused", "rejected"
CLOSED, AWAY, PENDING_FULL, FAILED, UNSENT = "closed", "away", "full", "failed", "unsent"


@dataclass(frozen=True)
class Request:
    """One OTLP export request: a signal, its bytes (protobuf), and how many items are in it."""

    signal: str
    content: bytes
    items: int


@dataclass(eq=False)
class _Item:
    """A request that was handed over. `settled`: it is known what became of it."""

    request: Request
    since: float
    spooling: bool = False
    settled: bool = False
    kept: Kept | None = None
    answer: Answer | None = None


@dataclass(eq=False)
class _Lane:
    """One signal."""

    endpoint: Endpoint
    waiting: deque[_Item] = field(default_factory=deque)
    sending: _Item | None = None
    busy_since: float | None = None
    """When the request that is under way, fresh or of the spool, was begun."""
    away_until: float = 0.0
    drain_from: float = 0.0
    """When the spool may be sent: what failed may be at fault itself, and a fresh request is to show it first."""
    pause: float = field(default_factory=lambda: FIRST_PAUSE)
    failed: Kept | None = None
    failures: int = 0
    takes_others: bool = False


class Outbox:
    """See the module.

    Args:
        endpoints: signal -> where it goes.
        spool: takes what cannot be sent now.
        count: called with (signal, what became of them, how many items, why).
        max_bytes: of requests that wait in memory; more go to the spool.
    """

    def __init__(
        self,
        endpoints: Mapping[str, Endpoint],
        spool: Spool,
        count: Callable[[str, str, int, str], None],
        max_bytes: float,
    ) -> None:
        self._spool = spool
        self._count = count
        self._max_bytes = max_bytes
        self._closed = False
        self._lanes: dict[str, _Lane] = {}
        self._reset({})
        for signal, endpoint in endpoints.items():
            self.open(signal, endpoint)
        forks.in_child(self._in_child)

    @property
    def folder(self) -> str:
        """Where the spool is."""
        return self._spool.folder

    def open(self, signal: str, endpoint: Endpoint) -> None:
        """Send a signal too; nothing happens if it is sent already."""
        with self._changed:
            if signal in self._lanes:
                return
            lane = self._lanes[signal] = _Lane(endpoint)
        self._start(f"verl-otel-{signal}-sender", lambda: self._send_next(signal, lane))

    def put(self, request: Request) -> None:
        """Hand over a request. Never waits for the network, never raises."""
        try:
            now = time.monotonic()
            size = len(request.content)
            item = _Item(request, now)
            with self._changed:
                lane = self._lanes[request.signal]
                self._unsettled[item] = None
                stalled = lane.busy_since is not None and now - lane.busy_since > STALLED
                full = self._bytes + size > self._max_bytes
                reason = CLOSED if self._closed else AWAY if stalled or now < lane.away_until else ""
                reason = reason or (PENDING_FULL if full else "")
                self._bytes += size
                if not reason:
                    lane.waiting.append(item)
                    self._changed.notify_all()
                    return
                item.spooling = True
            self._keep(item, reason)
        except Exception:
            border.caught("handing over telemetry")

    def pending(self) -> dict[str, int]:
        """Signal -> items that are neither sent nor spooled nor lost."""
        found = dict.fromkeys(self._lanes, 0)
        with self._changed:
            for item in self._unsettled:
                found[item.request.signal] += item.request.items
        return found

    def flush(self, timeout: float) -> bool:
        """Wait until what was handed over is sent, or spooled where that takes too long: `timeout` seconds at most.

        Returns whether it is."""
        end = time.monotonic() + timeout
        with self._changed:
            if self._changed.wait_for(lambda: not self._unsettled, max(0.0, timeout - min(1.0, timeout / 3))):
                return True
            self._spool_now = True
            self._changed.notify_all()
            return self._changed.wait_for(lambda: not self._unsettled, max(0.0, end - time.monotonic()))

    def close(self, timeout: float) -> None:
        """Send what is pending, `timeout` seconds at most; spool the rest, what is under way included."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        if not self.flush(max(timeout, LEAST_CLOSE)):
            with self._changed:
                left = list(self._unsettled)
            for item in left:
                self._settle(item, (DROPPED, UNSENT))
        for lane in self._lanes.values():
            lane.endpoint.close()

    # ---- threads ----------------------------------------------------------------------------------------------------

    def _reset(self, lanes: Mapping[str, _Lane]) -> None:
        self._changed = threading.Condition()
        self._unsettled: dict[_Item, None] = {}
        self._bytes = 0
        self._spool_now = False
        self._lanes = {}
        if not self._closed:
            self._start("verl-otel-spooler", self._spool_overdue)
        for signal, lane in lanes.items():
            self._lanes[signal] = _Lane(lane.endpoint)

    def _in_child(self) -> None:
        """A forked child has no threads, and what waited is its parent's."""
        self._reset(self._lanes)
        if not self._closed:
            for signal, lane in self._lanes.items():
                self._start(
                    f"verl-otel-{signal}-sender", lambda signal=signal, lane=lane: self._send_next(signal, lane)
                )

    def _start(self, name: str, work: Callable[[], bool]) -> None:
        def run() -> None:
            with suppress_instrumentation():
                while True:
                    try:
                        if not work():
                            return
                    except Exception:
                        border.caught("sending telemetry")
                        time.sleep(FIRST_PAUSE)

        threading.Thread(target=run, name=name, daemon=True).start()

    def _send_next(self, signal: str, lane: _Lane) -> bool:
        """Wait for something to send, and send it. False when there is nothing more to do."""
        with self._changed:
            while not lane.waiting:
                if self._closed:
                    return False
                pause = max(lane.away_until, lane.drain_from) - time.monotonic()
                pending = self._spool.pending(signal)
                if pending and pause <= 0:
                    break
                self._changed.wait(pause if pending else None)
            item = lane.sending = lane.waiting.popleft() if lane.waiting else None
            lane.busy_since = time.monotonic()
        try:
            if item is not None:
                self._send(lane, item)
        finally:
            with self._changed:
                lane.sending = lane.busy_since = None
        if self._may_drain(signal, lane):
            with self._changed:
                lane.busy_since = time.monotonic()
            try:
                self._drain_one(signal, lane)
            finally:
                with self._changed:
                    lane.busy_since = None
        return True

    def _may_drain(self, signal: str, lane: _Lane) -> bool:
        """Whether the spool's turn has come: not while what is fresh waits so long that it would be spooled itself."""
        now = time.monotonic()
        with self._changed:
            if self._closed or (lane.waiting and now - lane.waiting[0].since > STALLED / 2):
                return False
        return now >= max(lane.away_until, lane.drain_from) and self._spool.pending(signal)

    def _spool_overdue(self) -> bool:
        """Wait until something has waited too long, and spool it with all that waits behind it."""
        with self._changed:
            while True:
                oldest = [
                    min(item.since for item in (*lane.waiting, *self._under_way(lane)))
                    for lane in self._lanes.values()
                    if lane.waiting or self._under_way(lane)
                ]
                if oldest and (self._spool_now or min(oldest) + STALLED <= time.monotonic()):
                    break
                self._spool_now = False
                if self._closed and not self._unsettled:
                    return False
                self._changed.wait(min(oldest) + STALLED - time.monotonic() if oldest else None)
            overdue = time.monotonic() - STALLED
            items: list[_Item] = []
            for lane in self._lanes.values():
                of_lane = [*self._under_way(lane), *lane.waiting]
                if of_lane and (self._spool_now or min(item.since for item in of_lane) <= overdue):
                    items += of_lane
                    lane.waiting.clear()
            for item in items:
                item.spooling = True
            self._spool_now = False
        for item in items:
            self._keep(item, CLOSED if self._closed else AWAY)
        return True

    def _under_way(self, lane: _Lane) -> tuple[_Item, ...]:
        item = lane.sending
        return (item,) if item is not None and not item.spooling and not item.settled else ()

    # ---- what becomes of a request ----------------------------------------------------------------------------------

    def _settle(self, item: _Item, *outcomes: tuple[str, str], items: int | None = None) -> bool:
        """It is known what became of a request. False if it was known already."""
        with self._changed:
            if item.settled:
                return False
            item.settled = True
            self._unsettled.pop(item, None)
            self._bytes -= len(item.request.content)
            for outcome, reason in outcomes:
                self._count(item.request.signal, outcome, item.request.items if items is None else items, reason)
            self._changed.notify_all()
            return True

    def _keep(self, item: _Item, reason: str) -> None:
        """Spool a request, which may be under way."""
        try:
            kept = self._spool.write(item.request.signal, item.request.content)
        except NotKept as error:
            with self._changed:
                lane = self._lanes[item.request.signal]
                if lane.sending is item and item.answer is None:  # it may be delivered yet
                    item.spooling, item.since = False, time.monotonic()
                    return
                answer = item.answer
            if answer is not None and answer.outcome is not Outcome.LATER:
                self._answered(item, answer)
            else:
                self._settle(item, (DROPPED, str(error)))
            return
        except BaseException:
            self._settle(item, (DROPPED, FAILED))
            raise
        with self._changed:
            self._settle(item, (SPOOLED, reason))
            item.kept = kept
            answer = item.answer
            self._changed.notify_all()
        if answer is not None:
            self._answered_late(item, kept, answer)

    def _send(self, lane: _Lane, item: _Item) -> None:
        answer = lane.endpoint.post(item.request.content)
        with self._changed:
            item.answer = answer
            lane.sending = None
            spooling, kept = item.spooling, item.kept
            item.spooling = True  # the other thread is to leave it alone from now on
        if answer.outcome is Outcome.LATER:
            self._away(lane, answer)
        else:
            self._back(lane)
        if answer.outcome is not Outcome.DELIVERED or answer.rejected:
            self._say(lane, item.request.signal, answer)
        if kept is not None:
            self._answered_late(item, kept, answer)
        elif not spooling:
            if answer.outcome is Outcome.LATER:
                self._keep(item, AWAY)
                self._spool_waiting(lane)
            else:
                self._answered(item, answer)

    def _spool_waiting(self, lane: _Lane) -> None:
        with self._changed:
            items = list(lane.waiting)
            lane.waiting.clear()
            for item in items:
                item.spooling = True
        for item in items:
            self._keep(item, AWAY)

    def _answered(self, item: _Item, answer: Answer) -> None:
        """The endpoint has taken a request, or refused it."""
        if answer.outcome is Outcome.REFUSED:
            self._settle(item, (DROPPED, REFUSED))
            return
        rejected = min(answer.rejected, item.request.items)
        if self._settle(item, (DELIVERED, ""), items=item.request.items - rejected) and rejected:
            self._count(item.request.signal, DROPPED, rejected, REJECTED)

    def _answered_late(self, item: _Item, kept: Kept, answer: Answer) -> None:
        """A request that was spooled while it was under way has been answered after all."""
        if answer.outcome is not Outcome.LATER and self._spool.done(kept):
            self._count_replayed(item.request.signal, item.request.items, answer)

    def _drain_one(self, signal: str, lane: _Lane) -> None:
        record = self._spool.peek(signal)
        if record is None:
            return
        answer = lane.endpoint.post(record.content)
        if answer.outcome is Outcome.LATER:
            self._away(lane, answer)
            again = lane.failed == record.kept
            lane.failures = lane.failures + 1 if again and lane.takes_others else 1
            lane.failed, lane.takes_others = record.kept, False
            if answer.status:
                lane.drain_from = time.monotonic() + LONGEST_PAUSE
                if lane.failures >= TRIES:
                    self._spool.leave(record.kept)
            self._say(lane, signal, answer)
            return
        self._back(lane)
        if self._spool.done(record.kept):
            self._count_replayed(signal, record.items, answer)

    def _count_replayed(self, signal: str, items: int, answer: Answer) -> None:
        """Count what was taken out of the spool; what the endpoint did not take of it is lost."""
        lost = items if answer.outcome is Outcome.REFUSED else min(answer.rejected, items)
        self._count(signal, REPLAYED, items, "")
        if items > lost:
            self._count(signal, DELIVERED, items - lost, "")
        if lost:
            self._count(signal, DROPPED, lost, REFUSED if answer.outcome is Outcome.REFUSED else REJECTED)

    def _away(self, lane: _Lane, answer: Answer) -> None:
        with self._changed:
            pause = lane.pause if answer.wait is None else min(answer.wait, LONGEST_WAIT)
            lane.away_until = time.monotonic() + pause
            lane.pause = min(LONGEST_PAUSE, lane.pause * 2)

    def _back(self, lane: _Lane) -> None:
        with self._changed:
            lane.away_until, lane.drain_from, lane.pause, lane.takes_others = 0.0, 0.0, FIRST_PAUSE, True

    def _say(self, lane: _Lane, signal: str, answer: Answer) -> None:
        where: Any = lane.endpoint.shown
        if answer.outcome is Outcome.LATER:
            border.warn_once(
                "sending",
                "telemetry cannot be sent to %s (%s). The run goes on; what cannot be sent is kept in %s, sent when "
                "the endpoint is back, or later with: verl-otel replay %s. Check that an OpenTelemetry Collector "
                "listens there (OTEL_EXPORTER_OTLP_ENDPOINT)",
                where,
                answer.reason,
                self._spool.folder,
                self._spool.folder,
            )
        else:
            border.warn_once(
                f"sending {signal}",
                "%s does not take all %s (%s), and that is lost; the run goes on. Its own log says why",
                where,
                signal,
                answer.reason or f"it rejected {answer.rejected} items of a request",
            )
