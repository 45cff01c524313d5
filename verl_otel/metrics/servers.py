"""Metrics of a rollout server, by replica: requests, tokens, latency, and which weights it has.

What verl's `TokenOutput` says, as it says it: an engine that does not count preemptions or cached tokens has none here.
The server's event loop appends to a list; the background thread makes metrics of it. What only the engine knows (queue,
KV cache, time to the first token) is in the engine's own `/metrics` (`verl_otel.export.server_targets`).
"""

import weakref
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from verl_otel import forks
from verl_otel.background import Background
from verl_otel.identity import Identity, model_of_server, ray_actor
from verl_otel.metrics.instruments import Instruments
from verl_otel.semconv import attributes as attr
from verl_otel.semconv import metrics as names
from verl_otel.semconv.registry import Metric

MAX_REQUESTS = 10_000
"""Answered requests that wait to be recorded."""

STOP_REASONS = frozenset({"completed", "stop", "length", "aborted", "abort"})
"""verl's, by version and backend; what is none of them is `other`, and `unknown` where the server does not say."""

FAILED = "failed"


@dataclass(frozen=True, slots=True)
class Served:
    """A request that has ended. None is what the server did not say."""

    seconds: float
    stop_reason: str
    input_tokens: int | None = None
    output_tokens: int | None = None
    cached_tokens: int | None = None
    preemptions: int | None = None
    policy_version: int | None = None

    @classmethod
    def of(cls, output: Any, error: BaseException | None, seconds: float, input_tokens: int | None) -> "Served":
        """From verl's `TokenOutput` (all versions), or the exception that ended the request."""
        if error is not None:
            return cls(seconds, FAILED, input_tokens)
        reason = getattr(output, "stop_reason", None)
        tokens, extra = getattr(output, "token_ids", None), getattr(output, "extra_fields", None) or {}
        return cls(
            seconds,
            "unknown" if reason is None else reason if reason in STOP_REASONS else "other",
            input_tokens,
            None if tokens is None else len(tokens),
            _count(extra.get("num_cached_tokens")),
            _count(getattr(output, "num_preempted", None)),
            _count(extra.get("global_steps")),
        )

    def on_span(self) -> dict[str, Any]:
        """As attributes of the request's span."""
        found = {
            attr.OUTPUT_TOKENS: self.output_tokens,
            attr.CACHED_TOKENS: self.cached_tokens,
            attr.PREEMPTIONS: self.preemptions,
            attr.POLICY_VERSION: self.policy_version,
        }
        said = {name: value for name, value in found.items() if value is not None}
        return {attr.STOP_REASON: self.stop_reason, **said}


class ServerMetrics:
    """The metrics of the server in this process. `active` is the number of requests that it is answering."""

    def __init__(self, background: Background, instruments: Instruments, identity: Identity) -> None:
        self._background = background
        self._instruments = instruments
        self._identity = identity
        self._lock = forks.lock(self, "_lock")
        self._waiting: dict[str, list[Served]] = {}
        self._server: weakref.ref[Any] | None = None
        self._replica = identity.worker_index
        self._model_type = "rollout"
        self.engine: dict[str, str] = {}
        self.active = 0

    def of(self, server: Any) -> None:
        """Take what is known of verl's server object, at its first request."""
        if self._server is not None:
            return
        self._server = weakref.ref(server)
        self._replica = str(getattr(server, "replica_rank", self._replica))
        self._model_type = model_of_server(ray_actor()[1])
        engine = str(getattr(getattr(server, "config", None), "name", None) or self._identity.worker_group)
        self.engine = {attr.OPERATION: "text_completion", attr.ENGINE: engine}
        labels = (attr.RANK, attr.STAGE, attr.MODEL_TYPE, attr.REPLICA)
        self._instruments.observe(names.SERVER_ACTIVE, lambda: {self._key(): self.active}, *labels)
        self._instruments.observe(names.SERVER_POLICY_VERSION, self._policy_version, *labels)

    def labels(self, stage: str) -> dict[str, str]:
        """What each series and span of this server carries."""
        return {
            attr.RANK: self._identity.worker_index,
            attr.STAGE: stage,
            attr.MODEL_TYPE: self._model_type,
            attr.REPLICA: self._replica,
        }

    def began(self) -> None:
        """Count a request that is being answered."""
        with self._lock:
            self.active += 1

    def ended(self, stage: str, served: Served) -> None:
        """Count a request that has ended; cheap."""
        with self._lock:
            self.active -= 1
            waiting = self._waiting.setdefault(stage, [])
            full = len(waiting) >= MAX_REQUESTS
            if not full:
                waiting.append(served)
            first = len(waiting) == 1
        if full:
            self._instruments.dropped("metrics", "queue_full")
        elif first:
            self._background.defer(self._record, stage)

    def _key(self) -> tuple[str, ...]:
        return tuple(self.labels("rollout").values())

    def _policy_version(self) -> Mapping[tuple[str, ...], float]:
        version = _count(getattr(self._server and self._server(), "global_steps", None))
        return {} if version is None else {self._key(): version}

    # ---- in the background ------------------------------------------------------------------------------------------

    def _record(self, stage: str) -> None:
        import numpy

        with self._lock:
            waiting = self._waiting.pop(stage)
        labels = self.labels(stage)
        for reason, count in Counter(served.stop_reason for served in waiting).items():
            self._instruments.add(names.SERVER_REQUESTS, {**labels, attr.STOP_REASON: reason}, count)
        answered = [served for served in waiting if served.stop_reason != FAILED]
        self._sum(names.SERVER_TOKENS, {**labels, attr.TOKEN_TYPE: "input"}, [s.input_tokens for s in answered])
        self._sum(names.SERVER_TOKENS, {**labels, attr.TOKEN_TYPE: "output"}, [s.output_tokens for s in answered])
        self._sum(names.SERVER_CACHED_TOKENS, labels, [served.cached_tokens for served in answered])
        self._sum(names.SERVER_PREEMPTIONS, labels, [served.preemptions for served in answered])
        seconds = numpy.asarray([served.seconds for served in answered])
        self._instruments.record_all(names.SERVER_DURATION, {**labels, **self.engine}, seconds)
        per_token = [served.seconds / served.output_tokens for served in answered if served.output_tokens]
        self._instruments.record_all(names.SERVER_TOKEN_DURATION, labels, numpy.asarray(per_token))

    def _sum(self, metric: Metric, labels: Mapping[str, str], amounts: list[int | None]) -> None:
        said = [amount for amount in amounts if amount is not None]
        if said:
            self._instruments.add(metric, labels, sum(said))


def _count(value: Any) -> int | None:
    return value if isinstance(value, int) and not isinstance(value, bool) and value >= 0 else None
