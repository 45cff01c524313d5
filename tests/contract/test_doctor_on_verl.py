"""`verl-otel doctor` on the real verl that is installed: every hook that this version can have is on."""

import importlib.metadata
import importlib.util
import os

from verl_otel import hooks
from verl_otel.doctor import hooks as doctors_hooks
from verl_otel.doctor.asked import Asked

VERL = importlib.metadata.version("verl")


def test_every_hook_of_this_version_is_on_and_the_others_say_why_not():
    found = {}
    for finding in doctors_hooks.check(Asked(dict(os.environ), timeout=300)):
        found.setdefault(finding.id, []).append(finding)
    wanted = {hook.seam for hook in hooks.HOOKS if hook.is_in(VERL)}
    engines = {hook.seam for hook in hooks.HOOKS if hook.name == "engine_tracing"}
    without = {finding.data["seam"]: finding.what for finding in found.pop("VO-HOOK-NO-LIBRARY", [])}
    assert engines <= without.keys()
    for seam, what in without.items():
        assert what.endswith("not installed"), (seam, what)
    (on,) = found.pop("VO-HOOKS-ON")
    assert set(on.data["seams"]) == wanted - without.keys()
    (absent,) = found.pop("VO-HOOKS-OF-OTHER-VERSIONS")
    assert set(absent.data["seams"]) == {hook.seam for hook in hooks.HOOKS} - wanted
    assert found == {}
    if VERL >= "0.9":
        assert without.keys() == engines and len(on.data["seams"]) == 30
