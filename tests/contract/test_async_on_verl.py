"""The hooks for asynchronous trainers, on verl's own classes; only the actors and ranks behind them are not there."""

import asyncio
import sys
import time
import types

import pytest
from test_hooks_on_verl import instrumented

from verl_otel import border, telemetry


@pytest.fixture(autouse=True)
def fresh_border():
    border._counts.clear()
    yield
    assert border.failures() == {}


class Replica:
    """A rollout replica that answers."""

    workers = ()

    async def answer(self, **kwargs):
        await asyncio.sleep(0.001)

    abort_all_requests = resume_generation = release_kv_cache = resume_kv_cache = sleep = wake_up = answer


class Group:
    """A group of one rank that answers, with the metrics of a checkpoint engine."""

    world_size = 1

    def __init__(self, **kwargs):
        pass

    def execute_checkpoint_engine(self, *args, **kwargs):
        return [{}]

    def update_weights(self, **kwargs):
        return [{"checkpoint_engine/payload_mbytes": 0.25}]


@pytest.fixture
def manager(monkeypatch):
    """verl's manager of the weight sync."""

    def make(replicas=2, backend="there"):
        from verl.checkpoint_engine import base

        monkeypatch.setattr(base, "RayWorkerGroup", Group)
        monkeypatch.setattr(base.ray, "get", lambda references: references)
        engine = types.SimpleNamespace(build_topology=lambda *args: ({}, {}))
        monkeypatch.setitem(base.CheckpointEngineRegistry._registry, "there", engine)
        config = types.SimpleNamespace(backend=backend, custom_backend_module=None)
        return base.CheckpointEngineManager(config, Group(), [Replica() for _ in range(replicas)])

    return make


@pytest.fixture
def reloaded(monkeypatch):
    """Modules whose functions are decorated at import have to be imported while we are there, as in a run."""
    kept = {name: module for name, module in sys.modules.items() if name.startswith("verl.checkpoint_engine")}
    for name in kept:
        monkeypatch.delitem(sys.modules, name)
    yield
    for name in [name for name in sys.modules if name.startswith("verl.checkpoint_engine")]:
        monkeypatch.delitem(sys.modules, name)
    sys.modules.update(kept)


def in_stage(timer, work):
    from verl.utils.profiler import marked_timer

    with marked_timer(timer, {}):
        return work()


def test_a_weight_sync_has_its_parts_in_order_and_says_version_and_bytes(manager, reloaded):
    with instrumented() as seen:
        made = manager()
        in_stage("update_weights", lambda: made.update_weights(7))
        assert telemetry.current().background.drained(10)
        version = telemetry.current().steps.policy_version
    (stage,) = [s for s in seen.spans if s.name == "verl.weight_sync"]
    parts = sorted((s for s in seen.spans if s is not stage), key=lambda s: s.start_time)
    assert [s.name for s in parts] == [
        f"verl.weight_sync.{part}" for part in ("abort", "release", "transfer", "resume", "resume")
    ]
    assert {s.parent.span_id for s in parts} == {stage.context.span_id}
    assert [s.attributes.get("verl.weight_sync.replicas") for s in parts] == [2, 2, None, 2, 2]
    assert stage.attributes["verl.policy.version"] == version == 7
    assert stage.attributes["verl.weight_sync.bytes"] == 2**18


def test_a_weight_sync_from_a_coroutine_is_the_same(manager, reloaded):
    async def sync(made):
        return await made.update_weights(global_steps=8)

    with instrumented() as seen:
        made = manager()
        assert in_stage("timing_s/param_sync", lambda: asyncio.run(sync(made)))
        assert telemetry.current().background.drained(10)
    assert len([s for s in seen.spans if s.name.startswith("verl.weight_sync.")]) == 5


def test_a_sync_inside_the_ranks_has_no_parts(manager, reloaded):
    with instrumented() as seen:
        made = manager(backend="naive")
        in_stage("update_weights", lambda: made.update_weights(9))
        assert telemetry.current().background.drained(10)
    assert [s.name for s in seen.spans] == ["verl.weight_sync"]
    assert seen.spans[0].attributes["verl.policy.version"] == 9


def test_of_a_v1_step_staleness_and_links_are_told():
    from transfer_queue import KVBatchMeta
    from verl.trainer.ppo.v1 import trainer_base

    class Trainer(trainer_base.PPOTrainer):
        on_step_end = on_sample_end = lambda self: None

        def __init__(self):
            self.global_steps = 3
            self.parameter_sync_step = 2
            self.config = types.SimpleNamespace(data=types.SimpleNamespace(train_batch_size=4))

        def prepare_step(self):
            return {}

        def _step_once(self, metrics, timing_raw, size):
            tags = [{"global_steps": 2, "min_global_steps": 1, "max_global_steps": 1}] * size
            padding = {"is_padding": True, "min_global_steps": 0, "max_global_steps": 0, "global_steps": 0}
            keys = [f"{self.local_trigger_step}_{number}" for number in range(size + 1)]
            return KVBatchMeta(partition_id="train", keys=keys, tags=[*tags, padding])

    with instrumented() as seen:
        t, trainer = telemetry.current(), Trainer()
        t.steps.follow(trainer)
        t.steps.policy_version = 2
        t.steps._first = 1
        in_stage("step", lambda: trainer.step({}, {}))
        assert t.background.drained(10)
        (point,) = seen.points("verl.rollout.staleness")
    assert (point.count, point.sum) == (4, 4)
    (link,) = seen.spans[0].links
    assert dict(link.attributes) == {"verl.step.number": 2, "verl.count": 4}


def test_the_other_trainers_say_staleness_where_the_batch_does():
    import torch
    from verl import DataProto
    from verl.trainer.ppo import ray_trainer

    data = DataProto.from_dict(
        tensors={"token_level_rewards": torch.ones(4, 2), "response_mask": torch.ones(4, 2)},
        non_tensors={"uid": ["a", "a", "b", "b"], "max_global_steps": [3, 3, 2, 1]},
    )
    with instrumented() as seen:
        t = telemetry.current()
        t.steps.policy_version = 3
        ray_trainer.compute_advantage(data, adv_estimator="grpo")
        assert t.background.drained(10)
        (point,) = seen.points("verl.rollout.staleness")
    assert (point.count, point.sum, point.max) == (4, 3, 2)


def separate_trainer():
    """A class of its own, as users have it, of which only the profiling is asked."""
    from verl.experimental.separation.ray_trainer import SeparateRayPPOTrainer

    class Trainer(SeparateRayPPOTrainer):
        def __init__(self):
            self.global_steps, self.timing_raw = 5, {}

        def _start_profiling(self, do_profile):
            pass

    return Trainer


def test_a_trainer_with_separate_rollouts_is_known_from_its_base_and_logs_by_version():
    trainer = separate_trainer()
    with instrumented():
        t, one, other = telemetry.current(), trainer(), trainer()
        one._fit_start_profile(should_profiler=False)
        assert (t.steps.number(), t.steps.waits_for_rollout, t.steps.rollout_is_elsewhere) == (5, True, True)
        assert t.step_values.by_number
        other.current_param_version = 2
        other._fit_start_profile(should_profiler=False)
        assert not t.step_values.by_number


def test_a_trainer_that_takes_no_requests_says_so_where_somebody_relies_on_it(monkeypatch):
    trainer = separate_trainer()
    with instrumented():
        trainer()._fit_start_profile(should_profiler=False)
        assert "run control" not in border.failures()
        monkeypatch.setenv("VERL_OTEL_CONTROL", "/some/folder")
        trainer()._fit_start_profile(should_profiler=False)
        assert border.failures() == {"run control": 1}
    border._counts.clear()


def test_the_rollouter_is_measured_at_each_version_of_the_weights():
    from verl.experimental.fully_async_policy.message_queue import MessageQueueClient

    class Queue:
        def get_queue_size(self):
            future = asyncio.get_running_loop().create_future()
            future.set_result(3)
            return types.SimpleNamespace(future=lambda: future)

    class Rollouter:
        processor_task = object()

        def __init__(self, client):
            now = time.time()
            self.message_queue_client = client
            # Samples were in work in the first half, with two pauses of a second each in the other.
            self._active_count_history = [(now - 8, 2, 4), (now - 4, 0, 4), (now - 3, 1, 4), (now - 1, 0, 4)]

        async def reset_staleness(self):
            return await self.message_queue_client.get_queue_size()

        async def other(self):
            return await self.message_queue_client.get_queue_size()

    queue = Queue()
    queue.get_queue_size = types.SimpleNamespace(remote=queue.get_queue_size)

    def wrapped(future):
        return future

    with instrumented() as seen, pytest.MonkeyPatch.context() as patch:
        patch.setattr(asyncio, "wrap_future", wrapped)
        t = telemetry.current()
        rollouter = Rollouter(MessageQueueClient(queue))
        assert asyncio.run(rollouter.other()) == 3
        assert t.background.drained(10)
        assert seen.points("verl.rollouter.idle_ratio") == []
        assert asyncio.run(rollouter.reset_staleness()) == 3
        assert t.background.drained(10)
        (point,) = seen.points("verl.rollouter.idle_ratio")
    assert point.value == pytest.approx(0.25, abs=0.01)
