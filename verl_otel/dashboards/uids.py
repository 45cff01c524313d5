"""The dashboards' uids in Grafana. Links in alerts and in other dashboards hang on them."""

FLEET = "verl-fleet"
RUN = "verl-run"
STAGES = "verl-stages"
ROLLOUT = "verl-rollout"
HARDWARE = "verl-hardware"
TELEMETRY = "verl-telemetry"
