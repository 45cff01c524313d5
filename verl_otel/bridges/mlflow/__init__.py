"""OTLP -> MLflow: runs with parameters, metrics and state from events; traces in the experiment and run of their run.

`runs` knows MLflow's runs, `traces` forwards spans, `sink` is both of them for the bridge.
"""
