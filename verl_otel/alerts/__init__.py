"""Alerts: the rules for Prometheus, and the relay that brings what fires to chat robots and to the run."""
