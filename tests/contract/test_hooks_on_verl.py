"""Every hook against the real verl that is installed: it fits, it does what it says, and it goes away."""

import contextlib
import importlib
import importlib.metadata
import inspect

import pytest
from opentelemetry.sdk._logs import LoggerProvider
from opentelemetry.sdk._logs.export import InMemoryLogRecordExporter, SimpleLogRecordProcessor
from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.metrics.export import InMemoryMetricReader
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from verl_otel import VerlInstrumentor, border, hooks, telemetry
from verl_otel.hooks.patches import Patches
from verl_otel.tracing.ids import DerivedIdGenerator

VERL = importlib.metadata.version("verl")

SEAMS = {
    "ray": ["init"],
    "ray._private.worker": ["disconnect"],
    "ray.actor": ["ActorClass._remote", "ActorMethod._remote", "_make_actor"],
    "verl.utils.profiler.performance": ["_timer"],
    "verl.utils.tracking": ["Tracking.__init__", "Tracking.log", *(["Tracking.finish"] if VERL >= "0.9" else [])],
    "verl.single_controller.base.decorator": ["register"],
    "verl.single_controller.ray.base": ["_bind_workers_method_to_parent"],
    "verl.utils.rollout_trace": ["rollout_trace_attr"],
    "verl.utils.ray_utils": ["auto_await"],
    "verl.trainer.ppo.ray_trainer": [
        *("RayPPOTrainer.fit", "RayPPOTrainer.init_workers", "RayPPOTrainer._validate", "compute_advantage"),
        "RayPPOTrainer._save_checkpoint",
    ],
    "verl.trainer.ppo.metric_utils": ["compute_data_metrics"],
    "verl.workers.engine_workers": ["TrainingWorker._postprocess_output"],
    "verl.workers.rollout.llm_server": [
        *("LLMServerClient.generate", *(["FullyAsyncLLMServerClient.generate"] if VERL >= "0.9" else []))
    ],
    "verl.workers.rollout.replica": ["RolloutReplica.init_hybrid", "RolloutReplica.init_standalone"],
    "verl.trainer.ppo.v1.trainer_base": [
        *("PPOTrainer.fit", "PPOTrainer.init", "PPOTrainer._validate", "PPOTrainer.step"),
        *("PPOTrainer._add_batch_to_generate", "PPOTrainer._save_checkpoint"),
    ],
    "verl.checkpoint_engine.base": ["CheckpointEngineManager.build_process_group"],
    "verl.experimental.separation.ray_trainer": [
        *("SeparateRayPPOTrainer.init_workers", "SeparateRayPPOTrainer._init_resource_pools"),
        "SeparateRayPPOTrainer._fit_start_profile",
    ],
    "verl.experimental.one_step_off_policy.ray_trainer": ["OneStepOffRayTrainer.fit"],
    "verl.experimental.fully_async_policy.message_queue": [
        *("MessageQueueClient.get_queue_size", "MessageQueueClient.clear_queue")
    ],
    "verl.experimental.agent_loop.agent_loop": [
        *(["AsyncLLMServerManager.generate"] if VERL < "0.8" else []),
        *(["AgentLoopWorker.__init__", "AgentLoopWorker._run_agent_loop"] if VERL >= "0.7.1" else []),
        *(["AgentLoopWorkerBase._run_agent_loop"] if VERL < "0.7.1" else []),
    ],
    "verl.experimental.agent_loop.tool_agent_loop": ["ToolAgentLoop._call_tool"],
    "verl.tools.base_tool": ["BaseTool.__init_subclass__"],
    "verl.tools.function_tool": ["FunctionTool.call"],
    "verl.utils.reward_score.sandbox_fusion.utils": ["check_correctness"],
    "verl.utils.checkpoint.checkpoint_handler": [
        *("CheckpointHandler.__init__", "CheckpointHandler.load_checkpoint", "CheckpointHandler.save_checkpoint")
    ],
    "verl.experimental.reward_loop.reward_loop": ["RewardLoopWorker.compute_score"],
    "verl.workers.actor.dp_actor": ["DataParallelPPOActor.update_policy"],
    "verl.workers.critic.dp_critic": ["DataParallelPPOCritic.update_critic"],
    "verl.trainer.main_ppo_sync": [
        *("PPOTrainer.fit", "PPOTrainer.init_workers", "PPOTrainer._validate", "PPOTrainer._save_checkpoint")
    ],
}
IN_THIS_VERSION = [hook for hook in hooks.HOOKS if hook.is_in(VERL)]
NOT_IN_THIS_VERSION = [hook for hook in hooks.HOOKS if not hook.is_in(VERL) and hook.module in SEAMS]


def resolve(module: str, name: str):
    owner = importlib.import_module(module)
    *path, last = name.split(".")
    for part in path:
        owner = getattr(owner, part)
    return vars(owner).get(last)  # BaseTool has no __init_subclass__ of its own


def seams():
    modules = {hook.module for hook in IN_THIS_VERSION}
    return {(module, name): resolve(module, name) for module in SEAMS if module in modules for name in SEAMS[module]}


class Seen:
    """What was exported."""

    def __init__(self):
        self.spans_exporter = InMemorySpanExporter()
        self.reader = InMemoryMetricReader()
        self.logs = InMemoryLogRecordExporter()

    @property
    def spans(self):
        return self.spans_exporter.get_finished_spans()

    @property
    def events(self):
        return [log.log_record for log in self.logs.get_finished_logs()]

    def points(self, name):
        data = self.reader.get_metrics_data()
        metrics = [m for r in data.resource_metrics for s in r.scope_metrics for m in s.metrics] if data else []
        return [point for m in metrics if m.name == name for point in m.data.data_points]


@contextlib.contextmanager
def instrumented():
    """verl instrumented, everything exported to memory."""
    seen = Seen()
    tracer_provider = TracerProvider(id_generator=DerivedIdGenerator(), shutdown_on_exit=False)
    tracer_provider.add_span_processor(SimpleSpanProcessor(seen.spans_exporter))
    logger_provider = LoggerProvider(shutdown_on_exit=False)
    logger_provider.add_log_record_processor(SimpleLogRecordProcessor(seen.logs))
    instrumentor = VerlInstrumentor()
    instrumentor.instrument(
        skip_dep_check=True,
        tracer_provider=tracer_provider,
        meter_provider=MeterProvider([seen.reader], shutdown_on_exit=False),
        logger_provider=logger_provider,
    )
    try:
        yield seen
    finally:
        instrumentor.uninstrument()


def test_every_hook_fits_this_version_and_uninstrument_puts_every_name_back():
    before = seams()
    with instrumented():
        fitting = [hook for hook in IN_THIS_VERSION if hook.name != "engine_tracing"]  # no engine is installed here
        assert hooks.status() == {hook.seam: "installed" for hook in fitting}
        replaced = seams()
        assert [seam for seam in before if replaced[seam] is before[seam]] == []
    after = seams()
    assert [seam for seam in before if after[seam] is not before[seam]] == []


@pytest.mark.parametrize("hook", [hook for hook in NOT_IN_THIS_VERSION if hook.module != "ray"], ids=lambda h: h.seam)
def test_a_hook_is_left_out_only_where_its_seam_is_not(hook):
    """Not there, or in a class that Ray pickles by value, which a wrapper of ours would not reach."""
    patches = Patches()
    try:
        hook.install(importlib.import_module(hook.module), patches)
    except (ImportError, AttributeError):
        return
    assert {type(owner).__name__.split("(")[0] for owner, *_ in patches._done} == {"ActorClass"}
    patches.undo()


def test_nothing_is_complained_of_in_a_version_that_lacks_some_seams(caplog):
    with instrumented():
        for hook in hooks.HOOKS:
            with contextlib.suppress(ImportError):
                importlib.import_module(hook.module)
    assert [r.message for r in caplog.records if r.name == "verl_otel"] == []


def test_instrumenting_again_after_uninstrument_works():
    for _ in range(2):
        with instrumented() as seen:
            time_one_stage("adv")
        assert [span.name for span in seen.spans] == ["verl.advantage"]


def time_one_stage(name):
    from verl.utils.profiler import marked_timer

    timing = {}
    with marked_timer(name, timing):
        pass
    return timing


def test_a_stage_span_covers_the_interval_that_verl_times():
    with instrumented() as seen:
        timing = time_one_stage("update_actor")
    (span,) = seen.spans
    assert span.name == "verl.update_actor"
    assert 0 <= (span.end_time - span.start_time) / 1e9 - timing["update_actor"] < 0.05


def test_a_failing_stage_has_error_status_and_the_same_exception_reaches_verl():
    from verl.utils.profiler import marked_timer

    failure = RuntimeError("out of memory")
    with instrumented() as seen, pytest.raises(RuntimeError) as caught, marked_timer("update_critic", {}):
        raise failure
    assert caught.value is failure
    (span,) = seen.spans
    assert span.status.status_code.name == "ERROR"
    assert span.events[0].attributes["exception.message"] == "out of memory"


def test_what_tracking_logs_becomes_metrics_and_one_step_event(tmp_path, monkeypatch):
    from verl.utils.tracking import Tracking

    monkeypatch.setenv("VERL_FILE_LOGGER_ROOT", str(tmp_path))
    data = {"critic/score/mean": 0.1234567890123, "actor/grad_norm": 2, "val-core/a/b/acc/mean@4": 0.5, "note": "text"}
    with instrumented() as seen:
        tracking = Tracking("project", "experiment", default_backend=["file"], config={"trainer": {"nnodes": 1}})
        tracking.log(data={k: v for k, v in data.items() if k != "note"}, step=7)
        tracking.log(data={"note": "text"}, step=8)
        assert telemetry.current().background.drained(10)
        (point,) = seen.points("verl.reward.mean")
        assert point.value == data["critic/score/mean"]
        assert dict(point.attributes) == {
            "rank": "all",
            "stage": "reward",
            "model_type": "reward",
            "verl.key": "critic/score/mean",
        }
    steps = [event for event in seen.events if event.event_name == "verl.step"]
    assert [(e.attributes["verl.step.number"], dict(e.body)) for e in steps] == [
        (7, {k: v for k, v in data.items() if k != "note"}),
        (8, {}),
    ]


def test_tracking_works_as_before_when_our_part_fails(monkeypatch, tmp_path, caplog):
    from verl.utils.tracking import Tracking

    monkeypatch.setenv("VERL_FILE_LOGGER_ROOT", str(tmp_path))

    def broken(*_):
        raise ValueError("ours")

    with instrumented() as seen:
        monkeypatch.setattr(telemetry.current(), "log", broken)
        tracking = Tracking("project", "experiment", default_backend=["file"])
        tracking.log(data={"a/b": 1.5}, step=1)
        tracking.log(data={"a/b": 2.5}, step=2)
        assert {p.attributes["verl.otel.site"]: p.value for p in seen.points("verl.otel.failures")} == {
            "Tracking.log": 2
        }
        tracking.logger["file"].finish()
    (written,) = tmp_path.rglob("*.jsonl")
    assert len(written.read_text().splitlines()) == 2
    begin = "verl-otel: Tracking.log failed; the run goes on, this part of its telemetry is lost\nTraceback "
    said = [r.message for r in caplog.records if r.name == "verl_otel" and r.message.startswith(begin)]
    assert len(said) == 1
    assert said[0].endswith("\nValueError: ours")


@pytest.fixture(autouse=True)
def fresh_border():
    border._counts.clear()


def registered_worker():
    """A worker class as verl writes them, with registered methods of both kinds."""
    from verl.single_controller.base import decorator

    class Engine:
        rank = 3

        @decorator.register(dispatch_mode=decorator.Dispatch.ONE_TO_ALL)
        def update_actor(self, x):
            return self.train_mini_batch(x) + 1

        @decorator.register(dispatch_mode=decorator.Dispatch.ONE_TO_ALL)
        def train_mini_batch(self, x):
            if x < 0:
                raise ValueError("negative")
            return x * 2

        @decorator.register(dispatch_mode=decorator.Dispatch.ONE_TO_ALL)
        async def update_weights(self, x):
            return x

    return Engine


def test_a_registered_method_keeps_what_verl_and_ray_look_at():
    from verl.single_controller.base import decorator

    plain = registered_worker()
    with instrumented():
        wrapped = registered_worker()
    for name in ("update_actor", "update_weights"):
        before, after = vars(plain)[name], vars(wrapped)[name]
        assert getattr(after, decorator.MAGIC_ATTR) == getattr(before, decorator.MAGIC_ATTR)
        assert inspect.iscoroutinefunction(after) == inspect.iscoroutinefunction(before)
        assert after.__name__ == before.__name__


def test_nested_worker_calls_have_one_span_with_rank_and_error():
    with instrumented() as seen:
        worker = registered_worker()()
        assert worker.update_actor(2) == 5
        with pytest.raises(ValueError, match="negative"):
            worker.update_actor(-1)
    assert [(s.name, s.attributes["rank"], s.status.status_code.name) for s in seen.spans] == [
        ("verl.worker.update_actor", "3", "UNSET"),
        ("verl.worker.update_actor", "3", "ERROR"),
    ]


def test_a_worker_wrapped_while_instrumented_works_after_uninstrument():
    with instrumented() as seen:
        worker = registered_worker()()
    assert worker.update_actor(2) == 5
    assert seen.spans == ()


def test_a_hook_that_does_not_fit_is_off_and_says_so_and_the_others_work(monkeypatch, caplog):
    from verl.utils import tracking

    monkeypatch.delattr(tracking, "Tracking")
    with instrumented() as seen:
        assert hooks.status()["tracking on verl.utils.tracking"].startswith("AttributeError")
        time_one_stage("adv")
    assert [span.name for span in seen.spans] == ["verl.advantage"]
    assert sum("that part of the telemetry is off" in r.message for r in caplog.records) == 1


def test_trajectories_are_sampled_capped_and_in_the_trace_of_their_step(monkeypatch):
    from verl.utils.profiler.performance import simple_timer
    from verl.utils.rollout_trace import rollout_trace_attr  # noqa: F401  (imported before: replaced where it is)

    monkeypatch.setenv("VERL_OTEL_TRAJECTORIES", "2")
    with instrumented() as seen:
        from verl.utils import rollout_trace

        # All at once: the first is the slowest.
        with contextlib.ExitStack() as running:
            for sample in range(5):
                running.enter_context(
                    rollout_trace.rollout_trace_attr(sample_index=sample, step=4, rollout_n=0, validate=False)
                )
                with simple_timer("generate_sequences", {}):
                    pass
        dropped = {tuple(p.attributes.values()): p.value for p in seen.points("verl.otel.dropped")}
        identity = telemetry.current().identity
    from verl_otel.tracing import ids

    assert sorted(span.name for span in seen.spans) == sorted(["verl.generate", "verl.turn", "verl.trajectory"] * 2)
    assert {s.context.trace_id for s in seen.spans} == {ids.trace_id(identity.run_id, identity.attempt, 4)}
    parents = {span.parent.span_id for span in seen.spans if span.name == "verl.trajectory"}
    assert parents == {ids.span_id(identity.run_id, identity.attempt, 4, "gen")}
    assert dropped == {("traces", "trajectory_cap"): 3}


@pytest.mark.verl(since="0.7.1")
def test_auto_await_keeps_the_callers_context_and_its_own_rules():
    import asyncio

    from opentelemetry import trace
    from verl.utils import ray_utils

    with instrumented():

        @ray_utils.auto_await
        async def current():
            return trace.get_current_span().get_span_context().span_id

        tracer = TracerProvider(shutdown_on_exit=False).get_tracer("test")
        with tracer.start_as_current_span("outer") as span:
            wanted = span.get_span_context().span_id

            def sync_in_loop():
                return current()  # runs in another thread

            async def from_coroutine():
                return await current(), sync_in_loop()

            assert current() == wanted
            assert asyncio.run(from_coroutine()) == (wanted, wanted)


def test_arguments_that_another_version_of_tracking_has_reach_it(monkeypatch):
    from verl.utils import tracking

    got = []

    class Tracking(tracking.Tracking):
        def __init__(self, project_name, experiment_name, *, config=None, tags=()):
            got.append(tags)
            self.logger = {}

        def finish(self, exit_code=0, quiet=False):
            got.append((exit_code, quiet))

    monkeypatch.setattr(tracking, "Tracking", Tracking)
    with instrumented() as seen:
        made = tracking.Tracking("project", experiment_name="experiment", tags=("a",))
        made.finish(1, quiet=True)
    assert got[:2] == [("a",), (1, True)]
    assert [e.attributes["verl.run.state"] for e in seen.events if e.event_name == "verl.run.finished"] == ["failed"]


TRAINERS = {"verl.trainer.ppo.ray_trainer": "RayPPOTrainer", "verl.trainer.ppo.v1.trainer_base": "PPOTrainer"}


@pytest.mark.parametrize(
    "module", [hook.module for hook in IN_THIS_VERSION if hook.module in TRAINERS and hook.name == "trainer"]
)
def test_verls_loop_looks_at_what_run_control_sets(module):
    """`save_freq` in each step, and `total_training_steps` before each: real runs are asked in tests/e2e."""
    fit = inspect.getsource(getattr(importlib.import_module(module), TRAINERS[module]).fit)
    assert "self.config.trainer.save_freq > 0" in fit and "self.global_steps % self.config.trainer.save_freq" in fit
    assert "is_last_step = self.global_steps >= self.total_training_steps" in fit
    saved, logged, counted = (
        fit.index("_save_checkpoint()"),
        fit.rindex("logger.log("),
        fit.rindex("self.global_steps += 1"),
    )
    assert fit.index("is_last_step =") < saved < logged < counted
