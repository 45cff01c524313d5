"""Settings (`config.py`), who a process is (`identity.py`), and which exporters it gets (`export/providers.py`)."""

import os
import re
import sys
from types import MappingProxyType

import pytest
from hypothesis import given
from hypothesis import strategies as st
from opentelemetry import _logs, metrics, trace
from opentelemetry.sdk.resources import Resource

from verl_otel import border, config, identity
from verl_otel.config import Levels, RankDetail, Settings, number
from verl_otel.export import otlp, providers
from verl_otel.export.files import FileLogExporter, FileMetricExporter, FileSpanExporter
from verl_otel.identity import Identity

SIGNALS = ("traces", "metrics", "logs")


def warnings_of(caplog):
    return [record.getMessage() for record in caplog.records if record.name == "verl_otel"]


# ---- config.py


def test_without_variables_the_settings_are_the_defaults(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert Settings.from_environ({}) == Settings(
        str(tmp_path / "verl-otel"), 4, 5.0, Levels({}), RankDetail(), 500, frozenset()
    )


def test_settings_are_read_from_the_variables(tmp_path):
    found = Settings.from_environ(
        {
            "VERL_OTEL_FOLDER": str(tmp_path),
            "VERL_OTEL_TRAJECTORIES": " 9 ",
            "VERL_OTEL_EXIT_TIMEOUT": "0.5",
            "VERL_OTEL_LEVELS": "rollout=basic, reward = off,,*=detailed",
            "VERL_OTEL_RANK_DETAIL": "10",
            "VERL_OTEL_UNKNOWN_KEYS": "7",
            "VERL_OTEL_DISABLED_HOOKS": "timer, tracking,,",
        }
    )
    levels = Levels({"rollout": "basic", "reward": "off", "*": "detailed"})
    assert found == Settings(str(tmp_path), 9, 0.5, levels, RankDetail(every=10), 7, frozenset({"timer", "tracking"}))


@pytest.mark.parametrize(
    ("text", "module", "wanted"),
    [
        ("", "rollout", {"basic", "detailed"}),
        ("rollout=basic", "rollout", {"basic"}),
        ("rollout=basic", "reward", {"basic", "detailed"}),
        ("rollout=off", "rollout", set()),
        ("*=off,rollout=basic", "rollout", {"basic"}),
        ("*=off,rollout=basic", "actor", set()),
        ("*=off,rollout=basic", "telemetry", {"basic", "detailed"}),
        ("telemetry=off", "telemetry", set()),
        ("rollout=loud,actor", "rollout", {"basic", "detailed"}),  # not readable: as if it were not there
    ],
)
def test_a_level_says_what_of_a_module_is_recorded(text, module, wanted):
    levels = Levels.parse(text)
    assert {level for level in ("basic", "detailed") if levels.wants(module, level)} == wanted


def test_a_level_that_cannot_be_read_is_reported_once(caplog):
    for _ in range(3):
        Levels.parse("rollout=loud,actor=basic")
    assert len(warnings_of(caplog)) == 1
    assert "'rollout=loud'" in warnings_of(caplog)[0]


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("", {0, 1, 2, 3, 4, None}),
        ("all", {0, 1, 2, 3, 4, None}),
        ("off", set()),
        ("outliers", set()),
        ("2", {0, 2, 4, None}),
    ],
)
def test_the_detail_of_ranks_is_shown_at_some_steps(text, shown):
    detail = RankDetail.parse(text)
    assert {step for step in (0, 1, 2, 3, 4, None) if detail.at(step)} == shown
    assert RankDetail.parse(str(detail)) == detail


def test_a_detail_of_ranks_that_cannot_be_read_is_reported_and_all_used(caplog):
    assert RankDetail.parse("some") == RankDetail()
    assert "VERL_OTEL_RANK_DETAIL='some'" in warnings_of(caplog)[0]


def test_the_effective_configuration_holds_no_secret():
    secret = "hunter2"
    environ = {
        "OTEL_EXPORTER_OTLP_ENDPOINT": f"https://user:{secret}@collector.example:4318/{secret}?token={secret}",
        "OTEL_EXPORTER_OTLP_HEADERS": f"authorization=Bearer%20{secret}",
        "OTEL_EXPORTER_OTLP_CLIENT_KEY": f"/{secret}.pem",
        "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT": f"http://[{secret}",
        "VERL_OTEL_LEVELS": "rollout=basic",
        "OTEL_METRIC_EXPORT_INTERVAL": "2000",
    }
    found = Settings.from_environ(environ).effective(environ)
    assert secret not in str(found)
    assert found["OTEL_EXPORTER_OTLP_ENDPOINT"] == "https://collector.example:4318"
    assert found["VERL_OTEL_LEVELS"] == "rollout=basic"
    assert found["OTEL_METRIC_EXPORT_INTERVAL"] == "2000"
    assert found["VERL_OTEL_RANK_DETAIL"] == "all"


def test_the_environment_is_read_when_it_is_asked_for(monkeypatch):
    monkeypatch.setenv("VERL_OTEL_TRAJECTORIES", "7")
    assert Settings.from_environ().trajectories == 7


@pytest.mark.parametrize("text", ["many", "-1", "nan", "-inf", "1,5", "0x10", "4 5", "٤x"])
def test_a_malformed_number_warns_once_and_the_default_is_used(text, caplog):
    environ = {"VERL_OTEL_TRAJECTORIES": text, "VERL_OTEL_EXIT_TIMEOUT": text}
    for _ in range(3):
        found = Settings.from_environ(environ)
        assert (found.trajectories, found.exit_timeout) == (4, 5.0)
    messages = warnings_of(caplog)
    assert len(messages) == 2
    assert messages[0] == f"verl-otel: VERL_OTEL_TRAJECTORIES={text!r} is not a number of at least 0; using 4"


@given(st.text())
def test_any_text_gives_a_usable_number(text):
    value = number({"X": text}, "X", 3.0, 1.0)
    assert value >= 1.0
    border._counts.clear()


def test_a_disabled_sdk_is_recognized():
    assert config.sdk_disabled({"OTEL_SDK_DISABLED": " True "})
    assert not config.sdk_disabled({"OTEL_SDK_DISABLED": "false"})
    assert not config.sdk_disabled({"OTEL_SDK_DISABLED": "1"})  # the specification: only `true`
    assert not config.sdk_disabled({})


def test_settings_cannot_be_changed():
    with pytest.raises(AttributeError):
        Settings.from_environ(MappingProxyType({})).trajectories = 1


# ---- identity.py


def test_the_run_id_is_made_once_and_passed_on(monkeypatch):
    monkeypatch.setenv("VERL_OTEL_RUN_ID", "")
    first = identity.ensure_run_id()
    assert re.fullmatch(r"\d{8}-\d{6}-[0-9a-f]{6}", first)
    assert identity.ensure_run_id() == first
    assert os.environ["VERL_OTEL_RUN_ID"] == first
    assert Identity.detect().run_id == first


def test_a_run_id_of_the_users_own_is_used(monkeypatch):
    monkeypatch.setenv("VERL_OTEL_RUN_ID", " my-run ")
    assert identity.ensure_run_id() == "my-run"


def test_two_runs_have_different_ids():
    assert identity.new_run_id() != identity.new_run_id()


@pytest.fixture
def run_1(monkeypatch):
    monkeypatch.setenv("VERL_OTEL_RUN_ID", "run-1")


def test_the_process_of_the_command_is_the_launcher(run_1):
    assert Identity.detect() == Identity("run-1", 1, "launcher")


def test_a_process_of_torchrun_is_a_worker_with_its_rank(run_1, monkeypatch):
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "x")
    monkeypatch.setenv("RANK", "3")
    found = Identity.detect()
    assert (found.role, found.worker_index) == ("worker", "3")


@pytest.mark.parametrize(
    ("class_name", "actor_name", "role", "index"),
    [
        ("TaskRunner", "", "trainer", "0"),
        ("FullyAsyncTrainer", "", "trainer", "0"),
        ("WorkerDict", "abcWorkerDict_0:1", "worker", "5"),  # the rank, not a number in the name
        ("AsyncActorRolloutRefWorker", "", "worker", "5"),
        ("AgentLoopWorker", "agent_loop_worker_2_1f3c", "agent_loop", "2"),
        ("RewardLoopWorker", "reward_loop_worker_1", "reward_worker", "1"),
        ("vLLMHttpServer", "vllm_server_0_0", "rollout_server", "0"),
        ("SGLangHttpServer", "sglang_server_7_0", "rollout_server", "7"),
        ("SomethingElse", "x", "other", "0"),
        ("", "", "other", "0"),
    ],
)
def test_a_ray_actors_role_is_told_by_its_class(run_1, monkeypatch, class_name, actor_name, role, index):
    monkeypatch.setattr(sys, "argv", ["/ray/default_worker.py", "--x"])
    monkeypatch.setattr(identity, "ray_actor", lambda: (class_name, actor_name))
    monkeypatch.setenv("RANK", "5")
    found = Identity.detect()
    assert (found.role, found.worker_group, found.worker_index) == (role, class_name, index)


def test_an_actor_that_cannot_be_read_is_a_process_all_the_same(run_1, monkeypatch):
    def fail():
        raise RuntimeError("no actor")

    monkeypatch.setattr(sys, "argv", ["/ray/default_worker.py"])
    monkeypatch.setattr(identity, "ray_actor", fail)
    assert Identity.detect() == Identity("run-1", 1, "other")
    assert border.failures() == {"reading the Ray actor's name": 1}


def test_a_malformed_attempt_warns_once_and_is_one(run_1, monkeypatch, caplog):
    monkeypatch.setenv("VERL_OTEL_RUN_ATTEMPT", "second")
    assert [Identity.detect().attempt for _ in range(3)] == [1, 1, 1]
    assert warnings_of(caplog) == ["verl-otel: VERL_OTEL_RUN_ATTEMPT is not an integer; using 1"]


def test_the_resource_says_who_the_process_is(run_1, monkeypatch):
    monkeypatch.setenv("VERL_OTEL_RUN_ATTEMPT", "2")
    monkeypatch.setenv("VERL_OTEL_PROJECT", "gsm8k")
    monkeypatch.setenv("VERL_OTEL_EXPERIMENT", "ppo-1")
    found = dict(Identity.detect().resource().attributes)
    assert found["service.name"] == "verl-launcher"
    assert found["service.namespace"] == "verl"
    assert found["verl.run.id"] == "run-1"
    assert found["verl.run.attempt"] == 2
    assert found["verl.process.role"] == "launcher"
    assert found["verl.project.name"] == "gsm8k"
    assert found["verl.experiment.name"] == "ppo-1"
    assert found["process.pid"] == os.getpid()
    assert found["host.name"] == os.uname().nodename
    assert re.fullmatch(r"\d+\.\d+.*", found["verl.version"])
    assert "verl.worker.group" not in found  # empty
    assert found["telemetry.sdk.language"] == "python"


def test_each_process_has_an_instance_id_of_its_own(run_1):
    one, two = (Identity.detect().resource().attributes["service.instance.id"] for _ in range(2))
    assert one != two


def test_the_users_service_name_and_attributes_win(run_1, monkeypatch):
    monkeypatch.setenv("OTEL_RESOURCE_ATTRIBUTES", "verl.project.name=mine,team=rl%20core,service.namespace=prod")
    monkeypatch.setenv("OTEL_SERVICE_NAME", "my-service")
    found = Identity.detect().resource().attributes
    assert found["service.name"] == "my-service"
    assert found["service.namespace"] == "prod"
    assert found["verl.project.name"] == "mine"
    assert found["team"] == "rl core"
    assert found["verl.run.id"] == "run-1"


def test_verls_names_go_to_the_environment_where_the_user_has_set_none(monkeypatch):
    monkeypatch.setenv("VERL_OTEL_PROJECT", "mine")
    monkeypatch.setenv("VERL_OTEL_EXPERIMENT", "x")
    monkeypatch.delenv("VERL_OTEL_EXPERIMENT")
    identity.name_run({"project_name": "gsm8k", "experiment_name": "ppo-1"})
    assert os.environ["VERL_OTEL_PROJECT"] == "mine"
    assert os.environ["VERL_OTEL_EXPERIMENT"] == "ppo-1"


def test_a_name_that_verl_has_not_is_not_made_up(monkeypatch):
    identity.name_run({"project_name": None})
    assert "VERL_OTEL_PROJECT" not in os.environ
    assert "VERL_OTEL_EXPERIMENT" not in os.environ


# ---- export/providers.py


@pytest.mark.parametrize("signal", SIGNALS)
def test_without_an_endpoint_telemetry_goes_to_files(signal):
    assert providers.exporter_names(signal) == ["verl_otel_file"]


@pytest.mark.parametrize("signal", SIGNALS)
def test_with_an_endpoint_it_goes_there(signal, monkeypatch):
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", "http://collector:4318")
    assert providers.exporter_names(signal) == ["otlp_proto_http"]


def test_an_endpoint_for_one_signal_is_for_that_signal(monkeypatch):
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "http://collector:4318/v1/traces")
    assert [providers.exporter_names(signal) for signal in SIGNALS] == [
        ["otlp_proto_http"],
        ["verl_otel_file"],
        ["verl_otel_file"],
    ]


@pytest.mark.parametrize("signal", SIGNALS)
def test_none_means_none(signal, monkeypatch):
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", "http://collector:4318")
    monkeypatch.setenv(f"OTEL_{signal.upper()}_EXPORTER", "none")
    assert providers.exporter_names(signal) == []
    assert providers._exporters(signal, Resource({})) == []


def test_exporters_that_are_asked_for_are_used_as_named(monkeypatch):
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", "http://collector:4318")
    monkeypatch.setenv("OTEL_TRACES_EXPORTER", "otlp, verl_otel_file,,console")
    assert providers.exporter_names("traces") == ["otlp_proto_http", "verl_otel_file", "console"]


@pytest.mark.parametrize(
    ("variables", "expected"),
    [
        ({"OTEL_EXPORTER_OTLP_PROTOCOL": "grpc"}, ["otlp_proto_grpc", "otlp_proto_grpc"]),
        ({"OTEL_EXPORTER_OTLP_PROTOCOL": "http/protobuf"}, ["otlp_proto_http", "otlp_proto_http"]),
        ({"OTEL_EXPORTER_OTLP_TRACES_PROTOCOL": "grpc"}, ["otlp_proto_grpc", "otlp_proto_http"]),
        (
            {"OTEL_EXPORTER_OTLP_PROTOCOL": "grpc", "OTEL_EXPORTER_OTLP_TRACES_PROTOCOL": "http/protobuf"},
            ["otlp_proto_http", "otlp_proto_grpc"],
        ),
    ],
)
def test_the_protocol_chooses_the_otlp_exporter(monkeypatch, variables, expected):
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", "http://collector:4317")
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    assert [providers.exporter_names(signal)[0] for signal in ("traces", "logs")] == expected


def test_the_exporters_are_the_installed_ones(monkeypatch):
    assert [type(providers._exporters(signal, Resource({}))[0]) for signal in SIGNALS] == [
        FileSpanExporter,
        FileMetricExporter,
        FileLogExporter,
    ]
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", "http://localhost:4318")
    monkeypatch.setattr(otlp, "_outbox", None)
    assert [type(providers._exporters(signal, Resource({}))[0]) for signal in SIGNALS] == [
        otlp.OtlpSpanExporter,
        otlp.OtlpMetricExporter,
        otlp.OtlpLogExporter,
    ]
    otlp.close(0)


@pytest.mark.parametrize(
    ("asked", "protocol", "what_to_do"),
    [
        ("otlp", "grpc", "pip install opentelemetry-exporter-otlp-proto-grpc"),
        ("oltp", "", "correct the name (otlp, verl_otel_file, console, prometheus, none), or install the package"),
    ],
)
def test_an_exporter_that_is_not_installed_is_one_warning_with_what_to_do(
    asked, protocol, what_to_do, monkeypatch, caplog
):
    """Of a name that is misspelt no package is named: somebody may have made one."""
    monkeypatch.setenv("OTEL_TRACES_EXPORTER", f"{asked},verl_otel_file")
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_PROTOCOL", protocol)
    for _ in range(3):
        assert [type(exporter) for exporter in providers._exporters("traces", Resource({}))] == [FileSpanExporter]
    (message,) = warnings_of(caplog)
    assert what_to_do in message and ("pip install" in message) == (asked == "otlp")
    assert "OTEL_TRACES_EXPORTER" in message


def test_an_exporter_that_cannot_be_made_is_one_warning(monkeypatch, caplog):
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", "http://localhost:4318")
    monkeypatch.setenv("OTEL_PYTHON_EXPORTER_OTLP_HTTP_CREDENTIAL_PROVIDER", "no_such")
    for _ in range(3):
        assert providers._exporters("traces", Resource({})) == []
    (message,) = warnings_of(caplog)
    assert "cannot be made" in message and "OTEL_EXPORTER_" in message


def test_given_providers_are_used_not_set_globally_and_not_ours_to_shut_down(memory):
    before = (trace.get_tracer_provider(), metrics.get_meter_provider(), _logs.get_logger_provider())
    given = (memory.tracer_provider, memory.meter_provider, memory.logger_provider)
    found = providers.make(Identity("run-1", 1, "trainer").resource(), *given)
    assert (found.tracer, found.meter, found.logger) == given
    found.shut_down_ours()
    memory.tracer.start_span("still at work").end()
    assert [span.name for span in memory.spans] == ["still at work"]
    assert (trace.get_tracer_provider(), metrics.get_meter_provider(), _logs.get_logger_provider()) == before


@pytest.mark.parametrize(
    ("build", "variable"),
    [
        (providers._tracer_provider, "OTEL_BSP_SCHEDULE_DELAY"),
        (providers._meter_provider, "OTEL_METRIC_EXPORT_INTERVAL"),
        (providers._logger_provider, "OTEL_BLRP_SCHEDULE_DELAY"),
    ],
)
def test_a_malformed_delay_warns_once_and_the_provider_works(build, variable, monkeypatch, caplog, tmp_path):
    monkeypatch.setenv("VERL_OTEL_FOLDER", str(tmp_path))
    monkeypatch.setenv(variable, "soon")
    resource = Identity("run-1", 1, "trainer").resource()
    made = [build(resource) for _ in range(2)]
    for provider in made:
        assert provider.force_flush()
        provider.shutdown()
    messages = warnings_of(caplog)
    assert len(messages) == 1 and messages[0].startswith(f"verl-otel: {variable}='soon' is not a number")


def test_what_providers_of_ours_export_is_recorded(monkeypatch, tmp_path):
    from verl_otel.recording import reader

    monkeypatch.setenv("VERL_OTEL_FOLDER", str(tmp_path))
    provider = providers._tracer_provider(Identity("run-1", 1, "trainer").resource())
    provider.get_tracer("t").start_span("a").end()
    provider.shutdown()
    (span,) = reader.load(tmp_path / "run-1").spans
    assert (span.name, span.resource["verl.run.id"]) == ("a", "run-1")


# ---- a run that goes on from a checkpoint


@pytest.fixture
def checkpoints(tmp_path):
    """verl's folder of checkpoints, with one of attempt 3 of a run."""
    (tmp_path / "latest_checkpointed_iteration.txt").write_text("7")
    identity.remember_run(str(tmp_path), "run-a", 3)
    return tmp_path


@pytest.mark.parametrize(
    ("settings", "environ", "expected"),
    [
        ({"resume_mode": "auto"}, {}, ("run-a", "4")),
        ({"resume_mode": "disable"}, {}, (None, None)),
        ({"resume_mode": "auto"}, {"VERL_OTEL_RUN_ID": "mine"}, ("mine", None)),
        ({"resume_mode": "auto"}, {"VERL_OTEL_RUN_ID": "run-a"}, ("run-a", "4")),
        ({"resume_mode": "auto"}, {"VERL_OTEL_RUN_ATTEMPT": "9"}, ("run-a", "9")),
    ],
)
def test_a_run_that_resumes_is_the_next_attempt_of_the_run_that_saved(
    checkpoints, monkeypatch, settings, environ, expected
):
    for name in ("VERL_OTEL_RUN_ID", "VERL_OTEL_RUN_ATTEMPT"):
        monkeypatch.setenv(name, "")  # so that what is set below is put back
        monkeypatch.delenv(name)
    for name, value in environ.items():
        monkeypatch.setenv(name, value)
    identity.continue_run({**settings, "default_local_dir": str(checkpoints)})
    assert (os.environ.get("VERL_OTEL_RUN_ID"), os.environ.get("VERL_OTEL_RUN_ATTEMPT")) == expected


def test_a_run_resumes_from_the_path_that_it_is_told(checkpoints, monkeypatch):
    monkeypatch.setenv("VERL_OTEL_RUN_ID", "")
    monkeypatch.setenv("VERL_OTEL_RUN_ATTEMPT", "")
    told = {"resume_mode": "resume_path", "resume_from_path": str(checkpoints / "global_step_7")}
    identity.continue_run({**told, "default_local_dir": "elsewhere"})
    assert os.environ["VERL_OTEL_RUN_ID"] == "run-a"


@pytest.mark.parametrize("content", ["", "{", "[]", '{"run_id": "x"}', '{"run_id": "x", "attempt": "many"}'])
def test_what_cannot_be_read_beside_the_checkpoints_is_as_if_it_were_not_there(checkpoints, monkeypatch, content):
    monkeypatch.setenv("VERL_OTEL_RUN_ID", "mine")
    (checkpoints / ".verl-otel.json").write_text(content)
    identity.continue_run({"resume_mode": "auto", "default_local_dir": str(checkpoints)})
    assert os.environ["VERL_OTEL_RUN_ID"] == "mine"


def test_without_a_checkpoint_nothing_is_continued(tmp_path, monkeypatch):
    monkeypatch.setenv("VERL_OTEL_RUN_ID", "")
    identity.continue_run({"resume_mode": "auto", "default_local_dir": str(tmp_path)})
    assert os.environ["VERL_OTEL_RUN_ID"] == ""
