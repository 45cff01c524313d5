"""The table of cases (`../CASES.md`) names tests that exist, and leaves no case out."""

import ast
import re
from pathlib import Path

import pytest

TESTS = Path(__file__).parents[1]
ROWS = [
    [cell.strip() for cell in line.strip("|").split("|")]
    for line in (TESTS / "CASES.md").read_text().splitlines()
    if re.match(r"\| [A-Z]\d+ \|", line)
]
WANTED = "V2 V3 V12 R1 R3 R5 R6 R7 R9 R13 O6 O8 O10 O12 O14 M1 M2 M5 C7 C8 J1 J2"
NAMED = re.compile(r"`([\w/]+\.py)::(\w+)`")


def test_every_case_is_in_the_table_once():
    cases = [row[0] for row in ROWS]
    assert len(set(cases)) == len(cases)
    assert set(WANTED.split()) <= set(cases)


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row[0])
def test_the_tests_of_a_case_exist(row):
    _, symptom, covered = row
    assert symptom
    named = NAMED.findall(covered)
    assert len(named) == covered.count("::")
    for path, test in named:
        tree = ast.parse((TESTS / path).read_text())
        assert test in {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}, (path, test)
    if not named:
        (other,) = re.findall(r"^as (\w+)$", covered)
        assert other in [row[0] for row in ROWS if NAMED.search(row[2])]


def test_the_tests_that_are_named_after_a_case_are_in_the_table():
    covered = {row[0]: row[2] for row in ROWS}
    for path in TESTS.glob("*/test_*_cases.py"):
        for case, test in re.findall(r"^def (?=test_([a-z]\d+)_)(\w+)", path.read_text(), re.M):
            assert f"`{path.relative_to(TESTS)}::{test}`" in covered[case.upper()]
