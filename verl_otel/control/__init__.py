"""Run control, off unless `VERL_OTEL_CONTROL` names a folder: a running training may be asked to save a checkpoint, to
pause or to stop.

`requests` is what is asked: a signed file in the folder, which the nodes share. `run` is who does it, in the trainer's
process. A file rather than a port: the trainer listens on nothing, and need not reach the relay, nor the relay it.
"""
