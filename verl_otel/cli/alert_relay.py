"""`verl-otel alert-relay`: bring Alertmanager's notifications to group robots."""

import argparse
import os
import sys
from typing import Any

from verl_otel.cli.arguments import port


def add_to(commands: Any) -> None:
    """Add the command to the parser."""
    parser = commands.add_parser(
        "alert-relay",
        help="bring alerts from Alertmanager to WeCom, DingTalk, Feishu and other robots",
        description="A receiver for Alertmanager's webhook (POST /alerts) that tells group robots of WeCom, DingTalk "
        "and Feishu, and others by JSON. With VERL_OTEL_RELAY_TOKEN set, it takes only requests with this bearer "
        "token. See docs/alerting.md.",
    )
    parser.add_argument("--config", default="", metavar="FILE", help="YAML file with the robots; without it, one robot "
                        "by VERL_OTEL_RELAY_KIND, VERL_OTEL_RELAY_URL and VERL_OTEL_RELAY_SECRET")  # fmt: skip
    parser.add_argument("--host", default="127.0.0.1", help="address to listen on (default: %(default)s)")
    parser.add_argument("--port", type=port, default=4321, help="port to listen on (default: %(default)s)")
    parser.add_argument(
        "--without-token",
        action="store_true",
        help="listen beyond loopback although VERL_OTEL_RELAY_TOKEN is not set: anyone who reaches it can send alerts",
    )
    doing = parser.add_mutually_exclusive_group()
    doing.add_argument("--check", action="store_true", help="only say whether the configuration can be used")
    doing.add_argument("--test", action="store_true", help="only send a test message to each robot")
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    """Serve until interrupted, or only check or test."""
    from verl_otel.cli import missing_extra

    try:
        import uvicorn

        from verl_otel.alerts.relay.server import app
        from verl_otel.alerts.relay.settings import TOKEN, BadSettings, Settings
        from verl_otel.webserver import is_loopback
    except ImportError as error:
        return missing_extra(error, "alerts")
    try:
        settings = Settings.load(options.config)
    except BadSettings as error:
        print(f"verl-otel: {error}", file=sys.stderr)
        return 2
    folder = os.path.dirname(os.path.abspath(settings.state)) if settings.state else ""
    if folder and not os.access(folder, os.W_OK | os.X_OK):
        print(f"verl-otel: state: {folder} is not there, or cannot be written: make the folder", file=sys.stderr)
        return 2
    if options.check:
        for route in settings.robots:
            print(f"robot {route.name}: {route.robot.kind}, {_shown(route.match.labels)}")
        for route in settings.actions:
            print(f"action {route.action}: {_shown(route.match.labels)}")
        return 0
    if options.test:
        return _test(settings)
    if not (settings.token or options.without_token or is_loopback(options.host)):
        print(
            f"verl-otel: --host {options.host}: set {TOKEN}, here and for Alertmanager, so that only it can send "
            "alerts; or say --without-token if nobody else can reach this address",
            file=sys.stderr,
        )
        return 2
    uvicorn.run(app(settings), host=options.host, port=options.port, log_level="info", access_log=False)
    return 0


def _shown(labels: Any) -> str:
    return ", ".join(f"{label} {' or '.join(sorted(values))}" for label, values in labels.items()) or "all alerts"


def _test(settings: Any) -> int:
    from verl_otel.alerts.relay.delivery import Delivery
    from verl_otel.alerts.relay.message import Message
    from verl_otel.alerts.relay.metrics import Metrics
    from verl_otel.alerts.relay.robots import DELIVERED
    from verl_otel.alerts.relay.sent import Sent

    message = Message("a test message of verl-otel alert-relay", (("Alerts will be told here.",),), "info")
    failed = False
    for route in settings.robots:
        answer = Delivery(route, Sent(), Metrics()).try_once(message)
        failed = failed or answer.outcome != DELIVERED
        print(f"robot {route.name}: {answer.outcome}" + (f" ({answer.why})" if answer.why else ""))
    return 1 if failed else 0
