"""verl runs -> MLflow runs.

One MLflow run for one `verl.run.id`, found again by its tag, so that a restarted bridge and a resumed training continue
it. Handling an event twice changes nothing: MLflow stores equal points (key, step, time, value) once.
"""

import logging
import posixpath
import re
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from mlflow.entities import Metric, Param, Run, RunTag
from mlflow.exceptions import MlflowException
from mlflow.tracking import MlflowClient

from verl_otel.bridges.events import RunEvent, RunIdentity, integer
from verl_otel.redaction import shown
from verl_otel.semconv import attributes as attr
from verl_otel.semconv.metrics import key_digest

logger = logging.getLogger(__name__)

METRICS_PER_REQUEST, PARAMS_PER_REQUEST, TAGS_PER_REQUEST = 1000, 100, 100
MAX_KEY, MAX_VALUE = 250, 5000

TAG_RUN_ID = attr.RUN_ID
TAG_ATTEMPT = attr.RUN_ATTEMPT
TAG_FINISHED_AT = "verl.run.finished_at"
_COMMIT = "vcs.ref.head.revision"
_STATE = {"finished": "FINISHED", "failed": "FAILED", "killed": "KILLED", "stopped": "KILLED"}


@dataclass(frozen=True)
class MlflowRun:
    """Ids of an MLflow run."""

    experiment_id: str
    run_id: str


def metric_name(key: str) -> str:
    """verl's key as MLflow accepts it: the same as verl's own MLflow logger makes of it."""
    name = re.sub(r"/+", "/", key.replace("@", "_at_"))
    name = re.sub(r"[^/\w.\- :]", "_", name)
    if len(name) <= MAX_KEY and name == posixpath.normpath(name) and not name.startswith(("/", "..")) and name != ".":
        return name
    return re.sub(r"[./]+", "_", name)[: MAX_KEY - 9].strip() + "_" + key_digest(key)


class Runs:
    """The MLflow runs of a tracking server, by verl run."""

    def __init__(self, client: MlflowClient) -> None:
        self._client = client
        self._known: dict[str, MlflowRun] = {}
        self._locks: dict[str, threading.Lock] = {}
        self._lock = threading.Lock()

    def resolve(self, identity: RunIdentity) -> MlflowRun:
        """The MLflow run of a verl run, made if there is none yet."""
        with self._lock_of(identity.run_id):
            known = self._known.get(identity.run_id)
            if known is None:
                known = self._known[identity.run_id] = self._find(identity) or self._create(identity)
            return known

    def forget(self) -> None:
        """Look runs up again next time: MLflow says that one is not there any more."""
        self._known.clear()

    def handle(self, events: Sequence[RunEvent]) -> int:
        """Write events to MLflow; returns how many were not for it (no run named, unknown event, step no number)."""
        try:
            return self._handle(events)
        except MlflowException:
            self.forget()  # somebody may have deleted the run
            return self._handle(events)

    def _handle(self, events: Sequence[RunEvent]) -> int:
        ignored = 0
        steps: dict[MlflowRun, list[Metric]] = {}
        for event in events:
            if event.name == attr.EVENT_DOCTOR:
                self._note_doctor(event)
                continue
            identity = event.identity()
            is_step = event.name == attr.EVENT_STEP
            if identity is None or event.name not in _HANDLED or (is_step and event.step() is None):
                ignored += 1
                continue
            run = self.resolve(identity)
            if is_step:
                steps.setdefault(run, []).extend(_metrics(event))
            elif event.name == attr.EVENT_RUN_STARTED:
                self._started(run, event)
            elif event.name == attr.EVENT_TEXT:
                self._text(run, event)
            else:
                self._write_metrics(steps)  # before the run is closed
                steps = {}
                self._finished(run, event)
        self._write_metrics(steps)
        return ignored

    def _note_doctor(self, event: RunEvent) -> None:
        """Test data of `verl-otel doctor`: a tag of an experiment without runs, by which it knows that it came here.

        It may be in a request with events of runs, which must not be lost with it.
        """
        try:
            experiment = self._client.get_experiment_by_name(attr.SERVICE_DOCTOR)
            if experiment is None:
                experiment_id = self._client.create_experiment(attr.SERVICE_DOCTOR)
            else:
                experiment_id = experiment.experiment_id
            self._client.set_experiment_tag(experiment_id, attr.DOCTOR_ID, str(event.attributes.get(attr.DOCTOR_ID)))
        except Exception as error:
            logger.warning("test data of verl-otel doctor cannot be noted in MLflow: %s", shown(str(error)))

    def _lock_of(self, run_id: str) -> threading.Lock:
        with self._lock:
            return self._locks.setdefault(run_id, threading.Lock())

    def _find(self, identity: RunIdentity) -> MlflowRun | None:
        experiment = self._client.get_experiment_by_name(identity.project)
        if experiment is None:
            return None
        pattern = identity.run_id.replace("'", "_")  # MLflow's filters know no way to write a quote
        found = self._client.search_runs(
            [experiment.experiment_id], filter_string=f"tags.`{TAG_RUN_ID}` LIKE '{pattern}'"
        )
        ours = [run.info.run_id for run in found if run.data.tags.get(TAG_RUN_ID) == identity.run_id]
        return MlflowRun(experiment.experiment_id, ours[0]) if ours else None

    def _create(self, identity: RunIdentity) -> MlflowRun:
        experiment = self._client.get_experiment_by_name(identity.project)
        experiment_id = (
            experiment.experiment_id if experiment is not None else self._client.create_experiment(identity.project)
        )
        tags = {TAG_RUN_ID: identity.run_id, attr.EXPERIMENT_NAME: identity.experiment}
        run = self._client.create_run(experiment_id, tags=tags, run_name=identity.experiment)
        logger.info("run %s is MLflow run %s of experiment %r", identity.run_id, run.info.run_id, identity.project)
        return MlflowRun(experiment_id, run.info.run_id)

    def _started(self, run: MlflowRun, event: RunEvent) -> None:
        current = self._client.get_run(run.run_id)
        if event.attempt() < _attempt_of(current):
            return  # delivered again, after a later attempt has begun
        tags = {TAG_ATTEMPT: str(event.attempt())}
        if event.body.get(_COMMIT):
            tags["mlflow.source.git.commit"] = str(event.body[_COMMIT])
        if event.resource.get(attr.VERL_VERSION):
            tags[attr.VERL_VERSION] = str(event.resource[attr.VERL_VERSION])
        new = []
        for key, value in event.body.items():
            name, text = metric_name(key), str(value)[:MAX_VALUE]
            recorded = current.data.params.get(name)
            if key == _COMMIT or recorded == text:
                continue
            if recorded is None:
                new.append(Param(name, text))
            else:  # MLflow's parameters cannot change; a resumed run's can
                tags[f"{name}.attempt_{tags[TAG_ATTEMPT]}"[:MAX_KEY]] = text
        for start in range(0, len(new), PARAMS_PER_REQUEST):
            self._client.log_batch(run.run_id, params=new[start : start + PARAMS_PER_REQUEST])
        run_tags = [RunTag(key, value) for key, value in tags.items()]
        for start in range(0, len(run_tags), TAGS_PER_REQUEST):
            self._client.log_batch(run.run_id, tags=run_tags[start : start + TAGS_PER_REQUEST])
        if current.info.status != "RUNNING" and event.time_ns > int(current.data.tags.get(TAG_FINISHED_AT, 0)):
            self._client.update_run(run.run_id, status="RUNNING")

    def _finished(self, run: MlflowRun, event: RunEvent) -> None:
        if event.attempt() < _attempt_of(self._client.get_run(run.run_id)):
            return
        tags = [RunTag(TAG_FINISHED_AT, str(event.time_ns))]
        tags += [
            RunTag(key, str(value)[:MAX_VALUE]) for key, value in event.body.items() if key.startswith("exception.")
        ]
        self._client.log_batch(run.run_id, tags=tags)
        state = _STATE.get(str(event.attributes.get(attr.RUN_STATE)), "FINISHED")
        self._client.set_terminated(run.run_id, status=state, end_time=event.time_ns // 1_000_000)

    def _text(self, run: MlflowRun, event: RunEvent) -> None:
        """A text that users have logged: an artifact `texts/<name>/step-<n>-<time>.txt`."""
        name = str(event.attributes.get(attr.TEXT_NAME, "text"))
        name = re.sub(r"[^\w./-]+", "_", name).replace("..", "_").strip("/")
        file = f"texts/{name}/step-{event.step() or 0}-{event.time_ns}.txt"
        try:
            self._client.log_text(run.run_id, str(event.body.get("text", "")), file)
        except Exception as error:  # artifacts may be out of reach; the run's numbers are not to wait for them
            logger.warning("the text %s cannot be written to MLflow's artifacts: %s", file, shown(str(error)))

    def _write_metrics(self, metrics: Mapping[MlflowRun, list[Metric]]) -> None:
        for run, points in metrics.items():
            for start in range(0, len(points), METRICS_PER_REQUEST):
                self._client.log_batch(run.run_id, metrics=points[start : start + METRICS_PER_REQUEST])


_HANDLED = frozenset({attr.EVENT_STEP, attr.EVENT_RUN_STARTED, attr.EVENT_RUN_FINISHED, attr.EVENT_TEXT})


def _attempt_of(run: Run) -> int:
    return integer(run.data.tags.get(TAG_ATTEMPT)) or 0


def _metrics(event: RunEvent) -> list[Metric]:
    step = event.step() or 0
    time_ms = event.time_ns // 1_000_000
    taken: dict[str, str] = {}
    points = []
    for key, value in event.numbers().items():
        name = metric_name(key)
        if taken.setdefault(name, key) != key:  # two keys that MLflow would not tell apart
            name = f"{name[: MAX_KEY - 9]}_{key_digest(key)}"
        points.append(Metric(name, value, time_ms, step))
    return points
