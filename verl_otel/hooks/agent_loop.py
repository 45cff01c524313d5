"""`AgentLoopWorker._run_agent_loop` in `verl.experimental.agent_loop.agent_loop` (verl 0.7.1 to 0.9.1;
`AgentLoopWorkerBase` in 0.6.1 and 0.7.0): which agent loop runs next, for which data source.

Inside, verl opens `rollout_trace_attr`, where the trajectory begins.
"""

import functools
from types import ModuleType
from typing import Any

from verl_otel import border, telemetry
from verl_otel.hooks.closing import closing
from verl_otel.hooks.patches import Patches


def install(module: ModuleType, patches: Patches) -> None:
    worker = getattr(module, "AgentLoopWorkerBase", None) or module.AgentLoopWorker
    original = worker._run_agent_loop

    @functools.wraps(original)
    async def _run_agent_loop(self: Any, *args: Any, **kwargs: Any) -> Any:
        t = telemetry.current()
        if t is None:
            return await original(self, *args, **kwargs)
        with closing(t.trajectories.leave, t.trajectories.enter_about(**_about(self, kwargs))):
            return await original(self, *args, **kwargs)

    patches.set(worker, "_run_agent_loop", _run_agent_loop)


def _about(worker: Any, arguments: dict[str, Any]) -> dict[str, Any]:
    """The fields of `verl_otel.tracing.trajectories.About`."""
    try:
        source, session = arguments.get("data_source"), arguments.get("session_id")
        return {
            "agent": str(arguments["agent_name"]),
            "data_source": None if source is None else str(source)[:200],
            "session": session if isinstance(session, int) else None,  # V1; before, `rollout_n` says it
            "decode": getattr(getattr(worker, "tokenizer", None), "decode", None),
        }
    except Exception:
        border.caught("reading what an agent loop is to do")
        return {}
