"""Names: attributes, stages and metrics, as the telemetry contract has them. No logic of a run lives here."""
