"""From the Collector to systems that do not take OTLP, or not all of it."""
