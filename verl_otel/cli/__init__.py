"""The command `verl-otel`."""

import argparse
import os
import sys
from collections.abc import Sequence

from verl_otel.cli import (
    alert_relay,
    alert_rules,
    bridge,
    control,
    dashboards,
    doctor,
    down,
    replay,
    report,
    status,
    up,
)
from verl_otel.version import __version__

_COMMANDS = (up, status, down, doctor, report, replay, control, bridge, alert_relay, alert_rules, dashboards)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; returns its exit status."""
    parser = argparse.ArgumentParser(
        prog="verl-otel",
        description="Run the backends, check the set-up, look at runs, bring them to databases and alerts to people.",
        epilog="A run is recorded by: opentelemetry-instrument python -m verl.trainer.main_ppo ...",
    )
    parser.add_argument("--version", action="version", version=f"verl-otel {__version__}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for command in _COMMANDS:
        command.add_to(commands)
    options = parser.parse_args(arguments)
    try:
        status = options.run(options)
        sys.stdout.flush()
        return status
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:  # `| head`; what is left to say goes nowhere, also at the end of the interpreter
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 141


def missing_extra(error: ImportError, extra: str) -> int:
    """Say which extra is needed, and return the exit status."""
    print(f"verl-otel: {error.name} is not installed: run  pip install 'verl-otel[{extra}]'", file=sys.stderr)
    return 2
