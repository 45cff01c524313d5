"""Telemetry that cannot work leaves the process as it would be without it, and its end is bounded."""

import json
import socket
import subprocess
import sys
import time
from pathlib import Path

import bed
import pytest

HERE = Path(__file__).parent
FREE_PORT = "http://127.0.0.1:1"  # nothing listens there
EXIT_TIMEOUT, MARGIN = 5, 3


def train(tmp_path, *arguments, instrument=True, **environment):
    environment.setdefault("VERL_FILE_LOGGER_ROOT", str(tmp_path / "logs"))
    command = [*([bed.INSTRUMENT] if instrument else []), sys.executable, str(HERE / "small_trainer.py"), *arguments]
    result = subprocess.run(
        command, env=bed.clean_environment(**environment), cwd=tmp_path, capture_output=True, text=True, timeout=120
    )
    result.ended = time.time()
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
    "a collector that is not there": ({"OTEL_EXPORTER_OTLP_ENDPOINT": FREE_PORT}, 1),
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


@pytest.mark.parametrize("fault", FAULTS)
def test_the_training_is_as_without_us_with(fault, tmp_path, untouched):
    environment, warnings = FAULTS[fault]
    result = train(tmp_path, **environment)
    assert result.returncode == 0, result.stderr
    assert logged(tmp_path) == untouched
    assert len(warnings_of(result)) == warnings, result.stderr
    assert not (tmp_path / "verl-otel").exists() or "numbers" in fault or "exporter that" in fault or "sampler" in fault


def test_a_failing_training_still_fails_the_same_way(tmp_path):
    result = train(tmp_path, "fail")
    assert result.returncode == 1
    assert "RuntimeError: the training failed" in result.stderr


def exit_delay(result):
    (end,) = (float(line.split()[1]) for line in result.stdout.splitlines() if line.startswith("end "))
    return result.ended - end


def test_a_dead_collector_does_not_delay_the_exit(tmp_path):
    assert exit_delay(train(tmp_path, OTEL_EXPORTER_OTLP_ENDPOINT=FREE_PORT)) < EXIT_TIMEOUT + MARGIN


def test_a_collector_that_never_answers_does_not_delay_the_exit(tmp_path):
    with socket.create_server(("127.0.0.1", 0), backlog=64) as silent:
        endpoint = f"http://127.0.0.1:{silent.getsockname()[1]}"
        assert exit_delay(train(tmp_path, OTEL_EXPORTER_OTLP_ENDPOINT=endpoint)) < EXIT_TIMEOUT + MARGIN


def test_the_exit_delay_can_be_set(tmp_path):
    result = train(tmp_path, OTEL_EXPORTER_OTLP_ENDPOINT=FREE_PORT, VERL_OTEL_EXIT_TIMEOUT="0.2")
    assert exit_delay(result) < 0.2 + MARGIN
