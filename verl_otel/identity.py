"""Who this process is: run, attempt, role, worker; and its OpenTelemetry resource.

The run is named once, in the launcher, and travels to every other process by environment variables. Nothing here
imports Ray or verl: what they know is read only where they are loaded already.
"""

from __future__ import annotations

import json
import os
import re
import secrets
import sys
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from verl_otel import border, config
from verl_otel.semconv import attributes as attr

if TYPE_CHECKING:
    from opentelemetry.sdk.resources import Resource

CHECKPOINT_FILE = ".verl-otel.json"
"""Beside verl's checkpoints: the run and the attempt that have saved them."""

RESOURCE_ATTRIBUTES = "OTEL_RESOURCE_ATTRIBUTES"

LAUNCHER, TRAINER, WORKER, AGENT_LOOP = "launcher", "trainer", "worker", "agent_loop"
ROLLOUT_SERVER, REWARD_WORKER, OTHER = "rollout_server", "reward_worker", "other"

# Ray actor class name -> role, first match wins. Names of verl 0.6.1 to 0.9.1; a user's own subclass usually keeps
# them.
_ROLE_OF_CLASS = (
    (re.compile(r"FullyAsyncTaskRunner"), OTHER),  # makes trainer and rollouter, and waits for them
    (re.compile(r"TaskRunner|Trainer\b|FullyAsyncTrainer"), TRAINER),
    (re.compile(r"AgentLoop|Rollouter"), AGENT_LOOP),
    (re.compile(r"Reward"), REWARD_WORKER),
    (re.compile(r"Server"), ROLLOUT_SERVER),
    (re.compile(r"Worker"), WORKER),
)

_SERVICE_OF_ROLE = {
    TRAINER: "verl-trainer",
    LAUNCHER: "verl-launcher",
    WORKER: "verl-worker",
    AGENT_LOOP: "verl-agent-loop",
    ROLLOUT_SERVER: "verl-rollout-server",
    REWARD_WORKER: "verl-reward",
    OTHER: "verl-other",
}


def role_of_class(name: str) -> str:
    """The role of a process, by the class of the Ray actor that runs there."""
    return next((role for pattern, role in _ROLE_OF_CLASS if pattern.search(name)), OTHER)


def model_of_server(actor_name: str) -> str:
    """Whose model a rollout server has, by the name that verl gives its actor: `rollout`, `reward` or `teacher`."""
    return next((model for model in ("reward", "teacher") if f"_{model}_" in actor_name), "rollout")


def new_run_id() -> str:
    """A new run id: sortable by time, unique, legal in file names and URLs."""
    return f"{time.strftime('%Y%m%d-%H%M%S', time.gmtime())}-{secrets.token_hex(3)}"


_made_here = ""


def ensure_run_id() -> str:
    """The run id from the environment, made and put there if this process is the first of its run."""
    global _made_here
    run_id = os.environ.get(config.RUN_ID, "").strip()
    if not run_id:
        run_id = _made_here = os.environ[config.RUN_ID] = new_run_id()
    return run_id


def continue_run(trainer_config: Any) -> None:
    """Where verl is going to resume from a checkpoint, be the next attempt of the run that has saved it.

    What the user has set, run id or attempt, stays.

    Args:
        trainer_config: verl's `config.trainer` (OmegaConf node or mapping).
    """
    folder = _resumed_folder(trainer_config)
    if not folder:
        return
    try:
        with open(os.path.join(folder, CHECKPOINT_FILE), encoding="utf-8") as file:
            saved = json.load(file)
        run_id, attempt = str(saved["run_id"]), int(saved["attempt"])
    except (OSError, ValueError, TypeError, KeyError):  # a checkpoint of a run without us
        return
    current = os.environ.get(config.RUN_ID, "")
    if current in ("", _made_here):
        os.environ[config.RUN_ID] = current = run_id
    if current == run_id and not os.environ.get(config.RUN_ATTEMPT):
        os.environ[config.RUN_ATTEMPT] = str(attempt + 1)


def remember_run(folder: str, run_id: str, attempt: int) -> None:
    """Beside verl's checkpoints, say which run has saved them."""
    path = os.path.join(folder, CHECKPOINT_FILE)
    written = f"{path}.{os.getpid()}.tmp"
    with open(written, "w", encoding="utf-8") as file:
        json.dump({"run_id": run_id, "attempt": attempt}, file)
    os.replace(written, path)


def _resumed_folder(trainer_config: Any) -> str:
    """The folder of the checkpoints from which verl will resume, by its own rules; empty if it will not."""
    mode = trainer_config.get("resume_mode")
    if mode == "resume_path":
        return os.path.dirname(os.path.abspath(str(trainer_config.get("resume_from_path") or "")))
    folder = str(trainer_config.get("default_local_dir") or "")
    if mode == "auto" and folder and os.path.exists(os.path.join(folder, "latest_checkpointed_iteration.txt")):
        return folder
    return ""


def tidy_resource_attributes() -> None:
    """In a worker: take the empty parts out of `OTEL_RESOURCE_ATTRIBUTES`, which Ray makes where a node has none of its
    own (`hooks/ray_init.py`), and of which the SDK would warn."""
    text = os.environ.get(RESOURCE_ATTRIBUTES, "")
    if text.startswith(",") or ",," in text:
        os.environ[RESOURCE_ATTRIBUTES] = ",".join(filter(None, text.split(",")))


def in_ray_itself() -> bool:
    """Whether this is Ray's command or one of its own processes: they outlive a run, and must not name it."""
    own = re.compile(r"(?:^|/)ray$|-packages/ray/")
    return any(own.search(part) for part in sys.orig_argv[:4])


def in_ray_worker() -> bool:
    """Whether this process is a Ray worker (an actor's or a task's), told by the script that it runs."""
    return bool(sys.argv) and os.path.basename(sys.argv[0]) == "default_worker.py"


def name_run(trainer_config: Any) -> None:
    """Put verl's project and experiment names into the environment, unless the user has set them there.

    Args:
        trainer_config: verl's `config.trainer` (OmegaConf node or mapping).
    """
    for variable, key in ((config.PROJECT, "project_name"), (config.EXPERIMENT, "experiment_name")):
        value = trainer_config.get(key)
        if value is not None:
            os.environ.setdefault(variable, str(value))


def ray_actor() -> tuple[str, str]:
    """(class name, actor name) of the Ray actor in which this code runs, empty strings elsewhere."""
    ray = sys.modules.get("ray")
    if ray is None or not in_ray_worker() or not ray.is_initialized():
        return "", ""
    context = ray.get_runtime_context()
    task_name = context.get_task_name() or ""  # "WorkerDict.__init__", "actor's name:WorkerDict.__init__"
    try:
        actor_name = context.get_actor_name() or ""
    except Exception:  # not an actor: Ray raises, by version, several things
        actor_name = ""
    return task_name.rpartition(".")[0].rpartition(":")[2], actor_name


@dataclass(frozen=True)
class Identity:
    """The run and this process's place in it (contract: design section 3.1)."""

    run_id: str
    attempt: int
    role: str
    project: str = ""
    experiment: str = ""
    worker_group: str = ""
    worker_index: str = "0"
    """The rank of a rank worker; for other processes the index among those of their kind."""

    @property
    def launcher_is_silent(self) -> bool:
        """Whether the launcher is torchrun, whose own process has no telemetry."""
        return self.role == WORKER and "TORCHELASTIC_RUN_ID" in os.environ

    @classmethod
    def detect(cls) -> Identity:
        """Read the identity from the environment and, where Ray is loaded, from the actor that runs here."""
        class_name = actor_name = ""
        try:
            class_name, actor_name = ray_actor()
        except Exception:
            border.caught("reading the Ray actor's name")
        if not in_ray_worker():
            role = WORKER if "TORCHELASTIC_RUN_ID" in os.environ else LAUNCHER
        else:
            role = role_of_class(class_name)
        try:
            attempt = int(os.environ.get(config.RUN_ATTEMPT, "1"))
        except ValueError:
            border.warn_once(config.RUN_ATTEMPT, "%s is not an integer; using 1", config.RUN_ATTEMPT)
            attempt = 1
        index = re.search(r"_(\d+)(?:_|$)", actor_name)
        worker_index = os.environ.get("RANK") if role == WORKER else index[1] if index else None
        return cls(
            run_id=ensure_run_id(),
            attempt=attempt,
            role=role,
            project=os.environ.get(config.PROJECT, ""),
            experiment=os.environ.get(config.EXPERIMENT, ""),
            worker_group=class_name,
            worker_index=worker_index or "0",
        )

    def resource(self) -> Resource:
        """The resource of this process; the user's `OTEL_RESOURCE_ATTRIBUTES` and `OTEL_SERVICE_NAME` win."""
        from opentelemetry.sdk.resources import OTELResourceDetector, Resource

        ours = {
            attr.SERVICE_NAME: _SERVICE_OF_ROLE[self.role],
            attr.SERVICE_NAMESPACE: "verl",
            attr.SERVICE_INSTANCE_ID: secrets.token_hex(8),
            attr.HOST_NAME: os.uname().nodename,
            attr.PROCESS_PID: os.getpid(),
            attr.RUN_ID: self.run_id,
            attr.RUN_ATTEMPT: self.attempt,
            attr.PROCESS_ROLE: self.role,
        }
        optional = {
            attr.PROJECT_NAME: self.project,
            attr.EXPERIMENT_NAME: self.experiment,
            attr.WORKER_GROUP: self.worker_group,
            attr.VERL_VERSION: verl_version(),
        }
        ours.update({key: value for key, value in optional.items() if value})
        # The SDK's own attributes and those of detectors, then ours, then what the user has set. That is the same in
        # all processes of the run, so an instance id of theirs is only the beginning of ours.
        users = dict(OTELResourceDetector().detect().attributes)
        if users.get(attr.SERVICE_INSTANCE_ID):
            users[attr.SERVICE_INSTANCE_ID] = f"{users[attr.SERVICE_INSTANCE_ID]}/{ours[attr.SERVICE_INSTANCE_ID]}"
        return Resource({**Resource.create().attributes, **ours, **users})


def verl_version() -> str:
    """The version of verl that is installed, empty if it is not known."""
    from importlib.metadata import PackageNotFoundError, version

    try:
        return version("verl")
    except PackageNotFoundError:
        return ""
