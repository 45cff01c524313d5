"""Every command of the README's code blocks is run: here, or in the test named here."""

import re
import subprocess
import urllib.request
import zipfile
from pathlib import Path

import bed
import pytest

pytestmark = pytest.mark.run

COMMANDS = {
    "pip install 'verl-otel[report]'": "test_the_package_installs_with_its_extras",
    "opentelemetry-instrument python -m verl.trainer.main_ppo ...": "test_embedded.py, test_stack.py: all runs",
    "verl-otel report": "test_the_report_command_makes_the_page, unit/test_report.py",
    "verl-otel replay verl-otel/<run id> --endpoint http://127.0.0.1:4318": "test_restarts.py",
    "make demo": "test_make_demo_prints_where_things_are",
    "make test": "what runs this test",
    "make demo-stack": "test_make_demo_stack_prints_links",
    "pip install 'verl-otel[stack]'": "test_the_package_installs_with_its_extras",
    "verl-otel up": "test_up.py",
    "export OTEL_EXPORTER_OTLP_ENDPOINT=http://127.0.0.1:4318": "test_stack.py",
}


def test_each_command_in_the_readme_is_run_by_a_test():
    text = (bed.ROOT / "README.md").read_text()
    blocks = re.findall(r"^```sh\n(.*?)^```", text, re.M | re.S)
    commands = {line.partition("  #")[0].strip() for block in blocks for line in block.splitlines() if line.strip()}
    assert commands == set(COMMANDS)


def test_make_demo_prints_where_things_are(demo):
    printed, run = demo
    assert "step 4 of 4" in printed
    assert re.search(r"recorded telemetry +(\S+)", printed)[1] == str(run.telemetry)
    page = Path(re.search(r"page to look at +(\S+)", printed)[1])
    assert page.stat().st_size > 1_000_000


def test_the_report_command_makes_the_page(plain_run, tmp_path):
    command = [bed.PYTHON.parent / "verl-otel", "report", plain_run.telemetry, "-o", tmp_path / "page.html"]
    result = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert result.stdout.strip() == str(tmp_path / "page.html"), result.stderr
    text = (tmp_path / "page.html").read_text()
    for visible in ("Where the time goes", "critic/score/mean", "verl.worker.update_actor", "rank 1", "trajectory 4"):
        assert visible in text


def test_the_package_installs_with_its_extras(tmp_path):
    """A wheel is built from the checkout; what it and its extras need is satisfied by the locked environment."""
    uv = [bed.PYTHON.parent / "uv"]
    subprocess.run([*uv, "build", "--wheel", "-o", tmp_path, "--no-build-isolation", "--python", bed.PYTHON, bed.ROOT],
                   check=True, capture_output=True, timeout=120)  # fmt: skip
    (wheel,) = tmp_path.glob("verl_otel-*.whl")
    with zipfile.ZipFile(wheel) as archive:
        (metadata,) = [
            archive.read(name).decode() for name in archive.namelist() if name.endswith(".dist-info/METADATA")
        ]
    extras = ",".join(re.findall(r"^Provides-Extra: (.+)$", metadata, re.M))
    assert {"report", "stack"} <= set(extras.split(","))
    command = [*uv, "pip", "install", "--dry-run", "--python", bed.PYTHON, f"verl-otel[{extras}] @ file://{wheel}"]
    result = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert result.returncode == 0, result.stderr
    changes = [line for line in result.stderr.splitlines() if line.startswith((" + ", " - "))]
    assert all("verl-otel" in line for line in changes), changes


@pytest.mark.stack
def test_make_demo_stack_prints_links(tmp_path):
    command = ["make", "demo-stack", f"DEMO=--no-stay --folder {tmp_path}/output"]
    process = subprocess.Popen(command, cwd=bed.ROOT, env=bed.clean_environment(), stdout=subprocess.PIPE, text=True)
    answered = {}
    printed = []
    for line in process.stdout:
        printed.append(line)
        # The links are printed while the stack still runs.
        for link in re.findall(r"http://127\.0\.0\.1:\d+\S*", line):
            if "/query?g0" not in link and "/search?" not in link:  # pages: what we build has none
                with urllib.request.urlopen(link, timeout=20) as response:
                    answered[link] = response.status, len(response.read())
    assert process.wait(120) == 0, "".join(printed)[-3000:]
    assert [status for status, _ in answered.values()] == [200] * len(answered)
    assert len(answered) >= 3 and all(size > 100 for _, size in answered.values())
