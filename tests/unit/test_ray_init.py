"""What workers are given through `ray.init` (`hooks/ray_init.py`): all they need, and nothing of the user's changed."""

import copy
import json
import os
from types import ModuleType

import pytest
from opentelemetry.sdk.resources import OTELResourceDetector

from verl_otel import border, identity, telemetry
from verl_otel.hooks import ray_init
from verl_otel.hooks.patches import Patches
from verl_otel.hooks.ray_init import environment, with_environment
from verl_otel.identity import Identity


@pytest.fixture
def launcher(memory, monkeypatch, tmp_path):
    """Make the launcher's telemetry, after the test has set its variables."""
    monkeypatch.setenv("VERL_OTEL_FOLDER", str(tmp_path / "recordings"))
    return lambda: memory.process("launcher")


def test_the_variables_go_to_env_vars_of_the_runtime_env():
    assert with_environment({}, {"A": "1"}) == {"runtime_env": {"env_vars": {"A": "1"}}}


@pytest.mark.parametrize("empty", [{"runtime_env": None}, {"runtime_env": {}}, {"runtime_env": {"env_vars": None}}])
def test_an_empty_runtime_env_is_filled(empty):
    assert with_environment(empty, {"A": "1"}) == {"runtime_env": {"env_vars": {"A": "1"}}}


def test_what_the_user_has_set_wins_and_the_rest_of_the_arguments_stays():
    kwargs = {
        "address": "auto",
        "num_cpus": 2,
        "runtime_env": {
            "working_dir": "/job",
            "env_vars": {"OTEL_SERVICE_NAME": "mine", "NCCL_DEBUG": "WARN", "PYTHONPATH": "/my/path"},
        },
    }
    env = {"OTEL_SERVICE_NAME": "theirs", "PYTHONPATH": "/auto:${PYTHONPATH}", "VERL_OTEL_RUN_ID": "run-1"}
    assert with_environment(kwargs, env) == {
        "address": "auto",
        "num_cpus": 2,
        "runtime_env": {
            "working_dir": "/job",
            "env_vars": {
                "OTEL_SERVICE_NAME": "mine",
                "NCCL_DEBUG": "WARN",
                "PYTHONPATH": "/my/path",
                "VERL_OTEL_RUN_ID": "run-1",
            },
        },
    }


def test_the_arguments_of_the_caller_are_not_changed():
    kwargs = {"runtime_env": {"env_vars": {"A": "1"}, "pip": ["x"]}}
    before = copy.deepcopy(kwargs)
    with_environment(kwargs, {"B": "2"})
    assert kwargs == before


def test_what_ray_job_submit_has_set_is_left_alone(monkeypatch):
    job = {"runtime_env": {"env_vars": {"OTEL_SERVICE_NAME": "of the job"}}}
    monkeypatch.setenv("RAY_JOB_CONFIG_JSON_ENV_VAR", json.dumps(job))
    env = {"OTEL_SERVICE_NAME": "ours", "VERL_OTEL_RUN_ID": "run-1"}
    assert with_environment({}, env) == {"runtime_env": {"env_vars": {"VERL_OTEL_RUN_ID": "run-1"}}}


@pytest.mark.parametrize(
    "job", ["", "not json", "[]", "7", "null", "{}", '{"runtime_env": null}', '{"runtime_env": 3}']
)
def test_a_job_configuration_that_cannot_be_read_is_none(monkeypatch, job):
    monkeypatch.setenv("RAY_JOB_CONFIG_JSON_ENV_VAR", job)
    assert with_environment({}, {"A": "1"}) == {"runtime_env": {"env_vars": {"A": "1"}}}


def test_workers_get_every_setting_of_opentelemetry_and_of_ours(launcher, monkeypatch):
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", "http://collector:4318")
    monkeypatch.setenv("OTEL_TRACES_SAMPLER", "parentbased_traceidratio")
    monkeypatch.setenv("VERL_OTEL_TRAJECTORIES", "9")
    monkeypatch.setenv("SOME_SECRET", "hunter2")
    monkeypatch.setenv("MY_OTEL_THING", "x")
    env = environment(launcher())
    assert env["OTEL_EXPORTER_OTLP_ENDPOINT"] == "http://collector:4318"
    assert env["OTEL_TRACES_SAMPLER"] == "parentbased_traceidratio"
    assert env["VERL_OTEL_TRAJECTORIES"] == "9"
    assert set(env) == {
        *("OTEL_EXPORTER_OTLP_ENDPOINT", "OTEL_TRACES_SAMPLER"),
        *("VERL_OTEL_TRAJECTORIES", "VERL_OTEL_FOLDER", "VERL_OTEL_RUN_ID", "VERL_OTEL_ACTIVE", "PYTHONPATH"),
    }
    assert all(isinstance(value, str) for value in env.values())


@pytest.mark.parametrize(
    "name",
    [
        *("VERL_OTEL_RELAY_URL", "VERL_OTEL_RELAY_TOKEN", "VERL_OTEL_BRIDGE_TOKEN", "VERL_OTEL_SQL_URL"),
        *("VERL_OTEL_INFLUX_URL", "VERL_OTEL_INFLUX_AUTHORIZATION", "VERL_OTEL_GATEWAY_AUTHORIZATION"),
    ],
)
def test_secrets_of_our_services_do_not_go_to_workers(launcher, monkeypatch, name):
    """Who has them in the shell for `verl-otel up`, and starts a training there."""
    monkeypatch.setenv(name, "SECRET")
    assert "SECRET" not in str(environment(launcher()))


def test_workers_are_of_the_same_run_below_its_span(launcher, memory):
    t = launcher()
    t.start_run()
    env = environment(t)
    assert env["VERL_OTEL_RUN_ID"] == "run-1"
    t.close()
    run = memory.span("verl.run").context
    assert env["TRACEPARENT"] == f"00-{run.trace_id:032x}-{run.span_id:016x}-01"


def test_the_folder_is_absolute_since_workers_run_elsewhere(launcher, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("VERL_OTEL_FOLDER", "recordings")
    assert environment(launcher())["VERL_OTEL_FOLDER"] == str(tmp_path / "recordings")


@pytest.mark.parametrize(
    "variable",
    [
        "OTEL_EXPORTER_OTLP_HEADERS",
        "OTEL_EXPORTER_OTLP_TRACES_HEADERS",
        "OTEL_EXPORTER_OTLP_METRICS_HEADERS",
        "OTEL_EXPORTER_OTLP_LOGS_HEADERS",
    ],
)
def test_a_dollar_in_a_header_is_kept_from_rays_expansion(launcher, monkeypatch, variable):
    monkeypatch.setenv(variable, "authorization=pa$HOME${PATH}$$,x=1")
    value = environment(launcher())[variable]
    assert value == "authorization=pa%24HOME%24{PATH}%24%24,x=1"
    assert os.path.expandvars(value) == value  # what Ray does with it in the worker


def in_worker(value, own, monkeypatch):
    """The resource of a worker on a node with `OTEL_RESOURCE_ATTRIBUTES=own`, to which Ray has given `value`."""
    from ray._private.utils import update_envs

    if own is None:
        monkeypatch.delenv("OTEL_RESOURCE_ATTRIBUTES", raising=False)
    else:
        monkeypatch.setenv("OTEL_RESOURCE_ATTRIBUTES", own)
    update_envs({"OTEL_RESOURCE_ATTRIBUTES": value} if value is not None else {})
    identity.tidy_resource_attributes()
    return dict(OTELResourceDetector().detect().attributes)


LAUNCHERS = (
    "team=rl,deployment.environment.name=research,host.name=head,host.id=7,k8s.pod.name=head-abc,k8s.pod.uid=1,"
    "k8s.node.name=node-1,k8s.container.name=ray-head,k8s.job.name=submitter,container.id=c0ffee,os.type=linux,"
    "process.pid=1,cloud.availability_zone=a,k8s.cluster.name=east,k8s.namespace.name=rl,cloud.region=eu"
)
SHARED = {
    "team": "rl",
    "deployment.environment.name": "research",
    "k8s.cluster.name": "east",
    "k8s.namespace.name": "rl",
    "cloud.region": "eu",
}


@pytest.mark.parametrize(
    ("own", "expected"),
    [
        (None, SHARED),
        ("", SHARED),
        ("k8s.pod.name=worker-7", {**SHARED, "k8s.pod.name": "worker-7"}),
        ("k8s.pod.name=worker-7,team=of%20the%20cluster", {**SHARED, "k8s.pod.name": "worker-7"}),
    ],
)
def test_a_worker_has_what_the_run_says_and_what_its_own_node_says(launcher, monkeypatch, caplog, own, expected):
    monkeypatch.setenv("OTEL_RESOURCE_ATTRIBUTES", LAUNCHERS)
    value = environment(launcher())["OTEL_RESOURCE_ATTRIBUTES"]
    assert in_worker(value, own, monkeypatch) == expected
    assert caplog.text == "", "the SDK warns of empty parts"


@pytest.mark.parametrize("launchers", [None, "", " , ,", "host.name=head,k8s.pod.name=head-abc"])
def test_a_launcher_that_says_nothing_of_the_run_leaves_the_workers_their_own(launcher, monkeypatch, launchers):
    if launchers is not None:
        monkeypatch.setenv("OTEL_RESOURCE_ATTRIBUTES", launchers)
    env = environment(launcher())
    assert "OTEL_RESOURCE_ATTRIBUTES" not in env
    assert in_worker(None, "k8s.pod.name=worker-7", monkeypatch) == {"k8s.pod.name": "worker-7"}


def test_a_dollar_in_an_attribute_is_kept_from_rays_expansion(launcher, monkeypatch):
    monkeypatch.setenv("OTEL_RESOURCE_ATTRIBUTES", "price=$HOME${PATH}$$")
    value = environment(launcher())["OTEL_RESOURCE_ATTRIBUTES"]
    assert in_worker(value, None, monkeypatch) == {"price": "$HOME${PATH}$$"}


def test_a_detector_that_the_user_asks_for_is_heard_in_every_process(launcher, monkeypatch):
    """`os` is one of the SDK's; those for Kubernetes and clouds are packages of their own."""
    monkeypatch.setenv("OTEL_EXPERIMENTAL_RESOURCE_DETECTORS", "otel,os")
    assert environment(launcher())["OTEL_EXPERIMENTAL_RESOURCE_DETECTORS"] == "otel,os"
    assert Identity("run-1", 1, "worker").resource().attributes["os.type"] == "linux"


def test_nothing_is_guessed_from_the_variables_of_a_pod(monkeypatch):
    for name in ("RAY_CLUSTER_NAME", "POD_NAME", "POD_NAMESPACE", "NODE_NAME", "KUBERNETES_SERVICE_HOST"):
        monkeypatch.setenv(name, "x")
    found = Identity("run-1", 1, "worker").resource().attributes
    assert [name for name in found if name.startswith("k8s.")] == []


def test_a_header_with_a_dollar_means_the_same_to_the_exporter(launcher, monkeypatch):
    from opentelemetry.util.re import parse_env_headers

    text = "authorization=Bearer%20pa$s"
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_HEADERS", text)
    assert parse_env_headers(environment(launcher())["OTEL_EXPORTER_OTLP_HEADERS"]) == parse_env_headers(text)


def test_other_values_are_carried_as_they_are(launcher, monkeypatch):
    monkeypatch.setenv("OTEL_SERVICE_NAME", "a$b")
    assert environment(launcher())["OTEL_SERVICE_NAME"] == "a$b"


def test_pythonpath_keeps_the_workers_own(launcher, monkeypatch):
    monkeypatch.setenv("PYTHONPATH", "/launchers/own")
    folder, separator, rest = environment(launcher())["PYTHONPATH"].partition(os.pathsep)
    assert os.path.isfile(os.path.join(folder, "sitecustomize.py"))
    assert (separator, rest) == (os.pathsep, "${PYTHONPATH}")


@pytest.fixture
def ray(memory):
    """A module with an `init` like Ray's, hooked, and what it was called with."""
    calls = []

    def init(*args, **kwargs):
        calls.append((args, kwargs))
        return "the context of ray"

    module, patches = ModuleType("ray"), Patches()
    module.init = init
    ray_init.install(module, patches)
    telemetry.enable(
        tracer_provider=memory.tracer_provider,
        meter_provider=memory.meter_provider,
        logger_provider=memory.logger_provider,
    )
    yield module, calls
    patches.undo()
    telemetry.disable()
    assert module.init is init


def test_nothing_is_printed_even_with_secret_headers(ray, monkeypatch, capsys, caplog, tmp_path):
    module, calls = ray
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_HEADERS", "authorization=hunter2$x")
    caplog.set_level("DEBUG")
    module.init(address="auto")
    ((_, kwargs),) = calls
    assert "hunter2" in kwargs["runtime_env"]["env_vars"]["OTEL_EXPORTER_OTLP_HEADERS"]
    out, err = capsys.readouterr()
    assert (out, err) == ("", "")
    assert "hunter2" not in caplog.text


def test_init_returns_what_ray_returns_and_carries_the_run(ray, monkeypatch, tmp_path):
    module, calls = ray
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("VERL_OTEL_RUN_ID", "run-7")
    assert module.init("auto", num_cpus=2) == "the context of ray"
    ((args, kwargs),) = calls
    assert args == ("auto",)
    assert kwargs["num_cpus"] == 2
    assert kwargs["runtime_env"]["env_vars"]["VERL_OTEL_RUN_ID"] == "run-7"
    assert "TRACEPARENT" in kwargs["runtime_env"]["env_vars"]


def test_the_run_is_named_by_the_configuration_of_the_caller(ray, monkeypatch, tmp_path):
    module, calls = ray
    monkeypatch.chdir(tmp_path)
    for variable in ("VERL_OTEL_PROJECT", "VERL_OTEL_EXPERIMENT"):
        monkeypatch.setenv(variable, "x")  # so that it is put back
        monkeypatch.delenv(variable)

    class Config:
        trainer = {"project_name": "gsm8k", "experiment_name": "ppo-1"}

    def run_ppo(config):
        module.init()

    run_ppo(Config())
    env_vars = calls[0][1]["runtime_env"]["env_vars"]
    assert (env_vars["VERL_OTEL_PROJECT"], env_vars["VERL_OTEL_EXPERIMENT"]) == ("gsm8k", "ppo-1")


def test_a_failure_of_ours_leaves_the_call_as_it_was(ray, monkeypatch, tmp_path):
    module, calls = ray
    monkeypatch.chdir(tmp_path)
    module.init(runtime_env={"env_vars": 7})
    assert calls == [((), {"runtime_env": {"env_vars": 7}})]
    assert border.failures() == {"preparing ray.init": 1}
