"""The table of versions in the README is what the tests said, and names tests that exist."""

import ast
import json
import re
import sys
from pathlib import Path

import pytest

TESTS = Path(__file__).parents[1]
sys.path.insert(0, str(TESTS / "matrix"))

import cells  # noqa: E402
import support  # noqa: E402

PROJECT = (support.ROOT / "pyproject.toml").read_text()
OUTCOMES = json.loads(support.OUTCOMES.read_text())


def test_the_tables_are_made_from_the_outcomes():
    text = support.README.read_text()
    assert text.count(support.BEGIN) == text.count(support.END) == 1
    assert support.readme(text, OUTCOMES) == text
    assert support.page(OUTCOMES) == support.PAGE.read_text()


def test_every_cell_was_tried_and_holds():
    assert dict.fromkeys(support.TESTS, "passed") == OUTCOMES
    assert len(cells.CELLS) == 6 * 12


@pytest.mark.parametrize(("outcome", "shown"), [("failed", "✗"), ("not run", "?")])
def test_a_cell_whose_test_does_not_pass_shows_so(outcome, shown):
    """Of each test that a cell names: one that does not pass is enough."""
    for key, cell in cells.CELLS.items():
        assert support.state(cell, dict.fromkeys(support.TESTS, "passed")) in "●○-"
        for test in cell.tests:
            assert support.state(cell, {**OUTCOMES, test: outcome}) == shown, (key, test)


def test_every_test_that_is_claimed_exists():
    for test in support.TESTS:
        path, function = re.fullmatch(r"([\w/]+\.py)::(\w+)(?:\[.+\])?", test).groups()
        tree = ast.parse((TESTS / path).read_text())
        assert function in {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}, test


def test_the_bounds_that_are_claimed_are_those_of_the_package():
    bounds = dict(re.findall(r'"(opentelemetry-api)>=([\d.]+)', PROJECT))
    assert f"OpenTelemetry {bounds['opentelemetry-api']}" in support.BESIDES
    assert re.search(r'requires-python = ">=3.10,<3.13"', PROJECT)
    assert {"Python 3.10", "Python 3.12"} <= support.BESIDES.keys()
    assert (
        support.locked("ray") == re.search(r"^ray==(.+)$", (support.ROOT / "locks/verl-0.8.txt").read_text(), re.M)[1]
    )


def test_what_is_absent_says_which_module_is_missing():
    for (verl, column), cell in cells.CELLS.items():
        assert (cell.how == cells.ABSENT) == (not cell.tests), (verl, column)
        assert (cell.how == cells.ABSENT) == cell.note.startswith("verl."), (verl, column)
