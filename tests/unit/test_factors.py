"""Factors: what is a factor, how it is written, and which one a peak asks for."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fold.errors import MossError
from fold.scaling.factors import DEFAULT, Factors, factor_for_peak, parse_factor


@pytest.mark.parametrize(
    ("text", "values"),
    [
        ("0.0625", (0.0625,)),
        ("1/16", (0.0625,)),
        ("2^-4", (0.0625,)),
        (" 1/16 , 0.5,1 ", (0.0625, 0.5, 1.0)),
        (0.25, (0.25,)),
        (1, (1.0,)),
    ],
)
def test_factors_are_read(text: str | float, values: tuple[float, ...]) -> None:
    assert parse_factor(text) == values


@pytest.mark.parametrize(
    "text", ["", "a", "1/0", "0", "-1", "nan", "inf", "1,,2", "1/2/3", "1e300", "1e-300", "(-8)^0.5", "-2^-4"]
)
def test_what_is_no_factor_is_named(text: str) -> None:
    with pytest.raises(MossError, match="s_ffn"):
        parse_factor(text, "s_ffn")


@pytest.mark.parametrize("value", [0, -1.0, float("nan"), float("inf"), True, "1", None, [1.0], 10**400])
def test_bad_values_are_refused_in_words(value: object) -> None:
    with pytest.raises(MossError, match=r"^c .*\.$"):
        Factors((value,))  # type: ignore[arg-type]


def test_a_deep_list_is_refused_in_words() -> None:
    deep: list[object] = []
    for _ in range(100_000):
        deep = [deep]
    with pytest.raises(MossError, match="too deep to show"):
        Factors.from_json({"c": [deep]})


def test_lists_are_expanded_or_refused() -> None:
    factors = Factors((0.5, 0.25), (1.0,), (0.5, 1.0))
    assert factors.expand(2) == Factors((0.5, 0.25), (1.0, 1.0), (0.5, 1.0))
    with pytest.raises(MossError, match="c has 2 values, but this model has 3 blocks"):
        factors.expand(3)
    with pytest.raises(MossError, match="same number of values"):
        Factors((0.5, 0.25), (1.0, 1.0, 1.0))
    with pytest.raises(MossError, match="s_attn needs at least one value"):
        Factors(s_attn=())


def test_what_factors_say_of_themselves() -> None:
    assert DEFAULT.uniform and DEFAULT.power_of_two and not DEFAULT.identity
    assert Factors((0.5, 0.5)).uniform
    assert not Factors((0.5, 0.25)).uniform
    assert not Factors((0.1,)).power_of_two
    assert Factors((1.0, 1.0)).identity


def test_factors_survive_json() -> None:
    factors = Factors((0.5, 0.25), (1.0,), (0.5, 1.0))
    assert factors.to_json() == {"c": [0.5, 0.25], "s_attn": 1.0, "s_ffn": [0.5, 1.0]}
    assert Factors.from_json(factors.to_json()) == factors
    with pytest.raises(MossError, match=r"s_attn in probe\.json"):
        Factors.from_json({"s_attn": "x"}, "probe.json")
    with pytest.raises(MossError, match=r"probe\.json must be a JSON object"):
        Factors.from_json([1], "probe.json")


@given(st.floats(min_value=0.0, max_value=1e9))
def test_the_factor_is_the_largest_that_reaches_the_target(peak: float) -> None:
    factor = factor_for_peak(peak)
    assert peak * factor <= 4096.0
    assert factor == 1.0 or peak * factor * 2 > 4096.0


def test_the_factor_of_the_base_weights() -> None:
    assert factor_for_peak(6.2e4) == 1 / 16
    assert factor_for_peak(4096.0) == 1.0
    for peak in (float("nan"), float("inf"), -1.0):
        with pytest.raises(MossError, match="peak"):
            factor_for_peak(peak)


@pytest.mark.parametrize("text", ["0,0625", " 0,5", "00,25", "0,1"])
def test_a_decimal_comma_is_said_to_be_one(text: str) -> None:
    """What was read, and what to write, which then works."""
    with pytest.raises(MossError, match=r"c = .* was read as a list of two values") as caught:
        parse_factor(text, "c")
    assert text.strip() in str(caught.value)
    advised = str(caught.value).rpartition("write ")[2].rstrip(".")
    assert parse_factor(advised, "c") == (float(text.replace(",", ".")),)


def test_lists_with_commas_are_still_lists() -> None:
    assert parse_factor("1,2", "c") == (1.0, 2.0)
    assert parse_factor("0.5,0.25", "c") == (0.5, 0.25)
    with pytest.raises(MossError, match=r"c has 2 values.*a decimal point is a point"):
        Factors(parse_factor("1,5")).expand(4)
