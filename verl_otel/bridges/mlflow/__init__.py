"""OTLP -> MLflow: runs with parameters, metrics and state from events; traces in the experiment and run of their run.

`server` receives (OTLP/HTTP), `runs` knows MLflow's runs, `traces` forwards spans. Everything may be delivered twice.
"""
