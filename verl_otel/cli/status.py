"""`verl-otel status`: what of the stack runs."""

import argparse
import sys
from pathlib import Path
from typing import Any

from verl_otel.stack import StackError, state
from verl_otel.stack.services import SERVICES
from verl_otel.stack.stack import Stack


def add_to(commands: Any) -> None:
    """Add the command to the parser."""
    parser = commands.add_parser(
        "status",
        help="what of the stack that `up` has started runs, and what has failed",
        description="Show each program of the stack: whether it runs and answers, where, and where its log is; of one "
        "that does not, the end of its log. Exit status 0 if all of them answer.",
    )
    add_folder(parser)
    parser.set_defaults(run=run)


def add_folder(parser: argparse.ArgumentParser) -> None:
    """The option that all commands of the stack have."""
    parser.add_argument(
        "--folder", type=Path, default=state.default_folder(), help="where logs and data are (default: %(default)s)"
    )


def run(options: argparse.Namespace) -> int:
    """Show; returns the exit status."""
    folder = options.folder.expanduser().resolve()
    try:
        stack = Stack.started_in(folder)
    except StackError as error:
        print(f"verl-otel: {error}", file=sys.stderr)
        return 1
    if stack is None:
        print(f"verl-otel: nothing was started in {folder}: verl-otel up", file=sys.stderr)
        return 1
    return 0 if show(stack) else 1


def show(stack: Stack) -> bool:
    """Print a line for each program; returns whether all of them answer."""
    failed = []
    print(f"{'':<14}{'':<17}{'pid':<9}{'where':<26}log")
    for name in stack.services:
        if stack.runs(name):
            found = "runs" if stack.answers(name) else "does not answer"
            pid = str(stack.processes[name].pid)
        else:
            found, pid = "has ended", "-"
        if found != "runs":
            failed.append(name)
        print(f"{name:<14}{found:<17}{pid:<9}{stack.url(SERVICES[name].port):<26}{stack.log(name)}")
    for name in failed:
        print(f"\nthe end of {stack.log(name)}:")
        print("\n".join(f"  {line}" for line in stack.last_lines(name, 8)))
    return not failed
