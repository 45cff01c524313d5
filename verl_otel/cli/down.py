"""`verl-otel down`: stop the stack."""

import argparse
import sys
from typing import Any

from verl_otel.cli.status import add_folder
from verl_otel.stack import StackError, state
from verl_otel.stack.stack import Stack


def add_to(commands: Any) -> None:
    """Add the command to the parser."""
    parser = commands.add_parser(
        "down",
        help="stop what `up` has started; its data stays",
        description="Stop the stack, the Collector first, so that it hands over what it has. Data and logs stay: the "
        "next `up` goes on with them. To be rid of them, delete the folder.",
    )
    add_folder(parser)
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    """Stop; returns the exit status."""
    folder = options.folder.expanduser().resolve()
    try:
        stack = Stack.started_in(folder)
        if stack is None:
            print(f"nothing runs that was started in {folder}")
            return 0
        with state.alone(folder):
            stack.stop()
    except StackError as error:
        print(f"verl-otel: {error}", file=sys.stderr)
        return 1
    print(f"stopped; data and logs are in {folder}")
    return 0
