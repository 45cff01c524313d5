"""OTLP -> systems that do not take it, or not all of it: runs, their steps and traces.

`server` receives (OTLP/HTTP) for the sinks: `mlflow`, `sql`, `influx`. Everything may be delivered twice.
"""
