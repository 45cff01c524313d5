"""Planted secrets: none of them is in what is recorded, sent, logged or written, and files are their owner's only."""

import base64
import os
import re
import stat
import subprocess
import sys
import textwrap
from pathlib import Path
from urllib.parse import quote

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from verl_otel.config import Settings
from verl_otel.export.otlp_http import Endpoint
from verl_otel.hooks.tracking import RECORDED_PARAMETERS, parameters
from verl_otel.identity import Identity

# No secret is by chance a part of what is there anyway.
SECRETS = st.text("abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOP0123456789+/=.~!-", min_size=4, max_size=30).map(
    "Zq7{}".format
)
"""Such as tokens and passwords are."""


def assert_not_in(secret, *texts):
    """Nor as a URL or Basic authentication would write it."""
    encoded = base64.b64encode(f"user:{secret}".encode()).decode().rstrip("=")
    for text in texts:
        for form in {secret, quote(secret, safe=""), encoded}:
            assert form not in str(text)


def url(secret):
    return f"https://user:{quote(secret, safe='')}@127.0.0.1:1/{quote(secret, safe='')}?token={quote(secret, safe='')}"


def environment(secret):
    """Everywhere that an environment of a training has secrets."""
    password = quote(secret, safe="")
    signals = ("", "TRACES_", "METRICS_", "LOGS_")
    return {
        **{
            f"OTEL_EXPORTER_OTLP_{s}HEADERS": f"authorization=Bearer%20{password},x-api-key={password}" for s in signals
        },
        **{f"OTEL_EXPORTER_OTLP_{s}ENDPOINT": url(secret) for s in signals},
        "OTEL_EXPORTER_OTLP_CLIENT_KEY": f"/secrets/{password}.key",
        "WANDB_API_KEY": secret,
        "HF_TOKEN": secret,
        "AWS_SECRET_ACCESS_KEY": secret,
        "CLIENT_SECRET": secret,
        "DB_PASSWORD": secret,
        "MLFLOW_TRACKING_URI": url(secret),
        "MLFLOW_TRACKING_PASSWORD": secret,
        "VERL_OTEL_BRIDGE_TOKEN": secret,
        "HTTPS_PROXY": url(secret),
    }


SECRET_NAMES = st.sampled_from(
    [
        "api_key",
        "wandb_api_key",
        "token",
        "hf_token",
        "secret",
        "password",
        "passwd",
        "credentials",
        "endpoint",
        "headers",
    ]
)
PLACES = st.sampled_from(
    [
        *{name.rpartition(".")[0] for name in RECORDED_PARAMETERS},
        "",
        "env",
        "actor_rollout_ref.rollout.engine_kwargs.vllm",
    ]
)


@st.composite
def configs(draw, secret):
    """A configuration of verl with secrets in some places, beside what is recorded."""
    config = {}

    def put(name, value):
        *path, last = [part for part in name.split(".") if part]
        node = config
        for part in path:
            node = node.setdefault(part, {})
        node[last] = value

    put("trainer.nnodes", 1)
    put("actor_rollout_ref.actor.optim.lr", 1e-6)
    for _ in range(draw(st.integers(1, 6))):
        value = draw(st.sampled_from([secret, url(secret), [secret], {"value": secret}]))
        put(f"{draw(PLACES)}.{draw(SECRET_NAMES)}", value)
    return config


@settings(max_examples=200)
@given(st.data())
def test_no_secret_of_the_configuration_is_a_parameter(data):
    secret = data.draw(SECRETS)
    recorded = parameters(data.draw(configs(secret)))
    assert_not_in(secret, recorded)
    assert recorded["trainer.nnodes"] == 1  # what is asked for is there


@pytest.mark.parametrize("name", RECORDED_PARAMETERS)
def test_no_recorded_parameter_is_named_like_a_secret(name):
    assert not re.search(r"(?i)key|token|secret|passw|credential|auth|header|url|uri|endpoint", name)


def test_a_model_path_that_is_a_url_with_a_password_is_recorded_without_it():
    recorded = parameters({"actor_rollout_ref": {"model": {"path": "https://user:Zq7secret@hub.example/m"}}})
    assert_not_in("Zq7secret", recorded)


@settings(max_examples=200)
@given(SECRETS)
def test_no_secret_of_the_environment_is_in_the_effective_settings(secret):
    env = environment(secret)
    effective = Settings.from_environ(env).effective(env)
    assert_not_in(secret, effective)
    assert effective["OTEL_EXPORTER_OTLP_ENDPOINT"] == "https://127.0.0.1:1"


@settings(max_examples=100)
@given(SECRETS, st.sampled_from(["traces", "metrics", "logs"]))
def test_an_endpoint_shows_no_secret(secret, signal):
    endpoint = Endpoint(signal, environ=environment(secret))
    assert_not_in(secret, endpoint.shown)


@settings(max_examples=50)
@given(SECRETS)
def test_an_endpoint_that_is_none_is_reported_without_secrets(secret):
    for broken in (f"user:{secret}@host", f"ftp://user:{quote(secret, safe='')}@host", f"http://u:{secret}@[host"):
        with pytest.raises(ValueError) as error:
            Endpoint("traces", environ={"OTEL_EXPORTER_OTLP_ENDPOINT": broken})
        assert_not_in(secret, error.value)


@settings(max_examples=25, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_no_secret_is_in_spans_metrics_events_and_resources(new_memory, caplog, data):
    secret = data.draw(SECRETS)
    memory = new_memory()
    with pytest.MonkeyPatch.context() as patch:
        for name, value in environment(secret).items():
            patch.setenv(name, value)
        process = memory.process()
        process.run_started("project", "experiment", parameters(data.draw(configs(secret))))
        scope = process.steps.enter("update_actor")
        process.log({"actor/loss": 0.5, "a/new": 1}, 1)
        process.steps.leave(scope, None)
        process.run_finished(None)
        resource = Identity.detect().resource()
        recorded = [*(span.to_json() for span in memory.spans), *(log.to_json() for log in memory.logs)]
        recorded += [str(point) for name in ("verl.loss", "verl.training.step") for point in memory.points(name)]
    assert any("verl.run.started" in text for text in recorded)
    assert_not_in(secret, resource.attributes, *recorded, caplog.text)


TRAINING = """
    import os
    from verl.utils.profiler import marked_timer
    from verl.utils.tracking import Tracking

    secret, url = os.environ["HF_TOKEN"], os.environ["MLFLOW_TRACKING_URI"]
    config = {
        "trainer": {"nnodes": 1, "api_key": secret, "logger_url": url},
        "actor_rollout_ref": {"model": {"path": "m", "hf_token": secret}, "rollout": {"kwargs": {"key": [secret]}}},
    }
    tracking = Tracking("project", "experiment", default_backend=["console"], config=config)
    with marked_timer("update_actor", {}):
        pass
    tracking.log(data={"actor/loss": 0.5}, step=1)
"""


@pytest.mark.parametrize("mode", ["online", "offline"])
def test_no_secret_is_in_the_files_or_the_output_of_a_process(mode, tmp_path):
    """With an endpoint that is away, so that there are warnings and a spool; and recorded to files."""
    secret = "Zq7planted+secret/=4"
    given = {**environment(secret), "VERL_OTEL_MODE": mode, "VERL_OTEL_EXIT_TIMEOUT": "1"}
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("OTEL_", "VERL_OTEL_"))}
    instrument = str(Path(sys.executable).parent / "opentelemetry-instrument")
    done = subprocess.run(
        [instrument, sys.executable, "-c", textwrap.dedent(TRAINING)],
        cwd=tmp_path,
        env={**kept, **given, "NO_PROXY": "*"},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    assert ("cannot be sent" in done.stderr) == (mode == "online"), done.stderr
    files = [path for path in (tmp_path / "verl-otel").rglob("*") if path.is_file()]
    assert {"verl.run.started", "verl.update_actor"} <= set(
        re.findall(r'"(verl\.run\.started|verl\.update_actor)"', "".join(path.read_text() for path in files))
    )
    assert_not_in(secret, done.stdout, done.stderr, *files, *(path.read_text() for path in files))
    for path in (tmp_path / "verl-otel").rglob("*"):
        assert stat.S_IMODE(path.stat().st_mode) & 0o077 == 0 or not path.is_file(), path
