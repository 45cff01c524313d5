"""What a run says of itself when it begins (`export/announcement.py`)."""

import pytest

from verl_otel.config import Settings
from verl_otel.export import announcement, providers
from verl_otel.export.announcement import announce
from verl_otel.version import __version__


@pytest.fixture
def said(monkeypatch, tmp_path, capsys):
    """What is said of run-1 with these variables set, by a process that has made its providers itself."""
    ours = providers.Providers(*(object() for _ in range(3)))  # type: ignore[arg-type]
    monkeypatch.setattr(providers, "_made", [ours.tracer, ours.meter, ours.logger])
    monkeypatch.setattr(announcement, "_said", False)
    monkeypatch.setenv("VERL_OTEL_FOLDER", str(tmp_path))

    def say(**environ):
        for name, value in environ.items():
            monkeypatch.setenv(name, value)
        announce("run-1", Settings.from_environ(), ours)
        out, err = capsys.readouterr()
        assert out == ""
        return err.removeprefix(f"verl-otel {__version__}: ")

    return say


def test_a_run_that_is_recorded_says_the_command_that_shows_it(said, tmp_path):
    assert said() == f"run run-1 is recorded: verl-otel report {tmp_path}/run-1\n"


def test_it_is_said_once_in_a_process(said):
    assert (said() != "", said()) == (True, "")


@pytest.mark.parametrize(
    ("environ", "where"),
    [
        (
            {"OTEL_EXPORTER_OTLP_ENDPOINT": "https://user:hunter2@collector.example:4318/key/hunter2"},
            "is sent to https://collector.example:4318",
        ),
        ({"OTEL_TRACES_EXPORTER": "otlp", "OTEL_METRICS_EXPORTER": "none", "OTEL_LOGS_EXPORTER": "none"},
         "is sent to http://localhost:4318"),
        ({"OTEL_EXPORTER_OTLP_TRACES_ENDPOINT": "http://jaeger:4318/v1/traces", "VERL_OTEL_FOLDER": "/srv"},
         "is sent to http://jaeger:4318; is recorded: verl-otel report /srv/run-1"),
        ({"OTEL_EXPORTER_OTLP_ENDPOINT": "http://c:4318", "OTEL_METRICS_EXPORTER": "prometheus"},
         "is sent to http://c:4318; is scraped by Prometheus"),
        ({"OTEL_EXPORTER_OTLP_ENDPOINT": "http://c:4318", "VERL_OTEL_MODE": "offline", "VERL_OTEL_FOLDER": "/srv"},
         "is recorded: verl-otel report /srv/run-1"),
    ],
)  # fmt: skip
def test_a_run_says_where_it_goes_without_what_may_be_secret(said, environ, where):
    assert said(**environ) == f"run run-1 {where}\n"


def test_a_run_of_which_nothing_leaves_the_process_says_nothing(said):
    assert said(OTEL_TRACES_EXPORTER="none", OTEL_METRICS_EXPORTER="none", OTEL_LOGS_EXPORTER="none") == ""


def test_a_process_of_a_run_leaves_it_to_the_launcher(said):
    assert said(VERL_OTEL_ACTIVE="1") == ""


def test_where_the_providers_of_others_send_is_not_guessed(said, monkeypatch):
    monkeypatch.setattr(providers, "_made", [])
    assert said() == ""
