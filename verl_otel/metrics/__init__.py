"""From what verl hands to `Tracking.log` to OpenTelemetry instruments and step events."""
