"""One self-contained HTML page of a recorded run."""
