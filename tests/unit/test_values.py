"""verl's metric values -> numbers (`metrics/values.py`): nothing is lost, and nothing is guessed."""

import math
from decimal import Decimal
from enum import Enum, IntEnum
from fractions import Fraction

import numpy
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from verl_otel.metrics.values import kind_of, to_number


class Hostile:
    """Raises from everything that reads a number."""

    def __float__(self):
        raise RuntimeError("no")

    def item(self):
        raise RuntimeError("no")


class FailsAsFloat:
    def __float__(self):
        raise ValueError("no")


class ReturnsNonsense:
    def __float__(self):
        return "7"


class Level(IntEnum):
    HIGH = 3


class Color(Enum):
    RED = 1


def same(a, b):
    return (math.isnan(a) and math.isnan(b)) or a == b


@given(st.floats())
def test_a_float_stays_exactly_as_it_is(value):
    number = to_number(value)
    assert type(number) is float
    assert same(number, value)


@given(st.integers(-(2**63) + 1, 2**63 - 1))
def test_an_integer_of_64_bits_stays_an_integer(value):
    number = to_number(value)
    assert type(number) is int
    assert number == value


@given(st.integers(min_value=2**63, max_value=2**1000) | st.integers(min_value=-(2**1000), max_value=-(2**63) - 1))
def test_a_larger_integer_becomes_the_nearest_float(value):
    number = to_number(value)
    assert type(number) is float
    assert number == float(value)


def test_an_integer_beyond_the_floats_is_not_a_number():
    assert to_number(10**400) is None
    assert to_number(-(10**400)) is None


@pytest.mark.parametrize("value", [True, False, numpy.True_, numpy.False_, torch.tensor(True), torch.tensor(False)])
def test_a_truth_value_is_zero_or_one(value):
    number = to_number(value)
    assert type(number) is int
    assert number == (1 if value else 0)


@given(st.floats(), st.sampled_from([numpy.float64, numpy.float32, numpy.float16]))
def test_a_numpy_float_keeps_its_value(value, kind):
    with numpy.errstate(over="ignore"):
        scalar = kind(value)
    number = to_number(scalar)
    assert type(number) is float
    assert same(number, float(scalar))


@given(st.floats(), st.sampled_from([torch.float64, torch.float32, torch.bfloat16, torch.float16]))
def test_a_torch_scalar_keeps_its_value(value, kind):
    scalar = torch.tensor(value, dtype=torch.float64).to(kind)
    number = to_number(scalar)
    assert type(number) is float
    assert same(number, scalar.item())


@pytest.mark.parametrize(
    "value",
    [
        numpy.int64(-7),
        numpy.int8(-7),
        numpy.array(-7),
        numpy.array([-7]),
        numpy.array([[[-7]]]),
        torch.tensor(-7),
        torch.tensor([[-7]]),
        torch.tensor(-7, dtype=torch.int8),
    ],
)
def test_an_integer_array_of_one_element_is_its_element(value):
    number = to_number(value)
    assert type(number) is int
    assert number == -7


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (numpy.array(0.1), 0.1),
        (numpy.array([0.1]), 0.1),
        (numpy.array([0.1], dtype=object), 0.1),
        (numpy.longdouble("0.5"), 0.5),
        (numpy.uint64(2**64 - 1), float(2**64 - 1)),
        (torch.tensor([0.5]), 0.5),
        (torch.tensor(0.5, requires_grad=True), 0.5),
        (torch.nn.Parameter(torch.tensor(0.5)), 0.5),
        (Decimal("0.1"), 0.1),
        (Fraction(1, 4), 0.25),
        (Level.HIGH, 3),
        (-0.0, -0.0),
        (5e-324, 5e-324),
    ],
)
def test_other_numbers_are_read(value, expected):
    number = to_number(value)
    assert number == expected
    assert type(number) is type(expected)
    assert math.copysign(1, number) == math.copysign(1, expected)


@pytest.mark.parametrize("value", [math.nan, numpy.nan, numpy.float32("nan"), torch.tensor(math.nan), Decimal("NaN")])
def test_nan_is_a_number(value):
    assert math.isnan(to_number(value))


@pytest.mark.parametrize(
    "value", [math.inf, numpy.inf, numpy.array([numpy.inf]), torch.tensor(math.inf), Decimal("inf")]
)
def test_infinity_is_a_number(value):
    assert to_number(value) == math.inf
    assert to_number(-value) == -math.inf


@pytest.mark.parametrize(
    "value",
    [
        None,
        "3.5",
        "",
        b"3.5",
        bytearray(b"1"),
        [],
        [1.0],
        (1.0,),
        {"a": 1.0},
        {1.0},
        1 + 2j,
        numpy.complex128(1 + 2j),
        numpy.array([]),
        numpy.array([1.0, 2.0]),
        numpy.array("3.5"),
        numpy.str_("3.5"),
        numpy.array([None]),
        torch.tensor([1.0, 2.0]),
        torch.tensor([]),
        torch.zeros(2, 2),
        Decimal("sNaN"),
        Color.RED,
        float,
        print,
        object(),
        Hostile(),
        FailsAsFloat(),
        ReturnsNonsense(),
    ],
    ids=lambda value: f"{type(value).__name__}-{value!r:.20}",
)
def test_what_is_not_one_number_is_not_guessed(value):
    assert to_number(value) is None


@given(st.text() | st.binary() | st.lists(st.floats()) | st.dictionaries(st.text(), st.integers()) | st.none())
def test_text_and_collections_are_never_numbers(value):
    assert to_number(value) is None


@pytest.mark.parametrize(
    ("value", "kind"),
    [
        (None, "none"),
        ("a", "text"),
        ([1], "array"),
        ({}, "mapping"),
        (numpy.zeros(2), "array"),
        (torch.zeros(2), "array"),
        (type("Table", (), {})(), "table"),
        (type("DataFrame", (), {})(), "table"),
        (type("Image", (), {})(), "media"),
        (object(), "other"),
    ],
)
def test_what_is_not_a_number_is_counted_by_its_kind(value, kind):
    assert kind_of(value) == kind
