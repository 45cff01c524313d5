"""The command `verl-otel`."""

import argparse
import sys
from collections.abc import Sequence

from verl_otel.cli import doctor, mlflow_bridge, replay, report
from verl_otel.version import __version__


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; returns its exit status."""
    parser = argparse.ArgumentParser(
        prog="verl-otel",
        description="Look at verl runs, operate what their telemetry goes to, and find out what is wrong.",
        epilog="A run is recorded by: opentelemetry-instrument python -m verl.trainer.main_ppo ...  "
        "Nothing arrives? verl-otel doctor",
    )
    parser.add_argument("--version", action="version", version=f"verl-otel {__version__}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for command in (report, replay, doctor, mlflow_bridge):
        command.add_to(commands)
    options = parser.parse_args(arguments)
    return options.run(options)


def missing_extra(error: ImportError, extra: str) -> int:
    """Say which extra is needed, and return the exit status."""
    print(f"verl-otel: {error.name} is not installed: run  pip install 'verl-otel[{extra}]'", file=sys.stderr)
    return 2
