"""The parts of a weight sync: `verl.weight_sync.abort`, `.release`, `.transfer`, `.resume`, in the stage around them.

All but the transfer are calls of verl's to every rollout replica: below them is a span for each server. verl also
pauses replicas outside of a sync (before it trains on their devices): then the parts are under that stage.
"""

from collections.abc import Callable, Mapping
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any

from opentelemetry import context as otel_context
from opentelemetry.trace import SpanKind, Tracer

from verl_otel import border
from verl_otel.metrics.instruments import Instruments
from verl_otel.metrics.values import to_number
from verl_otel.semconv import attributes as attr
from verl_otel.tracing.errors import fail
from verl_otel.tracing.steps import Scope, Steps, current_scope

UPDATE = "update_weights"

_PHASE_OF_CALL = {
    "abort_replicas": "abort",
    "sleep_replicas": "release",
    "release_kv_cache_replicas": "release",
    "resume_kv_cache_replicas": "resume",
    "wake_up_replicas": "resume",
    "resume_generation_replicas": "resume",
}
"""Methods of verl's `CheckpointEngineManager`, without the transfer itself."""

MAX_SERVERS = 64
"""Servers that have a span in a phase; more are counted."""

_MIB_SENT = "checkpoint_engine/payload_mbytes"
"""What some of verl's checkpoint engines say of a sync: MiB that went to the rollout ranks."""

_SYNC = otel_context.create_key("verl-otel-weight-sync")


@dataclass
class Sync:
    """A running `update_weights`."""

    around: Scope | None
    version: int | None
    token: Any
    transfer: Scope | None = None


class WeightSync:
    """See the module. The methods are called around verl's and never raise."""

    def __init__(self, steps: Steps, tracer: Tracer, instruments: Instruments) -> None:
        self._steps = steps
        self._tracer = tracer
        self._instruments = instruments

    def enter(self, call: str, version: Any, replicas: int | None) -> Sync | Scope | None:
        """Before a call of verl's `CheckpointEngineManager`.

        Args:
            version: what `update_weights` is given: the step, by which verl counts versions of the weights.
        """
        try:
            if call == UPDATE:
                sync = Sync(current_scope(), version if isinstance(version, int) else None, None)
                sync.token = otel_context.attach(otel_context.set_value(_SYNC, sync))
                return sync
            phase = _PHASE_OF_CALL.get(call)
            if phase is None:
                return None
            attributes: dict[str, Any] = {attr.WEIGHT_SYNC_CALL: call}
            if replicas is not None:
                attributes[attr.WEIGHT_SYNC_REPLICAS] = replicas
            return self._steps.enter_part(f"{attr.WEIGHT_SYNC_SPAN_PREFIX}{phase}", attributes)
        except Exception:
            border.caught(f"opening the span of {call}")
            return None

    def server_called(self, method: str) -> Callable[[Future[Any]], None] | None:
        """A server is called, in a phase or elsewhere; gives what is to be told when it has answered.

        `rank` of the span is the place of the server among those of the phase: verl calls them in the same order.
        """
        scope = current_scope()
        if scope is None or not scope.part:
            return None
        scope.calls += 1
        if scope.calls > MAX_SERVERS:
            self._instruments.dropped("traces", "server_cap")
            return None
        where = {
            attr.RANK: str(scope.calls - 1),
            attr.STAGE: scope.labels[attr.STAGE],
            attr.MODEL_TYPE: "rollout",
        }
        name = f"{attr.REPLICA_SPAN_PREFIX}{method}"
        span = self._tracer.start_span(name, scope.context, SpanKind.CLIENT, where)

        def answered(answer: Future[Any]) -> None:
            fail(span, answer.exception())
            span.end()

        return answered

    def begin_transfer(self) -> None:
        """Inside `update_weights`, after the replicas are paused: trainer and rollout ranks are connected now."""
        sync = otel_context.get_value(_SYNC)
        if isinstance(sync, Sync) and sync.transfer is None:
            sync.transfer = self._steps.enter_part(f"{attr.WEIGHT_SYNC_SPAN_PREFIX}transfer", {})

    def end_transfer(self, call: str) -> None:
        """Inside `update_weights`, just before each call of the manager: the transfer is over if replicas resume."""
        sync = otel_context.get_value(_SYNC)
        if isinstance(sync, Sync) and _PHASE_OF_CALL.get(call) == "resume":
            self._end_transfer(sync, None)

    def leave(self, opened: Sync | Scope | None, error: BaseException | None, result: Any = None) -> None:
        """After the call. `result`: what `update_weights` returns."""
        if isinstance(opened, Scope):
            self._steps.leave(opened, error)
        elif opened is not None:
            try:
                self._end_transfer(opened, error)
                if error is None:
                    self._tell(opened, result)
            except Exception:
                border.caught("noting what a weight sync has done")
            finally:
                otel_context.detach(opened.token)

    def _end_transfer(self, sync: Sync, error: BaseException | None) -> None:
        transfer, sync.transfer = sync.transfer, None
        self._steps.leave(transfer, error)

    def _tell(self, sync: Sync, result: Any) -> None:
        if sync.version is not None:
            self._steps.policy_version = sync.version
        if sync.around is None or sync.around.labels[attr.STAGE] != "weight_sync":
            return
        sent = to_number(result.get(_MIB_SENT)) if isinstance(result, Mapping) else None
        if sync.version is not None:
            sync.around.span.set_attribute(attr.POLICY_VERSION, sync.version)
        if sent is not None:
            sync.around.span.set_attribute(attr.WEIGHT_SYNC_BYTES, round(sent * 2**20))
