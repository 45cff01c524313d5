"""Tries every cell of the table of versions, and writes what came of it: `make test-matrix`.

Outcomes go to docs/support.json; docs/support.md and the table in the README are made from them. With ids of tests as
arguments, or beginnings of ids, only these are tried anew; with `--write` none.
"""

import json
import os
import re
import subprocess
import sys
import tempfile
import xml.etree.ElementTree as ElementTree
from pathlib import Path

sys.path[:0] = [str(Path(__file__).parent), str(Path(__file__).resolve().parents[1] / "testbed")]

from cells import ABSENT, CELLS, COLUMNS, RUN, Cell  # noqa: E402
from environments import HERE, ROOT, VERSIONS  # noqa: E402

OUTCOMES = ROOT / "docs" / "support.json"
PAGE = ROOT / "docs" / "support.md"
README = ROOT / "README.md"
BEGIN, END = "<!-- support table: made by `make test-matrix` -->\n", "<!-- end of the support table -->\n"

BESIDES = {
    "Python 3.10": "matrix/test_pythons.py::test_the_package_works_on_another_python[3.10]",
    "Python 3.12": "matrix/test_pythons.py::test_the_package_works_on_another_python[3.12]",
    "Ray 2.41": "matrix/test_oldest_ray.py::test_the_oldest_ray",
    "OpenTelemetry 1.44": (
        "contract/test_oldest_opentelemetry.py::test_the_recorder_works_with_the_oldest_supported_opentelemetry"
    ),
}
"""Other versions that are supported, and the test that says so; all the rest runs with the newest."""

TESTS = sorted({test for cell in CELLS.values() for test in cell.tests} | set(BESIDES.values()))

PASSED = "passed"


def run(wanted: list[str]) -> dict[str, str]:
    """Test -> `passed`, `failed` or `not run`."""
    outcomes = dict.fromkeys(wanted, "not run")
    for part in ("contract", "integration", "matrix", "e2e"):  # as in `make test`, not all in one process
        tests = [f"tests/{test}" for test in wanted if test.startswith(f"{part}/")]
        if not tests:
            continue
        with tempfile.TemporaryDirectory() as folder:
            report = Path(folder, "report.xml")
            subprocess.run([HERE.python, "-m", "pytest", f"--junitxml={report}", *tests], cwd=ROOT, check=False)
            cases = [*ElementTree.parse(report).iter("testcase")] if report.exists() else []
        for case in cases:
            module = case.get("classname", "").removeprefix("tests.").replace(".", "/")
            wrong = [child for child in case if child.tag in ("failure", "error", "skipped")]
            outcomes[f"{module}.py::{case.get('name')}"] = "failed" if wrong else PASSED
    return {test: outcomes[test] for test in wanted}


def state(cell: Cell, outcomes: dict[str, str]) -> str:
    """What the table shows of a cell."""
    if cell.how == ABSENT:
        return "-"
    found = {outcomes.get(test, "not run") for test in cell.tests}
    if found != {PASSED}:
        return "✗" if "failed" in found else "?"
    return "●" if cell.how == RUN else "○"


def table(outcomes: dict[str, str]) -> str:
    """The table of the README."""
    lines = [
        "| verl | " + " | ".join(COLUMNS.values()) + " |",
        "|---" + "|:-:" * len(COLUMNS) + "|",
    ]
    for verl in reversed(VERSIONS):
        lines.append(f"| {verl} | " + " | ".join(state(CELLS[verl, column], outcomes) for column in COLUMNS) + " |")
    besides = ", ".join(name for name, test in BESIDES.items() if outcomes.get(test) == PASSED)
    legend = (
        "● a real training run on a CPU; ○ what the hooks hold on to, tested on the real wheel with real Ray actors; "
        f"- not in this version of verl; ✗ does not work; ? not tried. All with Python 3.11, Ray {locked('ray')} and "
        f"OpenTelemetry {locked('opentelemetry-api')}; besides, a part of the tests with each of {besides}. "
        "Which tests: [docs/support.md](docs/support.md)."
    )
    return "\n".join([*lines, "", *wrapped(legend)]) + "\n"


def locked(package: str) -> str:
    """The version of a package in the tested environment."""
    (version,) = re.findall(rf"^{package}==([\d.]+)$", (ROOT / "locks" / "test.txt").read_text(), re.M)
    return version


def wrapped(text: str, width: int = 120) -> list[str]:
    lines = [""]
    for word in text.split(" "):
        if len(lines[-1]) + len(word) >= width:
            lines.append("")
        lines[-1] += f" {word}" if lines[-1] else word
    return lines


def page(outcomes: dict[str, str]) -> str:
    """docs/support.md: the test behind each cell."""
    lines = [
        "# Supported versions, and the tests that say so",
        "",
        "Made by `make test-matrix` (`tests/matrix/support.py`) from what the tests said; the cells are declared in",
        "`tests/matrix/cells.py`. Tests are in `tests/`.",
        "",
        "| verl | program | | tests, or the module that this version lacks |",
        "|---|---|---|---|",
    ]
    for verl in reversed(VERSIONS):
        for column, title in COLUMNS.items():
            cell = CELLS[verl, column]
            shown = f"`{cell.note}`" if cell.how == ABSENT else "<br>".join(f"`{test}`" for test in cell.tests)
            lines.append(f"| {verl} | {title} | {state(cell, outcomes)} | {shown} |")
    lines += ["", "| besides | | test |", "|---|---|---|"]
    for name, test in BESIDES.items():
        lines.append(f"| {name} | {'●' if outcomes.get(test) == PASSED else '✗'} | `{test}` |")
    return "\n".join(lines) + "\n"


def readme(text: str, outcomes: dict[str, str]) -> str:
    """The README with the table in its place."""
    before, _, rest = text.partition(BEGIN)
    _, _, after = rest.partition(END)
    return before + BEGIN + "\n" + table(outcomes) + END + after


def write(outcomes: dict[str, str]) -> None:
    OUTCOMES.write_text(json.dumps(outcomes, indent=2, sort_keys=True) + "\n")
    PAGE.write_text(page(outcomes))
    README.write_text(readme(README.read_text(), outcomes))


def main(arguments: list[str]) -> int:
    os.environ.pop("PYTHONPATH", None)
    wanted = [test for test in TESTS if not arguments or test.startswith(tuple(arguments))]
    tried = run(wanted)
    known = json.loads(OUTCOMES.read_text()) if OUTCOMES.exists() else {}
    outcomes = {**{test: known.get(test, "not run") for test in TESTS}, **tried}
    write(outcomes)
    wrong = {test: outcome for test, outcome in outcomes.items() if outcome != PASSED}
    print("\n".join(f"{outcome}: {test}" for test, outcome in wrong.items()) or "every cell holds")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
