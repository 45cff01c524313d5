"""Waiting for what another thread or process does."""

import time


def until(condition, seconds=20):
    """The first true result of `condition()`; an error if it does not come."""
    end = time.monotonic() + seconds
    while not (result := condition()):
        assert time.monotonic() < end, "it does not happen"
        time.sleep(0.005)
    return result
