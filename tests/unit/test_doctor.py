"""`verl-otel doctor` (`verl_otel/doctor`): each area in the condition that it is there to find.

NVML is the fake of `test_hardware`; everything else is real: environments, packages on the path, spools, processes.
"""

import json
import os
import re
import subprocess
import sys
import textwrap
import time
from pathlib import Path
from types import SimpleNamespace

import jsonschema
import pytest
from otlp_server import spans
from test_hardware import Card, fake_nvml

from verl_otel import cli, config, hooks
from verl_otel.doctor import (
    activation,
    child,
    clock,
    devices,
    examination,
    findings,
    labels,
    rendering,
    runs,
    settings,
    versions,
)
from verl_otel.doctor import hooks as doctors_hooks
from verl_otel.doctor.asked import Asked
from verl_otel.doctor.examination import Area, examine
from verl_otel.doctor.findings import NOTE, OK, PROBLEM, WARNING, note, ok, problem, warning
from verl_otel.export import otlp_json
from verl_otel.export.spool import Spool

ROOT = Path(__file__).parents[2]
SOURCES = sorted((ROOT / "verl_otel" / "doctor").glob("*.py"))
PAGE = ROOT / "docs" / "doctor.md"
SCHEMA = json.loads((ROOT / "docs" / "doctor.schema.json").read_text())
ID = re.compile(r"\bVO-[A-Z0-9]+(?:-[A-Z0-9]+)*\b")


def found(area, **environ):
    """What an area finds in an environment with only these variables: id -> findings."""
    by_id = {}
    for finding in area.check(Asked({"PATH": os.environ["PATH"], **environ})):
        by_id.setdefault(finding.id, []).append(finding)
    return by_id


def only(by_id, id):
    (finding,) = by_id[id]
    return finding


def ids_of(by_id, *levels):
    return {id for id, of_id in by_id.items() if any(finding.level in levels for finding in of_id)}


# ---- versions


def test_the_environment_of_the_tests_is_one_that_is_supported():
    by_id = found(versions)
    packages = {finding.data["package"]: finding.data["version"] for finding in by_id["VO-VERSION"]}
    assert packages.keys() == {"python", "verl-otel", "verl", "ray", "torch"}
    assert packages["verl"] == "0.9.1"
    assert "opentelemetry-sdk" in only(by_id, "VO-OPENTELEMETRY").data["packages"]
    assert not ids_of(by_id, NOTE, WARNING, PROBLEM)


def test_the_versions_that_doctor_knows_are_those_that_are_supported():
    oldest, newest = versions.PYTHON
    wanted = f'requires-python = ">={oldest[0]}.{oldest[1]},<{newest[0]}.{newest[1] + 1}"'
    assert wanted in (ROOT / "pyproject.toml").read_text().splitlines()
    tested = re.search(r"^VERSIONS = (\(.*\))$", (ROOT / "tests/testbed/environments.py").read_text(), re.M)
    assert (eval(tested[1])[0], eval(tested[1])[-1]) == versions.VERL
    assert f"Ray {versions.RAY} or later" in (ROOT / "README.md").read_text()


@pytest.mark.parametrize(
    ("package", "version", "id", "level"),
    [
        ("verl", "0.6.0", "VO-VERSION-UNSUPPORTED", PROBLEM),
        ("verl", "0.6.1", None, OK),
        ("verl", "0.9.1.post1", None, OK),
        ("verl", "0.10.0", "VO-VERSION-UNTESTED", NOTE),
        ("verl", "a checkout", None, OK),
        ("verl", "", "VO-VERL-MISSING", WARNING),
        ("ray", "2.40.0", "VO-VERSION-UNSUPPORTED", PROBLEM),
        ("ray", "2.41.0", None, OK),
        ("ray", "", "VO-RAY-MISSING", WARNING),
    ],
)
def test_a_version_that_does_not_fit_is_told(package, version, id, level, monkeypatch):
    real = versions.installed
    monkeypatch.setattr(versions, "installed", lambda name: version if name == package else real(name))
    by_id = found(versions)
    assert ids_of(by_id, NOTE, WARNING, PROBLEM) == ({id} if id else set())
    assert id is None or only(by_id, id).level == level


def test_a_python_that_is_too_old_or_too_new_is_a_problem(monkeypatch):
    for version in ((3, 9, 1), (3, 13, 0)):
        monkeypatch.setattr(versions, "sys", SimpleNamespace(version_info=version, executable="python"))
        assert only(found(versions), "VO-VERSION-UNSUPPORTED").data["package"] == "python"


@pytest.fixture
def distribution(tmp_path, monkeypatch):
    """Install a distribution that has only metadata."""

    def install(name, requires=(), entry_points=""):
        folder = tmp_path / f"{name.replace('-', '_')}-1.0.dist-info"
        folder.mkdir()
        lines = ["Metadata-Version: 2.1", f"Name: {name}", "Version: 1.0", *(f"Requires-Dist: {r}" for r in requires)]
        (folder / "METADATA").write_text("\n".join(lines) + "\n")
        (folder / "entry_points.txt").write_text(textwrap.dedent(entry_points))
        monkeypatch.syspath_prepend(tmp_path)

    return install


def test_packages_of_opentelemetry_that_do_not_fit_together_are_told_with_what_each_needs(distribution):
    distribution(
        "opentelemetry-exporter-odd",
        [
            "opentelemetry-sdk==1.2.3",
            "opentelemetry-not-there>=1",
            "fastapi<0.1; extra == 'web'",
            "ray>=1",
            "not = a ~ need",
        ],
    )
    conflicts = found(versions)["VO-VERSION-CONFLICT"]
    assert [(f.data["package"], f.data["needs"], f.level) for f in conflicts] == [
        ("opentelemetry-exporter-odd", "opentelemetry-sdk==1.2.3", WARNING),
        ("opentelemetry-exporter-odd", "opentelemetry-not-there>=1", PROBLEM),
    ]
    assert "pip install" in conflicts[0].fix


# ---- activation


def test_in_a_plain_shell_everything_is_found_and_nothing_is_active():
    by_id = found(activation, PATH=f"{Path(sys.executable).parent}:{os.environ['PATH']}")
    assert by_id.keys() == {"VO-INSTRUMENT", "VO-ENTRY-POINTS", "VO-NOT-ACTIVE", "VO-PROVIDERS"}


def test_a_command_that_is_missing_or_of_another_python_is_told(tmp_path, monkeypatch):
    assert "VO-INSTRUMENT-NOT-ON-PATH" in found(activation, PATH=str(tmp_path))
    other = tmp_path / "opentelemetry-instrument"
    other.write_text("#!/bin/sh\n")
    other.chmod(0o755)
    by_id = found(activation, PATH=str(tmp_path))
    assert only(by_id, "VO-INSTRUMENT-OF-ANOTHER-PYTHON").data["path"] == str(other)
    monkeypatch.setattr(activation.sysconfig, "get_path", lambda name: str(tmp_path / "nowhere"))
    assert only(found(activation, PATH=str(tmp_path / "x")), "VO-INSTRUMENT-MISSING").level == PROBLEM


@pytest.mark.parametrize(
    "switch",
    [
        {"OTEL_SDK_DISABLED": "True"},
        {"VERL_OTEL_MODE": "disabled"},
        {"OTEL_PYTHON_DISABLED_INSTRUMENTATIONS": "requests, verl"},
        {"OTEL_PYTHON_DISABLED_INSTRUMENTATIONS": "*"},
    ],
)
def test_what_switches_telemetry_off_is_told_by_name(switch):
    ((variable, _),) = switch.items()
    assert only(found(activation, **switch), "VO-SWITCHED-OFF").data["variable"] == variable


def test_what_switches_nothing_off_is_not_told():
    by_id = found(activation, OTEL_SDK_DISABLED="false", OTEL_PYTHON_DISABLED_INSTRUMENTATIONS="verlx,requests")
    assert "VO-SWITCHED-OFF" not in by_id


def test_a_second_distro_is_told_until_one_is_chosen(distribution):
    distribution(
        "opentelemetry-distro",
        entry_points="""
        [opentelemetry_distro]
        distro = opentelemetry.distro:OpenTelemetryDistro
        """,
    )
    finding = only(found(activation), "VO-DISTRO-AMBIGUOUS")
    assert finding.fix == "export OTEL_PYTHON_DISTRO=verl_otel" and finding.level == WARNING
    assert "VO-ENTRY-POINTS" in found(activation, OTEL_PYTHON_DISTRO="verl_otel")
    assert only(found(activation, OTEL_PYTHON_DISTRO="distro"), "VO-DISTRO-OTHER").level == PROBLEM


def test_an_entry_point_that_is_not_there_or_cannot_be_loaded_is_told(monkeypatch, distribution):
    monkeypatch.setitem(activation._OURS, "opentelemetry_instrumentor", "verl_odd")
    assert "not installed" in only(found(activation), "VO-ENTRY-POINT").what
    distribution("odd", entry_points="[opentelemetry_instrumentor]\nverl_odd = verl_otel.nowhere:Nothing\n")
    assert "ModuleNotFoundError" in only(found(activation), "VO-ENTRY-POINT").what


PROGRAM = """
import json, os
from opentelemetry import trace
if os.environ.get("TAKEN"):
    from opentelemetry.sdk.trace import TracerProvider
    trace.set_tracer_provider(TracerProvider(shutdown_on_exit=False))
from verl_otel.doctor import activation
from verl_otel.doctor.asked import Asked
print(json.dumps({finding.id: finding.what for finding in activation.check(Asked(os.environ))}))
"""


@pytest.mark.parametrize(
    ("launch", "environ", "wanted"),
    [
        ([str(Path(sys.executable).with_name("opentelemetry-instrument"))], {}, "VO-ACTIVE"),
        ([], {config.ACTIVE: "1"}, "VO-WORKER-NOT-INSTRUMENTED"),
        ([], {"TAKEN": "1"}, "VO-PROVIDERS-TAKEN"),
    ],
    ids=["instrumented", "a worker that is not", "others' providers"],
)
def test_a_process_is_told_whether_it_is_instrumented_and_whose_the_providers_are(launch, environ, wanted):
    command = [*launch, sys.executable, "-c", PROGRAM]
    done = subprocess.run(command, env={**os.environ, **environ}, capture_output=True, text=True, timeout=120)
    told = json.loads(done.stdout)
    assert wanted in told, done.stderr
    if "TAKEN" in environ:
        assert "traces: opentelemetry.sdk.trace.TracerProvider" in told[wanted]
    else:
        assert "VO-PROVIDERS" in told


# ---- hooks


@pytest.fixture
def fake_verl(tmp_path):
    """A verl that has only one module; gives PYTHONPATH, with which it hides the real one."""

    def write(content):
        module = tmp_path / "verl" / "utils" / "tracking.py"
        module.parent.mkdir(parents=True)
        for folder in (module.parent, module.parent.parent):
            (folder / "__init__.py").touch()
        module.write_text(content)
        return str(tmp_path)

    return write


def test_a_seam_that_is_missing_is_told_with_the_reason_and_the_others_are_on(fake_verl):
    by_id = found(doctors_hooks, PYTHONPATH=fake_verl("class Tracking:\n    pass\n"), VERL_OTEL_DISABLED_HOOKS="timer")
    missing = {finding.data["seam"]: finding.what for finding in by_id["VO-HOOK-SEAM-MISSING"]}
    assert "has no attribute" in missing["tracking on verl.utils.tracking"]
    assert "no module verl.utils.rollout_trace" in missing["rollout_trace on verl.utils.rollout_trace"]
    assert "ray_init on ray" in only(by_id, "VO-HOOKS-ON").data["seams"]
    assert only(by_id, "VO-HOOK-DISABLED").data["hooks"] == ["timer"]
    assert not any("timer" in seam for seam in missing)
    without = {finding.data["seam"] for finding in by_id["VO-HOOK-NO-LIBRARY"]}
    assert without == {hook.seam for hook in hooks.HOOKS if hook.name == "engine_tracing"}


def test_what_cannot_be_imported_is_told_and_costs_only_itself(fake_verl):
    by_id = found(doctors_hooks, PYTHONPATH=fake_verl("raise SystemExit('no GPU here')"))
    finding = only(by_id, "VO-HOOK-NO-IMPORT")
    assert finding.data["seam"] == "tracking on verl.utils.tracking" and "SystemExit: no GPU here" in finding.what
    assert "VO-HOOKS-ON" in by_id and "VO-HOOKS-UNFINISHED" not in by_id


def test_a_process_that_crashes_costs_what_comes_after_and_says_where(fake_verl):
    by_id = found(doctors_hooks, PYTHONPATH=fake_verl("import os\nos.abort()"))
    finding = only(by_id, "VO-HOOKS-UNFINISHED")
    assert "signal 6, at tracking on verl.utils.tracking" in finding.what
    assert "ray_init on ray" in only(by_id, "VO-HOOKS-ON").data["seams"]


def test_a_process_that_hangs_is_ended(tmp_path):
    (tmp_path / "sitecustomize.py").write_text("import time\ntime.sleep(120)\n")
    start = time.monotonic()
    environ = {"PATH": os.environ["PATH"], "PYTHONPATH": str(tmp_path)}
    ended = list(child.run("hooks", environ, time.monotonic() + 0.2))
    assert ended == [{child.ENDED: child.LATE}] and time.monotonic() - start < 60
    assert not [f for f in Path("/proc/self/task").glob("*/children") if "verl_otel.doctor.child" in commands(f)]


def commands(children):
    """The command lines of child processes."""
    paths = [Path("/proc", pid, "cmdline") for pid in children.read_text().split()]
    return " ".join(path.read_text() for path in paths if path.exists())


def test_without_verl_there_is_nothing_to_try(monkeypatch):
    monkeypatch.setattr(doctors_hooks, "installed", lambda package: "")
    assert found(doctors_hooks).keys() == {"VO-HOOKS-UNKNOWN"}


# ---- settings


MALFORMED = {
    "VERL_OTEL_MODE": "sideways",
    "VERL_OTEL_EXIT_TIMEOUT": "soon",
    "VERL_OTEL_LEVELS": "rollout=loud",
    "VERL_OTEL_RANK_DETAIL": "some",
    "VERL_OTEL_UNKNOWN_KEYS": "-1",
    "VERL_OTEL_TRAJECTORIES": "many",
    "VERL_OTEL_RUN_ATTEMPT": "second",
    "VERL_OTEL_MAX_PENDING_MIB": "x",
    "OTEL_TRACES_SAMPLER": "dice",
    "OTEL_METRIC_EXPORT_INTERVAL": "often",
    "OTEL_BSP_MAX_QUEUE_SIZE": "huge",
    "OTEL_EXPORTER_OTLP_HEADERS": "authorization:Bearer Zq7secret",
    "OTEL_EXPORTER_OTLP_ENDPOINT": "http://127.0.0.1:1",
}


def test_every_malformed_setting_is_told_by_name():
    by_id = found(settings, **MALFORMED, VERL_OTEL_DISABLED_HOOKS="timer,trackin")
    told = "\n".join(finding.what for finding in by_id["VO-SETTING-MALFORMED"])
    for variable in [*MALFORMED, "VERL_OTEL_DISABLED_HOOKS"]:
        if variable == "OTEL_TRACES_SAMPLER":
            assert "sampler dice" in told
        elif variable != "OTEL_EXPORTER_OTLP_ENDPOINT":
            assert variable in told, variable
    assert "Zq7secret" not in str(by_id)
    assert len(by_id["VO-SETTING-MALFORMED"]) == len(MALFORMED)  # without the endpoint, with the hook
    assert "VO-PIPELINE" not in by_id


@pytest.mark.parametrize(
    ("variable", "value", "said"),
    [
        ("OTEL_PROPAGATORS", "pigeon", "Propagator pigeon not found"),
        ("OTEL_SPAN_ATTRIBUTE_COUNT_LIMIT", "few", "OTEL_SPAN_ATTRIBUTE_COUNT_LIMIT"),
    ],
)
def test_a_setting_with_which_opentelemetry_does_not_start_is_a_problem(variable, value, said):
    by_id = found(settings, **{variable: value})
    finding = only(by_id, "VO-PIPELINE-BROKEN")
    assert finding.level == PROBLEM and said in finding.what


def test_an_exporter_that_is_not_installed_is_a_problem_and_one_that_is_served_is_not_started():
    by_id = found(settings, OTEL_EXPORTER_OTLP_PROTOCOL="grpc", OTEL_METRICS_EXPORTER="prometheus,otlp")
    assert only(by_id, "VO-EXPORTER-MISSING").fix.startswith("pip install opentelemetry-exporter-otlp-proto-grpc")
    assert only(by_id, "VO-EXPORTERS").data["exporters"] == {
        "traces": ["verl_otel_file"],
        "metrics": ["prometheus", "otlp_proto_grpc"],
        "logs": ["verl_otel_file"],
    }


def test_with_good_settings_the_pipeline_can_be_made():
    by_id = found(settings, VERL_OTEL_LEVELS="rollout=basic", OTEL_EXPORTER_OTLP_ENDPOINT="http://127.0.0.1:1")
    assert "VO-PIPELINE" in by_id and not ids_of(by_id, NOTE, WARNING, PROBLEM)
    assert only(by_id, "VO-EXPORTERS").data["exporters"] == {
        signal: ["otlp_proto_http"] for signal in ("traces", "metrics", "logs")
    }


@pytest.fixture
def without_child(monkeypatch):
    """Only what is seen of the variables themselves."""
    monkeypatch.setattr(child, "run", lambda *_: iter([{"exporters": {}}]))


def test_values_that_may_hold_anything_are_not_shown(without_child):
    by_id = found(
        settings,
        OTEL_EXPORTER_OTLP_ENDPOINT="https://user:pass@collector:4318/path?token=t",
        OTEL_EXPORTER_OTLP_CLIENT_KEY="/secrets/key.pem",
        OTEL_RESOURCE_ATTRIBUTES="team=rl",
        VERL_OTEL_FOLDER="/srv/runs",
        VERL_OTEL_MODE="online",
        OTEL_BSP_SCHEDULE_DELAY="100",
        OTEL_TRACES_EXPORTER=" ",
    )
    assert {finding.what for finding in by_id["VO-SETTING"]} == {
        "OTEL_EXPORTER_OTLP_ENDPOINT=https://collector:4318",
        "OTEL_EXPORTER_OTLP_CLIENT_KEY=(set, not shown)",
        "OTEL_RESOURCE_ATTRIBUTES=(set, not shown)",
        "VERL_OTEL_FOLDER=/srv/runs",
        "VERL_OTEL_MODE=online",
        "OTEL_BSP_SCHEDULE_DELAY=100",
        "OTEL_TRACES_EXPORTER=(empty)",
    }


@pytest.mark.parametrize(
    ("name", "near"),
    [
        ("OTEL_EXPORTER_OTLP_ENDPIONT", "OTEL_EXPORTER_OTLP_ENDPOINT"),
        ("OTEL_TRACE_EXPORTER", "OTEL_TRACES_EXPORTER"),
        ("VERL_OTEL_LEVEL", "VERL_OTEL_LEVELS"),
        ("VERL_OTEL_NOVELTY", None),
        ("VERL_OTEL_LISTEN_HTTP", ""),
        ("VERL_OTEL_RELAY_URL", ""),
        ("VERL_OTEL_INFLUX_AUTHORIZATION", ""),
        ("OTEL_SOMEBODYS_OWN", ""),
    ],
)
def test_a_slip_of_the_pen_is_told_and_what_others_read_is_not(name, near, without_child):
    by_id = found(settings, **{name: "1"})
    told = by_id.get("VO-SETTING-UNKNOWN", [])
    assert [finding.data.get("near") for finding in told] == ([] if near == "" else [near])
    assert [finding.level for finding in told] == ([] if near == "" else [WARNING if near else NOTE])


@pytest.mark.parametrize(
    ("environ", "id"),
    [
        ({"VERL_OTEL_LEVELS": "rewrad=off"}, "VO-SETTING-MALFORMED"),
        ({"VERL_OTEL_LEVELS": "*=basic,reward=off,weight_sync=off,telemetry=off,my_own=off"}, None),
        ({"VERL_OTEL_MODE": "offline"}, "VO-OFFLINE"),
        ({"OTEL_TRACES_EXPORTER": "none"}, "VO-SIGNAL-OFF"),
        ({"OTEL_TRACES_SAMPLER": "parentbased_always_off"}, "VO-SAMPLER-OFF"),
        ({"OTEL_EXPORTER_OTLP_ENDPOINT": "http://c:4318/v1/traces/"}, "VO-ENDPOINT-WITH-SIGNAL"),
        ({"OTEL_EXPORTER_OTLP_LOGS_ENDPOINT": "http://c:4318"}, "VO-ENDPOINT-WITHOUT-PATH"),
        ({"OTEL_EXPORTER_OTLP_LOGS_ENDPOINT": "http://c:4318/"}, "VO-ENDPOINT-WITHOUT-PATH"),
        ({"OTEL_EXPORTER_OTLP_LOGS_ENDPOINT": "http://c:4318/v1/logs"}, None),
        ({"OTEL_EXPORTER_OTLP_LOGS_ENDPOINT": "http://c:4317", "OTEL_EXPORTER_OTLP_PROTOCOL": "grpc"}, None),
        ({"OTEL_EXPORTER_OTLP_ENDPOINT": "http://c:4318"}, None),
    ],
)
def test_what_is_seldom_meant_is_told(environ, id, without_child):
    assert ids_of(found(settings, **environ), NOTE, WARNING, PROBLEM) == ({id} if id else set())


# ---- labels


@pytest.mark.parametrize(
    ("attributes", "ids"),
    [
        ("team=rl,k8s.pod.name=p", {"VO-RESOURCE"}),
        ("", {"VO-RESOURCE"}),
        ("verl.run.id=x", {"VO-RESOURCE-OF-THE-RUN"}),
        ("rank=0", {"VO-RESOURCE-OF-POINTS"}),
        ("job=x", {"VO-RESOURCE-OF-PROMETHEUS"}),
        ("host.name=h", {"VO-RESOURCE-OF-A-PROCESS"}),
        ("service.name=s", {"VO-RESOURCE-SERVICE-NAME"}),
        ("a.b=1,a_b=2", {"VO-RESOURCE-SAME-LABEL"}),
        ("verl_run_id=1", {"VO-RESOURCE-SAME-LABEL"}),
        ("team=rl,loose", {"VO-RESOURCE-MALFORMED"}),
        ("a%2Eb=1,a_b=2", {"VO-RESOURCE-SAME-LABEL"}),
    ],
)
def test_resource_attributes_that_collide_are_told(attributes, ids):
    assert found(labels, OTEL_RESOURCE_ATTRIBUTES=attributes).keys() == ids


# ---- clocks


@pytest.mark.parametrize(
    ("date", "before", "after", "ahead"),
    [
        ("Thu, 01 Jan 1970 00:01:40 GMT", 100.2, 100.4, 0.0),
        ("Thu, 01 Jan 1970 00:01:40 GMT", 100.9, 101.3, 0.0),  # of the second before
        ("Thu, 01 Jan 1970 00:01:40 GMT", 102.0, 102.5, -1.0),
        ("Thu, 01 Jan 1970 00:01:40 GMT", 90.0, 91.0, 9.0),
        ("yesterday", 1.0, 2.0, None),
        ("", 1.0, 2.0, None),
    ],
)
def test_a_difference_of_clocks_is_what_is_certain_of_it(date, before, after, ahead):
    assert clock.skew(date, before, after) == ahead


@pytest.mark.parametrize(
    ("ahead", "id", "level"),
    [
        (0.0, "VO-CLOCK", OK),
        (-3.0, "VO-CLOCK", OK),
        (40.0, "VO-CLOCK-SKEW", WARNING),
        (-7200.0, "VO-CLOCK-SKEW", PROBLEM),
    ],
)
def test_what_a_difference_of_clocks_means(ahead, id, level):
    finding = clock.judged("there", ahead, {})
    assert (finding.id, finding.level, finding.data["seconds"]) == (id, level, ahead)
    assert ahead > -3 or "behind" in finding.what or level == OK


# ---- GPUs


@pytest.fixture
def nvml(monkeypatch):
    def put(*cards, **more):
        monkeypatch.setitem(sys.modules, "pynvml", fake_nvml(cards, **more))

    return put


def test_without_nvml_it_says_so_and_why(nvml, monkeypatch):
    nvml(init_error="LibRmVersionMismatch")
    finding = only(found(devices), "VO-GPU-NO-NVML")
    assert finding.level == NOTE and "no NVML (NVMLError_LibRmVersionMismatch" in finding.what
    monkeypatch.setitem(sys.modules, "pynvml", None)
    assert only(found(devices), "VO-GPU-NO-NVML").fix == "pip install 'verl-otel[hardware]'"


@pytest.mark.parametrize(
    ("mask", "id", "visible"),
    [
        (None, "VO-GPU", [0, 1]),
        ("1", "VO-GPU", [1]),
        ("1,0", "VO-GPU", [1, 0]),
        ("", "VO-GPU", []),
        ("-1", "VO-GPU", []),
        ("GPU-11aaaaaa", "VO-GPU", [1]),
        ("0,7", "VO-GPU-MASK", [0]),
        ("0,0", "VO-GPU-MASK", []),
        ("GPU-ffff", "VO-GPU-MASK", []),
    ],
)
def test_the_mask_is_resolved_to_uuids_as_cuda_does(mask, id, visible, nvml):
    cards = [Card(0), Card(1)]
    nvml(*cards)
    finding = only(found(devices, **({} if mask is None else {"CUDA_VISIBLE_DEVICES": mask})), id)
    assert finding.data["visible"] == [cards[number].uuid for number in visible]


def test_where_numbers_are_not_certain_it_says_what_to_do(nvml):
    nvml(Card(0), Card(1, model="NVIDIA L4", total=24 << 30))
    assert "UUIDs" in only(found(devices, CUDA_VISIBLE_DEVICES="1"), "VO-GPU-UNSURE").fix
    nvml()
    assert "VO-GPU-NONE" in found(devices)


# ---- folder and spools


def spooled(folder, run, records=3):
    """The spool of a run of this process, in files that are closed."""
    spool = Spool(str(folder / run / "spool"), f"trainer-{os.uname().nodename}")
    kept = [spool.write("traces", spans(f"span {number}")) for number in range(records)]
    spool.close()
    return spool, kept


def dead(folder):
    """Rename the files of spools to those of a process that has ended."""
    ended = subprocess.Popen(["true"])
    ended.wait()
    for path in folder.rglob("*.jsonl"):
        path.rename(path.with_name(path.name.replace(f"-{os.getpid()}-", f"-{ended.pid}-")))


def test_what_was_never_sent_is_told_with_the_command_that_sends_it(tmp_path):
    spooled(tmp_path, "run-1")
    dead(tmp_path)
    finding = only(found(runs, VERL_OTEL_FOLDER=str(tmp_path)), "VO-SPOOL-LEFT")
    assert finding.level == WARNING and finding.data["records"] == 3 and finding.data["bytes"] > 100
    assert f"verl-otel replay {tmp_path / 'run-1'} --endpoint" in finding.fix


def test_a_run_that_goes_on_sends_its_spool_itself(tmp_path):
    spooled(tmp_path, "run-1")
    finding = only(found(runs, VERL_OTEL_FOLDER=str(tmp_path)), "VO-SPOOL-OF-A-RUN")
    assert finding.level == NOTE and finding.data["processes"] == [os.getpid()]


def test_what_was_sent_by_the_process_or_by_replay_is_not_counted(tmp_path):
    spool, kept = spooled(tmp_path, "run-1")
    for record in kept[:2]:
        spool.done(record)
    dead(tmp_path)
    assert only(found(runs, VERL_OTEL_FOLDER=str(tmp_path)), "VO-SPOOL-LEFT").data["records"] == 1
    (path,) = tmp_path.rglob("*.jsonl")
    (path.parent / ".replayed.json").write_text(json.dumps({path.name: path.stat().st_size}))
    assert "VO-SPOOL" in found(runs, VERL_OTEL_FOLDER=str(tmp_path))


def test_what_is_too_much_to_read_is_told_by_its_size(tmp_path, monkeypatch):
    monkeypatch.setattr(runs, "READ", 1)
    monkeypatch.setattr(runs, "SHOWN", 2)
    for number in range(3):
        spooled(tmp_path, f"run-{number}", records=1)
    dead(tmp_path)
    by_id = found(runs, VERL_OTEL_FOLDER=str(tmp_path))
    assert [finding.data["records"] for finding in by_id["VO-SPOOL-LEFT"]] == [1, 0]
    assert "at least 0 requests" in by_id["VO-SPOOL-LEFT"][1].what and by_id["VO-SPOOL-LEFT"][1].data["bytes"] > 100
    assert only(by_id, "VO-SPOOL-MORE").what.startswith("1 older runs")


def test_an_empty_record_of_each_signal_is_known():
    assert {otlp_json.empty(signal) for signal in ("traces", "metrics", "logs")} < runs.replay.NOTHING


@pytest.mark.parametrize(
    ("free", "level"), [(10 << 30, OK), (1 << 30, WARNING), (10 << 20, PROBLEM)], ids=["enough", "little", "none"]
)
def test_a_disk_that_is_full_is_told(free, level, tmp_path, monkeypatch):
    monkeypatch.setattr(runs.shutil, "disk_usage", lambda path: SimpleNamespace(free=free))
    assert only(found(runs, VERL_OTEL_FOLDER=str(tmp_path / "not" / "yet")), "VO-DISK").level == level
    assert not (tmp_path / "not").exists()


def test_a_folder_that_cannot_be_written_is_a_problem():
    assert only(found(runs, VERL_OTEL_FOLDER="/proc/verl-otel"), "VO-FOLDER").level == PROBLEM


# ---- all together


def area(check, seconds=10.0):
    return Area("an area", check, seconds)


def test_an_area_that_fails_or_hangs_is_a_finding_and_costs_no_other():
    def fails(asked):
        yield ok("VO-A", "before")
        raise RuntimeError("boom")

    def hangs(asked):
        yield ok("VO-B", "before")
        time.sleep(3600)

    start = time.monotonic()
    examined = examine(Asked({}), (area(fails), area(hangs, 0.3), area(lambda asked: [ok("VO-C", "after")])))
    assert time.monotonic() - start < 30
    assert [(f.id, f.level) for _, f in examined.findings] == [
        ("VO-A", OK), ("VO-CHECK-FAILED", WARNING), ("VO-B", OK), ("VO-CHECK-LATE", WARNING), ("VO-C", OK)
    ]  # fmt: skip


def test_all_together_take_no_longer_than_was_asked_for():
    def hangs(asked):
        time.sleep(3600)
        yield

    start = time.monotonic()
    examine(Asked({}, timeout=0.5), tuple(area(hangs, 3600) for _ in range(5)))
    assert time.monotonic() - start < 30


@pytest.mark.parametrize(
    ("made", "status", "strict"),
    [
        ([], 0, 0),
        ([ok("VO-A", "a"), note("VO-B", "b")], 0, 0),
        ([warning("VO-A", "a", "do"), note("VO-B", "b")], 0, 1),
        ([problem("VO-A", "a", "do"), warning("VO-B", "b", "do")], 1, 1),
    ],
)
def test_the_exit_status_is_by_the_weightiest_finding(made, status, strict):
    examined = examine(Asked({}), (area(lambda asked: made),))
    assert (examined.exit_status(False), examined.exit_status(True)) == (status, strict)


EVERY = [
    ok("VO-A", "it is " + "so " * 60, number=1, path=Path("/x")),
    note("VO-B", "perhaps"),
    warning("VO-C", "not quite", "mend it " * 30),
    problem("VO-D", "not at all", "mend it", list=["a"]),
]


def test_as_text_each_finding_is_there_with_what_to_do_and_its_id_unless_all_is_well():
    examined = examine(Asked({}), (area(lambda asked: EVERY),))
    text = rendering.as_text(examined, colour=False)
    assert max(map(len, text.splitlines())) <= rendering.WIDTH and "\033" not in text
    assert all(f"[{id}]" in text for id in ("VO-B", "VO-C", "VO-D")) and "[VO-A]" not in text
    assert "-> mend it mend it" in text
    assert "1 problem, 1 warning, 1 note, 1 ok" in text
    assert "\033[31mproblem" in rendering.as_text(examined, colour=True)


def test_as_json_it_is_as_the_schema_says():
    examined = examine(Asked({}), (area(lambda asked: EVERY),))
    content = json.loads(rendering.as_json(examined, strict=False))
    jsonschema.validate(content, SCHEMA)
    assert content["schema"] == rendering.SCHEMA == SCHEMA["properties"]["schema"]["const"]
    assert content["counts"] == dict.fromkeys(findings.LEVELS, 1) and content["exit_status"] == 1
    assert [f["id"] for f in content["findings"]] == ["VO-A", "VO-B", "VO-C", "VO-D"]
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate({**content, "findings": [{"id": "VO-A"}]}, SCHEMA)


def test_every_finding_that_can_be_made_is_in_the_document_and_no_other():
    in_code = {id for path in SOURCES for id in ID.findall(path.read_text())}
    described = set(re.findall(r"^\| `(VO-[A-Z0-9-]+)` \|", PAGE.read_text(), re.M))
    assert in_code == described and len(in_code) > 60


def test_each_area_is_in_the_document():
    titles = re.findall(r"^### (.+)$", PAGE.read_text(), re.M)
    assert [area.name for area in examination.AREAS] == [t for t in titles if t != "any area"]


# ---- the command


def test_the_help_lists_all_commands_and_what_doctor_is_for(capsys):
    with pytest.raises(SystemExit):
        cli.main(["--help"])
    text = " ".join(capsys.readouterr().out.split())
    assert "doctor say what is set up, what is not, and what to do about it" in text
    with pytest.raises(SystemExit):
        cli.main(["doctor", "--help"])
    assert "--strict" in capsys.readouterr().out


@pytest.mark.parametrize("arguments", [["--timeout", "0"], ["--timeout", "x"], ["--prometheus", "localhost:9090"]])
def test_a_wrong_command_line_is_status_2_and_says_why(arguments, capsys):
    try:
        status = cli.main(["doctor", *arguments])
    except SystemExit as stopped:
        status = stopped.code
    assert status == 2 and arguments[0] in capsys.readouterr().err
