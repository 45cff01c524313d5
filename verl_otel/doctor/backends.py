"""Asking Jaeger, Prometheus and MLflow.

Credentials are never on the command line: `JAEGER_AUTHORIZATION` and `PROMETHEUS_AUTHORIZATION` are what the Collector
reads too, `MLFLOW_TRACKING_TOKEN`, `_USERNAME` and `_PASSWORD` are MLflow's own.
"""

import base64
from collections.abc import Iterator, Mapping
from typing import Any

from verl_otel import config
from verl_otel.doctor import clock
from verl_otel.doctor.findings import Finding

SECONDS = 8.0


class NoAnswer(Exception):
    """A backend cannot be asked; `fix` says what to do."""

    def __init__(self, message: str, fix: str) -> None:
        super().__init__(message)
        self.fix = fix


class Backend:
    """A backend at a base URL. Its methods raise `NoAnswer`.

    Args:
        name: `Jaeger`, `Prometheus` or `MLflow`.
    """

    def __init__(self, name: str, url: str, environ: Mapping[str, str]) -> None:
        self.name = name
        self.shown = config.without_secrets(url)
        self._url = url.rstrip("/")
        self._authorization = _authorization(name, environ)

    def get(self, path: str, **parameters: str) -> dict[str, Any]:
        """The JSON object at a path."""
        return self._json(self._request(path, parameters), path)

    def find(self, path: str, **parameters: str) -> dict[str, Any]:
        """The JSON object at a path; empty if there is none (404)."""
        response = self._request(path, parameters, (404,))
        return {} if response.status_code == 404 else self._json(response, path)

    def text(self, path: str) -> str:
        """What is at a path, cut to what a version may be long."""
        return self._request(path, {}).text[:50]

    def query(self, query: str) -> list[dict[str, Any]]:
        """The series that an instant query of Prometheus finds."""
        found = self.get("/api/v1/query", query=query).get("data", {}).get("result", [])
        return found if isinstance(found, list) else []

    def clock(self) -> Iterator[Finding]:
        """How far its clock is from ours."""
        yield from clock.of_server(self.shown, {})

    def _request(self, path: str, parameters: Mapping[str, str], allowed: tuple[int, ...] = ()) -> Any:
        import requests

        headers = {"authorization": self._authorization} if self._authorization else {}
        try:
            response = requests.get(f"{self._url}{path}", params=parameters, headers=headers, timeout=SECONDS)
        except requests.RequestException as error:
            reason = type(error).__name__
            raise NoAnswer(
                f"{self.name} at {self.shown} cannot be asked ({reason})",
                f"start it, or correct --{self.name.lower()}; a certificate's CA goes into REQUESTS_CA_BUNDLE",
            ) from None
        if response.status_code in (401, 403):
            raise NoAnswer(f"{self.name} at {self.shown} wants credentials (HTTP {response.status_code})", self._fix)
        if response.status_code >= 300 and response.status_code not in allowed:
            raise NoAnswer(
                f"{self.name} at {self.shown} answers HTTP {response.status_code} to {path}",
                f"is --{self.name.lower()} the base URL of {self.name}, with the path of a proxy in front, if any?",
            )
        return response

    @property
    def _fix(self) -> str:
        if self.name == "MLflow":
            return "set MLFLOW_TRACKING_TOKEN, or MLFLOW_TRACKING_USERNAME and MLFLOW_TRACKING_PASSWORD"
        return f"set {self.name.upper()}_AUTHORIZATION to `Bearer <token>` or `Basic <base64 of user:password>`"

    def _json(self, response: Any, path: str) -> dict[str, Any]:
        try:
            found = response.json()
        except ValueError:
            found = None
        if not isinstance(found, dict):
            raise NoAnswer(
                f"{self.name} at {self.shown} does not answer {path} with JSON",
                f"is --{self.name.lower()} the base URL of {self.name}, and not of a login page?",
            )
        return found


def _authorization(name: str, environ: Mapping[str, str]) -> str:
    if name != "MLflow":
        return environ.get(f"{name.upper()}_AUTHORIZATION", "").strip()
    token = environ.get("MLFLOW_TRACKING_TOKEN", "").strip()
    user, password = environ.get("MLFLOW_TRACKING_USERNAME", ""), environ.get("MLFLOW_TRACKING_PASSWORD", "")
    if token:
        return f"Bearer {token}"
    if user or password:
        return f"Basic {base64.b64encode(f'{user}:{password}'.encode()).decode()}"
    return ""
