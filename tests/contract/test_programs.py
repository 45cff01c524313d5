"""Each program of verl, one test for each column of the table of versions: what of it our hooks hold on to.

The timers are read from verl's own source; the classes and their methods are the real ones, with the hooks installed.
"""

import ast
import functools
import importlib
import importlib.util
import inspect
import json
import subprocess
from pathlib import Path

import bed
import pytest
from test_hooks_on_verl import VERL, instrumented

from verl_otel.semconv.stages import TRAJECTORY_TIMERS, stage_of

AROUND = {"start_profile", "stop_profile", "dump_rollout_generations"}
"""Timers that are no stage of ours: they become `verl.<timer>`."""

COMPUTE = {"reward", "old_log_prob", "ref", "values", "adv", "update_critic", "update_actor"}
STEP = {"step", "gen", "testing", "save_checkpoint", *COMPUTE}


def timers(*modules):
    """The names that these modules give to verl's timers."""
    found = set()
    for module in modules:
        for node in ast.walk(ast.parse(source(module))):
            if isinstance(node, ast.Call) and getattr(node.func, "id", "") in ("marked_timer", "simple_timer"):
                name = node.args[0]
                found.add(
                    name.value if isinstance(name, ast.Constant) else {"str(Role.RefPolicy)": "ref"}[ast.unparse(name)]
                )
    return found


def source(module):
    spec = importlib.util.find_spec(module)
    assert spec is not None and spec.origin, module
    return Path(spec.origin).read_text()


def assert_known(names):
    """Each timer has a stage or a part of a trajectory, or is one of those around the stages."""
    unknown = {name for name in names if stage_of(name).stage == "other" and name not in TRAJECTORY_TIMERS}
    assert unknown <= AROUND, unknown


def assert_logs_by_keyword(module):
    """What we take `data` and `step` from: each call of `Tracking.log`, by keyword; there is one at least."""
    calls = [
        {keyword.arg for keyword in node.keywords}
        for node in ast.walk(ast.parse(source(module)))
        if isinstance(node, ast.Call) and ast.unparse(node.func) in ("logger.log", "self.logger.log", "tracking.log")
    ]
    assert calls and all(call >= {"data", "step"} for call in calls), calls
    assert "Tracking(" in source(module) or "SeparateRayPPOTrainer" in source(module)


WORKERS = """
import importlib, inspect, json, sys
from verl_otel.tracing.propagation import carrier_kind
found = {}
for name in sys.argv[1:]:
    module, _, worker = name.rpartition(".")
    methods = inspect.getmembers(getattr(importlib.import_module(module), worker), inspect.isfunction)
    taken = [key for key, method in methods if carrier_kind([*inspect.signature(method).parameters.values()])]
    found[worker] = [key for key in taken if dict(methods)[key].__name__ == key]
print("found", json.dumps(found))
"""


@functools.cache
def methods_with_carrier(*workers):
    """Worker class -> its methods that take the trace context, in a process that is instrumented as a worker is."""
    command = [bed.INSTRUMENT, bed.LAUNCHER, "-c", WORKERS, *workers]
    done = subprocess.run(command, env=bed.clean_environment(), capture_output=True, text=True, timeout=120)
    (line,) = [line for line in done.stdout.splitlines() if line.startswith("found ")] or [done.stderr[-3000:]]
    return json.loads(line.removeprefix("found "))


ENGINE = ("verl.workers.engine_workers.ActorRolloutRefWorker", "verl.workers.engine_workers.TrainingWorker")
BEFORE_THE_ENGINE = ("verl.workers.fsdp_workers.ActorRolloutRefWorker", "verl.workers.fsdp_workers.CriticWorker")
ACTOR = {"compute_log_prob", "compute_ref_log_prob", "update_actor", "save_checkpoint", "init_model"}
TRAINING = {"train_batch", "infer_batch", "train_mini_batch", "reset", "save_checkpoint"}
CRITIC = {"compute_values", "update_critic", "save_checkpoint", "init_model"}
"""Methods that trainers call on ranks."""


def by_value(thing):
    """Whether Ray pickles a class by value: the name in its module is an actor class, not the class itself."""
    return type(thing).__name__.startswith("ActorClass")


def wrapped(cls, *names):
    """Whether each of these methods of a class is, or inherits, one that we have wrapped."""
    return [name for name in names if not hasattr(getattr(cls, name), "__wrapped__")] == []


def test_legacy_trainer():
    """`RayPPOTrainer`, which PPO and GRPO use before 0.9: class by reference, timers, worker methods."""
    found = timers("verl.trainer.ppo.ray_trainer")
    assert found >= STEP and ("update_weights" in found) == (VERL >= "0.7.1")
    assert_known(found)
    assert_logs_by_keyword("verl.trainer.ppo.ray_trainer")
    with instrumented():
        from verl.trainer.ppo.ray_trainer import RayPPOTrainer

        assert not by_value(RayPPOTrainer)
        assert wrapped(RayPPOTrainer, "fit", "init_workers", "_validate")
    if VERL < "0.8":
        found = methods_with_carrier(*BEFORE_THE_ENGINE)
        assert set(found["ActorRolloutRefWorker"]) >= ACTOR and set(found["CriticWorker"]) >= CRITIC
    if VERL >= "0.7":
        found = methods_with_carrier(*ENGINE)
        assert set(found["ActorRolloutRefWorker"]) >= ACTOR and set(found["TrainingWorker"]) >= TRAINING


@pytest.mark.verl(since="0.9.0")
def test_v1_trainers():
    """`PPOTrainer` and its three modes: none of them hides from us what the base class has."""
    base = "verl.trainer.ppo.v1.trainer_base"
    assert timers(base) >= STEP
    assert_logs_by_keyword(base)
    with instrumented():
        from verl.trainer.ppo.v1 import get_trainer_cls

        for mode in ("sync", "colocate_async", "separate_async"):
            trainer = get_trainer_cls(mode)
            assert not by_value(trainer)
            assert wrapped(trainer, "fit", "init", "_validate"), mode
            found = timers(trainer.__module__)
            assert "update_weights" in found
            assert_known(found)


@pytest.mark.verl(since="0.8.0", until="0.9.0")
def test_main_ppo_sync():
    found = timers("verl.trainer.main_ppo_sync")
    assert found == {*STEP, "update_weights", "dump_rollout_generations"}
    assert_known(found)
    assert_logs_by_keyword("verl.trainer.main_ppo_sync")
    with instrumented():
        from verl.trainer import main_ppo_sync

        assert by_value(main_ppo_sync.TaskRunner) and by_value(main_ppo_sync.AgentLoopWorkerTQ)
        assert wrapped(main_ppo_sync.PPOTrainer, "fit", "init_workers", "_validate")


@pytest.mark.verl(since="0.8.0")
def test_one_step_off():
    """Trainer by reference, in a task runner by value."""
    trainer = "verl.experimental.one_step_off_policy.ray_trainer"
    found = timers(trainer, "verl.experimental.separation.ray_trainer")
    assert found >= {"generate_async", "sync_rollout_weights", *STEP}
    assert_known(found)
    assert_logs_by_keyword(trainer)
    with instrumented():
        from verl.experimental.one_step_off_policy import main_ppo

        assert by_value(main_ppo.OneStepTaskRunner)
        assert not by_value(importlib.import_module(trainer).OneStepOffRayTrainer)
    assert set(methods_with_carrier(*ENGINE)["ActorRolloutRefWorker"]) >= {*ACTOR, "update_weights"}


@pytest.mark.verl(since="0.8.0")
def test_fully_async():
    """Trainer and rollouter are actors by value: their timers, Tracking and their base class are what we have."""
    package = "verl.experimental.fully_async_policy"
    found = timers(*(f"{package}.{name}" for name in ("fully_async_trainer", "fully_async_rollouter")))
    assert found >= {"step", "gen", "timing_s/param_sync", "rollouter/validate_time"}
    assert_known(found)
    assert_logs_by_keyword(f"{package}.fully_async_trainer")
    with instrumented():
        for module, name in (
            ("fully_async_trainer", "FullyAsyncTrainer"),
            ("fully_async_rollouter", "FullyAsyncRollouter"),
        ):
            assert by_value(getattr(importlib.import_module(f"{package}.{module}"), name))


def test_sft_by_torchrun():
    """No Ray: `Tracking` in the first process, and from 0.7.0 on the engine's methods, called where they are."""
    module = "verl.trainer.sft_trainer"
    assert_logs_by_keyword(module)
    assert timers(module) == set()
    if VERL >= "0.7":
        assert "TrainingWorker(" in source(module)
        assert set(methods_with_carrier(*ENGINE)["TrainingWorker"]) >= TRAINING


@pytest.mark.verl(since="0.7.0")
def test_sft_on_ray():
    """`TrainingWorker` as an actor class of its own, by reference, not fused into a WorkerDict."""
    module = "verl.trainer.sft_trainer_ray"
    assert_logs_by_keyword(module)
    assert timers(module) == set()
    assert "ray.remote(TrainingWorker)" in source(module)
    assert not by_value(importlib.import_module("verl.workers.engine_workers").TrainingWorker)
    assert set(methods_with_carrier(*ENGINE)["TrainingWorker"]) >= TRAINING


def test_agent_loop_with_tools():
    """Trajectories, their generations and tool calls; before 0.7.1 in a worker whose base class is by reference."""
    package = "verl.experimental.agent_loop"
    assert timers(f"{package}.single_turn_agent_loop") == {"generate_sequences"}
    assert timers(f"{package}.tool_agent_loop") == {"generate_sequences", "tool_calls"}
    assert timers(f"{package}.agent_loop") == ({"compute_score"} if VERL >= "0.8" else set())
    with instrumented():
        module = importlib.import_module(f"{package}.agent_loop")
        assert by_value(module.AgentLoopWorker) == (VERL < "0.7.1")
        base = module.AgentLoopWorkerBase if VERL < "0.7.1" else module.AgentLoopWorker
        assert "rollout_trace_attr(" in inspect.getsource(base._run_agent_loop)
        rollout_trace = importlib.import_module("verl.utils.rollout_trace")
        assert module.rollout_trace_attr is rollout_trace.rollout_trace_attr
        assert hasattr(rollout_trace.rollout_trace_attr, "__wrapped__")
        client = (
            importlib.import_module("verl.workers.rollout.llm_server").LLMServerClient
            if VERL >= "0.8"
            else module.AsyncLLMServerManager
        )
        assert wrapped(client, "generate")
