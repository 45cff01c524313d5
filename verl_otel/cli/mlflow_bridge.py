"""`verl-otel mlflow-bridge`: serve the bridge."""

import argparse
import os
from typing import Any

TOKEN = "VERL_OTEL_BRIDGE_TOKEN"
"""The bearer token that requests must bring. By environment only: a command line is seen by every user of a machine."""


def add_to(commands: Any) -> None:
    """Add the command to the parser."""
    parser = commands.add_parser(
        "mlflow-bridge",
        help="take OTLP from the Collector and write MLflow runs",
        description="An OTLP/HTTP receiver that turns runs, steps and traces of verl into MLflow runs. "
        "The Collector's exporter otlp_http/mlflow_bridge (collector/local.yaml) sends to it. "
        f"With ${TOKEN} set, it takes only requests with this bearer token; the Collector reads the same variable.",
    )
    parser.add_argument("--host", default="127.0.0.1", help="address to listen on (default: %(default)s)")
    parser.add_argument("--port", type=int, default=4320, help="port to listen on (default: %(default)s)")
    parser.add_argument(
        "--without-token",
        action="store_true",
        help=f"listen beyond loopback although ${TOKEN} is not set: anyone who can reach it can write to MLflow",
    )
    parser.add_argument(
        "--mlflow",
        metavar="URL",
        default=os.environ.get("MLFLOW_TRACKING_URI", "http://127.0.0.1:5000"),
        help="MLflow server with an SQL store, version 3.14 or later (default: $MLFLOW_TRACKING_URI or %(default)s)",
    )
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    """Serve until interrupted."""
    from verl_otel.cli import missing_extra

    try:
        import uvicorn

        from verl_otel.bridges.mlflow.server import app
        from verl_otel.webserver import is_loopback
    except ImportError as error:
        return missing_extra(error, "mlflow")
    if not options.mlflow.startswith(("http://", "https://")):
        print(f"verl-otel: --mlflow {options.mlflow}: the bridge needs an MLflow server (http:// or https://)")
        return 2
    token = os.environ.get(TOKEN, "").strip()
    if not (token or options.without_token or is_loopback(options.host)):
        print(
            f"verl-otel: --host {options.host}: set {TOKEN}, here and for the Collector, so that only it can write to "
            "MLflow; or say --without-token if nobody else can reach this address"
        )
        return 2
    uvicorn.run(app(options.mlflow, token), host=options.host, port=options.port, log_level="info", access_log=False)
    return 0
