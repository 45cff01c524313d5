"""The configurations of collector/ and deploy/, read as data.

Given to the real programs in tests/e2e/test_configurations.py.
"""

import argparse
import itertools
import re
from pathlib import Path
from typing import Any

import promql_parser
import pytest
import yaml

from verl_otel.cli import bridge
from verl_otel.export import targets
from verl_otel.semconv import registry
from verl_otel.semconv.prometheus import prometheus_name
from verl_otel.stack import ports

ROOT = Path(__file__).resolve().parents[2]
COLLECTOR, DEPLOY = ROOT / "collector", ROOT / "deploy"
COLLECTORS = ("local", "agent", "gateway")
VARIANT = COLLECTOR / "variants" / "prometheus-scrape.yaml"
VARIANTS = {path.stem: path for path in sorted((COLLECTOR / "variants").glob("*.yaml"))}
SECURE = ("tls", "mtls", "auth", "basic-auth")
LOOPBACK = ("127.0.0.1", "localhost", "[::1]")

VARIABLE = re.compile(r"\$\{env:(\w+)(?::-([^}]*))?\}")


def load(path: Path) -> dict[str, Any]:
    """A configuration as it is with no environment variable set."""
    text = VARIABLE.sub(lambda match: match[2] or "", path.read_text())
    return yaml.safe_load(text)


def collector(name: str) -> dict[str, Any]:
    return load(COLLECTOR / f"{name}.yaml")


def endpoints(config: Any) -> list[str]:
    """Every value of a key `endpoint` or `host` below `config`."""
    if isinstance(config, dict):
        here = [value for key, value in config.items() if key in ("endpoint", "host") and isinstance(value, str)]
        return here + [found for value in config.values() for found in endpoints(value)]
    if isinstance(config, list):
        return [found for value in config for found in endpoints(value)]
    return []


def host(endpoint: str) -> str:
    return endpoint.rpartition(":")[0] or endpoint


# --- collector/


@pytest.mark.parametrize("name", COLLECTORS)
def test_every_destination_has_its_own_queue_on_disk_and_is_never_given_up(name: str) -> None:
    config = collector(name)
    assert config["exporters"]
    for exporter, settings in config["exporters"].items():
        assert settings["sending_queue"]["storage"] == "file_storage", exporter
        assert settings["sending_queue"]["queue_size"] > 0, exporter
        assert settings["retry_on_failure"]["max_elapsed_time"] == 0, exporter
    queues = [settings["sending_queue"] for settings in config["exporters"].values()]
    assert not any(one is other for one, other in itertools.combinations(queues, 2)), "a queue written by a YAML alias"
    destinations = [address(settings) for settings in config["exporters"].values()]
    assert len(set(destinations)) == len(destinations), "two exporters to one destination"
    assert "file_storage" in config["service"]["extensions"]


@pytest.mark.parametrize("name", COLLECTORS)
def test_a_collector_listens_on_loopback_unless_told_otherwise(name: str) -> None:
    config = collector(name)
    listening = endpoints(config["receivers"]) + endpoints(config["extensions"]) + endpoints(config["service"])
    assert len(listening) == 4  # OTLP by gRPC and HTTP, health, its own metrics
    assert all(host(endpoint) in LOOPBACK for endpoint in listening), listening


CONFIGURATIONS = sorted(
    path
    for folder in (COLLECTOR, DEPLOY)
    for path in folder.rglob("*.yaml")
    if path.name != "builder.yaml" and path.parent.name != "alertmanager" and "kubernetes" not in path.parts
    if {"receivers", "extensions"} & set(load(path))
)


@pytest.mark.parametrize("path", CONFIGURATIONS, ids=lambda path: str(path.relative_to(ROOT)))
def test_no_configuration_listens_beyond_loopback_by_itself(path: Path) -> None:
    """Every receiver and extension, and exporters that are scraped: Collector, its variants, and Jaeger."""
    config = load(path)
    config.get("exporters", {}).pop("otlp_grpc/gateway", None)
    listening = [endpoints(config.get(part, {})) for part in ("receivers", "extensions", "service")]
    listening.append(endpoints(config.get("exporters", {}).get("prometheus", {})))
    assert all(host(endpoint) in LOOPBACK for found in listening for endpoint in found), listening
    # No receiver is left to its own default, which some day was all addresses.
    for protocol in config.get("receivers", {}).get("otlp", {}).get("protocols", {}).values():
        assert "endpoint" in protocol or path.parent.name == "variants"


def test_the_configurations_that_listen_are_found() -> None:
    assert {path.stem for path in CONFIGURATIONS} >= {*COLLECTORS, *SECURE, "jaeger"} - {"basic-auth"}


def test_what_is_not_said_to_listen_elsewhere_is_on_loopback() -> None:
    """The programs whose address is on the command line: `verl_otel/stack` and the bridge."""
    stack = "".join(path.read_text() for path in (ROOT / "verl_otel" / "stack").glob("*.py"))
    assert "0.0.0.0" not in stack and "::" not in stack
    parser = argparse.ArgumentParser()
    bridge.add_to(parser.add_subparsers())
    assert parser.parse_args(["bridge"]).host in LOOPBACK


@pytest.mark.parametrize("name", SECURE)
def test_the_secure_variants_add_to_the_receivers_and_change_nothing_else(name: str) -> None:
    variant = load(VARIANTS[name])
    assert set(variant) <= {"receivers", "extensions", "service"}
    protocols = variant["receivers"]["otlp"]["protocols"]
    assert protocols["grpc"] == protocols["http"] and set(protocols) == {"grpc", "http"}
    for base in COLLECTORS:
        extensions = collector(base)["service"]["extensions"]
        added = list(variant.get("extensions", {}))
        assert variant.get("service", {"extensions": extensions}) == {"extensions": [*extensions, *added]}


def test_the_secure_backends_are_the_exporters_of_the_base() -> None:
    variant = load(VARIANTS["secure-backends"])
    for base in ("local", "gateway"):
        assert set(variant["exporters"]) == set(collector(base)["exporters"])
    assert all(not exporter["tls"].get("insecure") for exporter in variant["exporters"].values())


@pytest.mark.parametrize("path", VARIANTS.values(), ids=VARIANTS)
def test_a_secret_is_a_variable_or_a_file_and_never_has_a_default(path: Path) -> None:
    for line in path.read_text().splitlines():
        setting, _, value = line.partition("#")[0].partition(":")
        if re.fullmatch(r"\s*(token|password|authorization|filename|file|\w+_file)", setting):
            assert value.strip().removeprefix("Bearer ").startswith("${env:"), line
        if re.fullmatch(r"\s*(token|password|authorization)", setting):
            assert value.strip().endswith((":-}", "}")) and VARIABLE.findall(value)[0][1] == "", line


@pytest.mark.parametrize("name", ["local", "gateway"])
def test_the_bridge_gets_the_token_that_it_asks_for(name: str) -> None:
    text = (COLLECTOR / f"{name}.yaml").read_text()
    assert f"authorization: Bearer ${{env:{bridge.TOKEN}:-}}" in text


@pytest.mark.parametrize("name", COLLECTORS)
def test_every_signal_is_routed_and_every_component_is_used(name: str) -> None:
    config = collector(name)
    pipelines = config["service"]["pipelines"]
    assert set(pipelines) == {"traces", "metrics", "logs"}
    for kind in ("receivers", "processors", "exporters"):
        used = {component for pipeline in pipelines.values() for component in pipeline[kind]}
        assert used == set(config[kind])
    assert set(config["service"]["extensions"]) == set(config["extensions"])
    for pipeline in pipelines.values():
        assert pipeline["processors"][0] == "memory_limiter"
    assert "deltatocumulative" in pipelines["metrics"]["processors"]


def address(exporter: dict[str, Any]) -> str:
    return exporter.get("metrics_endpoint") or exporter["endpoint"]


def test_the_gateway_routes_as_the_local_collector_does() -> None:
    local, gateway = collector("local"), collector("gateway")
    assert gateway["service"]["pipelines"] == local["service"]["pipelines"]
    # Only the sizes differ.
    for config in (local, gateway):
        for exporter in config["exporters"].values():
            del exporter["sending_queue"]["queue_size"]
    assert gateway["exporters"] == local["exporters"]
    # Also the same variables, which the defaults hide; those of where it listens differ, for a shared machine.
    variables = [
        {name for name, _ in VARIABLE.findall((COLLECTOR / f"{file}.yaml").read_text())}
        for file in ("local", "gateway")
    ]
    assert variables[0] == variables[1]


def test_the_scrape_variant_replaces_the_push_and_nothing_else() -> None:
    base, variant = collector("local"), load(VARIANT)
    assert set(variant["service"]) == {"pipelines"} and set(variant["service"]["pipelines"]) == {"metrics"}
    metrics = variant["service"]["pipelines"]["metrics"]
    assert metrics["exporters"] == ["prometheus"], "a second exporter to Prometheus would double every series"
    kept = base["service"]["pipelines"]["metrics"]["processors"]
    assert metrics["processors"] == [*kept, *variant["processors"]]
    assert not set(variant["exporters"]) & set(base["exporters"])
    assert host(variant["exporters"]["prometheus"]["endpoint"]) in LOOPBACK


@pytest.mark.parametrize("name", ["prometheus-scrape", "remote-write"])
def test_scraped_and_pushed_series_get_the_same_labels_from_the_resource(name) -> None:
    (statements,) = load(VARIANTS[name])["processors"]["transform/run_labels"]["metric_statements"]
    copied = []
    for statement in statements["statements"]:
        names = set(re.findall(r'attributes\["([^"]+)"\]', statement))
        assert len(names) == 1, statement
        copied += names
    assert copied == load(DEPLOY / "prometheus" / "prometheus.yaml")["otlp"]["promote_resource_attributes"]


def test_the_readme_lists_every_environment_variable_with_its_default() -> None:
    rows = re.findall(
        r"^\| `(\w+)` \| (?:`([^`]*)`)? ?\| ([\w, -]+) \|", (COLLECTOR / "README.md").read_text(), re.MULTILINE
    )
    documented = {
        (reader, variable, default)
        for variable, default, where in rows
        for reader in ({"all": COLLECTORS}.get(where) or where.split(", "))
    }
    files = {name: COLLECTOR / f"{name}.yaml" for name in COLLECTORS} | VARIANTS
    read = {
        (name, variable, default)
        for name, path in files.items()
        for variable, default in VARIABLE.findall(path.read_text())
    }
    assert documented == read


def test_the_collector_scrapes_rollout_servers_by_the_job_that_prometheus_does() -> None:
    """That job is tested with the real Prometheus, whose code the receiver is; our build of the Collector lacks it."""
    variant = load(VARIANTS["rollout-servers"])
    (receiver,) = variant["receivers"]
    assert receiver.split("/")[0] == "prometheus"
    assert variant["receivers"][receiver]["config"] == load(DEPLOY / "prometheus" / "scrape-rollout-servers.yaml")
    for base in ("local", "agent"):
        own = collector(base)["service"]["pipelines"]["metrics"]["receivers"]
        assert variant["service"] == {"pipelines": {"metrics": {"receivers": [*own, receiver]}}}
    (job,) = variant["receivers"][receiver]["config"]["scrape_configs"]
    assert job["file_sd_configs"][0]["files"] == [f"/srv/verl-otel/{targets.ROLLOUT_SERVERS}/*.json"]


# --- deploy/compose.yaml


COMPOSE = yaml.safe_load((DEPLOY / "compose.yaml").read_text())
SERVICES: dict[str, dict[str, Any]] = COMPOSE["services"]
INSIDE = ("collector_self", "jaeger_grpc", "jaeger_otlp", "jaeger_health", "bridge", "relay")
"""Ports that only the stack's own services ask."""


def mounts(service: dict[str, Any]) -> list[list[str]]:
    """[source, target, mode] of each volume of a service."""
    return [volume.split(":") for volume in service.get("volumes", [])]


def bound_files(service: dict[str, Any]) -> dict[str, Path]:
    """Where in the container -> file or folder of the repository."""
    return {target: DEPLOY / source for source, target, *_ in mounts(service) if source.startswith(".")}


def arguments(service: dict[str, Any]) -> dict[str, str]:
    """The `--name=value` of a service's command."""
    return dict(word.split("=", 1) for word in service["command"] if word.startswith("--") and "=" in word)


def test_the_stack_is_complete() -> None:
    backends = {"jaeger", "prometheus", "alertmanager", "grafana", "mlflow", "postgres"}
    assert set(SERVICES) == {"collector", "bridge", "relay", *backends}
    assert {name for name, service in SERVICES.items() if "profiles" in service} == {"relay"}
    assert all(service["restart"] == "unless-stopped" for service in SERVICES.values())


@pytest.mark.parametrize("name", SERVICES)
def test_ports_are_published_on_loopback_only(name: str) -> None:
    service = SERVICES[name]
    assert "network_mode" not in service
    for port in service.get("ports", []):
        assert isinstance(port, str) and re.fullmatch(r"127\.0\.0\.1:\d+:\d+", port), port


@pytest.mark.parametrize("name", SERVICES)
def test_images_are_pinned(name: str) -> None:
    service = SERVICES[name]
    if "build" in service:
        dockerfile = DEPLOY / service["build"]["context"] / service["build"]["dockerfile"]
        images = re.findall(r"^FROM (\S+)", dockerfile.read_text(), re.MULTILINE)
    else:
        images = [service["image"]]
    assert images
    for image in images:
        assert re.search(r":v?\d+\.\d+[\w.-]*$", image), image


@pytest.mark.parametrize("name", SERVICES)
def test_mounted_files_exist_and_cannot_be_written(name: str) -> None:
    service = SERVICES[name]
    for source, _, *mode in mounts(service):
        if source.startswith("."):
            path = DEPLOY / source  # Docker would make a folder of that name
            assert path.is_file() if path.suffix else path.is_dir(), source
            assert mode == ["ro"]
        else:
            assert source in COMPOSE["volumes"]
    command = service.get("command", [])
    configurations = {word.partition("=")[2] for word in command if word.startswith(("--config=", "--config.file="))}
    assert configurations <= set(bound_files(service))
    assert bool(configurations) == (name in ("collector", "jaeger", "prometheus", "alertmanager"))


@pytest.mark.parametrize("name", ["collector", "jaeger"])
def test_environment_variables_are_read_by_the_mounted_file(name: str) -> None:
    service = SERVICES[name]
    known = {}
    for path in bound_files(service).values():
        known.update(VARIABLE.findall(path.read_text()))
    given = {key: value for key, value in service["environment"].items() if not key.startswith("OTEL_")}
    assert set(given) <= set(known)
    # What is published, or sent to by another container, listens on all addresses of the container.
    listening = {value for value in given.values() if value.startswith("0.0.0.0:")}
    for port in service["ports"]:
        assert f"0.0.0.0:{port.rpartition(':')[2]}" in listening


def test_the_containers_find_each_other() -> None:
    """Each address that a service is given is another service, and the port on which that listens."""
    listens = {
        "jaeger": {SERVICES["jaeger"]["environment"]["JAEGER_OTLP"]},
        "collector": {f"{SERVICES['collector']['environment']['VERL_OTEL_SELF_HOST']}:8888"},
        "mlflow": {"{--host}:{--port}".format_map(arguments(SERVICES["mlflow"]))},
        "bridge": {f"{bridge_options().host}:{bridge_options().port}"},
        "prometheus": {"0.0.0.0:9090"},
        "alertmanager": {"0.0.0.0:9093"},
        "relay": {"0.0.0.0:4321"},  # the usual port; on all addresses by --host
        "postgres": {"0.0.0.0:5432"},
    }
    collectors = SERVICES["collector"]["environment"]
    given = [collectors[key] for key in ("JAEGER_OTLP", "PROMETHEUS_URL", "MLFLOW_BRIDGE_URL")]
    given += [bridge_options().mlflow, arguments(SERVICES["mlflow"])["--backend-store-uri"].split("@")[1].split("/")[0]]
    prometheus = load(DEPLOY / "prometheus" / "prometheus.yaml")
    for job in [*prometheus["alerting"]["alertmanagers"], *prometheus["scrape_configs"]]:
        given += [target for static in job["static_configs"] for target in static["targets"]]
    (receiver,) = load(DEPLOY / "alertmanager" / "alertmanager.yaml")["receivers"]
    given += [hook["url"].removesuffix("/alerts") for hook in receiver["webhook_configs"]]
    assert len(given) == 9
    for address in given:
        service, port = address.removeprefix("http://").split(":")
        assert f"0.0.0.0:{port}" in listens[service]


def test_the_rules_are_where_prometheus_looks_for_them() -> None:
    prometheus = SERVICES["prometheus"]
    (rules,) = load(DEPLOY / "prometheus" / "prometheus.yaml")["rule_files"]
    assert str(Path(arguments(prometheus)["--config.file"]).parent / rules) in bound_files(prometheus)


@pytest.mark.parametrize("name", SERVICES)
def test_a_password_is_yours_and_never_on_a_command_line(name: str) -> None:
    service = SERVICES[name]
    assert "PASSWORD" not in str(service.get("command"))
    environment = service.get("environment", {})
    for variable, value in environment.items() if isinstance(environment, dict) else []:
        if "PASSWORD" in variable:
            assert re.fullmatch(r"\$\{\w+_PASSWORD:\?set it to .+\}", value), "compose refuses to start without it"


def test_both_stacks_are_where_the_smoke_test_and_the_users_look() -> None:
    published = {port.split(":")[1] for service in SERVICES.values() for port in service.get("ports", [])}
    asked = re.findall(r'"--(\w+)", default="http://127.0.0.1:(\d+)"', (DEPLOY / "smoke.py").read_text())
    assert len(asked) == 4
    for option, port in asked:
        assert port in published and int(port) == ports.USUAL[{"otlp": "otlp_http"}.get(option, option)]
    usual = {str(port) for name, port in ports.USUAL.items() if name not in INSIDE}
    assert usual <= published and published - usual == {"3000"}  # Grafana has no build without Docker


def test_every_service_whose_image_can_has_a_healthcheck() -> None:
    assert {name for name, service in SERVICES.items() if "healthcheck" not in service} == {"collector"}


def test_mlflow_answers_to_the_names_by_which_it_is_called() -> None:
    allowed = arguments(SERVICES["mlflow"])["--allowed-hosts"].split(",")
    assert bridge_options().mlflow.removeprefix("http://") in allowed
    assert {"localhost:*", "127.0.0.1:*"} <= set(allowed) and "*" not in allowed


def test_the_collector_leaves_out_only_what_prometheus_would_refuse() -> None:
    window = load(DEPLOY / "prometheus" / "prometheus.yaml")["storage"]["tsdb"]["out_of_order_time_window"]
    for name in ("local", "gateway"):
        config = collector(name)
        (condition,) = config["processors"]["filter/too_late"]["metrics"]["datapoint"]
        (hours,) = re.findall(r'^time < Now\(\) - Duration\("(\d+)h"\)$', condition)
        assert int(hours) == int(window.removesuffix("h")) - 1  # an hour for what waits in the queue
        assert "filter/too_late" in config["service"]["pipelines"]["metrics"]["processors"]


def test_prometheus_takes_otlp() -> None:
    assert "--web.enable-otlp-receiver" in SERVICES["prometheus"]["command"]
    features = arguments(SERVICES["prometheus"])["--enable-feature"].split(",")
    assert set(features) == {"exemplar-storage", "native-histograms"}


def test_the_bridge_is_built_from_files_that_exist_and_runs_as_a_user() -> None:
    build = SERVICES["bridge"]["build"]
    context = (DEPLOY / build["context"]).resolve()
    assert context == ROOT
    dockerfile = (context / build["dockerfile"]).read_text()
    ignored = {line.strip().strip("/") for line in (ROOT / ".dockerignore").read_text().splitlines()}
    for sources in re.findall(r"^COPY (.+) \S+$", dockerfile, re.MULTILINE):
        for source in sources.split():
            assert (context / source).exists(), source
            assert source != "verl_otel" or (context / source / "cli").is_dir()
            assert source not in ignored
    (user,) = re.findall(r"^USER (\S+)", dockerfile, re.MULTILINE)
    assert user not in ("root", "0")


def bridge_options() -> argparse.Namespace:
    """The bridge's command line, as the real command reads it."""
    program, *command = SERVICES["bridge"]["command"]
    assert program == "verl-otel"
    parser = argparse.ArgumentParser()
    bridge.add_to(parser.add_subparsers())
    return parser.parse_args(command)


# --- docs/operating.md


OPERATING = (ROOT / "docs" / "operating.md").read_text()
QUERIES = [
    line.partition("#")[0].strip()
    for block in re.findall(r"^```promql\n(.*?)^```", OPERATING, re.MULTILINE | re.DOTALL)
    for line in block.splitlines()
]


@pytest.mark.parametrize("query", QUERIES)
def test_the_queries_for_operators_are_promql(query: str) -> None:
    promql_parser.parse(query)


def test_the_names_in_the_operators_document_are_those_of_the_registry() -> None:
    known = registry.load()
    metrics = {prometheus_name(metric.name, metric.unit, metric.instrument) for metric in known.metrics.values()}
    labels = {name.replace(".", "_") for name in known.attributes}
    used = set(re.findall(r"\b(?:verl|hw)_\w+", OPERATING)) - {"verl_otel", "hw_gpu_"}
    assert len(used) > 10 and used <= metrics | labels, used - metrics - labels


def test_the_files_that_the_operators_document_names_exist() -> None:
    named = set(re.findall(r"\b(?:deploy|collector|verl_otel)/[\w./-]+\w", OPERATING))
    named |= {
        f"deploy/kubernetes/{path}" for path in re.findall(r"`((?:overlays|components|base|ray)[\w./-]*)`", OPERATING)
    }
    assert len(named) > 10
    for path in named:
        assert list(ROOT.glob(path)), path
