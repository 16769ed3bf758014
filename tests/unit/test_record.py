"""The fold record: read, checked, and written back the same."""

from __future__ import annotations

import copy
import json

import pytest
from hypothesis import given
from hypothesis import strategies as st
from raw_files import golden_metadata

from fold.errors import MossError
from fold.scaling.factors import DEFAULT, Factors
from fold.scaling.record import RECORD_KEY, FoldRecord

GOOD = {"c": 0.0625, "via": "gate", "s_attn": 1.0, "s_ffn": 1.0, "eps": "stock"}


@pytest.mark.parametrize("name", ["hot_fp16fix", "hot_fp16fix_s", "warm_fp16fix_bf16"])
def test_golden_records_are_read_and_written_the_same(name: str) -> None:
    text = golden_metadata(name)[RECORD_KEY]
    record = FoldRecord.parse(text, name)
    assert record.to_json() == text
    assert FoldRecord.of(record.factors).to_json() == text


def test_the_fields_of_a_record_are_read() -> None:
    record = FoldRecord.parse(golden_metadata("hot_fp16fix_s")[RECORD_KEY], "x")
    assert record == FoldRecord(0.0625, 0.5, 0.25)
    assert record.factors == Factors((0.0625,), (0.5,), (0.25,))
    assert FoldRecord.parse('{"c": 1}', "x") == FoldRecord(1.0)


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=8,
)


@given(st.dictionaries(st.text().filter(lambda key: key not in GOOD), json_values, max_size=4))
def test_unknown_fields_survive(extra: dict[str, object]) -> None:
    record = FoldRecord.parse(json.dumps(GOOD | extra), "x")
    again = FoldRecord.parse(record.to_json(), "x")
    assert again == record
    assert dict(again.extra) == extra
    assert list(json.loads(record.to_json()))[:5] == list(GOOD)


@pytest.mark.parametrize("field", ["c", "s_attn", "s_ffn"])
@pytest.mark.parametrize(
    "value", ["0", "-0.5", "NaN", "Infinity", '"0.5"', "[0.5]", "true", "null", "{}", "1" + "0" * 400]
)
def test_bad_factors_name_file_and_field(field: str, value: str) -> None:
    text = json.dumps(GOOD).replace(f'"{field}": {GOOD[field]}', f'"{field}": {value}')
    with pytest.raises(MossError, match=rf"^{field} in the {RECORD_KEY} record of bad\.safetensors .*\.$"):
        FoldRecord.parse(text, "bad.safetensors")


@pytest.mark.parametrize(
    ("field", "value"), [("via", "weights"), ("via", None), ("via", ["gate"]), ("eps", "none"), ("eps", 1)]
)
def test_unknown_kinds_name_file_and_field(field: str, value: object) -> None:
    with pytest.raises(MossError, match=rf"^{field} in the {RECORD_KEY} record of bad\.safetensors"):
        FoldRecord.parse(json.dumps(GOOD | {field: value}), "bad.safetensors")


@pytest.mark.parametrize(
    "text", ["", "{", "[]", "null", "3", '"x"', "{}", '{"via": "gate"}', "[" * 100_000, "9" * 10_000]
)
def test_what_is_no_record_names_the_file(text: str) -> None:
    with pytest.raises(MossError, match=r"record of bad\.safetensors .*\.$"):
        FoldRecord.parse(text, "bad.safetensors")


def test_no_record_is_none() -> None:
    assert FoldRecord.from_metadata(None, "x") is None
    assert FoldRecord.from_metadata({"title": "x"}, "x") is None


def test_per_block_factors_have_no_record() -> None:
    with pytest.raises(MossError, match="Per-block"):
        FoldRecord.of(Factors((0.5, 0.25)))


def test_a_record_can_be_copied_and_shares_nothing_that_can_be_changed() -> None:
    record = FoldRecord.of(DEFAULT, (("by", "x"),))
    assert copy.deepcopy(record) == record
    assert hash(copy.deepcopy(FoldRecord(0.5))) == hash(FoldRecord(0.5))  # a dict in it could not be hashed
