"""The oldest and the newest supported Python (the tests run on the one in between): the package with its dependencies,
its unit tests that need neither torch nor Ray, and the seams of the real verl that import without them."""

import os
import subprocess

import pytest
from environments import HERE, ROOT
from pythons import PINNED, python

UV = HERE.python.parent / "uv"
TESTS = (
    *("recorder", "propagation", "steps", "workers", "patches", "ids", "ranks", "step_values", "files"),
    "config_identity",
)
MORE = ("numpy", "orjson", "packaging", "pytest", "pytest-timeout", "hypothesis")
"""What the tests and verl's own module need; the package brings the rest."""


@pytest.fixture(scope="module")
def jobs(tmp_path_factory):
    """Both at once: they mostly wait."""
    jobs = {}
    for version in PINNED:
        folder = tmp_path_factory.mktemp(f"python{version}")
        program = folder / "venv" / "bin" / "python"
        subprocess.run([UV, "venv", "-q", "--python", python(version), folder / "venv"], check=True, timeout=120)
        install = [UV, "pip", "install", "-q", "--python", program]
        subprocess.run([*install, ROOT, *MORE], check=True, timeout=300)
        subprocess.run([*install, "--no-deps", f"verl=={HERE.verl}"], check=True, timeout=300)
        files = [f"tests/unit/test_{name}.py" for name in TESTS]
        tests = [
            [*files, "--basetemp", folder / "unit"],
            ["tests/matrix/small_seams.py", "--basetemp", folder / "small"],
        ]
        env = {k: v for k, v in os.environ.items() if k not in ("PYTHONPATH", "PYTEST_ADDOPTS")}
        jobs[version] = [
            subprocess.Popen(
                [program, "-m", "pytest", "-q", "-p", "no:cacheprovider", *map(str, arguments)],
                cwd=ROOT, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
            )
            for arguments in tests
        ]  # fmt: skip
    yield jobs
    for job in (job for of_version in jobs.values() for job in of_version):
        job.kill()
        job.wait()


@pytest.mark.parametrize("version", PINNED)
def test_the_package_works_on_another_python(jobs, version):
    for job in jobs[version]:
        output, _ = job.communicate(timeout=300)
        assert job.returncode == 0, output[-3000:]
        assert " passed" in output and "skipped" not in output
