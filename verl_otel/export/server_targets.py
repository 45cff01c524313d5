"""The rollout servers' own metrics (vLLM's, SGLang's `/metrics`): by files, Prometheus or a Collector finds them.

Queue, KV cache, time to the first token: what only the engine knows, in the engine's own names. When verl has launched
a replica, a thread asks its address for `/metrics`, and where there are metrics writes a file
(`verl_otel.export.targets`). The trainer removes its run's files at the end of training, the launcher what is left.
"""

import sys
import threading
import time
import urllib.error
import urllib.request
from typing import Any

from verl_otel import border, config
from verl_otel.export import targets
from verl_otel.identity import ROLLOUT_SERVER, Identity
from verl_otel.semconv import attributes as attr
from verl_otel.semconv.prometheus import prometheus_label

TRIES, PAUSE, TIMEOUT = 3, 2.0, 5.0
"""How often a server is asked, and the seconds between and for one."""

_direct = urllib.request.build_opener(urllib.request.ProxyHandler({}))


class ServerTargets:
    """The targets that this process has announced. The methods never raise."""

    def __init__(self, identity: Identity, folder: str) -> None:
        self._identity = identity
        self._folder = f"{folder}/{targets.ROLLOUT_SERVERS}"
        self._lock = threading.Lock()
        self._closed = False

    def launched(self, replica: Any) -> None:
        """Announce verl's `RolloutReplica`, whose servers run; returns at once."""
        try:
            address = str(replica.server_address)
            model = "reward" if getattr(replica, "is_reward_model", False) else "rollout"
            model = "teacher" if getattr(replica, "is_teacher_model", False) else model
            labels = {
                **targets.of_run(self._identity),
                prometheus_label(attr.PROCESS_ROLE): ROLLOUT_SERVER,
                prometheus_label(attr.REPLICA): str(replica.replica_rank),
                prometheus_label(attr.ENGINE): str(replica.config.name),
                attr.MODEL_TYPE: model,
            }
            announcement = (f"{self._identity.run_id}-{model}-{replica.replica_rank}", address, labels)
            threading.Thread(
                target=self._announce, args=announcement, name="verl-otel-server-targets", daemon=True
            ).start()
        except Exception:
            border.caught("announcing a rollout server")

    def _announce(self, name: str, address: str, labels: dict[str, str]) -> None:
        try:
            if not _has_metrics(address):
                return
            labels[prometheus_label(attr.HOST_NAME)] = _host_name(address)
            with self._lock:
                if not self._closed:
                    targets.write(self._folder, name, address, labels)
        except OSError as error:
            border.warn_once(
                "announcing a rollout server",
                "Prometheus does not find the rollout servers' metrics (%s): set %s to a folder that can be written",
                error,
                config.FOLDER,
            )
        except Exception:
            border.caught("announcing a rollout server")

    def remove(self) -> None:
        """At the end of the run: remove all files of this attempt."""
        try:
            with self._lock:
                self._closed = True
                targets.remove_all(self._folder, self._identity.run_id, self._identity.attempt)
        except Exception:
            border.caught("removing the targets of rollout servers")


def _has_metrics(address: str) -> bool:
    """Whether `http://<address>/metrics` has metrics in Prometheus' format: vLLM's has, SGLang's with `enable_metrics`,
    TRT-LLM's has JSON; a server of users' own may not speak HTTP at all."""
    for left in reversed(range(TRIES)):
        try:
            with _direct.open(f"http://{address}/metrics", timeout=TIMEOUT) as answer:
                kind = answer.headers.get_content_type()
                return kind in {"text/plain", "application/openmetrics-text"}
        except urllib.error.HTTPError:
            return False
        except OSError:  # it may be busy
            if left:
                time.sleep(PAUSE)
        except Exception:  # not an address of HTTP
            return False
    return False


def _host_name(address: str) -> str:
    """The name of the node with an address, as Ray knows it; else the address of the node."""
    node = address.rpartition(":")[0].strip("[]")
    try:
        names = {found["NodeManagerAddress"]: found["NodeManagerHostname"] for found in sys.modules["ray"].nodes()}
        return str(names.get(node, node))
    except Exception:  # Ray is not there, or has no answer
        return node
