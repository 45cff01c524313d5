"""`verl-otel bridge`: serve the bridge."""

import argparse
import os
import sys
from typing import TYPE_CHECKING, Any
from urllib.parse import parse_qs, urlsplit

from verl_otel.cli.arguments import port
from verl_otel.redaction import shown

if TYPE_CHECKING:
    from verl_otel.bridges.sink import Sink

TOKEN = "VERL_OTEL_BRIDGE_TOKEN"
"""The bearer token that requests must bring. By environment only: a command line is seen by every user of a machine."""

SQL_URL = "VERL_OTEL_SQL_URL"
INFLUX_URL = "VERL_OTEL_INFLUX_URL"
INFLUX_AUTHORIZATION = "VERL_OTEL_INFLUX_AUTHORIZATION"


class WrongOption(Exception):
    """An option that cannot be used; the message says what to do."""


def add_to(commands: Any) -> None:
    """Add the command to the parser."""
    parser = commands.add_parser(
        "bridge",
        help="take OTLP from the Collector and write runs to MLflow, an SQL database, InfluxDB",
        description="An OTLP/HTTP receiver that turns runs, steps and traces of verl into MLflow runs, rows of an SQL "
        "database, points of InfluxDB. Each has its own address: /mlflow, /sql, /influx; collector/local.yaml sends to "
        "the first, collector/variants/sql.yaml and influx.yaml to the others. "
        f"With ${TOKEN} set, it takes only requests with this bearer token; the Collector reads the same variable.",
    )
    parser.add_argument("--host", default="127.0.0.1", help="address to listen on (default: %(default)s)")
    parser.add_argument("--port", type=port, default=4320, help="port to listen on (default: %(default)s)")
    parser.add_argument(
        "--without-token",
        action="store_true",
        help=f"listen beyond loopback although ${TOKEN} is not set: anyone who can reach it can write to the sinks",
    )
    parser.add_argument(
        "--mlflow",
        metavar="URL",
        default=os.environ.get("MLFLOW_TRACKING_URI", ""),
        help="MLflow server with an SQL store, version 3.14 or later (default: $MLFLOW_TRACKING_URI)",
    )
    parser.add_argument(
        "--sql",
        metavar="URL",
        help="database, such as postgresql://user@host/name or sqlite:////var/lib/verl.db; a password comes by "
        f"${SQL_URL}, which is also the default, or by $PGPASSWORD or ~/.pgpass",
    )
    parser.add_argument(
        "--influx",
        metavar="URL",
        help="where InfluxDB takes line protocol, such as http://host:8086/write?db=verl or "
        f"http://host:8086/api/v2/write?org=ORG&bucket=BUCKET (default: ${INFLUX_URL}); "
        f"${INFLUX_AUTHORIZATION} is sent along, such as 'Token ...'",
    )
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    """Serve until interrupted."""
    from verl_otel.cli import missing_extra

    try:
        import uvicorn

        from verl_otel.bridges.server import app
        from verl_otel.webserver import is_loopback
    except ImportError as error:
        return missing_extra(error, "bridge")
    sinks: dict[str, Sink] = {}
    for name, make in (("mlflow", _mlflow), ("sql", _sql), ("influx", _influx)):
        try:
            sink = make(options)
        except ImportError as error:
            return missing_extra(error, "bridge" if name == "influx" else name)
        except WrongOption as error:
            return _refuse(str(error))
        if sink is not None:
            sinks[name] = sink
    if not sinks:
        return _refuse("the bridge has nothing to write to: give it --mlflow, --sql or --influx")
    token = os.environ.get(TOKEN, "").strip()
    if not (token or options.without_token or is_loopback(options.host)):
        return _refuse(
            f"--host {options.host}: set {TOKEN}, here and for the Collector, so that only it can write to the "
            "sinks; or say --without-token if nobody else can reach this address"
        )
    uvicorn.run(app(sinks, token), host=options.host, port=options.port, log_level="info", access_log=False)
    return 0


def _mlflow(options: argparse.Namespace) -> "Sink | None":
    if not options.mlflow:
        return None
    if not options.mlflow.startswith(("http://", "https://")):
        raise WrongOption(f"--mlflow {shown(options.mlflow)}: the bridge needs an MLflow server (http:// or https://)")
    from verl_otel.bridges.mlflow.sink import MlflowSink

    return MlflowSink(options.mlflow)


def _sql(options: argparse.Namespace) -> "Sink | None":
    url = options.sql or os.environ.get(SQL_URL, "")
    if not url:
        return None
    if options.sql and _has_password(options.sql):
        raise WrongOption(
            f"--sql: every user of the machine sees a command line; give the URL with its password by {SQL_URL}"
        )
    from verl_otel.bridges.sql import SqlSink, WrongDatabase

    try:
        return SqlSink(url)
    except WrongDatabase as error:
        raise WrongOption(f"--sql: {error}") from error


def _influx(options: argparse.Namespace) -> "Sink | None":
    url = options.influx or os.environ.get(INFLUX_URL, "")
    if not url:
        return None
    if _has_password(url):
        raise WrongOption(
            f"--influx: no password in the URL; give it by {INFLUX_AUTHORIZATION}, as 'Token ...' or 'Basic ...'"
        )
    if not url.startswith(("http://", "https://")) or not urlsplit(url).path.strip("/"):
        raise WrongOption("--influx: give the address that takes line protocol, such as http://host:8086/write?db=verl")
    from verl_otel.bridges.influx import InfluxSink

    return InfluxSink(url, os.environ.get(INFLUX_AUTHORIZATION, "").strip())


def _has_password(url: str) -> bool:
    try:
        parts = urlsplit(url)
        return bool(parts.password) or not {"p", "password"}.isdisjoint(parse_qs(parts.query))
    except ValueError:
        return True  # not to be read, and so perhaps one


def _refuse(message: str) -> int:
    print(f"verl-otel: {message}", file=sys.stderr)
    return 2
