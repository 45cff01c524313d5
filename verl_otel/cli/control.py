"""`verl-otel control`: ask a run to save a checkpoint, pause, resume or stop."""

import argparse
import getpass
import json
import os
import sys
import time
from typing import Any

WAIT = 15.0
"""Seconds in which a run that listens has seen a request."""


def add_to(commands: Any) -> None:
    """Add the command to the parser."""
    parser = commands.add_parser(
        "control",
        help="ask a run to save a checkpoint, pause, resume or stop",
        description="Ask a run that was started with VERL_OTEL_CONTROL. A checkpoint is saved at verl's own next "
        "place for it; `pause` and `stop` save one first. The same two variables are needed here: VERL_OTEL_CONTROL, "
        "the folder, and VERL_OTEL_CONTROL_TOKEN_FILE. See docs/alerting.md.",
    )
    parser.add_argument("run_id", metavar="RUN", help="the run's id (VERL_OTEL_RUN_ID, verl_run_id in Prometheus)")
    parser.add_argument("action", choices=["checkpoint", "pause", "resume", "stop", "status"])
    parser.add_argument("--reason", default="", help="why, for the audit")
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    """Ask; returns the exit status."""
    from verl_otel.control import requests

    try:
        channel = requests.Channel.from_environ()
        if channel is None:
            raise requests.NoControl("set VERL_OTEL_CONTROL to the folder with which the run was started")
        folder = channel.found(options.run_id)
        if options.action == "status":
            print(_status(folder / requests.STATUS))
            return 0
        request = channel.ask(options.run_id, options.action, f"{_user()}@{os.uname().nodename}", options.reason)
    except requests.NoControl as error:
        print(f"verl-otel: {error}", file=sys.stderr)
        return 2
    path = folder / f"{request.id}{requests.SUFFIX}"
    deadline = time.monotonic() + WAIT
    while path.exists():
        if time.monotonic() > deadline:
            print(f"verl-otel: the run has not looked at the request; it may until {_clock(request.expires)}, if it "
                  "still runs", file=sys.stderr)  # fmt: skip
            return 1
        time.sleep(0.2)
    print(f"the run has seen request {request.id}; what becomes of it: `verl-otel control {options.run_id} status`, "
          "and the events verl.control")  # fmt: skip
    return 0


def _status(path: Any) -> str:
    try:
        status = json.loads(path.read_text(encoding="utf-8"))
        return f"{status['state']}, step {status['step']}, request {status['request'] or '(none)'}"
    except (OSError, ValueError, KeyError, TypeError):
        return "the run does not listen"


def _user() -> str:
    try:
        return getpass.getuser()
    except (KeyError, OSError):  # no such user on this machine
        return str(os.getuid())


def _clock(seconds: float) -> str:
    return time.strftime("%H:%M:%S", time.localtime(seconds))
