"""`verl.utils.reward_score.sandbox_fusion.utils.check_correctness` (verl 0.6.1 to 0.9.1): what came of test cases.

Time-outs and errors of the sandbox are not raised: verl makes a score of them. It says them in what this returns.
"""

import functools
from types import ModuleType
from typing import Any

from verl_otel import border, telemetry
from verl_otel.hooks.patches import Patches


def install(module: ModuleType, patches: Patches) -> None:
    original = module.check_correctness

    @functools.wraps(original)
    def check_correctness(*args: Any, **kwargs: Any) -> Any:
        result = original(*args, **kwargs)
        try:
            t = telemetry.peek()
            if t is not None:
                t.scores.checked([str(case.get("status") or "error") for case in result[1] if isinstance(case, dict)])
        except Exception:
            border.caught("reading what the sandbox says")
        return result

    patches.set_everywhere(module, "check_correctness", check_correctness)
