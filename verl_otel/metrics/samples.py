"""The samples of a step: distributions of rewards, lengths and the like, and statistics of the groups of GRPO.

verl hands its batches to hooks in the trainer process; references to the tensors are kept until the background thread
has reduced them, one `sum` each, by numpy: torch would wake its own threads, which the training needs. Tensors on a
device are left alone.
"""

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from opentelemetry import baggage

from verl_otel import forks
from verl_otel.background import Background
from verl_otel.identity import Identity
from verl_otel.metrics.instruments import Instruments
from verl_otel.metrics.step_values import StepValues
from verl_otel.semconv import attributes as attr
from verl_otel.semconv import metrics as names
from verl_otel.semconv.registry import Metric

if TYPE_CHECKING:
    import numpy

MAX_REQUESTS = 10_000
"""Requests of the agent loop that wait to be recorded."""


class Samples:
    """See the module. The methods are cheap and may raise; hooks catch.

    Args:
        step: gives the step in which verl is.
    """

    def __init__(
        self,
        background: Background,
        instruments: Instruments,
        step_values: StepValues,
        identity: Identity,
        step: Callable[[], int | None],
    ) -> None:
        self._background = background
        self._instruments = instruments
        self._step_values = step_values
        self._identity = identity
        self._step = step
        self._lock = forks.lock(self, "_lock")
        self._requests: dict[str, list[tuple[float, int | None]]] = {}

    def of_batch(self, batch: Any) -> None:
        """Distributions of the samples of a step.

        Args:
            batch: verl's `DataProto` with `token_level_scores`, `token_level_rewards`, `advantages`, `returns`,
                `response_mask` of shape (samples, response length), and lengths or masks.
        """
        tensors = {name: batch.batch[name] for name in batch.batch.keys() if name in _OF_BATCH}  # noqa: SIM118
        turns = batch.non_tensor_batch.get("__num_turns__")
        self._background.defer(self._record_batch, tensors, turns, self._step())

    def of_groups(self, data: Any) -> None:
        """Statistics of groups: samples of one prompt.

        Args:
            data: verl's `DataProto` with `token_level_rewards` (or scores) and `uid`, one for each prompt.
        """
        uids = data.non_tensor_batch.get("uid")
        rewards = data.batch.get("token_level_rewards", data.batch.get("token_level_scores"))
        if uids is not None and rewards is not None:
            right = data.non_tensor_batch.get("acc")
            self._background.defer(self._record_groups, rewards, uids, right, self._step())

    def of_request(self, seconds: float, tokens: int | None) -> None:
        """One answered request of the agent loop."""
        stage = str(baggage.get_baggage(attr.STAGE) or "rollout")
        with self._lock:
            waiting = self._requests.setdefault(stage, [])
            full = len(waiting) >= MAX_REQUESTS
            if not full:
                waiting.append((seconds, tokens))
            first = len(waiting) == 1
        if full:
            self._instruments.dropped("metrics", "queue_full")
        elif first:
            self._background.defer(self._record_requests, stage)

    # ---- in the background ------------------------------------------------------------------------------------------

    def _record_batch(self, tensors: Mapping[str, Any], turns: Any, step: int | None) -> None:
        import numpy

        tensors = {name: tensor for name, tensor in tensors.items() if _on_cpu(tensor)}
        mask = _numpy(tensors["response_mask"]) if "response_mask" in tensors else None
        lengths = _response_lengths(tensors)
        prompts = _prompt_lengths(tensors, lengths)
        answered = slice(None) if lengths is None else lengths > 0  # verl leaves aborted samples out of rewards, too
        for metric, name in ((names.REWARD_SCORE, "token_level_scores"), (names.REWARD_VALUE, "token_level_rewards")):
            if name in tensors:
                self._distribute(metric, _sums(tensors[name])[answered])
        self._distribute(names.ADVANTAGE_VALUE, _means(tensors.get("advantages"), mask))
        self._distribute(names.RETURN_VALUE, _means(tensors.get("returns"), mask))
        self._distribute(names.RESPONSE_TOKENS, lengths)
        self._distribute(names.PROMPT_TOKENS, prompts)
        if turns is not None:
            self._distribute(names.TURNS, numpy.asarray(turns, dtype=float))
        if lengths is not None:
            tokens = int(lengths.sum())
            labels = names.all_ranks(names.ROLLOUT_TOKENS)
            self._instruments.set(names.ROLLOUT_TOKENS, labels, tokens)
            self._instruments.add(names.GENERATED_TOKENS, labels, tokens)
            self._step_values.add(step, {names.ROLLOUT_TOKENS.name: tokens})

    def _record_groups(self, rewards: Any, uids: Any, right: Any, step: int | None) -> None:
        import numpy

        if not _on_cpu(rewards):
            return
        scores = _sums(rewards)
        _, group = numpy.unique(numpy.asarray(uids, dtype=str), return_inverse=True)
        sizes = numpy.bincount(group)
        if len(scores) != len(group) or sizes.max(initial=0) < 2:
            return  # one sample for each prompt: no groups
        means = numpy.bincount(group, scores) / sizes
        deviations = scores - means[group]
        stds = numpy.sqrt(numpy.bincount(group, deviations * deviations) / sizes)
        self._distribute(names.GROUP_MEAN, means)
        self._distribute(names.GROUP_STD, stds)
        low, high = _extremes(scores, group, len(sizes))
        figures = {names.GROUP_COUNT: float(len(sizes)), names.ZERO_VARIANCE: float(numpy.mean(low == high))}
        correct = _correct(right, scores)
        if correct is not None:
            share = numpy.bincount(group, correct) / sizes
            figures[names.ALL_RIGHT] = float(numpy.mean(share == 1))
            figures[names.ALL_WRONG] = float(numpy.mean(share == 0))
        for metric, value in figures.items():
            if numpy.isfinite(value):
                self._instruments.set(metric, names.all_ranks(metric), value)
        values = {metric.name: value for metric, value in figures.items()}
        values["verl.group.reward.std/mean"] = float(stds.mean())
        self._step_values.add(step, values)

    def _record_requests(self, stage: str) -> None:
        import numpy

        with self._lock:
            waiting = self._requests.pop(stage)
        labels = {attr.RANK: self._identity.worker_index, attr.STAGE: stage, attr.MODEL_TYPE: "rollout"}
        seconds = numpy.asarray([seconds for seconds, _ in waiting])
        self._instruments.record_all(names.GENERATE_DURATION, labels, seconds)
        rates = [tokens / seconds for seconds, tokens in waiting if tokens is not None and seconds > 0]
        self._instruments.record_all(names.GENERATE_THROUGHPUT, labels, numpy.asarray(rates))

    def _distribute(self, metric: Metric, values: "numpy.ndarray[Any, Any] | None") -> None:
        if values is not None:
            self._instruments.record_all(metric, names.all_ranks(metric), values)


_OF_BATCH = frozenset(
    (
        *("token_level_scores", "token_level_rewards", "advantages", "returns", "response_mask"),
        *("prompt_length", "response_length", "attention_mask", "prompts", "responses"),
    )
)


def _on_cpu(tensor: Any) -> bool:
    return getattr(getattr(tensor, "device", None), "type", "cpu") == "cpu"


def _numpy(tensor: Any) -> "numpy.ndarray[Any, Any]":
    """A tensor on the CPU, or what numpy can read, as 32- or 64-bit floats; without a copy where it is that already."""
    import numpy

    if hasattr(tensor, "detach"):
        tensor = tensor.detach()
        tensor = (tensor.float() if str(tensor.dtype) == "torch.bfloat16" else tensor).numpy()
    array = numpy.asarray(tensor)
    return array if array.dtype.kind == "f" else array.astype("float32" if array.ndim > 1 else float)


def _sums(tensor: Any) -> "numpy.ndarray[Any, Any]":
    """(samples, tokens) -> (samples,)"""
    return _numpy(tensor).sum(-1, dtype=float)


def _means(tensor: Any, mask: "numpy.ndarray[Any, Any] | None") -> "numpy.ndarray[Any, Any] | None":
    """(samples, tokens) -> the mean over the tokens of each response that has any."""
    import numpy

    if tensor is None or mask is None:
        return None
    counts, values = mask.sum(-1).astype(float), _numpy(tensor)  # whole numbers, which 32 bits hold
    sums = numpy.einsum("st,st->s", values, mask)
    if not numpy.isfinite(sums).all():  # perhaps only where there is no token
        sums = numpy.where(mask > 0, values, 0).sum(-1)
    return sums[counts > 0] / counts[counts > 0]


def _response_lengths(tensors: Mapping[str, Any]) -> "numpy.ndarray[Any, Any] | None":
    """As verl's `compute_data_metrics` has them: given (V1), or from the attention mask."""
    if "response_length" in tensors:
        return _numpy(tensors["response_length"])
    attention, responses = tensors.get("attention_mask"), tensors.get("responses")
    return None if attention is None or responses is None else _sums(attention[:, -responses.shape[-1] :])


def _prompt_lengths(tensors: Mapping[str, Any], responses: Any) -> "numpy.ndarray[Any, Any] | None":
    if "prompt_length" in tensors:
        return _numpy(tensors["prompt_length"])
    attention = tensors.get("attention_mask")
    return None if attention is None or responses is None else _sums(attention) - responses


def _extremes(scores: Any, group: Any, count: int) -> tuple[Any, Any]:
    import numpy

    low, high = numpy.full(count, numpy.inf), numpy.full(count, -numpy.inf)
    with numpy.errstate(invalid="ignore"):  # NaN is the extreme of its group
        numpy.minimum.at(low, group, scores)
        numpy.maximum.at(high, group, scores)
    return low, high


def _correct(right: Any, scores: Any) -> "numpy.ndarray[Any, Any] | None":
    """Which samples are right (1) or wrong (0): the reward function's `acc`; else scores that are only 0 and 1."""
    import numpy

    for values in (right, scores):
        try:
            array = numpy.asarray(values, dtype=float)
        except (TypeError, ValueError):
            continue
        if array.shape == scores.shape and numpy.isin(array, (0.0, 1.0)).all():
            return array
    return None
