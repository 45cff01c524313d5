"""A fault for a test: in rank 1's update of the second step its loss is NaN, or it is killed ($LOSS_FAULT: nan, kill).

Loaded by verl, like verl_cpu.register.
"""

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
            if os.environ["LOSS_FAULT"] == "kill":
                os.kill(os.getpid(), signal.SIGKILL)
            loss = loss * float("nan")
    return loss, metrics


losses.ppo_loss = ppo_loss
