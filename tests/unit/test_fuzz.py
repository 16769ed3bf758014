"""Hostile files: a fixed corpus, and the start of the long run of `python -m bench.fuzz`."""

from __future__ import annotations

import json
import random
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from raw_files import entry, golden, golden_metadata, raw_file, save
from repo import DATA

from bench import fuzz
from fold.checkpoint.reader import open_checkpoint
from fold.errors import MossError
from fold.scaling.factors import Factors
from fold.scaling.record import RECORD_KEY, FoldRecord

KEY = "layers.1.proj.o.weight"


def nested(depth: int) -> bytes:
    return b'{"a":' * depth + b"1" + b"}" * depth


def many_keys(count: int) -> bytes:
    return b"{" + b",".join(b'"%d":{}' % n for n in range(count)) + b"}"


def weights(value: float, dtype: torch.dtype = torch.bfloat16) -> Callable[[Path], Path]:
    def make(file: Path) -> Path:
        tensors = golden("cool")
        tensors[KEY] = tensors[KEY].to(dtype)
        tensors[KEY][3, 5] = value
        return save(file, tensors)

    return make


def header(content: Any, data: bytes = b"", length: int | None = None) -> Callable[[Path], Path]:
    return lambda file: raw_file(file, content, data, length)


def sound(count: int | None = None, extra: bytes = b"") -> Callable[[Path], Path]:
    def make(file: Path) -> Path:
        raw = (DATA / "cool.safetensors").read_bytes()
        file.write_bytes(raw[:count] + extra)
        return file

    return make


def record(text: str) -> Callable[[Path], Path]:
    return lambda file: save(file, golden("hot_fp16fix"), golden_metadata("hot_fp16fix") | {RECORD_KEY: text})


CORPUS: dict[str, Callable[[Path], Path]] = {
    **{f"cut at {n}": sound(n) for n in (0, 1, 7, 8, 9, 100, 5000, 300_000, -1)},
    "one byte more": sound(extra=b"\0"),
    "a megabyte more": sound(extra=bytes(2**20)),
    **{f"claims {n}": header("{}", length=n) for n in (1, 3, 2**31, 2**32, 2**62, 2**63, 2**64 - 1)},
    "deep objects": header(nested(100_000)),
    "deep lists": header(b"[" * 200_000),
    "a million keys": header(many_keys(1_000_000)),
    "all the keys that fit": header(many_keys(300_000)),
    "one key of megabytes": header({"a" * 4_000_000: entry("F32", [1], 0, 4)}, b"\0" * 4),
    "key twice": header(b'{"a":{"dtype":"U8","shape":[1],"data_offsets":[0,1]},"a":{}}', b"\0"),
    "field twice": header(b'{"a":{"dtype":"U8","dtype":"U8","shape":[1],"data_offsets":[0,1]}}', b"\0"),
    "not UTF-8": header(b'{"\xff\xfe":1}'),
    "half a surrogate": header(b'{"\\ud800":{"dtype":"U8","shape":[1],"data_offsets":[0,1]}}', b"\0"),
    "control characters": header({"\x1b[31m\r\n": entry("U8", [1], 0, 1)}, b"\0"),
    "unknown dtype": header({"a": entry("F128", [1], 0, 16)}, b"\0" * 16),
    "dtype a list": header({"a": {"dtype": ["F32"], "shape": [1], "data_offsets": [0, 4]}}, b"\0" * 4),
    "shape of floats": header({"a": {"dtype": "F32", "shape": [1.0], "data_offsets": [0, 4]}}, b"\0" * 4),
    "shape of booleans": header({"a": {"dtype": "U8", "shape": [True], "data_offsets": [0, 1]}}, b"\0"),
    "shape that overflows": header({"a": entry("U8", [2**32, 2**32], 0, 0)}),
    "shape that multiplies to zero": header({"a": entry("F32", [2**62, 0], 0, 0)}),
    "huge rank": header({"a": entry("U8", [1] * 100_000, 0, 1)}, b"\0"),
    "number of digits": header(b'{"a":' + b"9" * 100_000 + b"}"),
    "NaN as a size": header(b'{"a":{"dtype":"U8","shape":[NaN],"data_offsets":[0,1]}}', b"\0"),
    "offsets that overlap": header({"a": entry("U8", [4], 0, 4), "b": entry("U8", [4], 2, 6)}, b"\0" * 6),
    "offsets turned round": header({"a": entry("U8", [4], 4, 0)}, b"\0" * 4),
    "metadata a list": header({"__metadata__": []}),
    "metadata of numbers": header({"__metadata__": {"a": 1}}),
    "empty": header({}),
    "a number": header(b"1"),
    "a pickle": lambda file: file.write_bytes(b"\x80\x02}q\x00.") and file,
    "a zip": lambda file: file.write_bytes(b"PK\x03\x04" + bytes(100)) and file,
    **{f"weight {v} {d}": weights(v, d) for v in (float("nan"), float("inf"), float("-inf"))
       for d in (torch.bfloat16, torch.float16, torch.float32)},
    **{f"record {text[:30]}": record(text) for text in (
        "", "null", "[]", "0.0625", '"0.0625"', "{", '{"c":0}', '{"c":-1}', '{"c":NaN}', '{"c":Infinity}',
        '{"c":"1/16"}', '{"c":[0.0625]}', '{"c":null}', '{"c":true}', '{"c":1e-400}', '{"c":1e400}',
        '{"c":1' + "0" * 5000 + "}", '{"c":0.0625,"via":"weights"}', '{"c":0.0625,"eps":"other"}',
        '{"c":0.0625,"s_ffn":0}', '{"c":0.0625,"s_attn":{}}', "[" * 100_000, '{"c":0.0625,"x":' + "[" * 100_000,
        '{"c":\ud7ff}',
    )},
}  # fmt: skip


@pytest.mark.parametrize("case", CORPUS)
def test_hostile_files_are_one_sentence_in_bounded_time_and_memory(case: str, tmp_path: Path) -> None:
    """One sentence each, within two seconds, and no memory beyond the file's size and 256 MB."""
    fuzz.open_and_read(DATA / "cool.safetensors")
    file = CORPUS[case](tmp_path / "hostile.safetensors")
    said = fuzz.outcome(lambda: fuzz.open_and_read(file), file)
    assert said != "opened"
    assert "hostile.safetensors" in said


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux can begin a new peak of a process's memory")
def test_memory_beyond_the_bound_is_a_finding_each_time() -> None:
    for _ in range(2):  # the first one's peak must not hide the second one's
        with pytest.raises(AssertionError, match=r"[0-9]+ MB more until 'opened'"):
            fuzz.outcome(lambda: bytearray(b"x") * ((fuzz.MEGABYTES + 32) * 2**20))
    assert fuzz.outcome(lambda: bytearray(b"x") * (64 * 2**20)) == "opened"


def test_the_golden_files_pass() -> None:
    for name in ("cool", "hot_fp16fix_s", "hot_fused_qkv", "hot_prefixed"):
        assert fuzz.outcome(lambda name=name: fuzz.open_and_read(DATA / f"{name}.safetensors")) == "opened"


@pytest.mark.parametrize("first", [0, 100, 200])
def test_the_first_seeds_of_the_long_run_find_nothing(first: int, tmp_path: Path) -> None:
    files = fuzz.sources()
    fuzz.open_and_read(DATA / "cool.safetensors")
    for seed in range(first, first + 100):
        try:
            fuzz.one(seed, files, tmp_path)
        except AssertionError as error:
            pytest.fail(f"seed {seed}: {error}")


def test_records_of_every_shape() -> None:
    numbers = random.Random(1)
    passed = 0
    for _ in range(2000):
        text = fuzz.record_text(numbers)
        try:
            found = FoldRecord.parse(text, "x.safetensors")
        except MossError as error:
            assert "x.safetensors" in str(error) and "\n" not in str(error)
            continue
        passed += 1
        assert 0 < found.c < float("inf") and 0 < found.s_attn < float("inf") and found.via == "gate"
        assert FoldRecord.parse(found.to_json(), "x") == found
    assert passed > 50


def test_factors_of_every_shape() -> None:
    """The MOSS_FACTORS socket takes JSON from other packs."""
    for value in (*fuzz.ODD, *({"c": odd} for odd in fuzz.ODD), *({"c": [0.5], "s_ffn": odd} for odd in fuzz.ODD)):
        try:
            Factors.from_json(value, "the factors input")
        except MossError as error:
            assert "\n" not in str(error)


def test_an_index_of_every_shape(tmp_path: Path) -> None:
    """HF folders: the index is as untrusted as a header."""
    place = tmp_path / "diffusion_pytorch_model.safetensors.index.json"
    for odd in fuzz.ODD:
        for index in (odd, {"weight_map": odd}, {"weight_map": {KEY: odd}}, {"weight_map": {"a": "b.safetensors"}}):
            try:
                place.write_text(json.dumps(index), "utf-8")
            except UnicodeEncodeError:
                continue
            said = fuzz.outcome(lambda: fuzz.open_and_read(tmp_path))
            assert said != "opened", index


def test_the_long_run_reports(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert fuzz.main(["--seconds", "1", "--seed", "5", "--keep", str(tmp_path / "findings")]) == 0
    assert "0 findings" in capsys.readouterr().out
    assert not (tmp_path / "findings").exists()


def test_opening_twice_is_the_same(tmp_path: Path) -> None:
    with open_checkpoint(DATA / "cool.safetensors") as one, open_checkpoint(DATA / "cool.safetensors") as two:
        assert one.names() == two.names()
