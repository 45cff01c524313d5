"""deploy/kubernetes: it builds, each object is what its schema says, and what refers to each other fits.

There is no cluster here: see `manifests.py` for what is real.
"""

import json
import os
import re
import shutil
import socket
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jsonschema
import manifests
import pytest
import yaml
from cryptography.x509.oid import ExtendedKeyUsageOID
from manifests import KUBERNETES, ROOT, Objects, in_cluster, name, of_kind
from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from test_security import Authority

from verl_otel.stack.binaries import binary
from verl_otel.stack.ports import free_ports

pytestmark = pytest.mark.stack

PLATFORM = ("open", "secure", "operator")
WORKLOADS = ("DaemonSet", "StatefulSet", "Deployment")
COMPOSE = yaml.safe_load((ROOT / "deploy" / "compose.yaml").read_text())
SECRETS = {
    "open": {"verl-otel-bridge"},
    "secure": {
        *("verl-otel-bridge", "verl-otel-senders", "verl-otel-agents"),
        *("verl-otel-agent-tls", "verl-otel-gateway-tls"),
    },
    "operator": {"verl-otel-bridge"},
    "ray": set(),
}
"""What its user must make; docs/operating.md says how."""


def workloads(overlay: str) -> Objects:
    return of_kind(in_cluster(overlay), *WORKLOADS)


def pod(workload: dict[str, Any]) -> dict[str, Any]:
    return workload["spec"]["template"]["spec"]


def labels(workload: dict[str, Any]) -> dict[str, str]:
    return workload["spec"]["template"]["metadata"]["labels"]


def container(workload: dict[str, Any]) -> dict[str, Any]:
    (found,) = pod(workload)["containers"]
    return found


def ports(workload: dict[str, Any]) -> dict[str, int]:
    return {port["name"]: port["containerPort"] for port in container(workload)["ports"]}


def selects(selector: dict[str, Any], workload: dict[str, Any]) -> bool:
    own = labels(workload)
    assert set(selector) <= {"matchLabels", "matchExpressions"}
    expressions = selector.get("matchExpressions", [])
    assert all(each["operator"] == "In" for each in expressions)
    return all(own.get(key) == value for key, value in selector.get("matchLabels", {}).items()) and all(
        own.get(each["key"]) in each["values"] for each in expressions
    )


def matching(overlay: str, selector: dict[str, Any]) -> Objects:
    return [workload for workload in workloads(overlay) if selects(selector, workload)]


def backends(overlay: str) -> dict[str, str]:
    (found,) = [each for each in of_kind(in_cluster(overlay), "ConfigMap") if "JAEGER_OTLP" in each["data"]]
    return found["data"]


def environment(overlay: str, workload: dict[str, Any]) -> dict[str, str]:
    """The variables of a container; those from Secrets have a value that nothing checks."""
    maps = {name(each): each["data"] for each in of_kind(in_cluster(overlay), "ConfigMap")}
    variables: dict[str, str] = {}
    for source in container(workload).get("envFrom", []):
        variables.update(maps[source["configMapRef"]["name"]])
    return variables | {each["name"]: each.get("value", "from elsewhere") for each in container(workload)["env"]}


def collectors(overlay: str) -> Objects:
    return [workload for workload in workloads(overlay) if "collector" in container(workload)["image"]]


def configuration(overlay: str, workload: dict[str, Any], folder: Path) -> list[str]:
    """A Collector's arguments, with the files of its ConfigMaps in `folder`."""
    maps = {name(each): each["data"] for each in of_kind(in_cluster(overlay), "ConfigMap")}
    volumes = {volume["name"]: volume for volume in pod(workload)["volumes"]}
    for mount in container(workload)["volumeMounts"]:
        source = volumes.get(mount["name"], {}).get("configMap")
        if source:
            path = folder / mount["mountPath"].lstrip("/")
            path.mkdir(parents=True)
            for file, text in maps[source["name"]].items():
                (path / file).write_text(text)
    return [argument.replace("--config=", f"--config={folder}") for argument in container(workload)["args"]]


# --- schemas


@pytest.mark.parametrize("overlay", manifests.OVERLAYS)
def test_every_object_is_what_its_schema_says(overlay: str) -> None:
    objects = manifests.build(overlay)
    assert len({(found["kind"], name(found)) for found in objects}) == len(objects) > 3
    for found in objects:
        manifests.validate(found)


WRONG = [
    ("open", "StatefulSet", ("spec", "template", "spec", "containers", 0, "imagePullPolice")),
    ("open", "NetworkPolicy", ("spec", "ingres")),
    ("open", "HorizontalPodAutoscaler", ("spec", "behavior", "scaleDown", "policy")),
    ("open", "PodMonitor", ("spec", "podMetricsEndpoints", 0, "intervall")),
    ("operator", "OpenTelemetryCollector", ("spec", "modus")),
    ("operator", "OpenTelemetryCollector", ("spec", "env", 0, "val")),
    ("operator", "Instrumentation", ("spec", "python", "imag")),
    ("ray", "RayJob", ("spec", "rayClusterSpec", "headGroupSpec", "template", "spec", "containers", 0, "environment")),
    ("ray", "RayCluster", ("spec", "workerGroupSpecs", 0, "replica")),
]


@pytest.mark.parametrize(("overlay", "kind", "path"), WRONG, ids=lambda value: str(value))
def test_a_field_that_does_not_exist_is_found(overlay: str, kind: str, path: tuple[Any, ...]) -> None:
    found = json.loads(json.dumps(of_kind(manifests.build(overlay), kind)[0]))
    inner = found
    for key in path[:-1]:
        inner = inner[key]
    inner[path[-1]] = "x"
    with pytest.raises(jsonschema.ValidationError, match=str(path[-1])):
        manifests.validate(found)


def test_the_alert_rules_become_an_object_of_the_prometheus_operator() -> None:
    document = (ROOT / "docs" / "operating.md").read_text()
    (block,) = [each for each in re.findall(r"```sh\n(.*?)```", document, re.DOTALL) if "PrometheusRule" in each]
    command = block.replace("kubectl -n verl-otel apply -f -", "cat")
    done = subprocess.run(["bash", "-c", command], cwd=ROOT, check=True, capture_output=True, text=True)
    made = yaml.safe_load(done.stdout)
    assert made["spec"] == yaml.safe_load((ROOT / "deploy" / "prometheus" / "alerts.yaml").read_text())
    manifests.validate(made)


def test_the_operators_configurations_are_those_of_the_collector() -> None:
    folder = KUBERNETES / "overlays" / "operator"
    sys.path.insert(0, str(folder))
    import configs

    for collector in ("agent", "gateway"):
        made = (folder / f"{collector}-config.yaml").read_text()
        assert made == configs.patch(collector), "run: python deploy/kubernetes/overlays/operator/configs.py"


# --- the Collectors


@pytest.mark.parametrize("overlay", PLATFORM)
def test_the_collector_accepts_what_its_pod_gives_it(overlay: str, tmp_path: Path) -> None:
    assert len(collectors(overlay)) == 2
    for workload in collectors(overlay):
        folder = tmp_path / name(workload)
        command = [str(binary("verl-otelcol")), "validate", *configuration(overlay, workload, folder)]
        variables = {"PATH": os.environ["PATH"], **environment(overlay, workload)}
        done = subprocess.run(command, cwd=tmp_path, env=variables, capture_output=True, text=True, timeout=60)
        assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("overlay", PLATFORM)
def test_a_collector_reads_every_variable_that_its_pod_sets(overlay: str, tmp_path: Path) -> None:
    for workload in collectors(overlay):
        files = configuration(overlay, workload, tmp_path / name(workload))
        text = "".join(Path(argument.removeprefix("--config=")).read_text() for argument in files)
        read = set(re.findall(r"\$\{env:(\w+)", text))
        own = {each["name"] for each in container(workload)["env"]} - {"GOMEMLIMIT"}
        assert own <= read
        if "gateway" in name(workload):
            assert {"JAEGER_OTLP", "PROMETHEUS_URL", "MLFLOW_BRIDGE_URL"} <= read & set(environment(overlay, workload))


@pytest.mark.parametrize("overlay", PLATFORM)
def test_a_collector_listens_where_its_ports_say(overlay: str, tmp_path: Path) -> None:
    for workload in collectors(overlay):
        files = configuration(overlay, workload, tmp_path / name(workload))
        variables = environment(overlay, workload)
        text = Path(files[0].removeprefix("--config=")).read_text()
        for variable, default in re.findall(r"\$\{env:(\w+):-([^}]*)\}", text):
            text = text.replace(f"${{env:{variable}:-{default}}}", variables.get(variable, default))
        config = yaml.safe_load(text)
        protocols = config["receivers"]["otlp"]["protocols"]
        (reader,) = config["service"]["telemetry"]["metrics"]["readers"]
        own = reader["pull"]["exporter"]["prometheus"]
        listening = {
            "otlp-grpc": protocols["grpc"]["endpoint"],
            "otlp-http": protocols["http"]["endpoint"],
            "metrics": f"{own['host']}:{own['port']}",
        }
        assert listening == {port: f"0.0.0.0:{ports(workload)[port]}" for port in listening}
        health = config["extensions"]["health_check"]["endpoint"]
        for probe in ("readinessProbe", "livenessProbe"):
            port = container(workload)[probe]["httpGet"]["port"]
            assert health == f"0.0.0.0:{ports(workload).get(port, port)}"
        assert config["extensions"]["file_storage"]["directory"] in [
            mount["mountPath"] for mount in container(workload)["volumeMounts"] if not mount.get("readOnly")
        ]


@pytest.mark.parametrize("overlay", PLATFORM)
def test_the_memory_of_a_collector_is_enough_for_its_limiter(overlay: str, tmp_path: Path) -> None:
    for workload in collectors(overlay):
        (file, *_) = configuration(overlay, workload, tmp_path / name(workload))
        limiter = yaml.safe_load(Path(file.removeprefix("--config=")).read_text())["processors"]["memory_limiter"]
        go = int(environment(overlay, workload)["GOMEMLIMIT"].removesuffix("MiB"))
        assert limiter["limit_mib"] < go <= 0.9 * mib(container(workload)["resources"]["limits"]["memory"])


def mib(quantity: str) -> int:
    number, unit = re.fullmatch(r"(\d+)(Mi|Gi)", quantity).groups()  # type: ignore[union-attr]
    return int(number) * {"Mi": 1, "Gi": 1024}[unit]


def test_the_gateway_has_time_to_hand_over() -> None:
    """Before a gateway ends, every agent has connected anew, and so to another."""
    keepalive = yaml.safe_load((ROOT / "collector" / "gateway.yaml").read_text())["receivers"]["otlp"]["protocols"][
        "grpc"
    ]["keepalive"]["server_parameters"]
    age, grace = (int(keepalive[key].removesuffix("s")) for key in ("max_connection_age", "max_connection_age_grace"))
    for overlay in PLATFORM:
        (gateway,) = of_kind(in_cluster(overlay), "StatefulSet")
        sleep = container(gateway)["lifecycle"]["preStop"]["sleep"]["seconds"]
        # gRPC makes an age up to a tenth longer.
        assert 1.1 * age + grace < sleep < pod(gateway)["terminationGracePeriodSeconds"] - 15
        (scaler,) = of_kind(in_cluster(overlay), "HorizontalPodAutoscaler")
        (policy,) = scaler["spec"]["behavior"]["scaleDown"]["policies"]
        assert policy["value"] == 1 and policy["periodSeconds"] > pod(gateway)["terminationGracePeriodSeconds"]


def test_the_operators_collectors_are_those_of_the_base() -> None:
    """What both ways have to say of a pod is the same."""
    base, operator = ({kind: of_kind(in_cluster(way), kind)[0] for kind in WORKLOADS} for way in ("open", "operator"))
    for kind in ("DaemonSet", "StatefulSet"):
        for key in ("terminationGracePeriodSeconds", "tolerations", "topologySpreadConstraints", "securityContext"):
            assert pod(base[kind]).get(key) == pod(operator[kind]).get(key), key
        for key in ("image", "resources", "securityContext", "lifecycle", "envFrom"):
            assert container(base[kind]).get(key) == container(operator[kind]).get(key), key
        assert ports(operator[kind]).items() <= ports(base[kind]).items()
        written_out = {each["name"] for each in container(base[kind])["env"] if "0.0.0.0" in each.get("value", "")}
        kept = [
            each
            for each in container(base[kind])["env"]
            if each["name"] not in {*written_out, "VERL_OTEL_QUEUE_FOLDER"}
        ]
        assert sorted(map(str, kept)) == sorted(map(str, container(operator[kind])["env"]))
    gateways = [found["StatefulSet"]["spec"] for found in (base, operator)]
    for key in ("volumeClaimTemplates", "persistentVolumeClaimRetentionPolicy"):
        assert gateways[0][key] == gateways[1][key]
    scalers = [of_kind(in_cluster(way), "HorizontalPodAutoscaler")[0]["spec"] for way in ("open", "operator")]
    for key in ("minReplicas", "maxReplicas", "metrics", "behavior"):
        assert scalers[0][key] == scalers[1][key]


class Service:
    """Of a Kubernetes Service what matters here: a connection stays with the gateway that was there when it began."""

    def __init__(self, target: str) -> None:
        self.target = target
        self._server = socket.create_server(("127.0.0.1", 0))
        self.address = f"127.0.0.1:{self._server.getsockname()[1]}"
        threading.Thread(target=self._serve, daemon=True).start()

    def _serve(self) -> None:
        while True:
            try:
                connection, _ = self._server.accept()
            except OSError:  # closed
                return
            host, port = self.target.split(":")
            try:
                gateway = socket.create_connection((host, int(port)))
            except OSError:  # it ends
                connection.close()
                continue
            for source, sink in ((connection, gateway), (gateway, connection)):
                threading.Thread(target=self._copy, args=(source, sink), daemon=True).start()

    @staticmethod
    def _copy(source: socket.socket, sink: socket.socket) -> None:
        try:
            while content := source.recv(65536):
                sink.sendall(content)
            sink.shutdown(socket.SHUT_WR)
        except OSError:
            pass

    def close(self) -> None:
        self._server.close()


class Collectors:
    """Real Collectors side by side, each with ports and a folder of its own."""

    def __init__(self, folder: Path, *names: str) -> None:
        self.folder = folder
        ports = free_ports([f"{name} {port}" for name in names for port in ("grpc", "http", "health", "self")])
        self.address = {name: f"127.0.0.1:{port}" for name, port in ports.items()}
        self._processes: list[subprocess.Popen[bytes]] = []

    def start(self, which: str, arguments: list[str], variables: dict[str, str]) -> None:
        """Start one, and wait until it is up."""
        folder = self.folder / which
        folder.mkdir(exist_ok=True)
        own = {
            "PATH": os.environ["PATH"],
            **variables,
            "VERL_OTEL_LISTEN_GRPC": self.address[f"{which} grpc"],
            "VERL_OTEL_LISTEN_HTTP": self.address[f"{which} http"],
            "VERL_OTEL_HEALTH": self.address[f"{which} health"],
            "VERL_OTEL_SELF_HOST": "127.0.0.1",
            "VERL_OTEL_SELF_PORT": self.address[f"{which} self"].partition(":")[2],
            "VERL_OTEL_QUEUE_FOLDER": str(folder / "queue"),
        }
        with (folder / "log").open("wb") as log:
            command = [str(binary("verl-otelcol")), *arguments]
            self._processes.append(subprocess.Popen(command, cwd=folder, env=own, stdout=log, stderr=log))
        until(lambda: self._answers(which), f"{which} does not start: see {folder}/log")

    def accepted(self, which: str) -> int:
        """How many spans it has taken."""
        with urllib.request.urlopen(f"http://{self.address[f'{which} self']}/metrics", timeout=10) as response:
            found = re.findall(r"^otelcol_receiver_accepted_spans\S* (\S+)", response.read().decode(), re.MULTILINE)
        return int(sum(map(float, found)))

    def _answers(self, which: str) -> bool:
        try:
            urllib.request.urlopen(f"http://{self.address[f'{which} health']}", timeout=5).close()
        except OSError:
            return False
        return True

    def __enter__(self) -> "Collectors":
        return self

    def __exit__(self, *_: object) -> None:
        for process in self._processes:
            process.terminate()
        for process in self._processes:
            process.wait(30)


def until(done: Callable[[], bool], otherwise: str) -> None:
    deadline = time.monotonic() + 60
    while not done():
        assert time.monotonic() < deadline, otherwise
        time.sleep(0.1)


def send_a_span(url: str, **settings: Any) -> None:
    provider = TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(OTLPSpanExporter(f"{url}/v1/traces", timeout=5, **settings)))
    provider.get_tracer("test").start_span("test").end()
    provider.shutdown()


def test_agents_leave_a_gateway_that_is_out_of_the_service_and_nothing_is_lost(tmp_path: Path) -> None:
    """The real agent and two real gateways; a connection's age is 2 s here."""
    young = tmp_path / "young.yaml"
    age = {"server_parameters": {"max_connection_age": "2s", "max_connection_age_grace": "1s"}}
    young.write_text(yaml.safe_dump({"receivers": {"otlp": {"protocols": {"grpc": {"keepalive": age}}}}}))
    gateway = [f"--config={ROOT / 'collector' / 'gateway.yaml'}", f"--config={young}"]
    with Collectors(tmp_path, "agent", "old", "new") as collectors:
        collectors.start("old", gateway, {})
        collectors.start("new", gateway, {})
        service = Service(collectors.address["old grpc"])
        agent = [f"--config={ROOT / 'collector' / 'agent.yaml'}"]
        collectors.start("agent", agent, {"VERL_OTEL_GATEWAY": service.address})
        sent = 0

        def arrives(which: str, count: int) -> bool:
            nonlocal sent
            send_a_span(f"http://{collectors.address['agent http']}")
            sent += 1
            return collectors.accepted(which) >= count

        until(lambda: arrives("old", 1), "the agent does not reach the gateway")
        service.target = collectors.address["new grpc"]
        until(lambda: arrives("new", 3), "the agent stays with the old gateway")
        until(lambda: collectors.accepted("old") + collectors.accepted("new") == sent, "spans are lost")
        service.close()


def mounted(overlay: str, workload: dict[str, Any], secrets: dict[str, dict[str, str]], folder: Path) -> dict[str, str]:
    """The variables of a container with the files of its Secrets in `folder`, where the variables find them."""
    volumes = {volume["name"]: volume for volume in pod(workload)["volumes"]}
    for mount in container(workload)["volumeMounts"]:
        source = volumes.get(mount["name"], {}).get("secret")
        if source:
            path = folder / mount["mountPath"].lstrip("/")
            path.mkdir(parents=True)
            items = source.get("items", [{"key": key, "path": key} for key in secrets[source["secretName"]]])
            for item in items:
                (path / item["path"]).write_text(secrets[source["secretName"]][item["key"]])
    variables = environment(overlay, workload)
    for each in container(workload)["env"]:
        if "valueFrom" in each:
            reference = each["valueFrom"]["secretKeyRef"]
            variables[each["name"]] = secrets[reference["name"]][reference["key"]]
    return {key: re.sub(r"^/etc/verl-otel", f"{folder}/etc/verl-otel", value) for key, value in variables.items()}


def test_with_tls_and_tokens_only_who_has_one_gets_through_to_the_gateway(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The real Collectors, with the files and variables that the pods of the overlay have."""
    for variable in ("REQUESTS_CA_BUNDLE", "CURL_CA_BUNDLE"):  # the SDK's exporter would take them before ours
        monkeypatch.delenv(variable, raising=False)
    authority = Authority(tmp_path, "authority")
    tls = {}
    for part in ("agent", "gateway"):
        certificate, key = authority.issue(part, ExtendedKeyUsageOID.SERVER_AUTH)
        tls[f"verl-otel-{part}-tls"] = {"tls.crt": certificate.read_text(), "tls.key": key.read_text()}
    tls["verl-otel-agent-tls"]["ca.crt"] = authority.certificate.read_text()
    secrets = {
        **tls,
        "verl-otel-senders": {"tokens": "of-a-sender\n"},
        "verl-otel-agents": {"tokens": "old\nof-an-agent\n", "authorization": "Bearer of-an-agent"},
        "verl-otel-bridge": {"token": "of-the-bridge"},
    }
    assert set(secrets) == SECRETS["secure"]
    agent, gateway, _ = in_order("secure")
    with Collectors(tmp_path, "agent", "gateway") as collectors:
        for which, workload in (("gateway", gateway), ("agent", agent)):
            folder = tmp_path / which
            arguments = configuration("secure", workload, folder)
            variables = mounted("secure", workload, secrets, folder)
            variables |= {"VERL_OTEL_GATEWAY": collectors.address["gateway grpc"]} if which == "agent" else {}
            collectors.start(which, arguments, variables)
        url, trusted = f"https://{collectors.address['agent http']}", {"certificate_file": str(authority.certificate)}
        around = f"https://{collectors.address['gateway http']}"
        send_a_span(url, headers={"authorization": "Bearer of-an-agent"}, **trusted)
        send_a_span(around, headers={"authorization": "Bearer of-a-sender"}, **trusted)
        assert caplog.text.count("401") == 2
        send_a_span(url, headers={"authorization": "Bearer of-a-sender"}, **trusted)
        until(lambda: collectors.accepted("gateway") == 1, "the span does not reach the gateway")
        assert collectors.accepted("agent") == 1


# --- references


@pytest.mark.parametrize("overlay", PLATFORM)
def test_every_selector_selects_pods_that_have_the_ports(overlay: str) -> None:
    objects = in_cluster(overlay)
    services = of_kind(objects, "Service")
    assert {name(service) for service in services} >= {"verl-otel-agent", "verl-otel-gateway", "verl-otel-bridge"}
    for service in services:
        (workload,) = matching(overlay, {"matchLabels": service["spec"]["selector"]})
        for port in service["spec"]["ports"]:
            assert ports(workload)[port["targetPort"]] == port["port"]
    for monitor in of_kind(objects, "PodMonitor"):
        (workload,) = matching(overlay, monitor["spec"]["selector"])
        for endpoint in monitor["spec"]["podMetricsEndpoints"]:
            assert endpoint["port"] in ports(workload)
    for budget in of_kind(objects, "PodDisruptionBudget"):
        assert len(matching(overlay, budget["spec"]["selector"])) == 1
    for scaler in of_kind(objects, "HorizontalPodAutoscaler"):
        target = scaler["spec"]["scaleTargetRef"]
        (workload,) = [each for each in of_kind(objects, target["kind"]) if name(each) == target["name"]]
        assert "replicas" not in workload["spec"], "an apply would undo what the autoscaler has done"
        assert "cpu" in container(workload)["resources"]["requests"]
    for workload in workloads(overlay):
        assert selects(workload["spec"]["selector"], workload)
        for constraint in pod(workload).get("topologySpreadConstraints", []):
            assert selects(constraint["labelSelector"], workload)


@pytest.mark.parametrize("overlay", manifests.OVERLAYS)
def test_every_name_that_is_used_is_there(overlay: str) -> None:
    objects = in_cluster(overlay)
    there = {kind: {name(found) for found in of_kind(objects, kind)} for kind in ("ConfigMap", "ServiceAccount")}
    used: dict[str, set[str]] = {"ConfigMap": set(), "ServiceAccount": set(), "Secret": set()}
    for found in objects:
        for key, value in everything(found):
            if key in ("configMapRef", "configMap", "configMapKeyRef"):
                used["ConfigMap"].add(value["name"])
            elif key == "secretKeyRef":
                used["Secret"].add(value["name"])
            elif key == "secret":
                used["Secret"].add(value["secretName"])
            elif key == "serviceAccountName":
                used["ServiceAccount"].add(value)
    assert used["ConfigMap"] <= there["ConfigMap"] and used["ServiceAccount"] <= there["ServiceAccount"]
    assert used["Secret"] == SECRETS[overlay]
    document = (ROOT / "docs" / "operating.md").read_text()
    assert all(secret in document for secret in used["Secret"])
    for workload in of_kind(objects, *WORKLOADS):
        claims = {name(claim) for claim in workload["spec"].get("volumeClaimTemplates", [])}
        volumes = claims | {volume["name"] for volume in pod(workload).get("volumes", [])}
        assert {mount["name"] for mount in container(workload)["volumeMounts"]} == volumes


def everything(node: Any) -> Any:
    """Every (key, value) below a node."""
    for key, value in node.items() if isinstance(node, dict) else enumerate(node) if isinstance(node, list) else ():
        yield key, value
        yield from everything(value)


# --- who may talk to whom


def allowed(overlay: str, direction: str, workload: dict[str, Any]) -> set[tuple[str, str, int]]:
    """(peer, port) that the policies allow a workload; a peer is a workload's name, or a namespace's label."""
    found = set()
    for policy in of_kind(in_cluster(overlay), "NetworkPolicy"):
        spec = policy["spec"]
        if not selects(spec["podSelector"], workload):
            continue
        for rule in spec.get(direction, []):
            for peer in rule["from" if direction == "ingress" else "to"]:
                (kind,) = peer
                if kind == "podSelector":
                    peers = [name(each) for each in matching(overlay, peer[kind])]
                    assert peers, policy
                else:
                    peers = ["=".join(next(iter(peer[kind]["matchLabels"].items())))]
                for port in rule["ports"]:
                    number = port["port"]
                    if isinstance(number, str):  # a name is that of the pod which is selected
                        assert direction == "ingress"
                        number = ports(workload)[number]
                    found |= {(each, port["protocol"], number) for each in peers}
    return found


@pytest.mark.parametrize("overlay", PLATFORM)
def test_the_policies_allow_what_is_needed_and_nothing_else(overlay: str) -> None:
    found = {("agent", "gateway", "bridge")[index]: workload for index, workload in enumerate(in_order(overlay))}
    agent, gateway, bridge = (name(found[key]) for key in ("agent", "gateway", "bridge"))
    dns = {("kubernetes.io/metadata.name=kube-system", protocol, 53) for protocol in ("UDP", "TCP")}
    prometheus, training = "kubernetes.io/metadata.name=monitoring", "verl-otel/sender=true"
    assert allowed(overlay, "ingress", found["agent"]) == {
        (training, "TCP", 4317),
        (training, "TCP", 4318),
        (prometheus, "TCP", 8888),
    }
    assert allowed(overlay, "egress", found["agent"]) == {*dns, (gateway, "TCP", 4417)}
    assert allowed(overlay, "ingress", found["gateway"]) == {
        (agent, "TCP", 4417),
        (agent, "TCP", 4418),
        (prometheus, "TCP", 8988),
    }
    outside = {key: address(value) for key, value in backends(overlay).items() if key != "MLFLOW_BRIDGE_URL"}
    named = {key: (f"kubernetes.io/metadata.name={space}", "TCP", port) for key, (_, space, port) in outside.items()}
    assert allowed(overlay, "egress", found["gateway"]) == {
        *dns,
        (bridge, "TCP", 4320),
        named["JAEGER_OTLP"],
        named["PROMETHEUS_URL"],
    }
    assert allowed(overlay, "ingress", found["bridge"]) == {(gateway, "TCP", 4320)}
    assert allowed(overlay, "egress", found["bridge"]) == {*dns, named["MLFLOW_TRACKING_URI"]}
    (rest,) = [each for each in of_kind(in_cluster(overlay), "NetworkPolicy") if each["spec"]["podSelector"] == {}
               and set(each["spec"]) == {"podSelector", "policyTypes"}]  # fmt: skip
    assert rest["spec"]["policyTypes"] == ["Ingress", "Egress"]


def in_order(overlay: str) -> Objects:
    """Agent, gateway, bridge."""
    by_label = {labels(workload)["app.kubernetes.io/name"]: workload for workload in workloads(overlay)}
    return [by_label[f"verl-otel-{part}"] for part in ("agent", "gateway", "bridge")]


def address(url: str) -> tuple[str, str, int]:
    """Service, namespace and port of `http://service.namespace:port`, with or without the scheme."""
    service, _, port = url.rpartition("://")[2].partition(":")
    service, _, namespace = service.partition(".")
    return service, namespace, int(port)


@pytest.mark.parametrize("overlay", PLATFORM)
def test_agent_gateway_and_bridge_find_each_other(overlay: str) -> None:
    agent, gateway, _ = in_order(overlay)
    services = {name(service): service for service in of_kind(in_cluster(overlay), "Service")}
    targets = [environment(overlay, agent)["VERL_OTEL_GATEWAY"], environment(overlay, gateway)["MLFLOW_BRIDGE_URL"]]
    for target in targets:
        service, _, port = address(target)
        assert port in [each["port"] for each in services[service]["spec"]["ports"]]
    assert services["verl-otel-agent"]["spec"]["internalTrafficPolicy"] == "Local"


def test_training_pods_find_the_agent_and_may_send() -> None:
    (sender,) = of_kind(manifests.build("ray"), "ConfigMap")
    endpoints = [sender["data"]["OTEL_EXPORTER_OTLP_ENDPOINT"]]
    endpoints += [each["spec"]["exporter"]["endpoint"] for each in of_kind(in_cluster("operator"), "Instrumentation")]
    (space,) = of_kind(manifests.build("ray"), "Namespace")
    assert space["metadata"]["labels"]["verl-otel/sender"] == "true"
    for endpoint in endpoints:
        service, namespace, port = address(endpoint)
        (found,) = [each for each in of_kind(in_cluster("open"), "Service") if name(each) == service]
        assert found["metadata"]["namespace"] == namespace
        assert {"name": "otlp-http", "port": port, "targetPort": "otlp-http"} in found["spec"]["ports"]


# --- the pods


@pytest.mark.parametrize("overlay", PLATFORM)
def test_no_pod_can_do_more_than_it_must(overlay: str) -> None:
    """The pod security standard `restricted`, which the namespace enforces, and no file system that can be written."""
    (space,) = of_kind(in_cluster(overlay), "Namespace")
    assert space["metadata"]["labels"]["pod-security.kubernetes.io/enforce"] == "restricted"
    for workload in workloads(overlay):
        own, spec = container(workload)["securityContext"], pod(workload)
        assert spec["securityContext"]["runAsNonRoot"] and spec["securityContext"]["runAsUser"] > 0
        assert spec["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
        assert not {"hostNetwork", "hostPID", "hostIPC"} & set(spec)
        assert own["allowPrivilegeEscalation"] is False and own["capabilities"] == {"drop": ["ALL"]}
        assert own["readOnlyRootFilesystem"] is True
        assert spec["automountServiceAccountToken"] is False
        assert not any("hostPath" in volume for volume in spec["volumes"])
        assert not any("hostPort" in port for port in container(workload)["ports"])
        assert "memory" in container(workload)["resources"]["limits"]
        assert {"cpu", "memory"} <= set(container(workload)["resources"]["requests"])


@pytest.mark.parametrize("overlay", manifests.OVERLAYS)
def test_images_are_pinned_and_the_collector_is_the_tested_one(overlay: str) -> None:
    images = [value for key, value in everything(manifests.build(overlay)) if key == "image"]
    assert images
    for image in images:
        assert re.search(r":v?\d+\.\d+[\w.-]*$", image), image
        if "collector" in image:
            assert image == COMPOSE["services"]["collector"]["image"]


def test_the_bridge_is_started_by_its_image_and_told_the_rest_by_variables() -> None:
    (bridge,) = of_kind(in_cluster("open"), "Deployment")
    assert not {"args", "command"} & set(container(bridge))
    dockerfile = (ROOT / "deploy" / "bridge" / "Dockerfile").read_text()
    (command,) = re.findall(r"^CMD (\[.+\])$", dockerfile, re.MULTILINE)
    assert json.loads(command)[2:] == ["--host", "0.0.0.0"]
    assert re.findall(r"^EXPOSE (\d+)$", dockerfile, re.MULTILINE) == [str(ports(bridge)["otlp-http"])]
    assert {"VERL_OTEL_BRIDGE_TOKEN", "MLFLOW_TRACKING_URI"} <= set(environment("open", bridge))


INJECTED = """
import verl.utils.tracking, verl_otel
from verl_otel import telemetry
print("found", verl_otel.__file__, telemetry.current().identity.resource().attributes["service.name"])
"""


def test_what_the_operator_injects_is_at_work(tmp_path: Path) -> None:
    """By hand, what the image's Dockerfile and the operator do: a folder with all packages, put on PYTHONPATH."""
    dockerfile = (ROOT / "deploy" / "instrumentation" / "Dockerfile").read_text()
    (what,) = re.findall(r"--target /autoinstrumentation \"\.(\S+)\"", dockerfile)
    source = tmp_path / "source"
    source.mkdir()
    copied = " ".join(re.findall(r"^COPY (?!--from)(.+) \S+$", dockerfile, re.MULTILINE)).split()
    for each in copied:
        (shutil.copytree if (ROOT / each).is_dir() else shutil.copy)(ROOT / each, source / each)
    folder = tmp_path / "otel-auto-instrumentation-python"
    uv, python = (str(Path(sys.executable).with_name(program)) for program in ("uv", "python"))
    install = [uv, "pip", "install", "-q", "--python", python, "--target", str(folder), f"{source}{what}"]
    subprocess.run(install, check=True, timeout=300)
    (instrumentation,) = of_kind(manifests.build("operator"), "Instrumentation")
    variables = {
        "PATH": os.environ["PATH"],
        "PYTHONPATH": f"{folder}/opentelemetry/instrumentation/auto_instrumentation:{folder}",
        **{f"OTEL_{signal}_EXPORTER": "otlp" for signal in ("TRACES", "METRICS", "LOGS")},
        "OTEL_EXPORTER_OTLP_PROTOCOL": "http/protobuf",
        "OTEL_EXPORTER_OTLP_ENDPOINT": "http://127.0.0.1:1",  # nobody is there
        "OTEL_PROPAGATORS": ",".join(instrumentation["spec"]["propagators"]),
        "OTEL_SERVICE_NAME": "",
    }
    command = [python, "-c", INJECTED]
    done = subprocess.run(command, cwd=tmp_path, env=variables, capture_output=True, text=True, timeout=200)
    assert f"found {folder}/verl_otel/__init__.py verl-launcher" in done.stdout, done.stdout + done.stderr


# --- the pods of Ray


def test_every_pod_of_ray_says_what_it_is_and_where_to_send() -> None:
    specs = []
    for found in of_kind(manifests.build("ray"), "RayJob", "RayCluster"):
        cluster = found["spec"].get("rayClusterSpec", found["spec"])
        groups = [cluster["headGroupSpec"], *cluster["workerGroupSpecs"]]
        specs += [group["template"]["spec"] for group in groups]
    assert len(specs) == 4
    for spec in specs:
        (own,) = spec["containers"]
        assert {"configMapRef": {"name": "verl-otel-sender"}} in own["envFrom"]
        said = {each["name"]: each for each in own["env"]}
        attributes = dict(part.split("=") for part in said["OTEL_RESOURCE_ATTRIBUTES"]["value"].split(","))
        assert set(attributes) == {"k8s.pod.name", "k8s.namespace.name", "k8s.node.name"}
        order = list(said)
        for value in attributes.values():  # Kubernetes fills in only what stands before
            assert order.index(value[2:-1]) < order.index("OTEL_RESOURCE_ATTRIBUTES")
        assert any(mount["mountPath"] == "/var/lib/verl-otel" for mount in own["volumeMounts"])
    (job,) = of_kind(manifests.build("ray"), "RayJob")
    assert job["spec"]["entrypoint"].startswith("opentelemetry-instrument python -m verl.trainer.main_ppo ")
