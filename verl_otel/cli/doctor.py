"""`verl-otel doctor`: what is set up, what is not, and what to do about it."""

import argparse
import logging
import os
import sys
from typing import Any

from verl_otel.doctor import TIMEOUT


def add_to(commands: Any) -> None:
    """Add the command to the parser."""
    parser = commands.add_parser(
        "doctor",
        help="say what is set up, what is not, and what to do about it",
        description="Look at versions, hooks, settings, endpoints, GPUs and spools, in the environment in which it is "
        "called: that of a shell, or, as `opentelemetry-instrument verl-otel doctor`, that of a training. Where an "
        "endpoint is configured, a test span, metric and event are sent there, marked as such and of no run.",
        epilog="Exit status: 0; 1 if there is a problem, with --strict also a warning; 2 for a wrong command line. "
        "Credentials of backends: JAEGER_AUTHORIZATION, PROMETHEUS_AUTHORIZATION, MLFLOW_TRACKING_TOKEN. "
        "What each finding means: docs/doctor.md.",
    )
    parser.add_argument("--jaeger", metavar="URL", default="", help="read the test span back from this Jaeger")
    parser.add_argument("--prometheus", metavar="URL", default="", help="read the test metric back; count series")
    parser.add_argument("--mlflow", metavar="URL", default="", help="see whether the test event has got to this MLflow")
    parser.add_argument(
        "--ray",
        metavar="ADDRESS",
        nargs="?",
        const="",
        default=None,
        help="look at each node of this Ray cluster (default: $RAY_ADDRESS, or the one of this node)",
    )
    parser.add_argument("--strict", action="store_true", help="warnings count as problems, in the exit status")
    parser.add_argument("--json", action="store_true", help="for programs")
    parser.add_argument(
        "--timeout", type=_seconds, metavar="SECONDS", default=TIMEOUT, help="take no longer (default: %(default)g)"
    )
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    """Look at everything and print it; returns the exit status."""
    for flag in ("jaeger", "prometheus", "mlflow"):
        if getattr(options, flag) and not getattr(options, flag).startswith(("http://", "https://")):
            print(f"verl-otel: --{flag}: give a URL, such as http://127.0.0.1:9090", file=sys.stderr)
            return 2
    for name in ("verl_otel", "opentelemetry"):  # what they warn of are findings
        logging.getLogger(name).setLevel(logging.CRITICAL)
    environ = dict(os.environ)
    for name in environ:
        if name.startswith("OTEL_"):  # one that is malformed would keep OpenTelemetry from being imported here
            del os.environ[name]

    from verl_otel.doctor import rendering
    from verl_otel.doctor.asked import Asked
    from verl_otel.doctor.examination import examine

    if sys.stderr.isatty():
        print("verl-otel: looking around; importing all of verl takes a while ...", file=sys.stderr)
    found = examine(Asked(environ, options.jaeger, options.prometheus, options.mlflow, options.ray, options.timeout))
    if options.json:
        print(rendering.as_json(found, options.strict))
    else:
        print(rendering.as_text(found, sys.stdout.isatty() and not os.environ.get("NO_COLOR")))
    return found.exit_status(options.strict)


def _seconds(text: str) -> float:
    value = float(text)
    if not 1 <= value <= 3600:
        raise argparse.ArgumentTypeError("between 1 and 3600")
    return value
