"""A fault for a test: rank 1 is killed in its update of the second step. Loaded by verl, like verl_cpu.register."""

import functools
import os
import signal

from verl.workers.utils import losses

_ppo_loss = losses.ppo_loss
_calls = 0


@functools.wraps(_ppo_loss)
def ppo_loss(*args, **kwargs):
    global _calls
    loss, metrics = _ppo_loss(*args, **kwargs)
    if os.environ.get("RANK") == "1" and loss.requires_grad:
        _calls += 1
        if _calls == 3:  # of two micro-batches in each step
            os.kill(os.getpid(), signal.SIGKILL)
    return loss, metrics


losses.ppo_loss = ppo_loss
