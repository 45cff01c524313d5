"""What is installed here, and whether it fits together."""

import platform
import sys
from collections.abc import Iterator
from importlib import metadata

from packaging.requirements import InvalidRequirement, Requirement
from packaging.version import InvalidVersion, Version

from verl_otel.doctor.asked import Asked
from verl_otel.doctor.findings import Finding, note, ok, problem, warning
from verl_otel.version import __version__

PYTHON = ((3, 10), (3, 12))
"""The oldest and the newest that is supported."""

VERL = ("0.6.1", "0.9.1")
"""The oldest that is supported, and the newest that is tested."""

RAY = "2.41"
"""The oldest that is supported."""

_OURS = "verl-otel"


def check(asked: Asked) -> Iterator[Finding]:
    """Python, verl, Ray, torch, OpenTelemetry and verl-otel."""
    yield from _python()
    yield ok("VO-VERSION", f"verl-otel {__version__}", package=_OURS, version=__version__)
    yield from _verl()
    yield from _ray()
    torch = installed("torch")
    if torch:
        yield ok("VO-VERSION", f"torch {torch}", package="torch", version=torch)
    yield from _opentelemetry()


def installed(package: str) -> str:
    """The version of a package that is installed, empty if it is not."""
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return ""


def _python() -> Iterator[Finding]:
    version, (oldest, newest) = platform.python_version(), PYTHON
    shown = f"Python {version} ({sys.executable})"
    data = {"package": "python", "version": version, "executable": sys.executable}
    if oldest <= sys.version_info[:2] <= newest:
        yield ok("VO-VERSION", shown, **data)
        return
    supported = f"{_dotted(oldest)} to {_dotted(newest)}"
    yield problem(
        "VO-VERSION-UNSUPPORTED", f"{shown} is not supported", f"use Python {supported} for the training", **data
    )


def _verl() -> Iterator[Finding]:
    version, (oldest, newest) = installed("verl"), VERL
    if not version:
        yield warning(
            "VO-VERL-MISSING",
            f"verl is not installed for {sys.executable}",
            "call doctor with the Python of the training: /path/to/its/bin/verl-otel doctor",
        )
    elif _older(version, oldest):
        yield problem(
            "VO-VERSION-UNSUPPORTED",
            f"verl {version} is older than {oldest}",
            f"install verl {oldest} to {newest}",
            package="verl",
            version=version,
        )
    elif _older(newest, version) and not _same_release(newest, version):
        yield note(
            "VO-VERSION-UNTESTED",
            f"verl {version} is newer than {newest}, the newest that is tested",
            "see under hooks which of its seams were found; the others are off, and the run is not hurt",
            package="verl",
            version=version,
        )
    else:
        yield ok("VO-VERSION", f"verl {version}", package="verl", version=version)


def _ray() -> Iterator[Finding]:
    version = installed("ray")
    if version and _older(version, RAY):
        what = f"Ray {version} is older than {RAY}"
        yield problem("VO-VERSION-UNSUPPORTED", what, f"install Ray {RAY} or later", package="ray", version=version)
    elif version:
        yield ok("VO-VERSION", f"Ray {version}", package="ray", version=version)
    elif installed("verl"):
        yield warning("VO-RAY-MISSING", "Ray is not installed, and verl needs it", "install verl with its requirements")


def _opentelemetry() -> Iterator[Finding]:
    versions = {
        distribution.name.lower(): distribution.version
        for distribution in metadata.distributions()
        if distribution.name and distribution.name.lower().startswith("opentelemetry-")
    }
    conflicts = list(_conflicts([*sorted(versions), _OURS]))
    for package, requirement, found in conflicts:
        wanted = f"{requirement.name}{requirement.specifier}"
        serious = package == _OURS or not found
        what = f"{package} needs {wanted}, and {f'{requirement.name} {found}' if found else 'it'} is installed"
        what = what if found else f"{package} needs {wanted}, which is not installed"
        yield (problem if serious else warning)(
            "VO-VERSION-CONFLICT",
            what,
            "install the packages of OpenTelemetry together, so that they are of one release: "
            f"pip install --upgrade {_OURS} opentelemetry-sdk '{wanted}'",
            package=package,
            needs=wanted,
            installed=found,
        )
    if not conflicts:
        shown = ", ".join(
            f"{name.removeprefix('opentelemetry-')} {versions[name]}" for name in _SHOWN if name in versions
        )
        yield ok("VO-OPENTELEMETRY", f"OpenTelemetry: {shown}; its packages fit together", packages=versions)


_SHOWN = ("opentelemetry-api", "opentelemetry-sdk", "opentelemetry-instrumentation")


def _conflicts(packages: list[str]) -> Iterator[tuple[str, Requirement, str]]:
    """(package, what it needs, which version is installed) for needs that are not met."""
    for package in packages:
        try:
            needs = metadata.requires(package) or []
        except metadata.PackageNotFoundError:  # a checkout that is only on the path
            continue
        for text in needs:
            try:
                requirement = Requirement(text)
            except InvalidRequirement:
                continue
            if requirement.marker is not None and not requirement.marker.evaluate({"extra": ""}):
                continue
            found = installed(requirement.name)
            if not found or not requirement.specifier.contains(found, prereleases=True):
                yield package, requirement, found


def _older(version: str, than: str) -> bool:
    try:
        return Version(version) < Version(than)
    except InvalidVersion:
        return False


def _same_release(one: str, other: str) -> bool:
    """`0.9.1` and `0.9.1.post1+cpu`"""
    try:
        return Version(one).release[:3] == Version(other).release[:3]
    except InvalidVersion:
        return False


def _dotted(version: tuple[int, int]) -> str:
    return ".".join(map(str, version))
