"""A long run in short steps: memory, threads and open files of a process whose Collector comes and goes.

    python tests/bench/soak.py [MINUTES]

Ten steps a second with stages, calls of ranks, 300 keys, a metric of the user's; the endpoint refuses every other one.
Prints a line each minute, and fails if anything has grown between the fifth of the time and the end.
"""

import http.server
import os
import random
import shutil
import sys
import tempfile
import threading
import time
from pathlib import Path

FOLDER = Path(tempfile.mkdtemp(prefix="vs", dir="/tmp"))
MINUTES = float(sys.argv[1]) if len(sys.argv) > 1 else 30.0
MAX_GROWTH = {"resident MiB": 5, "threads": 0, "open files": 3}
"""A part of the spool is open for each signal while it is sent: three files, every other minute."""


class Endpoint(http.server.BaseHTTPRequestHandler):
    """Takes everything, or says that it is overloaded."""

    protocol_version = "HTTP/1.1"
    away = False
    taken = 0

    def do_POST(self):
        self.rfile.read(int(self.headers["content-length"]))
        Endpoint.taken += not self.away
        self.send_response(503 if self.away else 200)
        self.send_header("content-length", "0")
        self.end_headers()

    def log_message(self, *_):
        pass


def now():
    with open("/proc/self/statm") as statm:
        resident = int(statm.read().split()[1]) * os.sysconf("SC_PAGE_SIZE") / 2**20
    files = [
        os.readlink(f"/proc/self/fd/{fd}")
        for fd in os.listdir("/proc/self/fd")
        if os.path.lexists(f"/proc/self/fd/{fd}")
    ]
    return {
        "resident MiB": resident,
        "threads": sum(thread.name.startswith(("verl-otel", "Otel")) for thread in threading.enumerate()),
        "open files": sum(not file.startswith("socket:") for file in files),
    }


def main():
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Endpoint)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    os.environ.update(
        OTEL_EXPORTER_OTLP_ENDPOINT=f"http://127.0.0.1:{server.server_port}",
        VERL_OTEL_FOLDER=str(FOLDER),
        VERL_OTEL_LEVELS="hardware=off",
    )
    from verl_otel import log_scalar, telemetry
    from verl_otel.export import otlp

    telemetry.enable()
    t = telemetry.current()
    keys = [f"group_{i % 7}/metric_{i}" for i in range(300)]
    start, reported, seen = time.monotonic(), 0, []
    print(f"{'minute':>6} {'steps':>8} " + " ".join(f"{name:>13}" for name in MAX_GROWTH) + "   endpoint")
    step = 0
    while time.monotonic() - start < MINUTES * 60:
        step += 1
        outer = t.steps.enter("step")
        for stage in ("gen", "update_actor"):
            scope = t.steps.enter(stage)
            call = t.workers.enter(None, stage)
            t.workers.note("loss", [random.random()])
            t.workers.leave(call)
            t.steps.leave(scope)
        t.steps.leave(outer)
        log_scalar("reward/mine", random.random())
        t.log({key: random.random() for key in keys}, step)
        time.sleep(0.1)
        minute = int((time.monotonic() - start) // 60)
        Endpoint.away = minute % 2 == 1
        if minute > reported:
            reported = minute
            seen.append(now())
            values = " ".join(f"{seen[-1][name]:>13.1f}" for name in MAX_GROWTH)
            print(f"{minute:>6} {step:>8} {values}   {'away' if Endpoint.away else 'there'}", flush=True)
    telemetry.disable()
    print({f"{signal} {outcome} {reason}".strip(): items for (signal, outcome, reason), items in otlp.counts().items()})
    if len(seen) < 5:
        return 0
    early, late = seen[len(seen) // 5], seen[-1]
    grown = {name: late[name] - early[name] for name in MAX_GROWTH}
    print("grown:", {name: round(value, 1) for name, value in grown.items()})
    return int(any(grown[name] > limit for name, limit in MAX_GROWTH.items()))


if __name__ == "__main__":
    try:
        status = main()
    finally:
        shutil.rmtree(FOLDER, ignore_errors=True)
    sys.exit(status)
