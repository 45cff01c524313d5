"""Planted secrets: none of them is in what is recorded, sent, logged or written, and files are their owner's only."""

import base64
import contextlib
import os
import re
import stat
import subprocess
import sys
import textwrap
import time
from pathlib import Path
from types import SimpleNamespace
from urllib.parse import quote

import pytest
from agent_runs import inside, make, tool, trajectory
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from opentelemetry.trace import StatusCode

from verl_otel import border
from verl_otel.config import Settings
from verl_otel.export.otlp_http import Endpoint
from verl_otel.hooks.tracking import RECORDED_PARAMETERS, parameters
from verl_otel.identity import Identity
from verl_otel.redaction import redacted, shown, traceback_of
from verl_otel.tracing.errors import describe

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


@settings(max_examples=50, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(secret=SECRETS)
def test_a_model_path_that_is_a_url_is_recorded_without_its_password_and_its_query(new_memory, secret):
    hidden = quote(secret, safe="")
    path = f"https://user:{hidden}@hub.example/m?token={hidden}&X-Amz-Signature={hidden}#{hidden}"
    recorded = parameters({name: {"model": {"path": path}} for name in ("actor_rollout_ref", "critic")})
    assert set(recorded.values()) == {"https://hub.example/m"}
    memory = new_memory()
    t = make(memory)
    config = SimpleNamespace(rollout=SimpleNamespace(name="vllm"), model=SimpleNamespace(path=path))
    client = SimpleNamespace(config=SimpleNamespace(actor_rollout_ref=config))
    with trajectory(t), inside(t, t.enter_request(client, "request-1", {"prompt_ids": [1]})):
        pass
    assert memory.span("verl.generate").attributes["gen_ai.request.model"] == "https://hub.example/m"


MESSAGES = st.sampled_from(
    [
        "401 Client Error: Unauthorized for url: https://user:{0}@judge.example/v1/score?token={0}&page=2",
        "HTTPSConnectionPool(host='judge', port=443): Max retries exceeded with url: /v1?sig={0} (Caused by ...)",
        "https://bucket.s3.amazonaws.com/key?X-Amz-Credential={0}&X-Amz-Signature={0} is gone",
        "cannot open redis://:{0}@cache:6379/0",
        "refused: {{'Authorization': 'Bearer {0}', 'x-api-key': '{0}'}}",
        "the header was Authorization: Token {0}",
        "password={0}",
    ]
)
"""Of exceptions, with the place of a secret."""


class _Unusual(Exception):
    """Says something else when it is printed."""

    def __str__(self):
        return f"HTTP 401, {self.args[0]}"


def raised(message, long, kind):
    """An exception with a cause, as it is caught; a long one, if wanted, with the message at both ends."""
    text = f"{message} {'x ' * long} {message}" if long else message
    try:
        try:
            raise ValueError(text)
        except ValueError as cause:
            raise kind(text) from cause
    except kind as error:
        return error


@st.composite
def failures(draw):
    """A secret, and an exception that tells it."""
    secret = draw(SECRETS)
    message = draw(MESSAGES).format(quote(secret, safe=""))
    kind = draw(st.sampled_from([RuntimeError, _Unusual]))
    return secret, raised(message, draw(st.sampled_from([0, 0, 300, 30_000])), kind)


@settings(max_examples=25, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(failures())
def test_no_secret_of_an_exception_is_on_spans_or_in_events(new_memory, failure):
    secret, error = failure
    kind, memory = type(error), new_memory()
    agents, scores, trainer, launcher = make(memory), memory.process("reward_worker").scores, *memory_of_run(memory)
    with contextlib.suppress(kind), trajectory(agents):  # recorded as it is
        raise error
    for _ in range(9):
        with contextlib.suppress(kind), trajectory(agents), tool(agents) as call:  # held, and kept since it fails
            call.failed(error)
            raise error
    trainer.steps.leave(trainer.steps.enter("update_actor"), error)
    with contextlib.suppress(kind), called_from_sampled(memory), inside(scores, scores.enter()):
        raise error
    with called_from_sampled(memory), inside(scores, scores.enter()) as score:
        scores.answered(score, {"reward_extra_info": {"error": str(error)}})
    trainer.run_finished(error)
    launcher.close(error)
    spans, logs = [span.to_json() for span in memory.spans], [log.to_json() for log in memory.logs]
    assert_not_in(secret, *spans, *logs)
    assert {"verl.trajectory", "verl.tool", "verl.update_actor", "verl.compute_score", "verl.run"} <= {
        span.name for span in memory.spans if span.status.status_code is StatusCode.ERROR
    }
    assert sum("exception.stacktrace" in text and "test_security.py" in text for text in spans) >= 4
    assert any("[redacted]" in text and "verl.run.finished" in text for text in logs)


@settings(max_examples=25, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(failures())
def test_no_secret_of_a_failure_of_ours_is_in_the_log(caplog, failure):
    secret, error = failure
    caplog.clear()
    border._counts.clear()  # so that it is the first time at this site
    try:
        raise error
    except Exception:
        border.caught("a site")
    assert_not_in(secret, caplog.text)
    assert "a site failed; the run goes on" in caplog.text
    assert "test_security.py" in caplog.text


class _Unprintable(Exception):
    """Fails when it is printed."""

    @property
    def __cause__(self):
        raise AssertionError


def test_of_an_exception_that_cannot_be_printed_its_class_is_told():
    assert traceback_of(_Unprintable()) == "_Unprintable"


def memory_of_run(memory):
    """Trainer and launcher."""
    trainer, launcher = memory.process(), memory.process("launcher")
    launcher.start_run()
    return trainer, launcher


@contextlib.contextmanager
def called_from_sampled(memory):
    with memory.tracer.start_as_current_span("caller", record_exception=False, set_status_on_exception=False):
        yield


@pytest.mark.parametrize(
    "text",
    [
        "a" * 10**6,
        "a://" * 10**5,
        "a://" + "b@" * 10**5,
        "?a=" * 10**5,
        "token" * 10**5,
        ("authorization" + " " * 500) * 500,
        "eyJ-" * 10**5,
        "-----BEGIN " * 10**5,
        "-----BEGIN PRIVATE KEY-----" + "-----END " * 10**5,
    ],
    ids=range(9),
)
def test_what_it_takes_to_leave_secrets_out_of_a_text_is_bounded(text):
    started = time.process_time()
    assert len(describe(RuntimeError(text))) <= 500
    assert time.process_time() - started < 0.5
    started = time.process_time()
    redacted(text[:100_000], 100_000, queries=True)  # all of it
    assert time.process_time() - started < 2


def test_a_message_without_secrets_stays_as_it_is():
    for text in ("CUDA out of memory. Tried to allocate 2.00 GiB", "tokens=4096 of http://host:8000/v1", "a?b & c=d"):
        assert shown(text) == text
    assert shown("GET https://host/a?b=c failed") == "GET https://host/a?[redacted] failed"


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
