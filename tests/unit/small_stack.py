"""The command `verl-otel` with small programs in place of the stack's: python small_stack.py up --folder ...

Each is a real process with a real HTTP server. FAILS in the environment names one that ends at once, SLOW one that
never answers. On SIGTERM each writes its name into the file `ended` of the folder; the Collector takes its time before.
"""

import os
import sys
from pathlib import Path

from verl_otel.cli import main
from verl_otel.stack import binaries
from verl_otel.stack.services import SERVICES, Service

PROGRAM = """
import http.server, os, signal, sys, time

name, port = sys.argv[1], int(sys.argv[2])
print("hello from", name, flush=True)
if os.environ.get("FAILS") == name:
    sys.exit("no, says " + name)

def end(*_):
    if name == "collector":
        time.sleep(0.3)
    with open("ended", "a") as file:
        file.write(name + "\\n")
    os._exit(0)

signal.signal(signal.SIGTERM, end)

class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(503 if os.environ.get("SLOW") == name else 200)
        self.end_headers()

    def log_message(self, *_):
        pass

http.server.HTTPServer(("127.0.0.1", port), Handler).serve_forever()
"""


def small(name: str, port: str) -> Service:
    return Service(port, f"{port}/", lambda stack: ([sys.executable, "-c", PROGRAM, name, str(stack.ports[port])], {}))


SMALL = {
    "jaeger": small("jaeger", "jaeger"),
    "prometheus": small("prometheus", "prometheus"),
    "relay": small("relay", "relay"),
    "collector": small("collector", "otlp_http"),
}

if __name__ == "__main__":
    SERVICES.clear()
    SERVICES.update(SMALL)
    binaries.find = lambda program, report: Path(os.devnull)
    sys.exit(main())
