"""Files by which Prometheus finds what it scrapes (`file_sd_configs`), in folders under `VERL_OTEL_FOLDER`.

    prometheus/<run id>-<role>-<host>-<pid>.json    a process that serves its metrics (`verl_otel.export.prometheus`)
    rollout-servers/<run id>-<model>-<replica>.json a rollout server's own (`verl_otel.export.server_targets`)

The runs share a folder because Prometheus takes a `*` in the last part of the path only. Every user can read the
folders and their files, whatever the umask, since Prometheus is often another user. They say what anybody on the node
can ask the port. Recordings are elsewhere and stay their owner's.
"""

import glob
import json
import os
import re
import stat
from collections.abc import Mapping, Sequence
from typing import Any

from verl_otel.identity import Identity
from verl_otel.semconv import attributes as attr
from verl_otel.semconv.prometheus import prometheus_label

PROCESSES, ROLLOUT_SERVERS = "prometheus", "rollout-servers"


def write(folder: str, name: str, address: str, labels: Mapping[str, str]) -> str:
    """Write the file of one target; returns its path.

    Args:
        folder: made if it is not there.
        name: of the file, without `.json`; begins with the run id.
        address: `host:port`.
        labels: those of the target, and so of all its series.

    Raises:
        OSError: the folder cannot be written.
    """
    os.makedirs(folder, exist_ok=True)
    _let_read(folder)
    path = os.path.join(folder, f"{_file_name(name)}.json")
    temporary = path + ".tmp"
    with open(temporary, "w") as file:
        os.fchmod(file.fileno(), 0o644)
        json.dump([{"targets": [address], "labels": dict(labels)}], file)
    os.replace(temporary, path)
    return path


def remove(path: str) -> None:
    """Remove a file, if it is still there."""
    try:
        os.unlink(path)
    except OSError:
        pass  # somebody has tidied up


def remove_all(folder: str, run_id: str, attempt: Any) -> None:
    """Remove the files of one attempt of a run."""
    ours: Sequence[tuple[str, str]] = (
        (prometheus_label(attr.RUN_ID), run_id),
        (prometheus_label(attr.RUN_ATTEMPT), str(attempt)),
    )
    beginning = os.path.join(folder, _file_name(run_id))
    for path in glob.glob(glob.escape(beginning) + "-*.json"):  # and of runs whose name goes on like this
        try:
            with open(path) as file:
                labels = json.load(file)[0]["labels"]
            if all(labels.get(key) == value for key, value in ours):
                remove(path)
        except (OSError, ValueError, LookupError, TypeError, AttributeError):
            pass  # gone, or not ours


def of_run(identity: Identity) -> dict[str, str]:
    """The labels that say of which run a target is."""
    found = {
        attr.RUN_ID: identity.run_id,
        attr.RUN_ATTEMPT: str(identity.attempt),
        attr.PROJECT_NAME: identity.project,
        attr.EXPERIMENT_NAME: identity.experiment,
    }
    return {prometheus_label(name): value for name, value in found.items() if value}


def _file_name(text: str) -> str:
    return re.sub(r"[^\w.-]|^\.+", "_", text)


def _let_read(folder: str) -> None:
    """Let every user list a folder and what is in it, if that is ours to say."""
    try:
        mode = stat.S_IMODE(os.stat(folder).st_mode)
        if mode & 0o755 != 0o755:
            os.chmod(folder, mode | 0o755)
    except PermissionError:
        pass
