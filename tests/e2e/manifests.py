"""deploy/kubernetes as the tools see it: built by kustomize, checked against the schemas of what it is made of.

There is no Kubernetes here. kustomize and the schemas are the real ones, but for those of the OpenTelemetry Operator,
whose module no registry serves: `as_the_operator_makes_it` does what it does with our resources, as far as we use it.
"""

import functools
import json
import os
import subprocess
from pathlib import Path
from typing import Any

import jsonschema
import kubernetes_validate
import yaml
from validators import validator

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
KUBERNETES = ROOT / "deploy" / "kubernetes"
OVERLAYS = {"open": "overlays/open", "secure": "overlays/secure", "operator": "overlays/operator", "ray": "ray"}
OLDEST, NEWEST = "1.31", kubernetes_validate.latest_version()

# kind -> (Go module that has the definition, its hash, the file in it)
DEFINITIONS = {
    kind: (module, checksum, f"{folder}/{prefix}_{kind.lower()}s.yaml")
    for module, checksum, folder, prefix, kinds in (
        (
            "github.com/ray-project/kuberay/ray-operator@v1.5.0",
            "h1:KCjCQ7PSsvs9Ke+90CZbbs498nuaIJ/JkXk4vd54EVg=",
            "config/crd/bases",
            "ray.io",
            ("RayJob", "RayCluster"),
        ),
        (
            "github.com/prometheus-operator/prometheus-operator@v0.85.0",
            "h1:M5xLCLEoaW2IJfnuCwFzzpL+jSVQu3KGT84Pye+fW8s=",
            "example/prometheus-operator-crd",
            "monitoring.coreos.com",
            ("PodMonitor", "PrometheusRule"),
        ),
    )
    for kind in kinds
}

Objects = list[dict[str, Any]]


@functools.cache
def build(overlay: str) -> Objects:
    """The objects of one of `OVERLAYS`; not to be changed."""
    command = [validator("kustomize"), "build", str(KUBERNETES / OVERLAYS[overlay])]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    return [found for found in yaml.safe_load_all(done.stdout) if found]


@functools.cache
def in_cluster(overlay: str) -> Objects:
    """The same, with what the operator makes of its resources."""
    return [made for found in build(overlay) for made in as_the_operator_makes_it(found)]


def of_kind(objects: Objects, *kinds: str) -> Objects:
    return [found for found in objects if found["kind"] in kinds]


def name(found: dict[str, Any]) -> str:
    return found["metadata"]["name"]


def validate(found: dict[str, Any]) -> None:
    """Check one object strictly: an unknown field is an error too.

    Raises:
        jsonschema.ValidationError: where and what is wrong.
    """
    group = found["apiVersion"].rpartition("/")[0]
    if found["kind"] in DEFINITIONS:
        schema = definition(found["kind"], found["apiVersion"].rpartition("/")[2])
        jsonschema.Draft202012Validator(schema).validate(found)
    elif group == "opentelemetry.io":
        jsonschema.Draft202012Validator(OPERATOR[found["kind"]]).validate(found)
        for made in as_the_operator_makes_it(found):
            if made is not found:
                validate(made)
    else:
        for version in (OLDEST, NEWEST):
            _validate(json.dumps(found), version)


@functools.cache  # overlays have most objects in common, and a check takes 0.1 s
def _validate(found: str, version: str) -> None:
    kubernetes_validate.validate(json.loads(found), version, strict=True)


# --- definitions of other projects' resources


@functools.cache
def _module(module: str, checksum: str) -> Path:
    """The folder of a Go module, downloaded if need be."""
    command = ["go", "mod", "download", "-json", module]
    environment = {**os.environ, "GOFLAGS": "-mod=mod"}
    done = subprocess.run(command, capture_output=True, text=True, env=environment, cwd="/", timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    answer = json.loads(done.stdout)
    assert answer["Sum"] == checksum, answer["Sum"]
    return Path(answer["Dir"])


@functools.cache
def definition(kind: str, version: str) -> dict[str, Any]:
    """The schema of a custom resource, from its definition."""
    module, checksum, file = DEFINITIONS[kind]
    definitions = yaml.load((_module(module, checksum) / file).read_text(), yaml.CSafeLoader)  # they are large
    (schema,) = [each["schema"] for each in definitions["spec"]["versions"] if each["name"] == version]
    strict = _strict(schema["openAPIV3Schema"])
    strict["properties"]["metadata"] = {"type": "object"}
    return strict


def _strict(schema: Any) -> Any:
    """A definition's schema as JSON Schema that takes no unknown field."""
    if isinstance(schema, list):
        return [_strict(each) for each in schema]
    if not isinstance(schema, dict):
        return schema
    strict = {key: _strict(value) for key, value in schema.items()}
    if strict.pop("x-kubernetes-int-or-string", False):
        strict.pop("type", None)
        strict["anyOf"] = [{"type": "integer"}, {"type": "string"}]
    if isinstance(strict.get("properties"), dict) and not strict.get("x-kubernetes-preserve-unknown-fields"):
        strict.setdefault("additionalProperties", False)
    return strict


# --- the OpenTelemetry Operator


def _object(properties: dict[str, Any], required: tuple[str, ...] = ()) -> dict[str, Any]:
    return {"type": "object", "properties": properties, "required": list(required), "additionalProperties": False}


_TEXT, _ANY = {"type": "string", "minLength": 1}, {}
_HEAD = {"apiVersion": _TEXT, "kind": _TEXT, "metadata": {"type": "object"}}

OPERATOR = {
    "OpenTelemetryCollector": _object(
        {
            **_HEAD,
            "apiVersion": {"const": "opentelemetry.io/v1beta1"},
            "spec": _object(
                {
                    "mode": {"enum": ["daemonset", "statefulset"]},
                    "image": _TEXT,
                    "upgradeStrategy": {"enum": ["automatic", "none"]},
                    "config": {"type": "object", "required": ["receivers", "exporters", "service"]},
                    "autoscaler": _object(
                        {
                            "minReplicas": {"type": "integer"},
                            "maxReplicas": {"type": "integer"},
                            "targetCPUUtilization": {"type": "integer"},
                            "behavior": _ANY,
                        }
                    ),
                    "podDisruptionBudget": _object({"maxUnavailable": _ANY, "minAvailable": _ANY}),
                    "observability": _object({"metrics": _object({"enableMetrics": {"type": "boolean"}})}),
                    # Kubernetes' own, and checked as that.
                    **dict.fromkeys(
                        [
                            *("serviceAccount", "terminationGracePeriodSeconds", "tolerations", "env", "envFrom"),
                            *("daemonSetUpdateStrategy", "podSecurityContext", "securityContext", "resources"),
                            *("volumeMounts", "volumes", "lifecycle", "topologySpreadConstraints"),
                            *("persistentVolumeClaimRetentionPolicy", "volumeClaimTemplates"),
                        ],
                        _ANY,
                    ),
                },
                ("mode", "image", "config"),
            ),
        },
        ("spec",),
    ),
    "Instrumentation": _object(
        {
            **_HEAD,
            "apiVersion": {"const": "opentelemetry.io/v1alpha1"},
            "spec": _object(
                {
                    "exporter": _object({"endpoint": _TEXT}),
                    "propagators": {"type": "array", "items": {"enum": ["tracecontext", "baggage", "b3", "none"]}},
                    "python": _object({"image": _TEXT, "env": _ANY, "resourceRequirements": _ANY}),
                }
            ),
        },
        ("spec",),
    ),
}
"""Of the operator's definitions (0.158) what we use: ours, written after config/crd/bases of its repository."""


def as_the_operator_makes_it(found: dict[str, Any]) -> Objects:
    """What the operator (0.158) makes of an OpenTelemetryCollector; any other object as it is."""
    if found["kind"] != "OpenTelemetryCollector":
        return [found]
    spec = dict(found["spec"])
    labels = {
        **found["metadata"]["labels"],
        "app.kubernetes.io/managed-by": "opentelemetry-operator",
        "app.kubernetes.io/part-of": "opentelemetry",
    }
    metadata = {"name": f"{name(found)}-collector", "namespace": "verl-otel", "labels": labels}
    config = spec.pop("config")
    container = {
        "name": "otc-container",
        "image": spec.pop("image"),
        "args": ["--config=/conf/collector.yaml"],
        "ports": _ports(config),
        "readinessProbe": _probe(config),
        "livenessProbe": _probe(config),
        **_taken(spec, "env", "envFrom", "resources", "securityContext", "lifecycle"),
        "volumeMounts": [{"name": "otc-internal", "mountPath": "/conf"}, *spec.pop("volumeMounts", [])],
    }
    own = {"name": "otc-internal", "configMap": {"name": f"{name(found)}-collector"}}
    pod = {
        "serviceAccountName": spec.pop("serviceAccount"),
        "securityContext": spec.pop("podSecurityContext"),
        "automountServiceAccountToken": False,  # of the ServiceAccount
        "containers": [container],
        "volumes": [own, *spec.pop("volumes", [])],
        **_taken(spec, "terminationGracePeriodSeconds", "tolerations", "topologySpreadConstraints"),
    }
    template = {"metadata": {"labels": labels}, "spec": pod}
    workload: dict[str, Any] = {
        "apiVersion": "apps/v1",
        "kind": {"daemonset": "DaemonSet", "statefulset": "StatefulSet"}[spec.pop("mode")],
        "metadata": metadata,
        "spec": {"selector": {"matchLabels": labels}, "template": template},
    }
    if workload["kind"] == "DaemonSet":
        workload["spec"]["updateStrategy"] = spec.pop("daemonSetUpdateStrategy")
    else:
        workload["spec"]["serviceName"] = f"{name(found)}-collector"
        for key in ("volumeClaimTemplates", "persistentVolumeClaimRetentionPolicy"):
            workload["spec"][key] = spec.pop(key)
    data = {"collector.yaml": yaml.safe_dump(config)}
    made: Objects = [workload, {"apiVersion": "v1", "kind": "ConfigMap", "metadata": metadata, "data": data}]
    if scaler := spec.pop("autoscaler", None):
        target = {"type": "Utilization", "averageUtilization": scaler["targetCPUUtilization"]}
        made.append(
            {
                "apiVersion": "autoscaling/v2",
                "kind": "HorizontalPodAutoscaler",
                "metadata": metadata,
                "spec": {
                    "scaleTargetRef": {"apiVersion": "apps/v1", "kind": workload["kind"], "name": metadata["name"]},
                    "minReplicas": scaler["minReplicas"],
                    "maxReplicas": scaler["maxReplicas"],
                    "metrics": [{"type": "Resource", "resource": {"name": "cpu", "target": target}}],
                    "behavior": scaler["behavior"],
                },
            }
        )
    if budget := spec.pop("podDisruptionBudget", None):
        made.append(
            {
                "apiVersion": "policy/v1",
                "kind": "PodDisruptionBudget",
                "metadata": metadata,
                "spec": {**budget, "selector": {"matchLabels": labels}},
            }
        )
    assert set(spec) == {"upgradeStrategy", "observability"}, spec
    return made


def _taken(spec: dict[str, Any], *keys: str) -> dict[str, Any]:
    return {key: spec.pop(key) for key in keys if key in spec}


def _ports(config: dict[str, Any]) -> list[dict[str, Any]]:
    """The operator's names for the ports of receivers and of the Collector's own metrics, and their numbers."""
    protocols = config["receivers"]["otlp"]["protocols"]
    (reader,) = config["service"]["telemetry"]["metrics"]["readers"]
    return [
        *({"name": f"otlp-{key}", "containerPort": _port(of["endpoint"])} for key, of in protocols.items()),
        {"name": "metrics", "containerPort": reader["pull"]["exporter"]["prometheus"]["port"]},
    ]


def _probe(config: dict[str, Any]) -> dict[str, Any]:
    return {"httpGet": {"path": "/", "port": _port(config["extensions"]["health_check"]["endpoint"])}}


def _port(endpoint: str) -> int:
    return int(endpoint.rpartition(":")[2])
