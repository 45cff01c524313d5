"""`make demo` and `make demo-stack`: a real verl training run, instrumented, and where to look at it."""

import argparse
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import bed

STEPS = 4


class Progress:
    """Prints what the run does, from what verl prints."""

    def __init__(self) -> None:
        self._start = time.monotonic()
        self._said: set[str] = set()

    def say(self, text: str) -> None:
        print(f"[{time.monotonic() - self._start:4.0f} s] {text}", flush=True)

    def once(self, text: str) -> None:
        if text not in self._said:
            self._said.add(text)
            self.say(text)

    def line(self, line: str) -> None:
        if "ray init kwargs" in line:
            self.once("starting Ray")
        elif "Started a local Ray instance" in line:
            self.once("starting the trainer, 2 ranks, rollout servers, agent-loop and reward workers")
        elif (found := re.search(r"\((\w+) pid=\d+", line)) and found[1] not in self._said:
            self._said.add(found[1])
            self.say(f"  {found[1]} is there")
        if "Initial validation metrics" in line:
            self.once("validated before training")
        elif (found := re.search(r"step:(\d+) - ", line)) and found[1] != "0":
            bar = "#" * int(found[1]) + "." * (STEPS - int(found[1]))
            reward = re.search(r"critic/score/mean:([-\d.e]+)", line)
            took = re.search(r"timing_s/step:([-\d.e]+)", line)
            detail = f"reward {float(reward[1]):.3f}, {float(took[1]):.1f} s" if reward and took else ""
            self.once(f"[{bar}] step {found[1]} of {STEPS}: {detail}")


def train(folder: Path, progress: Progress, environment: dict[str, str]) -> bed.Run:
    """The run of the demo: GRPO, two ranks."""
    progress.say("making the model and the data (a random model of 116,000 parameters)")
    bed.assets()
    progress.say("opentelemetry-instrument python -m verl.trainer.main_ppo algorithm.adv_estimator=grpo ...")
    run = bed.run(
        folder,
        ["grpo", "trainer.experiment_name=demo", "trainer.project_name=verl-otel"],
        steps=STEPS,
        environment={"PYTHONUNBUFFERED": "1", **environment},  # lines when they are written, and in their order
        on_line=progress.line,
    )
    if run.returncode:
        print("".join(run.output.splitlines(keepends=True)[-40:]))
        sys.exit(f"the training failed (exit status {run.returncode}); its output is in {run.log}")
    progress.say("trained")
    return run


def embedded(folder: Path) -> None:
    """Nothing but the run: telemetry is recorded in files."""
    run = train(folder, Progress(), {})
    page = run.telemetry / "report.html"
    subprocess.run([bed.PYTHON, "-m", "verl_otel.cli", "report", run.telemetry], check=True, stdout=subprocess.DEVNULL)
    print(f"""
recorded telemetry   {run.telemetry}
page to look at      {page}
output of verl       {run.log}
""")


def with_stack(folder: Path, stay: bool) -> None:
    """The run through the Collector to Jaeger, Prometheus and MLflow."""
    from verl_otel.stack.stack import Stack

    for end in (signal.SIGTERM, signal.SIGHUP):  # a closed terminal leaves nothing behind either
        signal.signal(end, lambda *_: sys.exit(0))
    progress = Progress()
    stack = Stack(folder / "stack")
    try:
        stack.start(progress.say)
        run = train(folder, progress, {"OTEL_EXPORTER_OTLP_ENDPOINT": stack.url("otlp_http")})
        time.sleep(2)
        print(f"""
Jaeger       {stack.url("jaeger")}/search?service=verl-trainer&operation=verl.step
             {stack.url("jaeger")}/api/traces?service=verl-trainer&operation=verl.step&limit=20   (JSON)
Prometheus   {stack.url("prometheus")}/query?g0.expr=verl_reward_mean
             {stack.url("prometheus")}/api/v1/query?query=verl_reward_mean   (JSON)
MLflow       {stack.url("mlflow")}   (experiment verl-otel, run demo: metrics and traces)
output       {run.log}

Jaeger and Prometheus were built from their Go modules, which do not hold their web pages: without them, use the JSON
links here, or deploy/compose.yaml (official images). MLflow's pages are all here.
""")
        print("Running until you press Ctrl-C." if stay else "Stopping in 5 s.", flush=True)
        while stay:
            time.sleep(3600)
        time.sleep(5)
    except KeyboardInterrupt:
        pass
    finally:
        stack.stop()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--stack", action="store_true", help="through the Collector to Jaeger, Prometheus and MLflow")
    parser.add_argument("--no-stay", action="store_true", help="with --stack: stop the stack when the run has ended")
    parser.add_argument("--folder", type=Path, default=bed.ROOT / "demo-output", help="where to put everything")
    options = parser.parse_args()
    folder = options.folder.resolve()
    shutil.rmtree(folder, ignore_errors=True)
    if options.stack:
        with_stack(folder, stay=not options.no_stay)
    else:
        embedded(folder)


if __name__ == "__main__":
    main()
