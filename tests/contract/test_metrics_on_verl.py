"""Our figures against verl's own: what its functions print for a batch, and what our distributions of it say."""

import inspect

import numpy
import pytest
import torch
from opentelemetry.sdk.metrics.export import MetricsData
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.util.instrumentation import InstrumentationScope
from test_hooks_on_verl import VERL, instrumented
from verl_cpu.device import extend_torch_cpu

from verl_otel import border, telemetry
from verl_otel.metrics.distributions import Distributions

SAMPLES, PROMPT, RESPONSE = 64, 12, 20


LAYOUTS = [pytest.param(False, id="padded"), pytest.param(True, id="V1", marks=pytest.mark.verl(since="0.8.0"))]


@pytest.fixture(autouse=True)
def fresh_border():
    border._counts.clear()


def batch(aborted=0, lengths_given=False, seed=7):
    """A batch as verl's trainers have it when they compute metrics; the first samples have no response.

    Args:
        lengths_given: as the V1 trainers, which keep lengths instead of a mask of the whole sequence.
    """
    from verl import DataProto

    random = numpy.random.default_rng(seed)
    prompts = torch.tensor(random.integers(1, PROMPT + 1, SAMPLES))
    responses = torch.tensor(random.integers(1, RESPONSE + 1, SAMPLES))
    responses[:aborted] = 0
    mask = (torch.arange(RESPONSE) < responses[:, None]).long()
    prompt_mask = (torch.arange(PROMPT - 1, -1, -1) < prompts[:, None]).long()

    def on_tokens():
        return torch.tensor(random.normal(size=(SAMPLES, RESPONSE)), dtype=torch.float32) * mask

    scores = torch.zeros(SAMPLES, RESPONSE)
    scores[torch.arange(SAMPLES), (responses - 1).clamp(min=0)] = torch.tensor(
        random.choice([-1.0, 0.0, 0.5, 1.0], SAMPLES), dtype=torch.float32
    )
    tensors = {
        "prompts": torch.ones(SAMPLES, PROMPT, dtype=torch.long),
        "responses": torch.ones(SAMPLES, RESPONSE, dtype=torch.long),
        "response_mask": mask,
        "token_level_scores": scores,
        "token_level_rewards": scores - 0.01 * mask,
        "advantages": on_tokens(),
        "returns": on_tokens(),
    }
    if lengths_given:
        tensors.update(prompt_length=prompts.float(), response_length=responses.float())
    else:
        tensors["attention_mask"] = torch.cat([prompt_mask, mask], 1)
    turns = random.integers(1, 6, SAMPLES).astype(object)
    uid = numpy.array([f"prompt-{number // 8}" for number in range(SAMPLES)], dtype=object)
    return DataProto.from_dict(tensors=tensors, non_tensors={"__num_turns__": turns, "uid": uid})


class Ours:
    """Our histograms, in a process with the hooks."""

    def __init__(self):
        made = telemetry.current()
        assert made is not None
        self.telemetry = made
        self._distributions = Distributions(Resource.get_empty(), InstrumentationScope("verl_otel"))
        made.instruments._distributions = self._distributions

    def points(self):
        assert self.telemetry.background.drained(30)
        return {
            metric.name: point
            for of_resource in self._distributions.extend(MetricsData([])).resource_metrics
            for of_scope in of_resource.scope_metrics
            for metric in of_scope.metrics
            for point in metric.data.data_points
        }


@pytest.fixture
def ours():
    with instrumented():
        yield Ours()
    assert border.failures() == {}


PRINTED = {
    "verl.reward.score": "critic/score",
    "verl.reward.value": "critic/rewards",
    "verl.response.tokens": "response_length",
    "verl.prompt.tokens": "prompt_length",
    "verl.turns.count": "num_turns",
}


@pytest.mark.parametrize("lengths_given", LAYOUTS)
@pytest.mark.parametrize("aborted", [0, 5])
def test_the_distributions_have_the_mean_minimum_and_maximum_that_verl_prints(ours, lengths_given, aborted):
    from verl.trainer.ppo import metric_utils

    given = batch(aborted, lengths_given)
    printed = metric_utils.compute_data_metrics(given, use_critic=False)
    points = ours.points()
    for name, key in PRINTED.items():
        point = points[name]
        assert point.count == SAMPLES - (aborted if name.startswith("verl.reward") else 0), name
        assert point.sum / point.count == pytest.approx(float(printed[f"{key}/mean"]), rel=1e-5, abs=1e-6), name
        assert point.min == pytest.approx(float(printed[f"{key}/min"]), rel=1e-6), name
        assert point.max == pytest.approx(float(printed[f"{key}/max"]), rel=1e-6), name
        assert sum(point.bucket_counts) == point.count


@pytest.mark.parametrize("lengths_given", LAYOUTS)
def test_advantages_and_returns_are_means_over_the_tokens_of_a_sample(ours, lengths_given):
    from verl.trainer.ppo import metric_utils

    given = batch(5, lengths_given)
    printed = metric_utils.compute_data_metrics(given, use_critic=False)
    mask = given.batch["response_mask"].bool()
    points = ours.points()
    for name, key, tensor in (
        ("verl.advantage.value", "critic/advantages", "advantages"),
        ("verl.return.value", "critic/returns", "returns"),
    ):
        rows = zip(given.batch[tensor], mask, strict=True)
        by_hand = [row[of_row].double().mean().item() for row, of_row in rows if of_row.any()]
        point = points[name]
        assert point.count == len(by_hand) == SAMPLES - 5
        assert point.sum == pytest.approx(sum(by_hand), rel=1e-5, abs=1e-5)
        assert (point.min, point.max) == pytest.approx((min(by_hand), max(by_hand)), rel=1e-5)
        assert printed[f"{key}/min"] <= point.min <= point.max <= printed[f"{key}/max"]


def test_what_verl_prints_and_its_batch_are_as_without_us(ours):
    from verl.trainer.ppo import metric_utils

    given, same = batch(), batch()
    printed = metric_utils.compute_data_metrics(given, use_critic=False)
    original = metric_utils.compute_data_metrics.__wrapped__
    assert printed == original(same, use_critic=False)
    for name in same.batch.keys():  # noqa: SIM118
        assert torch.equal(given.batch[name], same.batch[name]), name


def test_groups_without_variance_are_those_to_which_grpo_gives_no_advantage(ours):
    from verl.trainer.ppo import core_algos, ray_trainer

    given = batch()
    scores = given.batch["token_level_rewards"]
    scores[:] = given.batch["token_level_scores"]
    scores[8:16] = 0  # two groups of eight samples each, all alike
    scores[24:32] = 0
    scores[24:32, 0] = 1
    algorithm = core_algos.AdvantageEstimator.GRPO
    result = ray_trainer.compute_advantage(given, adv_estimator=algorithm, norm_adv_by_std_in_grpo=True)
    assert ours.telemetry.background.drained(30)
    advantages = result.batch["advantages"].abs().sum(-1).reshape(8, 8)
    without = (advantages < 1e-4).all(1).float().mean().item()
    values = ours.telemetry.step_values.take(None, None)[None]
    assert values["verl.group.zero_variance"] == without == 0.25
    assert values["verl.group.count"] == 8
    rewards = scores.sum(-1).reshape(8, 8).double()
    points = ours.points()
    assert points["verl.group.reward.mean"].sum == pytest.approx(rewards.mean(1).sum().item())
    assert points["verl.group.reward.std"].sum == pytest.approx(rewards.std(1, correction=0).sum().item())


@pytest.mark.verl(since="0.7.0")
def test_a_ranks_own_values_are_those_that_verl_reduces(ours, monkeypatch, tmp_path, request):
    """`TrainingWorker._postprocess_output` gets what the engine has computed; what it returns is as without us."""
    from verl.workers import engine_workers

    if VERL < "0.9":  # verl calls functions of a GPU's that torch.cpu lacks; later versions have a platform for this
        extend_torch_cpu()
    if VERL < "0.7.1":  # it reduces over one rank, too
        torch.distributed.init_process_group("gloo", init_method=f"file://{tmp_path}/group", rank=0, world_size=1)
        request.addfinalizer(torch.distributed.destroy_process_group)
    noted = []
    monkeypatch.setattr(ours.telemetry.workers, "note", lambda quantity, values: noted.append((quantity, values)))

    class Worker:
        device_name, flops_counter = "cpu", None

        class engine:
            get_data_parallel_group = staticmethod(lambda: None)  # one rank

    def finish(function, forward_only=False):
        output = {
            "loss": [0.25, torch.tensor(0.5)],
            "metrics": {"grad_norm": torch.tensor(2.0), "lr": 0.01, "x": [1.0]},
        }
        options = {"global_token_num": None, "delta_time": 1.0, "images_seqlens": None}
        options = {name: options[name] for name in options if name in inspect.signature(function).parameters}
        return function(Worker(), output, forward_only=forward_only, **options)["metrics"]

    hooked = engine_workers.TrainingWorker._postprocess_output
    theirs, ours_too = finish(hooked.__wrapped__), finish(hooked)
    same = [key for key in theirs if not key.startswith("perf/")]  # those are of the machine at the moment
    assert {key: ours_too[key] for key in same} == {key: theirs[key] for key in same}
    assert (ours_too["loss"], ours_too["grad_norm"], ours_too["lr"]) == (0.75, 2.0, 0.01)
    assert set(ours_too) == set(theirs)
    assert noted == [("loss", [ours_too["loss"]]), ("grad_norm", [2.0]), ("learning_rate", [0.01])]
    noted.clear()
    finish(hooked, forward_only=True)  # no training
    assert noted == []
