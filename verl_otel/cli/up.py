"""`verl-otel up`: start the backends on this machine."""

import argparse
import functools
import importlib.metadata
import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

from verl_otel.cli.status import add_folder, show
from verl_otel.stack import StackError, binaries, ports, state
from verl_otel.stack.stack import RULES, Stack

DESCRIPTION = """\
Start the Collector, Jaeger, Prometheus, Alertmanager, MLflow and the bridge to it, wait
until all of them answer, and leave them running in the background. Started again, it
starts what has ended meanwhile. `verl-otel status` looks at them, `verl-otel down` stops
them.
"""

EPILOG = """\
Then, where the training is started:
  export OTEL_EXPORTER_OTLP_ENDPOINT=http://127.0.0.1:4318
  opentelemetry-instrument python -m verl.trainer.main_ppo ...

otelcol-contrib (or verl-otelcol), jaeger, prometheus and alertmanager are taken from PATH.
What is not there, or too old, is built from its Go modules, once: about 20 minutes on 2
cores, with Go 1.26 or later. MLflow is that of this Python environment. Everything
listens on loopback and asks for no password.

names for --port:
"""


def add_to(commands: Any) -> None:
    """Add the command to the parser."""
    parser = commands.add_parser(
        "up",
        help="start Collector, Jaeger, Prometheus, Alertmanager and MLflow on this machine",
        description=DESCRIPTION,
        epilog=EPILOG + "\n".join(f"  {name:<18}{port}" for name, port in ports.USUAL.items()),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add_folder(parser)
    parser.add_argument(
        "--port",
        metavar="NAME=NUMBER",
        action="append",
        default=[],
        type=_port,
        help="another port for one of them, such as prometheus=9091; may be given several times",
    )
    parser.add_argument("--free-ports", action="store_true", help="free ports for all that --port does not name")
    parser.add_argument("--rules", metavar="FILE", type=Path, help="Prometheus alert rules in place of verl-otel's own")
    parser.add_argument(
        "--relay",
        metavar="FILE",
        type=Path,
        help="send alerts to the chat robots in this file (docs/alerting.md); for one robot, the variables "
        "VERL_OTEL_RELAY_KIND, _URL and _SECRET do; without, alerts stay in Alertmanager",
    )
    parser.add_argument("--foreground", action="store_true", help="stay, and stop everything on Ctrl-C")
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    """Start; returns the exit status."""
    for end in (signal.SIGTERM, signal.SIGHUP):  # what was started until then is stopped again
        signal.signal(end, lambda *_: sys.exit(1))
    folder = options.folder.expanduser().resolve()
    try:
        with state.alone(folder):
            stack = _start(folder, options)
    except StackError as error:
        print(f"verl-otel: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("verl-otel: interrupted; what was started is stopped again", file=sys.stderr)
        return 130
    return _stay(stack) if options.foreground else 0


def _start(folder: Path, options: argparse.Namespace) -> Stack:
    """The running stack."""
    rules = _file(options.rules) if options.rules else None
    relay = str(_file(options.relay)) if options.relay else "" if os.environ.get("VERL_OTEL_RELAY_URL") else None
    program = functools.cache(lambda name: binaries.find(name, _say))
    stack = Stack.started_in(folder, program)
    if stack is None:
        listen = {**(ports.free_ports(ports.USUAL) if options.free_ports else ports.USUAL), **dict(options.port)}
        _check_ports(listen)
        stack = Stack(folder, listen, traces_on_disk=True, rules=rules or RULES, relay=relay, program=program)
    else:
        other_ports = options.free_ports or dict(options.port).items() - stack.ports.items()
        if other_ports or rules not in (None, stack.rules) or relay not in (None, stack.relay):
            raise StackError(f"a stack was started in {folder} with other ports, rules or robots: verl-otel down first")
        if all(stack.answers(name) for name in stack.services):
            print(f"it runs already, in {folder}")
            show(stack)
            return stack
    _check_python()
    for name in binaries.ON_PATH:
        program(name)  # what has to be built is, before anything starts
    stack.start(_say)
    show(stack)
    print(f"\nexport OTEL_EXPORTER_OTLP_ENDPOINT={stack.url('otlp_http')}   # where the training is started")
    return stack


def _file(path: Path) -> Path:
    path = path.expanduser().resolve()
    if not path.is_file():
        raise StackError(f"{path}: there is no such file")
    return path


def _check_ports(listen: dict[str, int]) -> None:
    """Say which ports cannot be had, all at once, and what to do."""
    shared = [name for name, port in listen.items() if list(listen.values()).count(port) > 1]
    if shared:
        raise StackError(f"{' and '.join(shared)} cannot have the same port")
    taken = ports.taken(listen)
    if taken:
        lines = [f"port {listen[name]}, for {name}, is taken by {owner}" for name, owner in taken.items()]
        name = next(iter(taken))
        other = ports.free_ports([name])[name]
        raise StackError("\n".join([*lines, f"Stop that, or choose: --port {name}={other}, or --free-ports"]))


def _check_python() -> None:
    """MLflow's server and the bridge are Python programs of this environment."""
    missing = []
    for package in ("mlflow", "starlette", "uvicorn", "requests"):
        try:
            importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            missing.append(package)
    if missing:
        raise StackError(f"{', '.join(missing)} not installed here: pip install 'verl-otel[stack]'")


def _stay(stack: Stack) -> int:
    """Until interrupted; then stop. Says once what has ended by itself."""
    print("running until you press Ctrl-C", flush=True)
    running = set(stack.processes)
    try:
        while running:
            time.sleep(1)
            for name in [name for name in running if not stack.runs(name)]:
                running.discard(name)
                _say(f"{name} has ended; the end of {stack.log(name)}:")
                print("\n".join(stack.last_lines(name, 8)), flush=True)
        return 1
    except KeyboardInterrupt:
        return 0
    finally:
        _say("stopping")
        stack.stop()


def _port(text: str) -> tuple[str, int]:
    name, _, number = text.partition("=")
    if name not in ports.USUAL or not number.isdigit() or not 0 < int(number) < 65536:
        raise argparse.ArgumentTypeError(
            f"{text}: NAME=NUMBER is needed, such as prometheus=9091; names: {', '.join(ports.USUAL)}"
        )
    return name, int(number)


def _say(text: str) -> None:
    print(f"[{time.strftime('%H:%M:%S')}] {text}", flush=True)
