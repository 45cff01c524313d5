"""The oldest supported Ray: the hooks of Ray and of worker groups with its own actors; all else is the newest."""

import os
import subprocess

import bed
from environments import HERE, ROOT, wheel

OLDEST = "2.41.0"
TESTS = (
    "tests/integration/test_small_programs.py",
    "tests/integration/test_ray.py::test_every_rank_of_every_kind_of_worker_group_is_under_the_stage_that_called_it",
    "tests/integration/test_ray.py::test_a_thread_of_ours_does_not_end_a_process_that_shuts_ray_down",
)


def test_the_oldest_ray(tmp_path):
    ray = wheel("ray", OLDEST)
    env = {**os.environ, "PYTHONPATH": str(ray), "PYTEST_ADDOPTS": ""}
    found = subprocess.run(
        [HERE.python, "-c", "import ray; print(ray.__version__)"], env=env, capture_output=True, text=True
    )
    assert found.stdout.strip() == OLDEST, found.stderr
    env.update(bed.fork_server(HERE.python).variables())
    command = [
        env["ZYGOTE_LAUNCHER"],
        "-m",
        "pytest",
        "-q",
        "-p",
        "no:cacheprovider",
        f"--basetemp={tmp_path}/tmp",
        *TESTS,
    ]
    done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, timeout=400)
    assert done.returncode == 0, done.stdout[-4000:]
    assert " passed" in done.stdout and "skipped" not in done.stdout
