"""Which hooks a version of verl has, and the one that travels with a trainer's class."""

import subprocess
import sys
import textwrap
import types

import cloudpickle
import pytest

from verl_otel import hooks
from verl_otel.hooks import main_ppo_sync
from verl_otel.hooks.patches import Patches


@pytest.mark.parametrize(
    ("verl", "there"),
    [
        ("0.6.1", False),
        ("0.7.0", False),
        ("0.7.1", True),
        ("0.7.1rc1", True),
        ("0.8.0.dev3", True),
        ("0.9.0", False),
        ("0.10.0", False),
        ("", True),
    ],
)
def test_a_hook_is_in_the_versions_from_since_to_until_and_where_no_version_is_known(verl, there):
    assert hooks.Hook("x", "verl.x", lambda module, patches: None, since="0.7.1", until="0.9.0").is_in(verl) is there


def test_without_bounds_a_hook_is_in_every_version():
    assert hooks.Hook("x", "verl.x", lambda module, patches: None).is_in("0.0.1")


def test_the_hooks_that_a_version_lacks_are_not_tried_and_the_others_are(monkeypatch, caplog):
    tried = []

    def install(name):
        return lambda module, patches: tried.append(name)

    monkeypatch.setattr(hooks, "_verl", lambda: "0.7.0")
    monkeypatch.setattr(hooks, "_active", True)
    monkeypatch.setattr(hooks, "_installed", {})
    for name, bounds in (("old", {"until": "0.7.0"}), ("now", {}), ("new", {"since": "0.8.0"})):
        hooks._apply(hooks.Hook(name, "verl.x", install(name), **bounds))(sys)
    assert tried == ["now"]
    assert hooks.status() == {"now on verl.x": "installed"}
    assert caplog.records == []


PROGRAM = """
class PPOTrainer:
    def __init__(self, config):
        self.config = config

    def init_workers(self):
        return "set up"

    def _validate(self):
        return {}

    def _save_checkpoint(self):
        pass

    def fit(self):
        return self.config + 1
"""

ELSEWHERE = """
import pickle, sys
if {without}:
    sys.modules["verl_otel"] = None  # an import of it fails
trainer = pickle.loads(bytes.fromhex(sys.stdin.read()))(41)
print(trainer.init_workers(), trainer.fit(), hasattr(type(trainer).fit, "__wrapped__"))
"""


@pytest.mark.parametrize("without", [True, False], ids=["without the package", "with the package"])
def test_the_trainer_of_main_ppo_sync_is_wrapped_where_it_arrives(without, monkeypatch):
    program, ray = types.ModuleType("__main__"), types.SimpleNamespace(init=lambda: "ray")
    exec(PROGRAM, program.__dict__)
    program.__spec__ = types.SimpleNamespace(name="verl.trainer.main_ppo_sync")
    monkeypatch.setitem(sys.modules, "__main__", program)
    patches = Patches()
    main_ppo_sync.install(ray, patches)
    assert ray.init() == "ray"
    assert hasattr(program.PPOTrainer.__init__, "__wrapped__") and not hasattr(program.PPOTrainer.fit, "__wrapped__")
    sent = cloudpickle.dumps(program.PPOTrainer).hex()
    patches.undo()
    assert not hasattr(program.PPOTrainer.__init__, "__wrapped__")
    command = [sys.executable, "-c", textwrap.dedent(ELSEWHERE.format(without=without))]
    there = subprocess.run(command, input=sent, capture_output=True, text=True, timeout=60)
    assert there.stdout.split() == ["set", "up", "42", str(not without)], there.stderr


def test_another_program_is_left_alone(monkeypatch):
    program = types.ModuleType("__main__")
    exec(PROGRAM, program.__dict__)
    program.__spec__ = types.SimpleNamespace(name="verl.trainer.main_ppo")
    monkeypatch.setitem(sys.modules, "__main__", program)
    ray = types.SimpleNamespace(init=lambda: None)
    main_ppo_sync.install(ray, Patches())
    ray.init()
    assert not hasattr(program.PPOTrainer.__init__, "__wrapped__")
