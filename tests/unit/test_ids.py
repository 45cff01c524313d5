"""Derived trace and span ids (`tracing/ids.py`): the same in every process of a run, and never from `random`."""

import os
import random
import threading

import pytest
from hypothesis import given
from hypothesis import strategies as st
from opentelemetry import trace
from opentelemetry.context import Context
from opentelemetry.sdk.trace.sampling import ALWAYS_OFF, ALWAYS_ON, ParentBased, TraceIdRatioBased
from opentelemetry.trace import NonRecordingSpan

from verl_otel.tracing import ids
from verl_otel.tracing.ids import DerivedIdGenerator

parts = st.tuples(st.text(max_size=30), st.integers(0, 9), st.integers(0, 10**6), st.text(max_size=20))


def test_ids_are_the_same_in_every_process_and_version():
    # A process of a newer version must land in the trace of an older one: these numbers may not change.
    assert f"{ids.trace_id('20261129-155413-3f9a1c', 1, 7):032x}" == "b8e11c3632b2287918160223d1db106c"
    assert f"{ids.span_id('20261129-155413-3f9a1c', 1, 7, 'gen'):016x}" == "b6bb6e02ca6ddad2"


@pytest.mark.parametrize("other", [("run-2", 1, 7, "gen"), ("run-1", 2, 7, "gen"), ("run-1", 1, 8, "gen")])
def test_another_run_attempt_or_step_has_other_ids(other):
    assert ids.span_id(*other) != ids.span_id("run-1", 1, 7, "gen")
    assert ids.trace_id(*other[:3]) != ids.trace_id("run-1", 1, 7)


def test_another_stage_has_another_span_id_in_the_same_trace():
    assert ids.span_id("run-1", 1, 7, "gen") != ids.span_id("run-1", 1, 7, "testing")


def test_parts_do_not_run_into_each_other():
    assert ids.trace_id("run-1", 11, 1) != ids.trace_id("run-1", 1, 11)
    assert ids.trace_id("run-11", 1, 1) != ids.trace_id("run-1", 11, 1)


@given(st.lists(parts, unique=True, min_size=2, max_size=5))
def test_different_names_never_share_a_span_id(found):
    found = [part for part in found if "\0" not in part[0] + part[3]]
    assert len({ids.span_id(*part) for part in found}) == len(found)


@given(parts)
def test_ids_are_valid_and_fit(part):
    assert 0 < ids.trace_id(*part[:3]) < 2**128
    assert 0 < ids.span_id(*part) < 2**64
    assert ids.span_id(*part) == ids.span_id(*part)


def test_the_generator_never_touches_random():
    before = random.getstate()
    generator = DerivedIdGenerator()
    for _ in range(10):
        generator.generate_trace_id(), generator.generate_span_id()
    assert random.getstate() == before


def test_processes_that_seed_random_alike_have_different_ids(memory):
    found = []
    for _ in range(2):  # what training code does on every rank
        random.seed(0)
        context = memory.tracer.start_span("a", context=Context()).get_span_context()
        found += [context.trace_id, context.span_id]
    assert len(set(found)) == 4


def test_a_forked_process_has_ids_of_its_own():
    generator = DerivedIdGenerator()
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        os.write(writing, generator.generate_trace_id().to_bytes(16, "big"))
        os._exit(0)
    os.waitpid(child, 0)
    os.close(writing)
    of_child = int.from_bytes(os.read(reading, 16), "big")
    os.close(reading)
    assert of_child not in (0, generator.generate_trace_id())


def test_starting_a_span_leaves_the_random_sequence_of_training_alone(memory):
    random.seed(0)
    expected = random.random()
    random.seed(0)
    memory.tracer.start_span("a", context=Context()).end()
    assert random.random() == expected


def test_ids_asked_for_are_used_for_the_next_span_only():
    generator = DerivedIdGenerator()
    with ids.use(5, 6):
        assert (generator.generate_trace_id(), generator.generate_span_id()) == (5, 6)
    assert generator.generate_trace_id() != 5
    assert generator.generate_span_id() != 6


def test_ids_asked_for_are_forgotten_after_an_exception():
    with pytest.raises(RuntimeError), ids.use(5, 6):
        raise RuntimeError
    assert DerivedIdGenerator().generate_span_id() != 6


def test_ids_asked_for_are_not_used_by_another_thread():
    generator, found = DerivedIdGenerator(), []
    with ids.use(5, 6):
        thread = threading.Thread(
            target=lambda: found.extend([generator.generate_trace_id(), generator.generate_span_id()])
        )
        thread.start()
        thread.join(30)
    assert len(found) == 2 and not {5, 6} & set(found)


def test_only_the_id_that_was_asked_for_is_given():
    generator = DerivedIdGenerator()
    with ids.use(None, 6):
        assert generator.generate_span_id() == 6
        assert generator.generate_trace_id() not in (0, 6)


def test_a_child_gets_the_span_id_in_its_parents_trace(memory):
    root = memory.tracer.start_span("root", context=Context())
    with ids.use(5, 6):
        child = memory.tracer.start_span("child", context=trace.set_span_in_context(root, Context()))
    assert child.get_span_context().trace_id == root.get_span_context().trace_id
    assert child.get_span_context().span_id == 6


@pytest.mark.parametrize(
    "sampler",
    [ALWAYS_ON, ALWAYS_OFF, TraceIdRatioBased(0.5), ParentBased(TraceIdRatioBased(0.5)), ParentBased(ALWAYS_ON)],
    ids=lambda sampler: sampler.get_description(),
)
def test_another_process_takes_the_trainers_sampling_decision(new_memory, sampler):
    trainer, worker = new_memory(sampler), new_memory(sampler)
    decisions = set()
    for step in range(60):
        with ids.use(ids.trace_id("run-1", 1, step), ids.span_id("run-1", 1, step, "step")):
            root = trainer.tracer.start_span("verl.step", context=Context())
        remote = ids.remote_context(sampler, "run-1", 1, step, "step")
        own = root.get_span_context()
        assert (remote.trace_id, remote.span_id) == (own.trace_id, own.span_id)
        assert remote.trace_flags.sampled == own.trace_flags.sampled
        assert remote.is_remote
        below = trace.set_span_in_context(NonRecordingSpan(remote), Context())
        assert worker.tracer.start_span("a", context=below).is_recording() == root.is_recording()
        decisions.add(remote.trace_flags.sampled)
    assert len(decisions) == (2 if "0.5" in sampler.get_description() else 1)
