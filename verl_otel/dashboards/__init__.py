"""Grafana dashboards, made from the registry of names: `verl-otel dashboards`.

A module for each dashboard; what they share is in `layout` (variables, links), `panels` (kinds of panels) and `queries`
(PromQL). Nothing of a run imports this.
"""

from verl_otel.dashboards import fleet, hardware, layout, rollout, run, stages, telemetry

MLFLOW = "http://127.0.0.1:5000"


def files(mlflow: str = MLFLOW) -> dict[str, str]:
    """File name -> text of each dashboard, as Grafana imports and provisions it.

    Args:
        mlflow: URL of MLflow, for the links to it.
    """
    boards = [module.board(mlflow) for module in (fleet, run, stages, rollout, hardware, telemetry)]
    return {f"{board.build().uid}.json": layout.to_json(board) for board in boards}
