"""The agent loop's client of the rollout servers, `generate`: latency and throughput of every request.

From 0.8.0 on an answer has the version of the weights, too.

`verl.workers.rollout.llm_server.LLMServerClient` (verl 0.8.0 on),
`verl.experimental.agent_loop.agent_loop.AsyncLLMServerManager` (0.6.1 to 0.7.1).
"""

import functools
import time
from types import ModuleType
from typing import Any

from verl_otel import border, telemetry
from verl_otel.hooks.patches import Patches


def install(module: ModuleType, patches: Patches) -> None:
    _wrap(module.LLMServerClient, patches)


def install_before_0_8(module: ModuleType, patches: Patches) -> None:
    _wrap(module.AsyncLLMServerManager, patches)


def _wrap(client: Any, patches: Patches) -> None:
    original = client.generate

    @functools.wraps(original)
    async def generate(self: Any, *args: Any, **kwargs: Any) -> Any:
        started = time.perf_counter()
        output = await original(self, *args, **kwargs)
        try:
            t = telemetry.peek()
            if t is not None:
                tokens = getattr(output, "token_ids", None)
                t.samples.of_request(time.perf_counter() - started, None if tokens is None else len(tokens))
                t.trajectories.generated_with((getattr(output, "extra_fields", None) or {}).get("global_steps"))
        except Exception:
            border.caught("the latency of a request")
        return output

    patches.set(client, "generate", generate)
