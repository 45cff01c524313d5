"""Spans: steps and stages, calls on ranks, trajectories; and the context that travels between processes."""
