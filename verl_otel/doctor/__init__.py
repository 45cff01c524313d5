"""`verl-otel doctor`: what is set up, what is not, and what to do about it.

One module per area, each a function `check(asked)` that yields findings. They run side by side, in threads of their own
(`examination.py`); what could break or block a process, such as importing verl, happens in another one (`child.py`).
Nothing is sent but marked test data (`probe.py`), and that only where an endpoint is configured.
"""

TIMEOUT = 120.0
"""Seconds that an examination takes at most; importing all of verl is what takes long."""
