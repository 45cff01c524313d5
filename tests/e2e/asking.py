"""Asking the backends what has come to them."""

import json
import time
import urllib.parse
import urllib.request


def get(url, **query):
    with urllib.request.urlopen(f"{url}?{urllib.parse.urlencode(query)}" if query else url, timeout=30) as response:
        return json.load(response)


def prometheus(stack, query, run=None):
    """The answer to a query: now, or just after a run has ended, since Prometheus shows a sample for five minutes."""
    when = {} if run is None else {"time": run.log.stat().st_mtime + 10}
    return get(f"{stack.url('prometheus')}/api/v1/query", query=query, **when)["data"]["result"]


def eventually(check, seconds=60):
    """The first true result of `check()`, or its last one; data may still be on its way."""
    deadline = time.monotonic() + seconds
    while True:
        try:
            result = check()
        except OSError:  # it is away
            result = None
        if result or time.monotonic() > deadline:
            return result
        time.sleep(0.3)
