"""Reads recorded OTLP back: the one reader for everything that looks at a run afterwards."""
