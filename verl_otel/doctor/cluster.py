"""Ray's nodes: whether a worker there would find verl-otel, in the versions that are here."""

import time
from collections.abc import Iterator
from typing import Any

from verl_otel.doctor import child, clock
from verl_otel.doctor.asked import Asked
from verl_otel.doctor.findings import Finding, ok, problem, warning

SECONDS = 60.0
ON_A_NODE = 30.0
"""Seconds in which a node has to answer: it may have to start a worker."""

PACKAGES = ("verl-otel", "verl", "opentelemetry-sdk", "opentelemetry-instrumentation")


def check(asked: Asked) -> Iterator[Finding]:
    """Nothing unless it was asked for: it starts a task on every node."""
    if asked.ray is None:
        return
    address = asked.ray or asked.environ.get("RAY_ADDRESS", "") or "auto"
    here: dict[str, Any] = {}
    ended, nodes = "", 0
    for found in child.run("ray", asked.environ, asked.until(SECONDS), address):
        ended = found.get(child.ENDED, ended)
        here = found.get("here", here)
        if "node" in found:
            nodes += 1
            yield from _of_node(found, here)
        if "error" in found:
            yield problem(
                "VO-RAY-UNREACHABLE",
                f"the Ray cluster {address} cannot be joined ({found['error']})",
                "is it up (ray status), with the versions of Ray and Python that are here? Give its address to --ray",
                address=address,
            )
            return
    if ended or not nodes:
        what = f"not all nodes of the Ray cluster {address} have answered: {ended or 'there are none'}"
        yield warning("VO-RAY-UNFINISHED", what, "look with ray status; give it more time with --timeout")


def _of_node(found: dict[str, Any], here: dict[str, Any]) -> Iterator[Finding]:
    node, there = found["node"], found.get("there")
    if there is None:
        what = f"node {node} runs no task ({found.get('reason', 'no answer')})"
        yield problem("VO-RAY-NODE-NO-ANSWER", what, "look with ray status and at the node's logs", node=node)
        return
    versions, wanted = there["versions"], here["versions"]
    if not versions.get("verl-otel"):
        yield problem(
            "VO-RAY-NODE-WITHOUT",
            f"node {node}: verl-otel is not installed for {there['executable']}",
            "pip install verl-otel in the environment of the workers, on every node, or in the image",
            node=node,
            versions=versions,
        )
    elif versions != wanted:
        differ = ", ".join(
            f"{name} {versions[name] or 'missing'} (here {wanted[name] or 'missing'})"
            for name in PACKAGES
            if versions.get(name) != wanted.get(name)
        )
        what = f"node {node} has other versions: {differ}"
        yield warning("VO-RAY-NODE-VERSIONS", what, "install the same on every node", node=node, versions=versions)
    else:
        yield ok(
            "VO-RAY-NODE", f"node {node}: verl-otel {versions['verl-otel']}, as here", node=node, versions=versions
        )
    yield clock.judged(f"node {node}", found["ahead"], {"node": node})


def in_child(address: str) -> Iterator[dict[str, Any]]:
    """Join the cluster and ask each node by a task; `ahead` is the node's clock minus ours, in seconds."""
    import ray
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    yield {"here": _look(PACKAGES)}
    try:
        ray.init(address, log_to_driver=False, logging_level="ERROR", namespace="verl-otel-doctor")
    except Exception as error:
        told = f"{type(error).__name__}: {error}".splitlines()[0][:300]
        token = "; it wants a token, by RAY_AUTH_MODE=token" if "AuthToken" in f"{error}{error.__cause__}" else ""
        yield {"error": told + token}
        return
    look = ray.remote(num_cpus=0, max_retries=0)(_self_contained())
    asked = {}
    for node in ray.nodes():
        if node["Alive"]:
            strategy = NodeAffinitySchedulingStrategy(node["NodeID"], soft=False)
            shown = f"{node['NodeManagerHostname']} ({node['NodeManagerAddress']})"
            asked[shown] = look.options(scheduling_strategy=strategy)
    references = {shown: task.remote(PACKAGES) for shown, task in asked.items()}
    end = time.monotonic() + ON_A_NODE
    for shown, reference in references.items():
        try:
            ray.get(reference, timeout=max(0.1, end - time.monotonic()))  # there is a worker now
            before = time.time()
            there = ray.get(asked[shown].remote(PACKAGES), timeout=max(0.1, end - time.monotonic()))
            yield {"node": shown, "there": there, "ahead": _ahead(there["time"], before, time.time())}
        except Exception as error:
            yield {"node": shown, "reason": type(error).__name__}


def _ahead(there: float, before: float, after: float) -> float:
    """0 where the difference may be nothing."""
    return there - after if there > after else min(0.0, there - before)


def _look(packages: tuple[str, ...]) -> dict[str, Any]:
    """What is installed for this Python. Goes to nodes that may not have this package: it needs nothing of it."""
    import sys
    import time
    from importlib import metadata

    versions = {}
    for package in packages:
        try:
            versions[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            versions[package] = ""
    return {"versions": versions, "executable": sys.executable, "time": time.time()}


def _self_contained() -> Any:
    """`_look` as a function of no module, so that Ray sends it as a whole."""
    import types

    return types.FunctionType(_look.__code__, {"__builtins__": __builtins__}, "look")
