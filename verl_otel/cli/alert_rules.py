"""`verl-otel alert-rules`: Prometheus' alert rules, with thresholds of one's own."""

import argparse
import sys
from pathlib import Path
from typing import Any


def add_to(commands: Any) -> None:
    """Add the command to the parser."""
    parser = commands.add_parser(
        "alert-rules",
        help="make Prometheus' alert rules",
        description="Make the file with Prometheus' alert rules. The thresholds are those of "
        "deploy/prometheus/thresholds.yaml, and what FILE says otherwise, for all runs or by project.",
    )
    parser.add_argument("--thresholds", type=Path, metavar="FILE", help="what differs, in the form of thresholds.yaml")
    parser.add_argument("-o", "--output", type=Path, metavar="FILE", help="file to write (default: standard output)")
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    """Write the rules; returns the exit status."""
    from verl_otel.alerts import rules, thresholds

    try:
        text = rules.generate(thresholds.load(options.thresholds))
        if options.output is not None:
            options.output.write_text(text, encoding="utf-8")
    except (thresholds.BadThresholds, OSError) as error:
        print(f"verl-otel: {error}", file=sys.stderr)
        return 2
    if options.output is None:
        sys.stdout.write(text)
    return 0
