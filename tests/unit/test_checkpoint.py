"""Opening checkpoints: every layout, and every kind of damage in a sentence that names file and field."""

from __future__ import annotations

import json
import math
import os
import struct
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from raw_files import entry, golden, quantized, raw_file, save, shard, write_index
from repo import DATA, ROOT
from safetensors import SafetensorError, safe_open
from torch import Tensor

from fold.checkpoint.header import DTYPE_BITS, MAX_HEADER_BYTES, read_header
from fold.checkpoint.reader import INDEX_NAME, SINGLE_NAME, Checkpoint, check_finite, is_finite, open_checkpoint
from fold.errors import MossError
from fold.scaling.record import RECORD_KEY, FoldRecord

O_WEIGHT = "layers.1.proj.o.weight"


def assert_holds_golden(checkpoint: Checkpoint, tensors: dict[str, Tensor]) -> None:
    found = checkpoint.state_dict()
    assert found.keys() == tensors.keys()
    for name, tensor in tensors.items():
        assert found[name].dtype == tensor.dtype and torch.equal(found[name], tensor), name


@pytest.mark.parametrize("name", ["hot", "hot_prefixed", "hot_fused_qkv"])
def test_layout_prefix_and_dtype_of_golden_files_are_recognised(name: str) -> None:
    with open_checkpoint(DATA / f"{name}.safetensors") as checkpoint:
        assert checkpoint.fused == ("fused" in name)
        assert checkpoint.prefix == ("model.diffusion_model." if "prefixed" in name else "")
        assert (checkpoint.dtype, checkpoint.quantization, checkpoint.record) == ("bf16", None, None)
        assert (checkpoint.arch.dim, checkpoint.arch.depth, checkpoint.foreign) == (64, 4, ())
        assert_holds_golden(checkpoint, golden("hot_fused_qkv" if "fused" in name else "hot"))


@pytest.mark.parametrize("name", ["hot", "hot_fused_qkv"])
def test_qkv_layout_is_converted_both_ways(name: str) -> None:
    with open_checkpoint(DATA / f"{name}.safetensors") as checkpoint:
        for fused, other in ((True, "hot_fused_qkv"), (False, "hot")):
            converted, expected = checkpoint.state_dict(fused=fused), golden(other)
            assert converted.keys() == expected.keys()
            assert all(torch.equal(converted[key], expected[key]) for key in expected)


def test_record_and_dtype_of_a_fixed_file() -> None:
    with open_checkpoint(DATA / "hot_fp16fix_s.safetensors") as checkpoint:
        assert checkpoint.record == FoldRecord(0.0625, 0.5, 0.25)
        assert checkpoint.dtype == "fp16"
        cast = checkpoint.state_dict(torch.float32)
        assert torch.equal(cast[O_WEIGHT], checkpoint.tensor(O_WEIGHT).float())
        assert checkpoint.state_dict(torch.bfloat16)["rope.bands"].dtype == torch.float32


@pytest.mark.parametrize("prefix", ["", "model.diffusion_model.", "diffusion_model.", "transformer."])
def test_all_in_one_files_are_opened_without_their_other_components(tmp_path: Path, prefix: str) -> None:
    others = {
        "vae.decoder.conv.weight": torch.ones(2),
        "text_encoders.layers.0.weight": torch.ones(3),
        "conditioner.x": torch.ones(1),
        "first_stage_model.x": torch.ones(1, dtype=torch.int64),
    }
    tensors = golden("cool")
    file = save(tmp_path / "all.safetensors", {prefix + key: value for key, value in tensors.items()} | others)
    with open_checkpoint(file) as checkpoint:
        assert checkpoint.prefix == prefix
        assert sorted(checkpoint.foreign) == sorted(others)
        assert_holds_golden(checkpoint, tensors)
        assert checkpoint.info(O_WEIGHT).name == prefix + O_WEIGHT


def test_rope_bands_may_be_absent(tmp_path: Path) -> None:
    tensors = golden("cool")
    del tensors["rope.bands"]
    with open_checkpoint(save(tmp_path / "x.safetensors", tensors)) as checkpoint:
        assert "rope.bands" not in checkpoint.names()
        assert_holds_golden(checkpoint, tensors)


@pytest.mark.parametrize("inside", ["", "transformer"])
@pytest.mark.parametrize("sharded", [True, False])
def test_hf_folders_are_opened_single_and_sharded(tmp_path: Path, inside: str, sharded: bool) -> None:
    place, tensors = tmp_path / inside, golden("hot_fp16fix")
    record = {RECORD_KEY: '{"c": 0.0625}'}
    if sharded:
        shard(place, tensors, record)
    else:
        place.mkdir(exist_ok=True)
        save(place / SINGLE_NAME, tensors, record)
    with open_checkpoint(tmp_path) as checkpoint:
        assert len(checkpoint.files) == (2 if sharded else 1)
        assert checkpoint.record == FoldRecord(0.0625)
        assert_holds_golden(checkpoint, tensors)


def test_tensors_are_mapped_not_copied() -> None:
    with open_checkpoint(DATA / "hot.safetensors") as checkpoint:
        assert checkpoint.tensor(O_WEIGHT).data_ptr() == checkpoint.tensor(O_WEIGHT).data_ptr()
        kept = checkpoint.tensor(O_WEIGHT)
    assert torch.equal(kept, golden("hot")[O_WEIGHT])


@pytest.mark.parametrize("kind", ["int8", "fp8_scaled", "nvfp4", "fp8"])
def test_quantized_files_are_recognised_and_stay_as_stored(tmp_path: Path, kind: str) -> None:
    tensors = quantized(kind)
    with open_checkpoint(save(tmp_path / "q.safetensors", tensors)) as checkpoint:
        assert checkpoint.quantization == kind
        assert checkpoint.arch.ffn_dim == 96
        assert len(checkpoint.names()) + len(checkpoint.companions) == len(tensors)
        state = checkpoint.state_dict(torch.float16, check=True)
        assert state.keys() == tensors.keys()
        assert state["video_embedder.weight"].dtype == torch.float16
        assert state[O_WEIGHT].dtype == (torch.float16 if kind == "fp8" else tensors[O_WEIGHT].dtype)
        with pytest.raises(MossError, match=f"quantized \\({kind}\\)"):
            checkpoint.state_dict(fused=True)
        if kind != "fp8":
            assert checkpoint.dtype == "bf16"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({O_WEIGHT: None}, f"has no {O_WEIGHT}"),
        ({"shared_block_modulation.weight": None}, "has no shared_block_modulation.weight"),
        ({"layers.0.norm1.weight": None}, "has no layers.0.norm1.weight"),
        ({O_WEIGHT: torch.ones(64, 63)}, rf"{O_WEIGHT} is \[64, 63\], not \[64, 64\]"),
        ({"layers.1.proj.o.bias": torch.ones(64)}, r"unknown keys in the model: layers\.1\.proj\.o\.bias"),
        ({"layers.1.proj.qkv.weight": torch.ones(192, 64)}, "has no layers.0.proj.qkv.weight"),
        ({"control.map.weight": torch.ones(1)}, r"unknown keys in the model: control\.map\.weight"),
        ({"layers.1.extra.weight_scale": torch.ones(1)}, "unknown keys"),
        ({"position_ids": torch.ones(1, 9, dtype=torch.int64)}, "unknown keys in the model: position_ids"),
        ({"layers.1.extra.weight": torch.ones(4, 4, dtype=torch.int8)}, r"unknown keys.*: layers\.1\.extra\.weight"),
        ({"layers.1.steps.weight": torch.ones(1, dtype=torch.int64)}, r"unknown keys.*: layers\.1\.steps\.weight"),
        ({O_WEIGHT: torch.ones(64, 64, dtype=torch.int64)}, f"stores {O_WEIGHT} as I64"),
        ({O_WEIGHT: torch.ones(64, 64, dtype=torch.int8)}, f"stores {O_WEIGHT} as I8"),
    ],
)
def test_what_is_no_moss_state_dict_is_named(tmp_path: Path, change: dict[str, Tensor | None], message: str) -> None:
    tensors = {key: value for key, value in (golden("cool") | change).items() if value is not None}
    with pytest.raises(MossError, match=rf"^bad\.safetensors .*{message}"):
        open_checkpoint(save(tmp_path / "bad.safetensors", tensors))


MARKERS = {
    "__index_timestep_zero__": torch.zeros(0),
    "iteration": torch.tensor(70000),
    "layers.1.is_trained": torch.tensor([True]),
    "vpred": torch.tensor([], dtype=torch.uint8),
}


@pytest.mark.parametrize("prefix", ["", "model.diffusion_model."])
@pytest.mark.parametrize("name", MARKERS)
def test_a_marker_is_passed_over_in_words(
    tmp_path: Path, name: str, prefix: str, caplog: pytest.LogCaptureFixture
) -> None:
    tensors = golden("cool")
    stored = {prefix + key: value for key, value in (tensors | {name: MARKERS[name]}).items()}
    with caplog.at_level("INFO"), open_checkpoint(save(tmp_path / "x.safetensors", stored)) as checkpoint:
        assert_holds_golden(checkpoint, tensors)
        assert checkpoint.foreign == (prefix + name,)
    (line,) = caplog.messages
    assert line == f"x.safetensors: {name} is no weight of MOSS-Image and is passed over."
    assert caplog.records[0].levelname == "INFO"


def test_two_models_in_one_file_are_refused(tmp_path: Path) -> None:
    tensors = golden("cool")
    both = tensors | {f"transformer.{key}": value.clone() for key, value in tensors.items()}
    with pytest.raises(MossError, match="more than one"):
        open_checkpoint(save(tmp_path / "bad.safetensors", both))


def test_another_model_is_refused(tmp_path: Path) -> None:
    file = save(tmp_path / "flux.safetensors", {"double_blocks.0.img_mod.lin.weight": torch.ones(1)})
    with pytest.raises(MossError, match=r"flux\.safetensors is not a MOSS-Image model.*double_blocks"):
        open_checkpoint(file)


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_broken_weights_are_named(tmp_path: Path, value: float, dtype: torch.dtype) -> None:
    tensors = golden("cool") | {O_WEIGHT: torch.ones(64, 64, dtype=dtype)}
    tensors[O_WEIGHT][3, 5] = value
    with (
        open_checkpoint(save(tmp_path / "bad.safetensors", tensors)) as checkpoint,
        pytest.raises(MossError, match=rf"{O_WEIGHT} in bad\.safetensors holds NaN"),
    ):
        checkpoint.state_dict(check=True)
    check_finite("x", torch.zeros(0), "y")
    check_finite("x", torch.ones(3, dtype=torch.int64), "y")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_values_whose_sum_overflows_are_finite(dtype: torch.dtype) -> None:
    large = torch.full((8, 8), torch.finfo(dtype).max, dtype=dtype)
    assert is_finite(large) and is_finite(-large)
    large[3, 5] = -math.inf
    assert not is_finite(large)
    mixed = torch.zeros(8, 8, dtype=dtype)
    mixed[0, 0], mixed[7, 7] = math.inf, -math.inf
    assert not is_finite(mixed)


# --- headers ---------------------------------------------------------------------------------------------------------

ONE = {"a": entry("F32", [2], 0, 8)}
TWO = {"a": entry("F32", [1], 0, 4), "b": entry("F32", [1], 4, 8)}

BAD_HEADERS: dict[str, tuple[Any, bytes, str]] = {
    "no JSON": ("{", b"", "not valid JSON"),
    "list": ("[]", b"", "not a JSON object"),
    "text": ('"x"', b"", "not a JSON object"),
    "not UTF-8": (b"\xff\xfe{}", b"", "not UTF-8"),
    "deep": ("[" * 200_000, b"", "nested too deeply"),
    "deep objects": ('{"a":' * 200_000, b"", "nested too deeply"),
    "metadata twice": ('{"__metadata__": {}, "__metadata__": {}}', b"", "__metadata__ twice"),
    "more after it": ("{}{}", b"", "not valid JSON"),
    "comma at the end": ('{"__metadata__": {},}', b"", "not valid JSON"),
    "line break in text": ('{"__metadata__": {"a": "\n"}}', b"", "__metadata__"),
    "a megabyte of nothing": ('{"a": [' + "[]," * 700_000 + "]}", b"", "not valid JSON"),
    "twice inside": ('{"a": {"dtype": "F32", "dtype": "F16"}}', b"", "dtype twice"),
    "metadata list": ({"__metadata__": []}, b"", "__metadata__"),
    "metadata number": ({"__metadata__": {"x": 1}}, b"", "__metadata__"),
    "metadata half surrogate": ('{"__metadata__": {"x": "\\ud800"}}', b"", "__metadata__"),
    "name half surrogate": ('{"\\ud800": 1}', b"", "UTF-8 name"),
    "entry number": ({"a": 1}, b"", "a is not an object of dtype"),
    "entry without shape": ({"a": {"dtype": "F32", "data_offsets": [0, 4]}}, b"1234", "a is not an object of dtype"),
    "dtype": ({"a": entry("F33", [2], 0, 8)}, b"12345678", "a has the unknown dtype F33"),
    "dtype list": ({"a": ONE["a"] | {"dtype": ["F32"]}}, b"12345678", "a has the unknown dtype"),
    "shape negative": ({"a": entry("F32", [-2], 0, 8)}, b"12345678", "a has a bad shape"),
    "shape float": ({"a": entry("F32", [2.0], 0, 8)}, b"12345678", "a has a bad shape"),  # type: ignore[list-item]
    "shape bool": ({"a": entry("F32", [True, 2], 0, 8)}, b"12345678", "a has a bad shape"),
    "shape huge": ({"a": entry("F32", [2**64], 0, 8)}, b"12345678", "a has a bad shape"),
    "shape of many huge": ({"a": entry("F32", [2**60] * 20_000, 0, 8)}, b"12345678", "do not fit"),
    "shape overflow": ({"a": entry("F32", [2**62, 2**62], 0, 8)}, b"12345678", "do not fit"),
    "offsets three": ({"a": ONE["a"] | {"data_offsets": [0, 4, 8]}}, b"12345678", "a has bad data_offsets"),
    "offsets back": ({"a": entry("F32", [2], 8, 0)}, b"12345678", "a has bad data_offsets"),
    "offsets negative": ({"a": entry("F32", [2], -8, 0)}, b"12345678", "a has bad data_offsets"),
    "offsets text": ({"a": ONE["a"] | {"data_offsets": "08"}}, b"12345678", "a has bad data_offsets"),
    "size": ({"a": entry("F32", [3], 0, 8)}, b"12345678", "a has 8 bytes"),
    "past the end": ({"a": entry("F32", [3], 0, 12)}, b"12345678", "truncated"),
    "far past the end": ({"a": entry("U8", [2**60], 0, 2**60)}, b"12345678", "truncated"),
    "overlap": (TWO | {"b": entry("F32", [1], 2, 6)}, b"12345678", "b start at 2, which overlaps"),
    "gap": (TWO | {"b": entry("F32", [1], 8, 12)}, b"123456789012", "b start at 8, which leaves a gap"),
    "same range": (TWO | {"b": entry("F32", [1], 0, 4)}, b"1234", "overlaps"),
    "rest": (ONE, b"123456789", "its tensors end"),
}


@pytest.mark.parametrize("case", BAD_HEADERS)
def test_bad_headers_name_file_and_field(tmp_path: Path, case: str) -> None:
    header, data, message = BAD_HEADERS[case]
    file = raw_file(tmp_path / "bad.safetensors", header, data)
    with pytest.raises(MossError, match=r"^bad\.safetensors is not a usable safetensors file: .*\.$") as caught:
        read_header(file)
    assert message in str(caught.value) and len(str(caught.value)) < 400


NO_SAFETENSORS: dict[str, tuple[bytes, str]] = {
    "nothing": (b"", "fewer than the 8"),
    "four bytes": (b"\x01\x02\x03\xff", "fewer than the 8"),
    "cut header": (struct.pack("<Q", 100) + b"{}", "truncated"),
    "impossible length": (struct.pack("<Q", 2**63) + b"{}", "above the limit"),
    "zip": (b"PK\x03\x04" + b"0" * 100, "pickle"),
    "pickle 2": (b"\x80\x02}" + b"0" * 100, "pickle"),
    "pickle 4": (b"\x80\x04\x95" + b"0" * 100, "pickle"),
    "GGUF": (b"GGUF\x03\0\0\0" + b"0" * 100, "GGUF"),
    "gzip": (b"\x1f\x8b\x08\x00" + b"0" * 100, "gzip"),
    "picture": (b"\x89PNG\r\n\x1a\n" + b"0" * 100, "picture"),
    "zeros": (bytes(4096), "zeros: a download"),
    "git-lfs": (
        b"version https://git-lfs.github.com/spec/v1\noid sha256:4d7a\nsize 10234567890\n", "it is a git-lfs pointer"
    ),
    "web page": (b"\n<!DOCTYPE html>\n<html><head>" + b"x" * 5000, r"it is a web page \(HTML\)"),
    "old web page": (b"<HTML>" + b"x" * 5000, r"it is a web page \(HTML\)"),
    "server error": (b'<?xml version="1.0"?><Error><Code>AccessDenied</Code></Error>', "it is an XML text"),
    "JSON": (b'{"error":"Invalid username or password."}', "it is a JSON text, which begins with '{\"error\""),
    "JSON with a mark": (b'\xef\xbb\xbf{"error": 1}', "it is a JSON text"),
    "UTF-16": ('{"error": 1}'.encode("utf-16"), "it is a JSON text"),
    "words": (b"Entry not found", "it is a text, which begins with 'Entry not found'"),
    "one word": (b"Gone", "it is a text, which begins with 'Gone'"),
    "Chinese": ("\u6587\u4ef6\u4e0d\u5b58\u5728".encode() * 100, "it is a text, which begins with '\u6587"),
}  # fmt: skip


@pytest.mark.parametrize("case", NO_SAFETENSORS)
def test_what_is_no_safetensors_file(tmp_path: Path, case: str) -> None:
    content, message = NO_SAFETENSORS[case]
    file = tmp_path / "bad.safetensors"
    file.write_bytes(content)
    with pytest.raises(MossError, match=rf"bad\.safetensors .*{message}") as caught:
        open_checkpoint(file)
    assert str(caught.value).endswith(".") and "\n" not in str(caught.value) and len(str(caught.value)) < 400


def test_an_index_that_is_a_pointer_is_named(tmp_path: Path) -> None:
    (tmp_path / INDEX_NAME).write_bytes(NO_SAFETENSORS["git-lfs"][0])
    with pytest.raises(MossError, match=r"no usable weight_map: it is a git-lfs pointer"):
        open_checkpoint(tmp_path)


# --- whatever the safetensors package opens ------------------------------------------------------------------------

A = '"a":{"dtype":"F32","shape":[2],"data_offsets":[0,8]}'

#: Headers in front of eight bytes of data, all of which the package opens.
ODD_HEADERS = {
    "metadata null": f'{{"__metadata__":null,{A}}}',
    "metadata key twice": f'{{"__metadata__":{{"x":"1","x":"2"}},{A}}}',
    "tensor twice": f'{{"a":{{"dtype":"I32","shape":[2],"data_offsets":[0,8]}},{A}}}',
    "tensor twice, the first of another size": f'{{"a":{{"dtype":"F32","shape":[4],"data_offsets":[4,8]}},{A}}}',
    "tensor twice, the first ending before it begins": f'{{"a":{{"dtype":"U8","shape":[4],"data_offsets":[8,4]}},{A}}}',
    "field of its own": '{"a":{"dtype":"F32","shape":[2],"data_offsets":[0,8],"note":{"of":[1]}}}',
    "long field of its own": '{"a":{"dtype":"F32","note":"%s","shape":[2],"data_offsets":[0,8]}}' % ("x" * 9000),
    "entry as a list": '{"a":["F32",[2],[0,8]]}',
    "many axes": '{"a":{"dtype":"F32","shape":[2%s],"data_offsets":[0,8]}}' % (",1" * 98),
    "white space": f' \n\t{{ {A} ,\r\n"__metadata__" : {{ }} }}  \n',
    "escapes": '{"\\u0061\\ud83d\\ude00\\"":{"dtype":"F\\u00332","shape":[2],"data_offsets":[0,8]}}',
    "no name": '{"":{"dtype":"F32","shape":[2],"data_offsets":[0,8]}}',
    "no size, huge axis": f'{{"z":{{"dtype":"F32","shape":[0,{2**64 - 1}],"data_offsets":[8,8]}},{A}}}',
    "scalar": '{"a":{"dtype":"F64","shape":[],"data_offsets":[0,8]}}',
    "megabytes of metadata": f'{{"__metadata__":{{"workflow":"{"[1, 2], " * 900_000}"}},{A}}}',
    "a long name": f'{{"{"n" * 5_000_000}":{A.partition(":")[2]}}}',
}


def package_reads(file: Path) -> tuple[dict[str, Any], dict[str, str]] | None:
    """Tensors as (dtype, shape) and metadata as the safetensors package reads them; None where it refuses."""
    try:
        with safe_open(file, "pt") as opened:
            slices = {name: opened.get_slice(name) for name in opened.keys()}  # noqa: SIM118
            return {n: (s.get_dtype(), tuple(s.get_shape())) for n, s in slices.items()}, opened.metadata() or {}
    except SafetensorError:
        return None


def we_read(file: Path) -> tuple[dict[str, Any], dict[str, str]]:
    header = read_header(file)
    return {name: (info.dtype, info.shape) for name, info in header.tensors.items()}, header.metadata


@pytest.mark.parametrize("case", ODD_HEADERS)
def test_what_the_package_opens_is_read_alike(tmp_path: Path, case: str) -> None:
    file = raw_file(tmp_path / "odd.safetensors", ODD_HEADERS[case], b"12345678")
    expected = package_reads(file)
    assert expected is not None, "the package refuses it, so this proves nothing"
    assert we_read(file) == expected


@pytest.mark.parametrize("dtype", sorted(DTYPE_BITS))
def test_every_dtype_of_the_package(tmp_path: Path, dtype: str) -> None:
    count = 4 if DTYPE_BITS[dtype] == 6 else 64 // DTYPE_BITS[dtype]
    size = count * DTYPE_BITS[dtype] // 8
    file = raw_file(tmp_path / "odd.safetensors", {"a": entry(dtype, [count], 0, size)}, bytes(size))
    expected = package_reads(file)
    if expected is None:
        pytest.skip(f"this version of safetensors has no {dtype}")
    assert we_read(file) == expected


NAMES = st.sampled_from(["a", "b", "", "__metadata__", "\u4e2d", "dtype"])
SCRAPS = st.recursive(
    st.none() | st.booleans() | st.integers(-1, 9) | st.sampled_from(["F32", "U8", "", "\u4e2d", 0.5, 2**64 - 1]),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(NAMES, inner, max_size=3),
    max_leaves=6,
)
ENTRIES = st.builds(
    lambda dtype, shape, begin, more: {"dtype": dtype, "shape": shape, "data_offsets": [begin, begin + 4]} | more,
    st.sampled_from(["F32", "U8"]),
    st.sampled_from([[1], [4], [1, 1], [2, 2], [], [0]]),
    st.sampled_from([0, 4]),
    st.dictionaries(NAMES, SCRAPS, max_size=2),
)
MEMBERS = st.tuples(NAMES, ENTRIES | SCRAPS | st.dictionaries(NAMES, st.sampled_from(["", "x"]), max_size=2))


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=400, deadline=None)
@given(st.lists(MEMBERS, max_size=3), st.sampled_from([0, 4, 8]), st.sampled_from(["", " ", "\n", "\0", "x"]))
def test_nothing_that_the_package_opens_is_refused(
    tmp_path: Path, members: list[tuple[str, Any]], size: int, tail: str
) -> None:
    text = "{" + ", ".join(f"{json.dumps(name)}: {json.dumps(value)}" for name, value in members) + "}" + tail
    file = raw_file(tmp_path / "odd.safetensors", text, bytes(size))
    expected = package_reads(file)
    if expected is not None:
        assert we_read(file) == expected


@pytest.mark.parametrize("suffix", [".ckpt", ".pt", ".PTH", ".bin"])
def test_pickles_are_never_opened(tmp_path: Path, suffix: str) -> None:
    with pytest.raises(MossError, match=r"only \.safetensors is opened"):
        open_checkpoint(tmp_path / f"model{suffix}")


def test_missing_and_odd_paths(tmp_path: Path) -> None:
    with pytest.raises(MossError, match=r"no\.safetensors does not exist"):
        open_checkpoint(tmp_path / "no.safetensors")
    with pytest.raises(MossError, match="holds no MOSS-Image model"):
        open_checkpoint(tmp_path)
    with pytest.raises(MossError, match="cannot be opened"):
        open_checkpoint("nul\0.safetensors")
    if hasattr(os, "mkfifo"):
        os.mkfifo(tmp_path / "pipe.safetensors")
        with pytest.raises(MossError, match="not a regular file"):
            open_checkpoint(tmp_path / "pipe.safetensors")


MEASURE = """
import sys, time
from bench.memory import peak_mb
from fold.checkpoint.reader import open_checkpoint
from fold.errors import MossError
before, started = peak_mb(), time.process_time()
try:
    open_checkpoint(sys.argv[1])
except MossError as error:
    print(time.process_time() - started, peak_mb() - before, str(error)[:200], sep="|")
"""
ZERO_SIZED = '"t%06d":{"dtype":"U8","shape":[0],"data_offsets":[0,0]},'

#: How a hostile header of 96 MB is filled, what is said of it, and how many times its size it may cost.
HOSTILE = {
    "objects in a list": ('{"a":[', "{},", "]}", "not valid JSON", 3),
    "lists under names": ("{", '"k%07d":[],', '"z":[]}', "k0000000 is not an object", 3),
    "tensors without size": ("{", ZERO_SIZED, '"z":{}}', "z is not an object of dtype", 9),
    "a workflow": ('{"__metadata__":{"workflow":"', "[1, 2], ", '"}}', "is not a MOSS-Image model", 3),
    "small metadata": ('{"__metadata__":{', '"%07d":"",', '"z":1}}', "__metadata__ is not", 12),
}


@pytest.mark.skipif(sys.platform != "linux", reason="reads peak memory the Linux way")
@pytest.mark.parametrize("case", HOSTILE)
def test_memory_for_the_largest_header_is_bounded(tmp_path: Path, case: str) -> None:
    start, unit, end, message, times = HOSTILE[case]
    size = 96_000_000 if "%" not in unit else 12_000_000  # what grows with the count does so in proportion
    count = size // len(unit % 0 if "%" in unit else unit)
    body = "".join(unit % i for i in range(count)) if "%" in unit else unit * count
    file = raw_file(tmp_path / "bad.safetensors", start + body + end)
    done = subprocess.run(
        [sys.executable, "-c", MEASURE, str(file)], cwd=ROOT, check=True, capture_output=True, text=True
    )
    seconds, peak, said = done.stdout.split("|", 2)
    assert message in said
    assert file.stat().st_size / 1e6 < float(peak) < times * file.stat().st_size / 1e6 + 64
    assert float(seconds) < 10.0


def test_a_header_above_the_limit_is_not_read(tmp_path: Path) -> None:
    file = raw_file(tmp_path / "bad.safetensors", "{}", length=MAX_HEADER_BYTES + 1)
    os.truncate(file, MAX_HEADER_BYTES + 100)
    assert package_reads(file) is None
    with pytest.raises(MossError, match=rf"above the limit of {MAX_HEADER_BYTES}"):
        read_header(file)


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=150, deadline=None)
@given(st.data())
def test_damaged_bytes_never_raise_anything_else(tmp_path: Path, data: st.DataObject) -> None:
    """Flip, cut or insert bytes in the header of a good file: it opens, or MossError says why not."""
    good = (DATA / "cool.safetensors").read_bytes()
    position = data.draw(st.integers(0, 7800))
    new = data.draw(st.binary(max_size=4))
    cut = data.draw(st.integers(0, 4))
    damaged = good[:position] + new + good[position + cut :]
    if data.draw(st.booleans()):
        damaged = damaged[: data.draw(st.integers(0, len(damaged)))]
    file = tmp_path / "bad.safetensors"
    file.write_bytes(damaged)
    try:
        with open_checkpoint(file) as checkpoint:
            checkpoint.state_dict(check=True)
    except MossError as error:
        assert "bad.safetensors" in str(error)


def test_a_sparse_file_of_gigabytes_opens_at_once(tmp_path: Path) -> None:
    """Opening reads the header only: 10 GB of holes cost nothing, and torch is not needed."""
    header = {"x": entry("U8", [10 * 10**9], 0, 10 * 10**9)}
    file = raw_file(tmp_path / "large.safetensors", header)
    os.truncate(file, file.stat().st_size + 10 * 10**9)
    started = time.process_time()
    assert read_header(file).file_bytes > 10**10
    assert time.process_time() - started < 0.05


# --- HF folders ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "name",
    [
        "../out.safetensors",
        "/etc/x.safetensors",
        "a/b.safetensors",
        "..\\x.safetensors",
        "C:x.safetensors",
        "x.bin",
        "",
    ],
)
def test_an_index_cannot_point_out_of_its_folder(tmp_path: Path, name: str) -> None:
    save(tmp_path / "out.safetensors", golden("cool"))
    folder = tmp_path / "model"
    folder.mkdir()
    write_index(folder, {"a": name})
    with pytest.raises(MossError, match=r"no plain \.safetensors file name"):
        open_checkpoint(folder)


@pytest.mark.parametrize(
    "text", ["", "[]", "{}", '{"weight_map": []}', '{"weight_map": {}}', '{"weight_map": {"a": 1}}', "[" * 99999]
)
def test_a_bad_index_is_named(tmp_path: Path, text: str) -> None:
    (tmp_path / INDEX_NAME).write_text(text)
    with pytest.raises(MossError, match="no usable weight_map"):
        open_checkpoint(tmp_path)


def test_shards_must_hold_what_the_index_says(tmp_path: Path) -> None:
    folder = shard(tmp_path / "m", golden("cool"))
    index = json.loads((folder / INDEX_NAME).read_text())["weight_map"]
    write_index(folder, index | {"layers.9.norm1.weight": index[O_WEIGHT]})
    with pytest.raises(MossError, match=r"layers\.9\.norm1\.weight is in diffusion.*, but it is not"):
        open_checkpoint(folder)
    write_index(folder, index | {O_WEIGHT: "gone.safetensors"})
    with pytest.raises(MossError, match=r"gone\.safetensors does not exist"):
        open_checkpoint(folder)


def test_shards_must_not_share_tensors_or_differ_in_their_record(tmp_path: Path) -> None:
    tensors = golden("cool")
    folder = shard(tmp_path / "m", tensors)
    index = json.loads((folder / INDEX_NAME).read_text())["weight_map"]
    second = folder / "diffusion_pytorch_model-00002-of-00002.safetensors"
    part = {name: tensors[name] for name, shard_name in index.items() if shard_name == second.name}
    save(second, part | {O_WEIGHT: tensors[O_WEIGHT].clone()})
    with pytest.raises(MossError, match=f"{O_WEIGHT} is both in"):
        open_checkpoint(folder)
    save(second, part, {RECORD_KEY: '{"c": 0.5}'})
    with pytest.raises(MossError, match="different"):
        open_checkpoint(folder)


def test_inspect_starts_without_torch_and_without_what_only_writing_and_logging_need() -> None:
    code = "import sys; import fold.checkpoint.reader, fold.cli.inspect; print(*sys.modules)"
    found = subprocess.run([sys.executable, "-S", "-c", code], cwd=ROOT, check=True, capture_output=True, text=True)
    assert "fold.cli.inspect" in found.stdout.split()
    assert not {"torch", "numpy", "safetensors", "logging", "concurrent.futures"} & set(found.stdout.split())
