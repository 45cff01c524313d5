"""What telemetry touches of a trainer, without Ray: stages, Tracking, an end. Run by test_exit_and_faults.py."""

import sys
import time

from verl.utils.profiler import marked_timer
from verl.utils.tracking import Tracking

tracking = Tracking("project", "experiment", default_backend=["file"], config={"trainer": {"nnodes": 1}})
for step in range(1, 4):
    timing = {}
    with marked_timer("step", timing), marked_timer("update_actor", timing):
        value = step * 0.1
    tracking.log(data={"actor/loss": value, "training/global_step": step}, step=step)
print("trained", flush=True)
if "fail" in sys.argv:
    raise RuntimeError("the training failed")
print(f"end {time.time()}", flush=True)
