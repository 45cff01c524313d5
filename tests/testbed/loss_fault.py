"""Faults for tests, in rank 1's update of the actor, by $LOSS_FAULT: `nan` (its loss), `kill` (the rank) or `hang` (for
HANG seconds), in the second step, or in another: `hang@4,nan@6`. When each began is printed.

Loaded by verl, like verl_cpu.register.
"""

import functools
import os
import signal
import time

from verl.workers.utils import losses

HANG = 15.0

_ppo_loss = losses.ppo_loss
_calls = 0


def _faults():
    """Number of the call -> the fault: there are two micro-batches in each step."""
    parts = [part.partition("@") for part in os.environ["LOSS_FAULT"].split(",")]
    return {2 * int(step or 2) - 1: what for what, _, step in parts}


@functools.wraps(_ppo_loss)
def ppo_loss(*args, **kwargs):
    global _calls
    loss, metrics = _ppo_loss(*args, **kwargs)
    if os.environ.get("RANK") == "1" and loss.requires_grad:
        _calls += 1
        fault = _faults().get(_calls)
        if fault is not None:
            print(f"loss_fault {fault} at {time.time():.1f}", flush=True)
        if fault == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        elif fault == "hang":
            time.sleep(HANG)
        elif fault == "nan":
            loss = loss * float("nan")
    return loss, metrics


losses.ppo_loss = ppo_loss
