"""What telemetry touches of a trainer, without Ray: stages, Tracking, an end. Run by test_exit_and_faults.py.

Arguments: how it ends (`fail`, `exit`, `interrupt`, `terminate`, `terminate-unhandled`,
`terminate-hanging`), and `counts`: print what became of its telemetry.
"""

import atexit
import ctypes
import json
import os
import signal
import sys
import threading
import time

from verl.utils.profiler import marked_timer
from verl.utils.tracking import Tracking


def print_counts():
    """After telemetry has ended: exit handlers are called in reverse order."""
    from verl_otel.export import otlp

    print(f"left {time.time()}")
    outbox = otlp.current()
    pending = outbox.pending() if outbox is not None else {}
    print("counts " + json.dumps({"pending": pending, "counts": [[*key, n] for key, n in otlp.counts().items()]}))


def terminated(*_):
    print("the user's handler", flush=True)
    sys.exit(3)


if "counts" in sys.argv:
    atexit.register(print_counts)
if "terminate" in sys.argv:
    signal.signal(signal.SIGTERM, terminated)
tracking = Tracking("project", "experiment", default_backend=["file"], config={"trainer": {"nnodes": 1}})
time.sleep(0.7)  # the start of the run is announced by a thread, which asks git for the commit
for step in range(1, 4):
    timing = {}
    with marked_timer("step", timing), marked_timer("update_actor", timing):
        value = step * 0.1
    tracking.log(data={"actor/loss": value, "training/global_step": step}, step=step)
print("trained", flush=True)
print(f"end {time.time()}", flush=True)
if "fail" in sys.argv:
    raise RuntimeError("the training failed")
if "exit" in sys.argv:
    sys.exit(4)
if "interrupt" in sys.argv:
    os.kill(os.getpid(), signal.SIGINT)
    time.sleep(60)
if "terminate-hanging" in sys.argv:
    threading.Timer(0.5, os.kill, (os.getpid(), signal.SIGTERM)).start()
    lock, libc = ctypes.create_string_buffer(64), ctypes.CDLL(None)
    libc.pthread_mutex_lock(lock)
    libc.pthread_mutex_lock(lock)  # never returns, and no signal interrupts it
if "terminate" in sys.argv or "terminate-unhandled" in sys.argv:
    os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(60)
