"""The contract tests with the older versions of verl: each runs them once, in its own environment, with its wheel."""

import functools
import os
import subprocess
import tempfile
import xml.etree.ElementTree as ElementTree
from pathlib import Path

import bed
import pytest
from cells import CONTRACTS, NEWEST, program_test
from environments import ROOT, VERSIONS, environment

SUITE = (
    "tests/contract/test_hooks_on_verl.py",
    "tests/contract/test_metrics_on_verl.py",
    "tests/contract/test_programs.py",
    "tests/integration/test_small_programs.py",
    "tests/integration/test_ray.py::test_every_rank_of_every_kind_of_worker_group_is_under_the_stage_that_called_it",
)


@functools.cache
def outcomes(verl: str) -> dict[str, str]:
    """Test -> what it said, empty if it passed."""
    of_version = environment(verl)
    server = bed.fork_server(of_version.python)
    env = {**os.environ, **of_version.variables, **server.variables(of_version.python), "PYTEST_ADDOPTS": ""}
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder, "report.xml")
        command = [env["ZYGOTE_LAUNCHER"], "-m", "pytest", "-q", "-p", "no:cacheprovider", "-W", "ignore"]
        done = subprocess.run(
            [*command, f"--basetemp={folder}/tmp", f"--junitxml={report}", *SUITE],
            cwd=ROOT, env=env, capture_output=True, text=True, timeout=600,
        )  # fmt: skip
        assert report.exists(), done.stdout[-3000:] + done.stderr[-3000:]
        cases = [*ElementTree.parse(report).iter("testcase")]
    found = {}
    for case in cases:
        wrong = [f"{child.tag}: {child.text}" for child in case if child.tag in ("failure", "error", "skipped")]
        found[f"{case.get('classname')}.{case.get('name')}"] = "\n".join(wrong)
    return found


def passed(found: dict[str, str]) -> str:
    """What the tests that did not pass said."""
    return "\n".join(f"{name}: {text[-2000:]}" for name, text in found.items() if text)


@pytest.mark.parametrize("verl", [verl for verl in VERSIONS if verl != NEWEST])
def test_the_hooks_fit(verl):
    """Install, do what they say, and go away; context through worker groups and programs on real Ray."""
    found = {name: text for name, text in outcomes(verl).items() if "contract.test_programs" not in name}
    assert len(found) > 25
    assert not passed(found), passed(found)


@pytest.mark.parametrize(("verl", "column"), CONTRACTS, ids=["-".join(key) for key in CONTRACTS])
def test_a_program(verl, column):
    """What the hooks hold on to in a program of this version."""
    assert outcomes(verl)[f"tests.contract.test_programs.{program_test(verl, column)}"] == ""
