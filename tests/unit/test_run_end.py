"""How a run has ended, as the trainer or the launcher says it: the event and the metric."""

import time

import pytest

from verl_otel.export.termination import Terminated

ENDS = [
    (None, "finished"),
    (ValueError("no reward"), "failed"),
    (SystemExit(1), "failed"),
    (KeyboardInterrupt(), "killed"),
    (Terminated("by SIGTERM"), "killed"),
]


def told(memory):
    """States of the events, and the points of the metric: state -> seconds since that time."""
    events = [event for event in memory.events if event.event_name == "verl.run.finished"]
    points = memory.values("verl.run.end_time", "verl.run.state")
    return (
        [event.attributes["verl.run.state"] for event in events],
        {state: time.time() - value for (state,), value in points.items()},
    )


@pytest.mark.parametrize(("error", "state"), ENDS)
def test_the_trainer_says_it_once(memory, error, state):
    process = memory.process()
    process.run_finished(error)
    process.run_finished(ValueError("later"))
    events, points = told(memory)
    assert events == [state] and points.keys() == {state} and 0 <= points[state] < 60
    (event,) = memory.events
    assert event.body.get("exception.type") == (type(error).__name__ if error else None)
    assert event.severity_number.name == ("ERROR" if state == "failed" else "INFO")


@pytest.mark.parametrize(("error", "state"), ENDS)
def test_a_launcher_says_it_only_where_the_trainer_dies_with_it(memory, error, state):
    launcher = memory.process("launcher")
    launcher.start_run()
    launcher.close(error)
    events, points = told(memory)
    expected = ["killed"] if state == "killed" else []  # everything else the trainer has seen before
    assert events == expected and list(points) == expected


def test_a_process_that_launches_and_trains_nothing_says_nothing(memory):
    memory.process("launcher").close(KeyboardInterrupt())
    assert told(memory) == ([], {})
