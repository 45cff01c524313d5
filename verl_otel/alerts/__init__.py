"""Alerts on the metrics of a run: Prometheus' rules (`rules`), and what is done when one fires."""
