"""Posting OTLP requests (`export/otlp_http.py`): what each answer of an endpoint means, and what is never shown."""

import base64
import os
import socket
import time
from email.utils import formatdate

import pytest
from hypothesis import given
from hypothesis import strategies as st
from otlp_server import Server, spans

from verl_otel.export.otlp_http import Endpoint, Outcome, headers_of

SECRET = "s3cr3t-7731"


def endpoint(server, **variables):
    return Endpoint("traces", environ={"OTEL_EXPORTER_OTLP_ENDPOINT": server.url, **variables})


def test_a_request_arrives_as_it_is(server):
    content = spans("a", "b")
    answer = endpoint(server).post(content)
    assert (answer.outcome, answer.rejected) == (Outcome.DELIVERED, 0)
    assert server.taken == [("traces", content)]
    assert server.headers[0]["content-type"] == "application/x-protobuf"


@pytest.mark.parametrize(
    ("fault", "outcome"),
    [
        ("400", Outcome.REFUSED),
        ("413", Outcome.REFUSED),
        ("401", Outcome.LATER),
        ("404", Outcome.LATER),
        ("302", Outcome.LATER),
        ("408", Outcome.LATER),
        ("429", Outcome.LATER),
        ("500", Outcome.LATER),
        ("503", Outcome.LATER),
        ("resets", Outcome.LATER),
        ("garbage", Outcome.LATER),
        ("hangs", Outcome.LATER),
    ],
)
def test_what_an_answer_means(server, fault, outcome):
    server.fault = fault
    answer = endpoint(server, OTEL_EXPORTER_OTLP_TIMEOUT="0.5").post(spans("a"))
    assert answer.outcome is outcome
    assert answer.reason
    assert answer.status == (int(fault) if fault.isdecimal() else 0)
    assert server.taken == []
    assert all("elsewhere" not in str(headers) for headers in server.headers)


def test_an_endpoint_that_hangs_costs_the_timeout_once(server):
    server.fault = "hangs"
    start = time.monotonic()
    endpoint(server, OTEL_EXPORTER_OTLP_TRACES_TIMEOUT="0.3", OTEL_EXPORTER_OTLP_TIMEOUT="60").post(spans("a"))
    assert time.monotonic() - start < 5
    assert server.tried["traces"] == 1


def test_a_kept_connection_that_the_endpoint_has_closed_is_opened_again(server):
    e = endpoint(server)
    assert e.post(spans("a")).outcome is Outcome.DELIVERED
    port = server.port
    server.close()
    with Server(port=port) as again:
        assert e.post(spans("b")).outcome is Outcome.DELIVERED
        assert again.names() == ["b"]


@pytest.mark.parametrize(
    ("value", "seconds"), [("7", 7), ("0", 0), ("-3", 0), ("soon", None), ("nan", None), ("", None)]
)
def test_retry_after(server, value, seconds):
    server.fault, server.retry_after = "429", value
    assert endpoint(server).post(b"").wait == seconds


def test_retry_after_as_a_date(server):
    server.fault, server.retry_after = "503", formatdate(time.time() + 60, usegmt=True)
    wait = endpoint(server).post(b"").wait
    assert wait is not None and 50 < wait <= 60


def test_a_partial_success_says_how_many_were_rejected(server):
    server.rejected = 2
    assert endpoint(server).post(spans("a", "b", "c")).rejected == 2


def test_an_endless_answer_is_not_read(server):
    def answer(handler, status, content=b""):
        handler.send_response(200)
        handler.send_header("Content-Length", str(1 << 40))
        handler.end_headers()
        handler.wfile.write(b"x" * (1 << 20))
        server.ended.wait()

    original = server.RequestHandlerClass
    server.RequestHandlerClass = type("Handler", (original,), {"answer": answer})
    start = time.monotonic()
    assert endpoint(server).post(spans("a")).outcome is Outcome.DELIVERED
    assert time.monotonic() - start < 5


@pytest.mark.parametrize("compression", ["gzip", "deflate"])
def test_compression(server, compression):
    content = spans("a")
    endpoint(server, OTEL_EXPORTER_OTLP_COMPRESSION=compression).post(content)
    assert server.taken == [("traces", content)]
    assert server.headers[0]["content-encoding"] == compression


def test_headers_of_one_signal_come_before_those_of_all(server):
    both = {
        "OTEL_EXPORTER_OTLP_HEADERS": "a=1",
        "OTEL_EXPORTER_OTLP_TRACES_HEADERS": "authorization=Bearer%20x=y, b = ü",
    }
    endpoint(server, **both).post(spans("a"))
    assert server.headers[0]["authorization"] == "Bearer x=y"
    assert server.headers[0]["b"].encode("latin-1").decode() == "ü"
    assert "a" not in server.headers[0]


def test_user_and_password_of_the_url_are_sent(server):
    url = f"http://user:{SECRET}%21@127.0.0.1:{server.port}"
    e = Endpoint("traces", environ={"OTEL_EXPORTER_OTLP_ENDPOINT": url})
    assert e.post(spans("a")).outcome is Outcome.DELIVERED
    assert server.headers[0]["authorization" if "authorization" in server.headers[0] else "Authorization"] == (
        "Basic " + base64.b64encode(f"user:{SECRET}!".encode()).decode()
    )
    assert e.shown == server.url


def test_netrc_does_not_come_before_our_headers(server, tmp_path, monkeypatch):
    (tmp_path / ".netrc").write_text("machine 127.0.0.1 login other password other\n")
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("NETRC", str(tmp_path / ".netrc"))
    endpoint(server, OTEL_EXPORTER_OTLP_HEADERS="authorization=Bearer mine").post(spans("a"))
    assert server.headers[0]["authorization"] == "Bearer mine"


@pytest.mark.parametrize("url", ["not a url", "http://", "ftp://host", "http://host:secret-port", "http://[::1", "//x"])
def test_what_is_no_url_is_said_without_showing_it(url):
    with pytest.raises(ValueError, match="not the URL of an OTLP endpoint") as error:
        Endpoint("traces", environ={"OTEL_EXPORTER_OTLP_TRACES_ENDPOINT": url})
    assert url == "http://" or url not in str(error.value)


def test_a_credential_provider_that_is_not_installed_is_an_error():
    with pytest.raises(ValueError, match="no_such"):
        Endpoint("traces", environ={"OTEL_PYTHON_EXPORTER_OTLP_HTTP_CREDENTIAL_PROVIDER": "no_such"})


@pytest.mark.parametrize(
    "variables",
    [
        {"OTEL_EXPORTER_OTLP_CERTIFICATE": f"/nowhere/{SECRET}.pem"},
        {"OTEL_EXPORTER_OTLP_CLIENT_CERTIFICATE": f"/nowhere/{SECRET}.pem"},
        {"OTEL_EXPORTER_OTLP_HEADERS": f"authorization={SECRET}%0Ainjected: x"},
        {},
    ],
)
def test_no_reason_shows_a_secret(server, variables):
    url = f"https://user:{SECRET}@127.0.0.1:{server.port}/{SECRET}?token={SECRET}"
    e = Endpoint("traces", url, environ=variables)
    answer = e.post(spans("a"))
    assert answer.outcome is Outcome.LATER
    assert SECRET not in repr(answer) and SECRET not in e.shown


def test_a_forked_child_opens_a_connection_of_its_own(server):
    e = endpoint(server)
    e.post(spans("parent"))
    session = e._session
    child = os.fork()
    if child == 0:
        answer = e.post(spans("child"))
        os._exit(0 if answer.outcome is Outcome.DELIVERED and e._session is not session else 1)
    assert os.waitpid(child, 0)[1] == 0
    assert e.post(spans("parent again")).outcome is Outcome.DELIVERED
    assert server.names() == ["parent", "child", "parent again"]


def test_nobody_there_is_said_in_words_without_the_url():
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    answer = Endpoint("logs", f"http://127.0.0.1:{port}/{SECRET}").post(b"")
    assert answer.outcome is Outcome.LATER
    assert "ConnectionError" in answer.reason and SECRET not in answer.reason


def test_a_header_that_cannot_be_read_is_left_out_and_not_shown(caplog):
    assert headers_of(f"{SECRET},a=1,b c={SECRET}, x=\x00{SECRET},,ok=%41") == {"a": "1", "ok": "A"}
    assert "HEADERS" in caplog.text
    assert SECRET not in caplog.text


@given(st.text(max_size=40))
def test_any_text_can_be_given_as_headers(text):
    for name, value in headers_of(text).items():
        assert name and "\n" not in name + value
