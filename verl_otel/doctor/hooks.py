"""Every hook, on or off, and why: tried on the verl that is installed, without a training."""

import importlib
from collections.abc import Iterator
from typing import Any

from verl_otel.doctor import child
from verl_otel.doctor.asked import Asked
from verl_otel.doctor.findings import Finding, note, ok, warning
from verl_otel.doctor.versions import installed

SECONDS = 100.0

ON, DISABLED, NOT_IN_VERSION, NO_LIBRARY, NO_SEAM, NO_IMPORT = (
    *("on", "disabled", "not_in_version", "no_library", "no_seam", "no_import"),
)


def check(asked: Asked) -> Iterator[Finding]:
    """What became of each hook."""
    if not installed("verl"):
        yield note("VO-HOOKS-UNKNOWN", "verl is not installed, so there is nothing to hook", "see under versions")
        return
    states: dict[str, dict[str, Any]] = {}
    trying = ended = ""
    for found in child.run("hooks", asked.environ, asked.until(SECONDS)):
        ended = found.get(child.ENDED, "")
        trying = found.get("trying", trying)
        if "state" in found:
            states[found["seam"]] = found
    by_state: dict[str, list[dict[str, Any]]] = {}
    for found in states.values():
        by_state.setdefault(found["state"], []).append(found)

    on = by_state.get(ON, [])
    if on:
        names = sorted({found["name"] for found in on})
        what = f"{len(on)} hooks are on: {', '.join(names)}"
        yield ok("VO-HOOKS-ON", what, seams=[found["seam"] for found in on])
    for found in by_state.get(NO_SEAM, []):
        yield warning(
            "VO-HOOK-SEAM-MISSING",
            f"{found['seam']} is off: this version does not have what it needs ({found['reason']})",
            "that part of the telemetry is missing, the rest works; use a version of verl from the table in the "
            "README, or report it with this line",
            seam=found["seam"],
        )
    for found in by_state.get(NO_IMPORT, []):
        yield warning(
            "VO-HOOK-NO-IMPORT",
            f"{found['seam']} is off here: {found['module']} cannot be imported ({found['reason']})",
            f"look with: python -c 'import {found['module']}'; if the training does not use it, nothing is missing",
            seam=found["seam"],
        )
    for found in by_state.get(NO_LIBRARY, []):
        what = f"{found['seam']} is off: {found['reason']}"
        yield note(
            "VO-HOOK-NO-LIBRARY", what, "if the training does not use it, nothing is missing", seam=found["seam"]
        )
    disabled = sorted({found["name"] for found in by_state.get(DISABLED, [])})
    if disabled:
        what = f"off by VERL_OTEL_DISABLED_HOOKS: {', '.join(disabled)}"
        yield note("VO-HOOK-DISABLED", what, "take them out of the variable to have them back", hooks=disabled)
    absent = by_state.get(NOT_IN_VERSION, [])
    if absent:
        what = f"verl {installed('verl')} has nothing for: {', '.join(found['seam'] for found in absent)}"
        yield ok("VO-HOOKS-OF-OTHER-VERSIONS", what, seams=[found["seam"] for found in absent])
    if ended:
        yield warning(
            "VO-HOOKS-UNFINISHED",
            f"trying the hooks has ended early: {ended}" + (f", at {trying}" if trying else ""),
            f"look with: python -X faulthandler -c 'import {trying.rpartition(' on ')[2] or 'verl'}'; "
            "or give it more time with --timeout",
            seam=trying,
        )


def in_child(_: str) -> Iterator[dict[str, Any]]:
    """Install the hooks, import what they wait for, and say what became of each."""
    from verl_otel import hooks, identity
    from verl_otel.config import Settings

    disabled = Settings.from_environ().disabled_hooks
    verl = identity.verl_version()
    hooks.install(disabled)
    for hook in hooks.HOOKS:
        found = {"seam": hook.seam, "name": hook.name, "module": hook.module}
        if hook.name in disabled:
            yield {**found, "state": DISABLED}
        elif not hook.is_in(verl):
            yield {**found, "state": NOT_IN_VERSION}
        else:
            yield {"trying": hook.seam}
            yield {**found, **_try(hook.module, hook.seam)}


def _try(module: str, seam: str) -> dict[str, str]:
    from verl_otel import hooks

    try:
        importlib.import_module(module)
    except ModuleNotFoundError as error:
        missing = error.name or ""
        if module == missing or module.startswith(f"{missing}."):
            package = module.partition(".")[0]
            if missing == package:
                return {"state": NO_LIBRARY, "reason": f"{package} is not installed"}
            return {"state": NO_SEAM, "reason": f"no module {missing}"}
        return {"state": NO_LIBRARY, "reason": f"{module} needs {missing}, which is not installed"}
    except BaseException as error:  # also SystemExit: it is others' code
        return {"state": NO_IMPORT, "reason": f"{type(error).__name__}: {error}"[:300]}
    status = hooks.status().get(seam, "its module was imported, and it was not tried")
    return {"state": ON, "reason": ""} if status == "installed" else {"state": NO_SEAM, "reason": status}
