"""Write the Collectors' configurations into the operator's resources, which take them as objects and not as files.

    python deploy/kubernetes/overlays/operator/configs.py

Makes agent-config.yaml and gateway-config.yaml from collector/agent.yaml and collector/gateway.yaml. The operator
reads ports and probes from a configuration without knowing its variables, so the addresses to listen on are written
out; those of the destinations stay variables.
"""

import re
from pathlib import Path
from typing import Any

import yaml

HERE = Path(__file__).resolve().parent
COLLECTOR = HERE.parents[3] / "collector"
QUEUE = "/var/lib/verl-otel"

_VARIABLE = re.compile(r"\$\{env:(VERL_OTEL_(?:LISTEN_\w+|HEALTH|SELF_\w+|QUEUE_FOLDER)):-([^}]*)\}")


def config(name: str) -> dict[str, Any]:
    """collector/<name>.yaml, listening on the pod's addresses."""
    text = (COLLECTOR / f"{name}.yaml").read_text()
    return yaml.safe_load(_VARIABLE.sub(_in_a_pod, text))


def patch(name: str) -> str:
    """The patch that gives the resource `name` its configuration."""
    resource = {
        "apiVersion": "opentelemetry.io/v1beta1",
        "kind": "OpenTelemetryCollector",
        "metadata": {"name": f"verl-otel-{name}"},
        "spec": {"config": config(name)},
    }
    made = f"# Made from collector/{name}.yaml by configs.py.\n"
    return made + yaml.dump(resource, Dumper=_WithoutAliases, sort_keys=False, width=120)


def _in_a_pod(match: re.Match[str]) -> str:
    variable, default = match.groups()
    if variable == "VERL_OTEL_QUEUE_FOLDER":
        return QUEUE
    return default.replace("127.0.0.1", "0.0.0.0")


class _WithoutAliases(yaml.SafeDumper):
    def ignore_aliases(self, data: Any) -> bool:
        return True


if __name__ == "__main__":
    for collector in ("agent", "gateway"):
        (HERE / f"{collector}-config.yaml").write_text(patch(collector))
