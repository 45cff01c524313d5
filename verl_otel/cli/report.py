"""`verl-otel report`: one HTML page of a recorded run."""

import argparse
import sys
from pathlib import Path
from typing import Any

from verl_otel import config


def add_to(commands: Any) -> None:
    """Add the command to the parser."""
    parser = commands.add_parser(
        "report",
        help="make one HTML page of a recorded run",
        description="Make one self-contained HTML page of a recorded run: the time line of its steps, stages and "
        "ranks, and the curves of its metrics.",
    )
    parser.add_argument(
        "folder",
        type=Path,
        nargs="?",
        help="folder of the run, such as verl-otel/<run id> (default: the newest in $VERL_OTEL_FOLDER, or ./verl-otel)",
    )
    parser.add_argument("-o", "--output", type=Path, help="file to write (default: report.html in the folder)")
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    """Write the page; returns the exit status."""
    from verl_otel.cli import missing_extra
    from verl_otel.recording import reader

    try:
        from verl_otel.report import page
    except ImportError as error:
        return missing_extra(error, "report")
    try:
        folder = options.folder or reader.newest(config.Settings.from_environ().folder)
        recording = reader.load(folder)
    except reader.NoRecording as error:
        print(f"verl-otel: {error}", file=sys.stderr)
        return 1
    if len(runs := recording.runs()) > 1:
        print(f"verl-otel: {folder} has several runs, give the folder of one: {', '.join(runs)}", file=sys.stderr)
        return 1
    output = options.output or folder / "report.html"
    try:
        output.write_text(page.render(recording), encoding="utf-8")
    except OSError as error:
        print(f"verl-otel: {output} cannot be written ({error.strerror}): give another with --output", file=sys.stderr)
        return 1
    print(output)
    return 0
