"""`verl-otel dashboards`: write Grafana's dashboards."""

import argparse
import os
import sys
from pathlib import Path
from typing import Any

from verl_otel.config import without_credentials


def add_to(commands: Any) -> None:
    """Add the command to the parser."""
    parser = commands.add_parser(
        "dashboards",
        help="write the Grafana dashboards",
        description="Write the Grafana dashboards as JSON files, to import or to provision. Those in deploy/grafana "
        "are the same, with MLflow on this machine.",
    )
    parser.add_argument("-o", "--output", type=Path, required=True, metavar="DIR", help="folder to write to")
    parser.add_argument(
        "--mlflow",
        metavar="URL",
        default=os.environ.get("MLFLOW_TRACKING_URI", ""),
        help="MLflow, for the links to it, as a browser reaches it (default: $MLFLOW_TRACKING_URI, or this machine)",
    )
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    """Write the files; returns the exit status."""
    from verl_otel.cli import missing_extra

    if sys.version_info < (3, 11):
        print("verl-otel: dashboards needs Python 3.11 or later, as the Grafana SDK does", file=sys.stderr)
        return 2
    try:
        from verl_otel import dashboards
    except ImportError as error:
        return missing_extra(error, "dashboards")
    mlflow = without_credentials(options.mlflow or dashboards.MLFLOW)  # a browser asks for them
    if not mlflow.startswith(("http://", "https://")):
        print(f"verl-otel: --mlflow {mlflow}: a browser needs a URL (http:// or https://)", file=sys.stderr)
        return 2
    try:
        options.output.mkdir(parents=True, exist_ok=True)
        for name, text in dashboards.files(mlflow).items():
            path = options.output / name
            path.write_text(text, encoding="utf-8")
            print(path)
    except OSError as error:
        print(f"verl-otel: cannot write: {error}", file=sys.stderr)
        return 1
    return 0
