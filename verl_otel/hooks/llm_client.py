"""The agent loop's client of the rollout servers, `generate`: a span, latency and throughput of every request.

`verl.workers.rollout.llm_server.LLMServerClient` (verl 0.8.0 on; `FullyAsyncLLMServerClient` there asks it again for
the rest of a response that a weight sync has cut off),
`verl.experimental.agent_loop.agent_loop.AsyncLLMServerManager` (0.6.1 to 0.7.1). From 0.8.0 on an answer has the
version of the weights, too.
"""

import functools
import time
from types import ModuleType
from typing import Any

from verl_otel import border, telemetry
from verl_otel.hooks.closing import closing
from verl_otel.hooks.patches import Patches


def install(module: ModuleType, patches: Patches) -> None:
    _wrap(module.LLMServerClient, patches)
    resuming = getattr(module, "FullyAsyncLLMServerClient", None)
    if resuming is not None:
        _wrap_resuming(resuming, patches)


def install_before_0_8(module: ModuleType, patches: Patches) -> None:
    _wrap(module.AsyncLLMServerManager, patches)


def _wrap(client: Any, patches: Patches) -> None:
    original = client.generate

    @functools.wraps(original)
    async def generate(self: Any, *args: Any, **kwargs: Any) -> Any:
        t = telemetry.peek()
        if t is None:
            return await original(self, *args, **kwargs)
        started = time.perf_counter()
        request = t.trajectories.enter_request(self, args[0] if args else kwargs.get("request_id"), kwargs)
        with closing(t.trajectories.leave, request):
            output = await original(self, *args, **kwargs)
            t.trajectories.answered(request, kwargs.get("prompt_ids"), output)
        try:
            tokens = getattr(output, "token_ids", None)
            t.samples.of_request(time.perf_counter() - started, None if tokens is None else len(tokens))
            t.trajectories.generated_with((getattr(output, "extra_fields", None) or {}).get("global_steps"))
        except Exception:
            border.caught("the latency of a request")
        return output

    patches.set(client, "generate", generate)


def _wrap_resuming(client: Any, patches: Patches) -> None:
    original = client.generate

    @functools.wraps(original)
    async def generate(self: Any, *args: Any, **kwargs: Any) -> Any:
        t = telemetry.peek()
        if t is None:
            return await original(self, *args, **kwargs)
        with closing(t.trajectories.leave, t.trajectories.enter_generation()):
            return await original(self, *args, **kwargs)

    patches.set(client, "generate", generate)
