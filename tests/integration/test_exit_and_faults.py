"""Telemetry that cannot work leaves the process as it would be without it, and its end is bounded."""

import json
import statistics
import subprocess
import sys
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from signal import SIGTERM

import bed
import pytest
from otlp_server import FAULTS as FAULTS_OF_ENDPOINTS
from otlp_server import Server

from verl_otel.recording import replay

HERE = Path(__file__).parent
FREE_PORT = "http://127.0.0.1:1"  # nothing listens there
EXIT_TIMEOUT, MARGIN = 5, 3


def train(tmp_path, *arguments, instrument=True, **environment):
    environment.setdefault("VERL_FILE_LOGGER_ROOT", str(tmp_path / "logs"))
    command = [*([bed.INSTRUMENT] if instrument else []), sys.executable, str(HERE / "small_trainer.py"), *arguments]
    started = time.time()
    result = subprocess.run(
        command, env=bed.clean_environment(**environment), cwd=tmp_path, capture_output=True, text=True, timeout=120
    )
    result.ended = time.time()
    result.seconds = result.ended - started
    return result


def logged(tmp_path):
    (path,) = (tmp_path / "logs").rglob("*.jsonl")
    return [json.loads(line) for line in path.read_text().splitlines()]


def warnings_of(result):
    return [line for line in result.stderr.splitlines() if "verl-otel:" in line]


@pytest.fixture(scope="module")
def untouched(tmp_path_factory):
    folder = tmp_path_factory.mktemp("untouched")
    result = train(folder, instrument=False)
    assert result.returncode == 0, result.stderr
    return logged(folder)


FAULTS = {
    "an endpoint that is no URL": ({"OTEL_EXPORTER_OTLP_ENDPOINT": "not a url"}, 1),
    "an exporter that is not installed": ({"OTEL_TRACES_EXPORTER": "zipkin"}, 1),
    "a protocol whose package is not installed": (
        {"OTEL_EXPORTER_OTLP_ENDPOINT": FREE_PORT, "OTEL_EXPORTER_OTLP_PROTOCOL": "grpc"},
        1,  # all three signals ask for the same package
    ),
    "a folder that cannot be written": ({"VERL_OTEL_FOLDER": "/dev/null/x"}, 3),
    "numbers that are none": ({"OTEL_BSP_SCHEDULE_DELAY": "soon", "VERL_OTEL_TRAJECTORIES": "many"}, 2),
    "a sampler that does not exist": ({"OTEL_TRACES_SAMPLER": "sometimes"}, 0),
    "an attribute limit that is none": ({"OTEL_SPAN_ATTRIBUTE_COUNT_LIMIT": "x"}, 1),
    "the SDK disabled": ({"OTEL_SDK_DISABLED": "true"}, 0),
    "no exporters": (
        {"OTEL_TRACES_EXPORTER": "none", "OTEL_METRICS_EXPORTER": "none", "OTEL_LOGS_EXPORTER": "none"},
        0,
    ),
}


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """fault -> the folder and the result of a training with it; two at a time."""
    with ThreadPoolExecutor(2) as pool:
        folders = {fault: tmp_path_factory.mktemp("fault") for fault in FAULTS}
        running = {fault: pool.submit(train, folders[fault], **FAULTS[fault][0]) for fault in FAULTS}
        return {fault: (folders[fault], future.result()) for fault, future in running.items()}


@pytest.mark.parametrize("fault", FAULTS)
def test_the_training_is_as_without_us_with(fault, trained, untouched):
    warnings = FAULTS[fault][1]
    folder, result = trained[fault]
    assert result.returncode == 0, result.stderr
    assert logged(folder) == untouched
    assert len(warnings_of(result)) == warnings, result.stderr
    assert not (folder / "verl-otel").exists() or "numbers" in fault or "exporter that" in fault or "sampler" in fault


def test_a_failing_training_still_fails_the_same_way(tmp_path):
    result = train(tmp_path, "fail")
    assert result.returncode == 1
    assert "RuntimeError: the training failed" in result.stderr


def moment(result, name):
    (found,) = (float(line.split()[1]) for line in result.stdout.splitlines() if line.startswith(f"{name} "))
    return found


def exit_delay(result):
    return result.ended - moment(result, "end")


def test_the_exit_delay_can_be_set(tmp_path):
    result = train(tmp_path, OTEL_EXPORTER_OTLP_ENDPOINT=FREE_PORT, VERL_OTEL_EXIT_TIMEOUT="0.2")
    assert exit_delay(result) < 0.2 + MARGIN


# ---- what an endpoint can do wrong to which signals, from the start or after it has taken one request; and how the
# training ends

SIGNALS = ("traces", "metrics", "logs")
OUTCOMES = ("delivered", "spooled", "replayed", "dropped")
MATRIX = {
    "nothing": ("", SIGNALS, False, ""),
    **{fault: (fault, SIGNALS, False, "") for fault in FAULTS_OF_ENDPOINTS},
    **{f"{fault}, {of} only": (fault, (of,), False, "") for fault in ("hangs", "400", "503") for of in SIGNALS},
    **{f"{fault}, later": (fault, SIGNALS, True, "") for fault in ("hangs", "resets", "503")},
    **{f"hangs, then {end}": ("hangs", SIGNALS, False, end) for end in ("fail", "exit", "interrupt", "terminate")},
}
LAUNCHER_SHARE = 0.3
"""What this small trainer, which looks like a launcher, may take of the time for the end of a run."""

STATUS = {"": 0, "fail": 1, "exit": 4, "interrupt": 1, "terminate": 3}
"""As without telemetry: with verl in it, an interrupted process ends with 1."""


class Case:
    """A training against an endpoint; what was taken then, and after a replay to a healthy one."""

    def __init__(self, folder, fault, signals, later, end):
        with Server() as server, Server() as healthy:
            server.later, endpoint = later, server.url_of(fault)
            if signals != SIGNALS:
                server.fault, server.faults = "", dict.fromkeys(signals, fault)
            self.result = train(
                folder,
                "counts",
                *end.split(),
                OTEL_EXPORTER_OTLP_ENDPOINT=endpoint,
                VERL_OTEL_EXIT_TIMEOUT=f"{EXIT_TIMEOUT / LAUNCHER_SHARE}",
            )
            self.logged = logged(folder)
            self.taken = of_server(server)
            spools = list((folder / "verl-otel").rglob("spool"))
            self.replayed = replay.replay(spools[0], healthy.url) if spools else None
            self.taken_later = of_server(healthy)
            self.names = [sorted(server.names()), sorted(healthy.names())]
        (line,) = (line for line in self.result.stdout.splitlines() if line.startswith("counts "))
        found = json.loads(line.partition(" ")[2])
        self.delay = moment(self.result, "left") - moment(self.result, "end")
        self.pending = found["pending"]
        self.counts = {of: Counter() for of in self.pending}
        for of, outcome, _, items in found["counts"]:
            self.counts[of][outcome] += items

    def handed_over(self, signal):
        became = self.counts[signal]
        return became["delivered"] + became["spooled"] - became["replayed"] + became["dropped"] + self.pending[signal]


def of_server(server):
    return {signal: server.items(signal) for signal in SIGNALS}


@pytest.fixture(scope="module")
def matrix(tmp_path_factory, untouched, pytestconfig):
    """The cases by name; and prints them as a table."""
    with ThreadPoolExecutor(2) as pool:
        without = [pool.submit(train, tmp_path_factory.mktemp("without"), instrument=False) for _ in range(3)]
        running = {name: pool.submit(Case, tmp_path_factory.mktemp("case"), *case) for name, case in MATRIX.items()}
        cases = {name: future.result() for name, future in running.items()}
        seconds = statistics.median(future.result().seconds for future in without)
    with pytestconfig.pluginmanager.getplugin("capturemanager").global_and_fixture_disabled():
        print("\n" + "\n".join(table(cases, untouched, seconds)))
    return cases


def table(cases, untouched, seconds):
    """Lines: what the training logged, how long it took, and of each signal what became of what was handed over."""
    yield f"{'an endpoint that':22} result     time  exit  delivered + spooled - replayed + dropped = handed over"
    for name, case in cases.items():
        result = "identical" if case.logged == untouched else "DIFFERENT"
        became = {
            of: [case.counts[of][what] for what in ("delivered", "spooled", "replayed", "dropped")] for of in SIGNALS
        }
        counts = "; ".join(
            f"{of} {' '.join(map(str, numbers))} = {case.handed_over(of)}" for of, numbers in became.items()
        )
        yield f"{name:22} {result:9} {case.result.seconds / seconds:5.2f}x {case.delay:4.1f}s  {counts}"


@pytest.mark.parametrize("name", MATRIX)
def test_with_an_endpoint_that(name, matrix, untouched):
    fault, signals, later, end = MATRIX[name]
    case, well = matrix[name], matrix["nothing"]
    assert case.result.returncode == STATUS[end], case.result.stderr
    assert case.logged == untouched
    assert case.delay < EXIT_TIMEOUT
    assert "the user's handler" in case.result.stdout or end != "terminate"
    for signal in SIGNALS:
        became, meets = case.counts[signal], fault if signal in signals else ""
        assert case.pending[signal] == 0
        if signal != "metrics":  # how often those are exported depends on how long it takes
            assert case.handed_over(signal) == well.handed_over(signal) > 0
        if meets != "is slow":  # what it has taken, it has said
            assert became["delivered"] == case.taken[signal]
        assert became["spooled"] - became["replayed"] == case.taken_later[signal]
        assert became["dropped"] == (case.handed_over(signal) if meets == "400" else 0)
        assert later or became["delivered"] == (0 if meets else case.handed_over(signal))
    if fault == "400":
        assert len(warnings_of(case.result)) == len(signals) + 1  # one for each signal, and at the end how much
        return
    assert sorted(case.names[0] + case.names[1]) == well.names[0] or fault == "is slow"
    assert set(case.names[0] + case.names[1]) == set(well.names[0])
    if fault == "":
        assert case.replayed is None and warnings_of(case.result) == []
    else:
        last = warnings_of(case.result)[-1]
        assert f"{case.replayed.items} are kept in" in last and "0 are lost" in last
        assert len(warnings_of(case.result)) == (1 if fault in {"hangs", "is slow"} else 2)


@pytest.mark.parametrize("end", ["terminate-unhandled", "terminate-hanging"])
def test_a_process_that_nobody_saves_from_a_signal_ends_by_it_and_loses_nothing(end, tmp_path, matrix, untouched):
    with Server() as server, Server() as healthy:
        endpoint = server.url_of("hangs")
        result = train(tmp_path, end, OTEL_EXPORTER_OTLP_ENDPOINT=endpoint, VERL_OTEL_EXIT_TIMEOUT="5")
        (spool,) = (tmp_path / "verl-otel").rglob("spool")
        replay.replay(spool, healthy.url)
        taken, names = of_server(healthy), healthy.names()
    assert result.returncode == -SIGTERM, result.stderr
    assert exit_delay(result) < EXIT_TIMEOUT
    assert logged(tmp_path) == untouched
    well = matrix["nothing"]
    assert {of: taken[of] for of in ("traces", "logs")} == {of: well.taken[of] for of in ("traces", "logs")}
    assert sorted(names) == well.names[0]
