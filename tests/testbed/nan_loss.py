"""A fault for a test: rank 1's policy loss is NaN in the second step (of two micro-batches the first).

Loaded by verl, like verl_cpu.register.
"""

import functools
import os

from verl.workers.utils import losses

_ppo_loss = losses.ppo_loss
_calls = 0


@functools.wraps(_ppo_loss)
def ppo_loss(*args, **kwargs):
    global _calls
    loss, metrics = _ppo_loss(*args, **kwargs)
    if os.environ.get("RANK") == "1" and loss.requires_grad:
        _calls += 1
    return (loss * float("nan") if _calls == 3 else loss), metrics


losses.ppo_loss = ppo_loss
