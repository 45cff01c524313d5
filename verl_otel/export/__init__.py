"""Getting telemetry out of the process: which exporters, local files, flushing and the end of the process."""
