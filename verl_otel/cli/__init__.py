"""The command `verl-otel`."""

import argparse
import sys
from collections.abc import Sequence

from verl_otel.cli import (
    alert_relay,
    alert_rules,
    control,
    down,
    mlflow_bridge,
    replay,
    report,
    status,
    up,
)
from verl_otel.version import __version__


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; returns its exit status."""
    parser = argparse.ArgumentParser(
        prog="verl-otel",
        description="Run the backends, look at recorded runs, bring telemetry to MLflow and alerts to people.",
        epilog="A run is recorded by: opentelemetry-instrument python -m verl.trainer.main_ppo ...",
    )
    parser.add_argument("--version", action="version", version=f"verl-otel {__version__}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for command in (up, status, down, report, replay, mlflow_bridge, alert_rules, alert_relay, control):
        command.add_to(commands)
    options = parser.parse_args(arguments)
    return options.run(options)


def missing_extra(error: ImportError, extra: str) -> int:
    """Say which extra is needed, and return the exit status."""
    print(f"verl-otel: {error.name} is not installed: run  pip install 'verl-otel[{extra}]'", file=sys.stderr)
    return 2
