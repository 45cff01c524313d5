"""Tool calls: `ToolAgentLoop._call_tool` (verl 0.6.1 to 0.9.1), and the tools themselves, `BaseTool.execute` of every
subclass (0.6.1 to 0.9.1) and `FunctionTool.call` (0.8.0 on).

`_call_tool` knows the call as the model has written it, but lets no exception out: verl tells the model of it. The
tools raise. An agent loop of a user's own that calls tools without `_call_tool` is seen by them alone.
"""

import functools
import inspect
from types import ModuleType
from typing import Any

from verl_otel import border, telemetry
from verl_otel.hooks.closing import closing
from verl_otel.hooks.patches import Patches


def install_agent_loop(module: ModuleType, patches: Patches) -> None:
    loop = module.ToolAgentLoop
    original = loop._call_tool

    @functools.wraps(original)
    async def _call_tool(self: Any, tool_call: Any, *args: Any, **kwargs: Any) -> Any:
        t = telemetry.peek()
        if t is None:
            return await original(self, tool_call, *args, **kwargs)
        call = _opened(t, self, tool_call)
        with closing(t.trajectories.leave, call):
            result = await original(self, tool_call, *args, **kwargs)
            t.trajectories.answered(call, getattr(tool_call, "arguments", None), _text(result))
            return result

    patches.set(loop, "_call_tool", _call_tool)


def install_function_tool(module: ModuleType, patches: Patches) -> None:
    _wrap(module.FunctionTool, "call", patches)


def install_base_tool(module: ModuleType, patches: Patches) -> None:
    """The subclasses that there are, and each that comes, as it is defined."""
    base = module.BaseTool
    own = vars(base).get("__init_subclass__")

    def __init_subclass__(cls: Any, **kwargs: Any) -> None:
        (super(base, cls).__init_subclass__ if own is None else own.__get__(None, cls))(**kwargs)
        _wrap_own(cls, patches)

    for tool in _subclasses(base):
        _wrap_own(tool, patches)
    patches.set(base, "__init_subclass__", classmethod(__init_subclass__))


def _subclasses(base: Any) -> list[Any]:
    return [found for tool in base.__subclasses__() for found in (tool, *_subclasses(tool))]


def _wrap_own(tool: Any, patches: Patches) -> None:
    try:
        if inspect.iscoroutinefunction(vars(tool).get("execute")):
            _wrap(tool, "execute", patches)
    except Exception:
        border.caught("wrapping a tool")


def _wrap(owner: Any, name: str, patches: Patches) -> None:
    original = vars(owner)[name]

    @functools.wraps(original)
    async def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        t = telemetry.peek()
        if t is None:
            return await original(self, *args, **kwargs)
        with closing(t.trajectories.leave, t.trajectories.enter_tool(str(getattr(self, "name", type(self).__name__)))):
            return await original(self, *args, **kwargs)

    patches.set(owner, name, call)


def _opened(t: Any, loop: Any, tool_call: Any) -> Any:
    try:
        name = str(tool_call.name)
        known = name in (getattr(loop, "tools", None) or ())
        return t.trajectories.enter_tool(name, getattr(tool_call, "tool_call_id", None), known)
    except Exception:
        border.caught("reading a tool call")
        return None


def _text(result: Any) -> Any:
    """Of `(ToolResponse, reward, metrics)`; None if it is something else."""
    return getattr(result[0], "text", None) if isinstance(result, tuple) and result else None
