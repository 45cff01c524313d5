"""GPUs and host of a run: OpenTelemetry's `hw.*` and `system.*` metrics, from one sampler per node and run.

Every process of a run calls `start`. A daemon thread then announces which GPUs its process uses (`visible`), and one
process of the run on each node is elected (`election`) to sample all announced GPUs (`sampler`) and the host (`host`).
The other processes cost a wake-up per interval, and take over when the elected one dies. GPUs are read through NVML
(`nvml`) or through readers that other packages bring (`readers`).
"""

from __future__ import annotations

import os
import threading
from typing import TYPE_CHECKING

from verl_otel import border

if TYPE_CHECKING:
    from opentelemetry.metrics import MeterProvider

    from verl_otel.identity import Identity

_lock = threading.Lock()
_thread: threading.Thread | None = None
_stopping = threading.Event()


def start(identity: Identity, meter_provider: MeterProvider, interval: float = 10.0) -> None:
    """Take part in the sampling of this node's hardware; once per process, returns at once, never raises.

    Args:
        interval: seconds between two samples, and between two tries to become the sampler.
    """
    global _thread, _stopping
    try:
        with _lock:
            if _thread is None:
                _stopping = threading.Event()
                arguments = (identity, meter_provider, interval, _stopping)
                _thread = threading.Thread(target=_run, args=arguments, name="verl-otel-hardware", daemon=True)
                _thread.start()
    except Exception:
        border.caught("starting the hardware sampler")


def stop(timeout: float = 1.0) -> None:
    """End the sampling of this process and let another one take over; waits `timeout` seconds at most, never raises."""
    global _thread
    with _lock:
        thread, _thread = _thread, None
        _stopping.set()
    if thread is not None and thread.ident is not None and thread is not threading.current_thread():
        thread.join(timeout)


def _run(identity: Identity, meter_provider: MeterProvider, interval: float, stopping: threading.Event) -> None:
    try:
        from verl_otel.hardware.sampler import Sampler

        Sampler(identity, meter_provider, interval, stopping).run()
    except Exception:
        border.caught("sampling the hardware")


def _forget_in_child() -> None:
    """A forked child has no sampler thread, and its copy of the lock may be held by a thread that it does not have."""
    global _lock, _thread
    _lock, _thread = threading.Lock(), None


os.register_at_fork(after_in_child=_forget_in_child)
