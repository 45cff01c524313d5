"""Collector, Jaeger, Prometheus, Alertmanager, MLflow and the bridge on one machine, without containers."""


class StackError(Exception):
    """What keeps the stack from starting, in words for the user."""
