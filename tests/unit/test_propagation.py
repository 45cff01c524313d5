"""Context across calls (`tracing/propagation.py`): each kind of callable stays what it is, and nothing leaks."""

import asyncio
import gc
import inspect
import logging

import pytest
from hypothesis import given
from hypothesis import strategies as st
from opentelemetry import baggage, propagate, trace
from opentelemetry import context as otel_context
from opentelemetry.context import Context
from opentelemetry.propagators.textmap import TextMapPropagator
from opentelemetry.trace import NonRecordingSpan, SpanContext, TraceFlags

from verl_otel.hooks import worker_group
from verl_otel.tracing import propagation
from verl_otel.tracing.propagation import BY_REFERENCE, BY_VALUE, CARRIER, carrier_kind, with_carrier

TRACE_ID, SPAN_ID = 0x0AF7651916CD43DD8448EB211C80319C, 0xB7AD6B7169203331
PARENT = {"traceparent": f"00-{TRACE_ID:032x}-{SPAN_ID:016x}-01"}


def here():
    """Trace id of the current span, 0 if there is none."""
    return trace.get_current_span().get_span_context().trace_id


def plain(a, b=2, *more, **options):
    return here(), a, b, more, options


async def coroutine(a, b=2, *more, **options):
    first = here()
    await asyncio.sleep(0)
    assert here() == first
    return first, a, b, more, options


def generator(count):
    for index in range(count):
        got = yield here(), index
        assert got is None
    return here(), "end"


async def async_generator(count):
    for index in range(count):
        await asyncio.sleep(0)
        yield here(), index


@pytest.fixture(autouse=True)
def nothing_leaks(caplog):
    """No test may make OpenTelemetry complain about a context that is detached where it was not attached."""
    caplog.set_level(logging.DEBUG)
    yield
    assert "Failed to detach context" not in caplog.text


KINDS = {
    plain: lambda f: (
        not any(
            check(f) for check in (inspect.iscoroutinefunction, inspect.isgeneratorfunction, inspect.isasyncgenfunction)
        )
    ),
    coroutine: inspect.iscoroutinefunction,
    generator: inspect.isgeneratorfunction,
    async_generator: inspect.isasyncgenfunction,
}


@pytest.mark.parametrize("func", KINDS, ids=lambda f: f.__name__)
def test_a_callable_keeps_its_kind_and_its_name(func):
    wrapped = with_carrier(func)
    assert KINDS[func](wrapped)
    assert (wrapped.__name__, wrapped.__qualname__, wrapped.__module__) == (
        func.__name__,
        func.__qualname__,
        func.__module__,
    )


@pytest.mark.parametrize("func", KINDS, ids=lambda f: f.__name__)
def test_the_signature_shows_the_carrier_and_nothing_else_changes(func):
    wrapped = with_carrier(func)
    shown = inspect.signature(wrapped).parameters
    assert shown[CARRIER].kind is inspect.Parameter.KEYWORD_ONLY
    assert [p for p in shown.values() if p.name != CARRIER] == list(inspect.signature(func).parameters.values())
    assert inspect.unwrap(wrapped) is wrapped  # Ray follows `__wrapped__` and takes the signature that it finds


def test_the_kind_of_a_carrier_is_read_from_the_signature():
    assert carrier_kind(list(inspect.signature(with_carrier(plain)).parameters.values())) == BY_REFERENCE
    assert (
        carrier_kind(list(inspect.signature(worker_group._travelling(plain, "actor")).parameters.values())) == BY_VALUE
    )
    assert carrier_kind(list(inspect.signature(plain).parameters.values())) is None
    assert carrier_kind([]) is None
    assert carrier_kind(None) is None


def test_wrapping_twice_shows_one_carrier_of_the_outer_kind():
    """As a method of a worker is, which is registered first and then bound to a `WorkerDict`."""
    twice = worker_group._travelling(with_carrier(plain), "actor")
    names = list(inspect.signature(twice).parameters)
    assert names == ["a", "b", "more", CARRIER, "options"]
    assert carrier_kind(list(inspect.signature(twice).parameters.values())) == BY_VALUE
    assert twice(1, **{CARRIER: PARENT}) == (TRACE_ID, 1, 2, (), {})


def test_a_plain_function_sees_its_parent_and_leaks_nothing():
    wrapped = with_carrier(plain)
    assert wrapped(1, 3, 4, x=5, **{CARRIER: PARENT}) == (TRACE_ID, 1, 3, (4,), {"x": 5})
    assert here() == 0
    assert wrapped(1) == (0, 1, 2, (), {})


def test_a_method_gets_its_own_self():
    class Worker:
        @with_carrier
        def rank(self, a):
            return self, here(), a

    worker = Worker()
    assert worker.rank(7, **{CARRIER: PARENT}) == (worker, TRACE_ID, 7)


def test_a_coroutine_sees_its_parent_and_leaks_nothing():
    wrapped = with_carrier(coroutine)

    async def run():
        result = await wrapped(1, x=5, **{CARRIER: PARENT})
        return result, here()

    assert asyncio.run(run()) == ((TRACE_ID, 1, 2, (), {"x": 5}), 0)


def test_concurrent_coroutines_each_see_their_own_parent():
    async def twice():
        first = here()
        await asyncio.sleep(0.001)
        return first, here()

    carriers = [{"traceparent": f"00-{n:032x}-{SPAN_ID:016x}-01"} for n in range(1, 20)]

    async def run():
        return await asyncio.gather(*(with_carrier(twice)(**{CARRIER: carrier}) for carrier in carriers))

    assert asyncio.run(run()) == [(n, n) for n in range(1, 20)]


def test_a_generator_sees_its_parent_and_its_caller_does_not():
    items = with_carrier(generator)(3, **{CARRIER: PARENT})
    seen = []
    while True:
        try:
            seen.append(next(items))
        except StopIteration as stop:
            result = stop.value
            break
        assert here() == 0
    assert seen == [(TRACE_ID, 0), (TRACE_ID, 1), (TRACE_ID, 2)]
    assert result == (TRACE_ID, "end")
    assert here() == 0


def test_what_is_sent_into_a_generator_arrives():
    def echo():
        got = yield "ready"
        while got != "stop":
            got = yield got, here()
        return "stopped"

    items = with_carrier(echo)(**{CARRIER: PARENT})
    assert next(items) == "ready"
    assert items.send(1) == (1, TRACE_ID)
    assert items.send(2) == (2, TRACE_ID)
    with pytest.raises(StopIteration) as stop:
        items.send("stop")
    assert stop.value.value == "stopped"


def test_a_generator_that_is_left_early_cleans_up():
    closed = []

    def items():
        try:
            yield 1
            yield 2
        finally:
            closed.append(True)

    running = with_carrier(items)(**{CARRIER: PARENT})
    assert next(running) == 1
    running.close()
    assert closed == [True]
    assert here() == 0


def test_an_async_generator_sees_its_parent_and_its_caller_does_not():
    async def run():
        seen = []
        async for item in with_carrier(async_generator)(3, **{CARRIER: PARENT}):
            seen.append(item)
            assert here() == 0
        assert here() == 0
        return seen

    assert asyncio.run(run()) == [(TRACE_ID, 0), (TRACE_ID, 1), (TRACE_ID, 2)]


def test_an_async_generator_that_is_read_by_several_tasks_leaks_nothing():
    async def run():
        items = with_carrier(async_generator)(4, **{CARRIER: PARENT})

        async def read():
            item = await items.__anext__()
            assert here() == 0
            return item

        seen = [await asyncio.create_task(read()) for _ in range(3)]
        await asyncio.create_task(items.aclose())
        assert here() == 0
        return seen

    assert asyncio.run(run()) == [(TRACE_ID, 0), (TRACE_ID, 1), (TRACE_ID, 2)]


def test_an_async_generator_that_is_left_early_cleans_up():
    closed = []

    async def items():
        try:
            yield 1
            yield 2
        finally:
            closed.append(True)

    async def run():
        running = with_carrier(items)(**{CARRIER: PARENT})
        assert await running.__anext__() == 1
        await running.aclose()
        assert closed == [True]

    asyncio.run(run())


def test_an_async_generator_that_is_cancelled_cleans_up():
    closed = []

    async def items():
        try:
            yield 1
            await asyncio.sleep(60)
        finally:
            closed.append(True)

    async def run():
        running = with_carrier(items)(**{CARRIER: PARENT})
        await running.__anext__()
        task = asyncio.create_task(running.__anext__())
        await asyncio.sleep(0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert closed == [True]

    asyncio.run(run())


class Failure(Exception):
    pass


FAILURE = Failure("as it is")


def failing_plain():
    raise FAILURE


async def failing_coroutine():
    raise FAILURE


def failing_generator():
    yield 1
    raise FAILURE


async def failing_async_generator():
    yield 1
    raise FAILURE


async def exhaust(items):
    async for _ in items:
        pass


@pytest.mark.parametrize(
    "run",
    [
        lambda: with_carrier(failing_plain)(**{CARRIER: PARENT}),
        lambda: asyncio.run(with_carrier(failing_coroutine)(**{CARRIER: PARENT})),
        lambda: list(with_carrier(failing_generator)(**{CARRIER: PARENT})),
        lambda: asyncio.run(exhaust(with_carrier(failing_async_generator)(**{CARRIER: PARENT}))),
    ],
    ids=["plain", "coroutine", "generator", "async generator"],
)
def test_an_exception_arrives_unchanged_and_the_context_is_left(run):
    with pytest.raises(Failure) as caught:
        run()
    assert caught.value is FAILURE
    assert here() == 0


@given(
    st.none()
    | st.text()
    | st.integers()
    | st.lists(st.text())
    | st.dictionaries(
        st.sampled_from(["traceparent", "tracestate", "baggage", "x"]), st.text() | st.integers() | st.none()
    )
)
def test_a_broken_carrier_never_hurts_the_call(carrier):
    assert with_carrier(plain)(1, **{CARRIER: carrier})[1:] == (1, 2, (), {})
    assert [index for _, index in with_carrier(generator)(2, **{CARRIER: carrier})] == [0, 1]
    assert here() == 0


def test_what_is_injected_is_extracted(memory):
    with memory.tracer.start_as_current_span("stage") as span:
        token = otel_context.attach(baggage.set_baggage("stage", "update"))
        carrier = propagation.inject()
        otel_context.detach(token)
    context = propagation.extract(carrier)
    assert trace.get_current_span(context).get_span_context().span_id == span.get_span_context().span_id
    assert baggage.get_baggage("stage", context) == "update"
    assert all(isinstance(k, str) and isinstance(v, str) for k, v in carrier.items())


def test_without_a_span_there_is_no_carrier():
    assert propagation.inject() is None
    assert propagation.extract(None) is None
    assert propagation.extract({}) is None
    assert propagation.attach(None) is None
    propagation.detach(None)


def test_the_threads_of_each_event_loop_keep_the_context():
    """Also of a loop that is where an earlier one was in memory."""

    async def in_a_thread():
        propagation.into_threads()
        return await asyncio.get_running_loop().run_in_executor(None, here)

    token = propagation.attach(PARENT)
    try:
        for _ in range(20):
            assert asyncio.run(in_a_thread()) == TRACE_ID
            gc.collect()
    finally:
        propagation.detach(token)


class OneHeader(TextMapPropagator):
    """A user's own format."""

    def extract(self, carrier, context=None, getter=None):
        trace_id = int(carrier.get("x-my-trace", "0"))
        parent = SpanContext(trace_id, SPAN_ID, True, TraceFlags(TraceFlags.SAMPLED))
        return trace.set_span_in_context(NonRecordingSpan(parent), context or Context())

    def inject(self, carrier, context=None, setter=None):
        carrier["x-my-trace"] = str(trace.get_current_span(context).get_span_context().trace_id)

    @property
    def fields(self):
        return {"x-my-trace"}


def test_the_users_propagators_are_used(memory):
    before = propagate.get_global_textmap()
    propagate.set_global_textmap(OneHeader())
    try:
        with memory.tracer.start_as_current_span("stage") as span:
            carrier = propagation.inject()
        expected = span.get_span_context().trace_id
        assert carrier == {"x-my-trace": str(expected)}
        assert with_carrier(plain)(1, **{CARRIER: carrier})[0] == expected
    finally:
        propagate.set_global_textmap(before)
