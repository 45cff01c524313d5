"""The samples of a step (`metrics/samples.py`): what their distributions and groups are, and what they cost."""

import asyncio
import math
import threading
import time
from types import SimpleNamespace

import numpy
import pytest
import torch
from opentelemetry import baggage
from opentelemetry import context as otel_context
from opentelemetry.sdk.metrics.export import MetricsData
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.util.instrumentation import InstrumentationScope

from verl_otel import border, telemetry
from verl_otel.hooks import advantage, data_metrics, llm_client
from verl_otel.hooks.patches import Patches
from verl_otel.metrics import samples as samples_module
from verl_otel.metrics.distributions import Distributions


class Followed:
    """verl's trainer."""

    global_steps = 5


class Process:
    """A process with histograms of ours."""

    def __init__(self, memory, role="trainer", **identity):
        self.memory = memory
        self.telemetry = memory.process(role, **identity)
        self.samples = self.telemetry.samples
        self._distributions = Distributions(Resource.get_empty(), InstrumentationScope("verl_otel"))
        self.telemetry.instruments._distributions = self._distributions
        self._followed = Followed()
        self.telemetry.steps.follow(self._followed)

    def histogram(self, name):
        """The one point of a histogram; None if there is none."""
        self.memory.settle()
        metrics = [
            metric
            for of_resource in self._distributions.extend(MetricsData([])).resource_metrics
            for of_scope in of_resource.scope_metrics
            for metric in of_scope.metrics
            if metric.name == name
        ]
        points = [point for metric in metrics for point in metric.data.data_points]
        assert len(points) <= 1
        return points[0] if points else None

    def figures(self, name):
        point = self.histogram(name)
        return None if point is None else (point.count, point.sum, point.min, point.max)

    def groups(self):
        """The metrics of groups, and what the step's event will have."""
        self.memory.settle()
        metrics = {}
        for name in ("count", "zero_variance", "all_right", "all_wrong"):
            for value in self.memory.values(f"verl.group.{name}").values():
                metrics[name] = value
        in_event = self.telemetry.step_values.take(5, None)[5]
        return metrics, {key.removeprefix("verl.group."): value for key, value in in_event.items()}


@pytest.fixture
def process(memory):
    return Process(memory)


def batch(**content):
    """verl's DataProto, as far as it is read: tensors, and arrays of objects."""
    tensors = {name: value for name, value in content.items() if isinstance(value, torch.Tensor)}
    arrays = {name: value for name, value in content.items() if not isinstance(value, torch.Tensor)}
    return SimpleNamespace(batch=tensors, non_tensor_batch=arrays)


def per_token(*rows):
    return torch.tensor(rows, dtype=torch.float32)


def padded():
    """Three samples, with prompts of up to 2 and responses of up to 3 tokens, padded as verl's legacy trainer does."""
    return dict(
        prompts=torch.ones(3, 2),
        responses=torch.ones(3, 3),
        attention_mask=torch.tensor([[1, 1, 1, 1, 1], [0, 1, 1, 0, 0], [1, 1, 1, 1, 0]]),
        response_mask=torch.tensor([[1, 1, 1], [1, 0, 0], [1, 1, 0]]),
        token_level_scores=per_token([0, 0, 1], [0.5, 0, 0], [0, -2, 0]),
        token_level_rewards=per_token([0, 0, 0.75], [0.5, 0, 0], [-0.25, -2, 0]),
        advantages=per_token([1, 2, 3], [4, 0, 0], [-1, -3, 0]),
        returns=per_token([1, 1, 1], [2, 0, 0], [-3, -3, 0]),
    )


# ---- distributions --------------------------------------------------------------------------------------------------


def test_the_distributions_of_a_padded_batch(process):
    process.samples.of_batch(batch(**padded(), __num_turns__=numpy.array([2, 4, 2], dtype=object)))
    assert process.figures("verl.reward.score") == (3, -0.5, -2.0, 1.0)
    assert process.figures("verl.reward.value") == (3, -1.0, -2.25, 0.75)
    assert process.figures("verl.advantage.value") == (3, 4.0, -2.0, 4.0)  # means over the tokens: 2, 4, -2
    assert process.figures("verl.return.value") == (3, 0.0, -3.0, 2.0)
    assert process.figures("verl.response.tokens") == (3, 6.0, 1.0, 3.0)
    assert process.figures("verl.prompt.tokens") == (3, 5.0, 1.0, 2.0)
    assert process.figures("verl.turns.count") == (3, 8.0, 2.0, 4.0)
    assert dict(process.histogram("verl.reward.score").attributes) == {
        **{"rank": "all", "stage": "reward", "model_type": "reward"}
    }
    assert border.failures() == {}


def test_lengths_that_are_given_are_taken(process):
    given = {**padded(), "prompt_length": torch.tensor([10, 20, 30]), "response_length": torch.tensor([7.0, 9.0, 11.0])}
    del given["attention_mask"]
    process.samples.of_batch(batch(**given))
    assert process.figures("verl.response.tokens") == (3, 27.0, 7.0, 11.0)
    assert process.figures("verl.prompt.tokens") == (3, 60.0, 10.0, 30.0)


def test_generated_tokens_are_a_gauge_a_counter_and_a_value_of_the_step(process, memory):
    for _ in range(2):
        process.samples.of_batch(batch(**padded()))
    assert memory.values("verl.rollout.tokens", "rank", "stage", "model_type") == {("all", "rollout", "rollout"): 6}
    assert memory.values("verl.rollout.generated_tokens") == {(): 12}
    assert process.telemetry.step_values.take(5, None) == {5: {"verl.rollout.tokens": 6}}


@pytest.mark.parametrize("left_out", [*padded(), ()])
def test_what_a_batch_does_not_have_is_not_made_up(process, left_out):
    content = {name: value for name, value in padded().items() if name != left_out}
    process.samples.of_batch(batch(**content))
    names = {
        "verl.reward.score": {"token_level_scores"},
        "verl.reward.value": {"token_level_rewards"},
        "verl.advantage.value": {"advantages", "response_mask"},
        "verl.return.value": {"returns", "response_mask"},
        "verl.response.tokens": {"attention_mask", "responses"},
        "verl.prompt.tokens": {"attention_mask", "responses"},
        "verl.turns.count": {left_out},
    }
    for name, needed in names.items():
        assert (process.figures(name) is None) == (left_out in needed), name
    assert border.failures() == {}


def test_a_response_without_tokens_has_no_reward_and_no_advantage(process, memory):
    """verl calls it aborted, and leaves it out of its statistics of rewards."""
    content = padded()
    content["attention_mask"][1, 2:] = 0
    content["response_mask"][1] = 0
    process.samples.of_batch(batch(**content))
    assert process.figures("verl.reward.score") == (2, -1.0, -2.0, 1.0)
    assert process.figures("verl.advantage.value") == (2, 0.0, -2.0, 2.0)
    assert process.figures("verl.response.tokens") == (3, 5.0, 0.0, 3.0)
    assert memory.points("verl.metric.non_finite") == []


def test_rewards_that_are_not_finite_are_counted_and_not_recorded(process, memory):
    content = padded()
    content["token_level_scores"][0, 1] = math.nan
    content["token_level_scores"][1, 0] = math.inf
    process.samples.of_batch(batch(**content))
    assert process.figures("verl.reward.score") == (1, -2.0, -2.0, -2.0)
    (bad,) = memory.points("verl.metric.non_finite")
    assert (bad.value, bad.attributes["metric"], bad.attributes["rank"]) == (2, "verl.reward.score", "all")


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64, torch.int64])
def test_tensors_of_any_type_are_read(process, dtype):
    content = {name: tensor.to(dtype) for name, tensor in padded().items()}
    content["response_mask"] = content["response_mask"].bool()
    process.samples.of_batch(batch(**content))
    point = process.figures("verl.reward.score")
    assert point == (3, -1.0, -2.0, 1.0) if dtype is torch.int64 else point == (3, -0.5, -2.0, 1.0)
    assert process.figures("verl.response.tokens") == (3, 6.0, 1.0, 3.0)
    assert border.failures() == {}


def test_long_responses_are_counted_exactly(process):
    """More tokens than a small type can count."""
    length = 5000
    content = dict(responses=torch.ones(2, length), attention_mask=torch.ones(2, length + 3, dtype=torch.bfloat16))
    process.samples.of_batch(batch(**content))
    assert process.figures("verl.response.tokens") == (2, 10000.0, 5000.0, 5000.0)
    assert process.figures("verl.prompt.tokens") == (2, 6.0, 3.0, 3.0)


def test_tensors_that_need_gradients_are_read_without(process):
    content = padded()
    content["token_level_scores"].requires_grad_(True)
    process.samples.of_batch(batch(**content))
    assert process.figures("verl.reward.score") == (3, -0.5, -2.0, 1.0)


def test_tensors_on_a_device_are_left_alone(process, memory):
    content = padded()
    content["token_level_scores"] = content["token_level_scores"].to("meta")
    content["advantages"] = content["advantages"].to("meta")
    process.samples.of_batch(batch(**content))
    assert process.figures("verl.reward.score") is None
    assert process.figures("verl.advantage.value") is None
    assert process.figures("verl.reward.value") == (3, -1.0, -2.25, 0.75)
    process.samples.of_groups(batch(token_level_rewards=content["token_level_scores"], uid=uids("a", "a", "b")))
    assert process.groups()[0] == {}
    assert border.failures() == {}


# ---- groups ---------------------------------------------------------------------------------------------------------


def uids(*names):
    return numpy.array(names, dtype=object)


def rewards(*values):
    """One reward for each sample, on its last token."""
    return torch.stack([torch.tensor([0.0, 0.0, float(value)]) for value in values])


FOUR_GROUPS = uids(*"abcdabcdabcd")
BY_GROUP = ((1.0, 1.0, 1.0), (0.0, 0.0, 0.0), (1.0, 0.0, 0.0), (1.0, 1.0, 0.0))


def interleaved(by_group=BY_GROUP):
    return rewards(*(values[place] for place in range(3) for values in by_group))


def test_the_groups_of_a_batch_are_those_computed_by_hand(process):
    process.samples.of_groups(batch(token_level_rewards=interleaved(), uid=FOUR_GROUPS))
    metrics, in_event = process.groups()
    assert metrics == {"count": 4, "zero_variance": 0.5, "all_right": 0.25, "all_wrong": 0.25}
    std = math.sqrt(2) / 3
    assert in_event == pytest.approx({**metrics, "reward.std/mean": std / 2})
    assert process.figures("verl.group.reward.mean") == pytest.approx((4, 2.0, 0.0, 1.0))
    assert process.figures("verl.group.reward.std") == pytest.approx((4, 2 * std, 0.0, std))


def test_groups_of_different_sizes(process):
    process.samples.of_groups(batch(token_level_rewards=rewards(1, 5, 3, 7, 7), uid=uids("x", "y", "x", "x", "z")))
    metrics, _ = process.groups()
    assert metrics == {"count": 3, "zero_variance": 2 / 3}
    assert process.figures("verl.group.reward.mean") == pytest.approx((3, (11 / 3) + 5 + 7, 11 / 3, 7.0))


def test_equal_rewards_have_no_variance_though_their_mean_is_rounded(process):
    equal = torch.tensor([[0.1], [0.1], [0.1], [0.7], [0.7], [0.7]], dtype=torch.float64)  # (0.1 + 0.1 + 0.1) / 3 > 0.1
    process.samples.of_groups(batch(token_level_rewards=equal, uid=uids(*"aaabbb")))
    metrics, _ = process.groups()
    assert metrics["zero_variance"] == 1.0


def test_right_and_wrong_are_what_the_reward_function_says(process):
    """`acc` and rewards differ, such as with a bonus for the format."""
    acc = numpy.array([True, False] * 6, dtype=object)
    process.samples.of_groups(batch(token_level_rewards=interleaved(), uid=FOUR_GROUPS, acc=acc))
    metrics, _ = process.groups()
    assert (metrics["all_right"], metrics["all_wrong"]) == (0.5, 0.5)
    assert metrics["zero_variance"] == 0.5  # of the rewards


def test_scores_that_are_not_only_0_and_1_say_nothing_of_right_and_wrong(process):
    process.samples.of_groups(batch(token_level_rewards=interleaved() * 2, uid=FOUR_GROUPS))
    metrics, in_event = process.groups()
    assert metrics == {"count": 4, "zero_variance": 0.5}
    assert set(in_event) == {"count", "zero_variance", "reward.std/mean"}


@pytest.mark.parametrize("acc", [["?"] * 12, [0.5] * 12, [None] * 12, [1.0] * 5, [[1.0]] * 12])
def test_an_acc_that_is_none_is_not_taken(process, acc):
    given = numpy.empty(len(acc), dtype=object)
    given[:] = acc
    process.samples.of_groups(batch(token_level_rewards=interleaved(), uid=FOUR_GROUPS, acc=given))
    metrics, _ = process.groups()
    assert (metrics["all_right"], metrics["all_wrong"]) == (0.25, 0.25)
    assert border.failures() == {}


def test_one_sample_for_each_prompt_is_no_group(process):
    process.samples.of_groups(batch(token_level_rewards=rewards(1, 0, 1), uid=uids("a", "b", "c")))
    assert process.groups() == ({}, {})
    assert process.figures("verl.group.reward.mean") is None


@pytest.mark.parametrize(
    "content",
    [
        {"token_level_rewards": rewards(1, 1)},
        {"uid": uids("a", "a")},
        {"token_level_rewards": rewards(1, 1, 1), "uid": uids("a", "a")},
        {"token_level_rewards": torch.zeros(0, 3), "uid": uids()},
        {},
    ],
)
def test_without_prompts_or_rewards_there_are_no_groups(process, content):
    process.samples.of_groups(batch(**content))
    assert process.groups() == ({}, {})
    assert border.failures() == {}


def test_scores_stand_in_for_rewards(process):
    process.samples.of_groups(batch(token_level_scores=interleaved(), uid=FOUR_GROUPS))
    assert process.groups()[0]["count"] == 4


@pytest.mark.filterwarnings("error")
def test_a_reward_that_is_not_finite_does_not_cost_the_other_groups(process, memory):
    content = interleaved()
    content[0, 2] = math.nan  # of group a
    process.samples.of_groups(batch(token_level_rewards=content, uid=FOUR_GROUPS))
    metrics, _ = process.groups()
    assert metrics == {"count": 4, "zero_variance": 0.25}
    assert process.figures("verl.group.reward.mean") == pytest.approx((3, 1.0, 0.0, 2 / 3))
    assert set(memory.values("verl.metric.non_finite", "metric")) == {
        ("verl.group.reward.mean",),
        ("verl.group.reward.std",),
    }


# ---- requests of the agent loop -------------------------------------------------------------------------------------


def test_requests_have_latency_and_throughput_by_worker(memory):
    process = Process(memory, "agent_loop", worker_index="4")
    for seconds, tokens in ((2.0, 100), (0.5, 50), (1.0, None), (0.0, 5)):
        process.samples.of_request(seconds, tokens)
    assert process.figures("verl.generate.duration") == (4, 3.5, 0.0, 2.0)
    assert process.figures("verl.generate.throughput") == (2, 150.0, 50.0, 100.0)
    assert dict(process.histogram("verl.generate.duration").attributes) == {
        **{"rank": "4", "stage": "rollout", "model_type": "rollout"}
    }


def test_requests_of_validation_are_kept_apart(memory):
    process = Process(memory, "agent_loop")
    token = otel_context.attach(baggage.set_baggage("stage", "validation"))
    process.samples.of_request(1.0, 10)
    otel_context.detach(token)
    assert process.histogram("verl.generate.duration").attributes["stage"] == "validation"


def test_requests_that_wait_are_bounded_and_counted(memory, monkeypatch):
    monkeypatch.setattr(samples_module, "MAX_REQUESTS", 3)
    process, gate = Process(memory, "agent_loop"), threading.Event()
    process.telemetry.background.defer(gate.wait, 60)
    for _ in range(5):
        process.samples.of_request(1.0, 10)
    gate.set()
    assert process.figures("verl.generate.duration") == (3, 3.0, 1.0, 1.0)
    assert memory.values("verl.otel.dropped", "verl.otel.reason") == {("queue_full",): 2}
    process.samples.of_request(1.0, 10)
    assert process.figures("verl.generate.duration")[0] == 4


def test_no_request_is_lost_between_threads(memory):
    process = Process(memory, "agent_loop")

    def ask():
        for _ in range(500):
            process.samples.of_request(1.0, 10)

    threads = [threading.Thread(target=ask) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert process.figures("verl.generate.duration")[0] == 2000


# ---- hooks ----------------------------------------------------------------------------------------------------------


@pytest.fixture
def hooked(process, monkeypatch):
    monkeypatch.setattr(telemetry, "_current", process.telemetry)
    patches = Patches()
    yield patches
    patches.undo()


def test_the_hooks_pass_on_what_verl_gives_and_gets(process, hooked):
    calls = []
    metrics = SimpleNamespace(
        __name__="metrics", compute_data_metrics=lambda batch, use_critic=True: calls.append(1) or {"a": 1}
    )
    trainer = SimpleNamespace(__name__="trainer", compute_advantage=lambda data, *a, **k: data)
    data_metrics.install(metrics, hooked)
    advantage.install(trainer, hooked)
    content = batch(**padded())
    assert metrics.compute_data_metrics(content) == metrics.compute_data_metrics(batch=content) == {"a": 1}
    grouped = batch(token_level_rewards=interleaved(), uid=FOUR_GROUPS)
    assert trainer.compute_advantage(grouped, 1) is trainer.compute_advantage(data=grouped) is grouped
    assert process.figures("verl.reward.score")[0] == 6
    assert process.figures("verl.group.reward.mean")[0] == 8
    assert metrics.compute_data_metrics("nonsense") == {"a": 1}
    assert trainer.compute_advantage("nonsense") == "nonsense"
    assert set(border.failures()) == {"the distributions of a batch", "the groups of a batch"}


def test_the_clients_answers_are_timed(process, hooked):
    class LLMServerClient:
        async def generate(self, prompt, **options):
            await asyncio.sleep(0.02)
            if prompt == "fail":
                raise RuntimeError("no")
            return SimpleNamespace(token_ids=[1] * 10) if prompt == "tokens" else "text"

    llm_client.install(SimpleNamespace(LLMServerClient=LLMServerClient), hooked)

    async def ask(prompt):
        return await LLMServerClient().generate(prompt, max_tokens=10)

    assert asyncio.run(ask("tokens")).token_ids == [1] * 10
    assert asyncio.run(ask("other")) == "text"
    with pytest.raises(RuntimeError):
        asyncio.run(ask("fail"))
    count, seconds, low, _ = process.figures("verl.generate.duration")
    assert count == 2 and 0.02 <= low <= seconds < 10
    assert process.figures("verl.generate.throughput")[0] == 1


# ---- cost -----------------------------------------------------------------------------------------------------------


class Watched(torch.Tensor):
    """A tensor that tells which threads compute with it."""

    threads: set[str] = set()

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        if "__get__" not in getattr(func, "__name__", ""):
            cls.threads.add(threading.current_thread().name)
        return super().__torch_function__(func, types, args, kwargs or {})


def test_nothing_is_computed_on_the_training_thread(process):
    content = {name: tensor.as_subclass(Watched) for name, tensor in padded().items()}
    Watched.threads.clear()
    process.samples.of_batch(batch(**content))
    process.samples.of_groups(batch(token_level_rewards=content["token_level_rewards"], uid=uids("a", "a", "b")))
    process.memory.settle()
    assert Watched.threads == {"verl-otel-recorder"}
    assert border.failures() == {}


def test_handing_over_a_large_batch_takes_no_time(process):
    content = dict(
        token_level_scores=torch.rand(512, 8192),
        attention_mask=torch.ones(512, 9000),
        responses=torch.ones(512, 8192),
    )
    gate = threading.Event()
    process.telemetry.background.defer(gate.wait, 60)
    started = time.perf_counter()
    for _ in range(100):
        process.samples.of_batch(batch(**content))
    seconds = (time.perf_counter() - started) / 100
    process.telemetry.background._pending.clear()
    gate.set()
    assert seconds < 0.001
