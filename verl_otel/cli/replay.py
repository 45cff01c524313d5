"""`verl-otel replay`: send recorded or spooled telemetry to an OTLP endpoint."""

import argparse
import signal
import sys
import threading
from pathlib import Path
from typing import Any


def add_to(commands: Any) -> None:
    """Add the command to the parser."""
    parser = commands.add_parser(
        "replay",
        help="send recorded or spooled telemetry to a Collector",
        description="Send what a run has recorded in files, or could not send, to an OTLP/HTTP endpoint: each record "
        "once, also if the command is stopped and started again. Copies of what the run has sent itself (*.copy.jsonl) "
        "are left out. Headers and certificates are read from the OTEL_EXPORTER_OTLP_* variables. How far it came is "
        "noted in the folder (.replayed.json).",
    )
    parser.add_argument("folder", type=Path, help="folder of the run, or its spool, such as verl-otel/<run id>/spool")
    parser.add_argument(
        "--endpoint", default="", help="base URL of the endpoint (default: OTEL_EXPORTER_OTLP_ENDPOINT)"
    )
    parser.add_argument(
        "--copies",
        action="store_true",
        help="send copies too, such as to another Collector: where the run has sent them to, they are twice then",
    )
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    """Send; returns the exit status."""
    from verl_otel.recording import replay

    stopped = threading.Event()
    before = {name: signal.signal(name, lambda *_: stopped.set()) for name in (signal.SIGINT, signal.SIGTERM)}
    bar = _Bar() if sys.stderr.isatty() else None
    try:
        done = replay.replay(options.folder, options.endpoint, bar or (lambda *_: None), stopped.is_set, options.copies)
    except replay.CannotReplay as error:
        _end(bar)
        print(f"verl-otel: {error}", file=sys.stderr)
        return 1
    except replay.Stopped:
        _end(bar)
        print("verl-otel: stopped; start the command again to go on", file=sys.stderr)
        return 130
    finally:
        for name, handler in before.items():
            signal.signal(name, handler)
    _end(bar)
    print(f"sent {done.items} items in {done.requests} requests; {done.before} requests were sent before"
          + (f", {done.refused} items were refused" if done.refused else "")
          + (f", {done.too_large} items are too large" if done.too_large else "")
          + (f", {done.unreadable} lines cannot be read" if done.unreadable else ""))  # fmt: skip
    if done.left_out:
        print(f"{done.left_out} files with copies of what the run has sent itself are left out; to send them too, give "
              "--copies")  # fmt: skip
    return 1 if done.refused or done.too_large else 0


def _end(bar: "_Bar | None") -> None:
    if bar is not None:
        bar.end()


class _Bar:
    """A bar on the terminal: bytes sent of bytes there are."""

    def __init__(self) -> None:
        self._shown = ""

    def __call__(self, sent: int, total: int) -> None:
        width = 40
        filled = width * sent // max(1, total)
        shown = f"[{'#' * filled}{'.' * (width - filled)}] {100 * sent // max(1, total):3d} %"
        if shown != self._shown:
            self._shown = shown
            print(f"\r{shown}", end="", file=sys.stderr, flush=True)

    def end(self) -> None:
        if self._shown:
            print(file=sys.stderr)
