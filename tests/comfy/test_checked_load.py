"""NaN and infinity in a file are refused by name, found while ComfyUI copies the weights; the copy stays as it was."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import comfy.model_management as mm
import comfy.model_patcher
import comfy.utils
import pytest
import torch
from comfy_runs import DTYPES, conditioning, fixed, load, report, sample, stock
from hypothesis import given
from hypothesis import strategies as st
from moss_fp16_pack.fold.checkpoint import load as casting
from moss_fp16_pack.fold.checkpoint import reader
from moss_fp16_pack.fold.checkpoint.reader import copy_checked
from moss_fp16_pack.fold.errors import MossError
from moss_fp16_pack.nodes.loading import checked_copy
from moss_fp16_pack.nodes.loading.checked_copy import CheckedCopies, _covered
from moss_fp16_pack.nodes.loading.load import load_moss
from quantized_files import quantize
from raw_files import golden, golden_metadata, save, shard
from repo import DATA

DAMAGED = ("layers.0.proj.q.weight", "layers.2.proj.v.weight", "layers.2.proj.ffn_down.weight", "layers.1.norm2.weight")
FUSED = "layers.1.proj.qkv.weight"


@pytest.fixture(autouse=True)
def small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reader, "_PIECE", 1000)


def damaged(folder: Path, key: str, value: float, file: str = "hot", place: int = -1) -> str:
    tensors = golden(file)
    tensors[key].view(-1)[place] = value
    return str(save(folder / "bad.safetensors", tensors))


@pytest.mark.parametrize("engine", ["builtin", "native"])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("key", DAMAGED)
def test_one_bad_value_is_refused_by_name(key: str, dtype: str, engine: str, foreign: None, tmp_path: Path) -> None:
    for value in (float("nan"), float("-inf")):
        with pytest.raises(MossError, match=rf"^{key} in bad\.safetensors holds NaN or infinity"):
            load_moss(damaged(tmp_path, key, value), dtype, True, engine)


@pytest.mark.parametrize("engine", ["builtin", "native"])
@pytest.mark.parametrize("place", [0, 192 * 64 // 2, -1])
def test_one_bad_value_in_a_fused_weight(place: int, engine: str, foreign: None, tmp_path: Path) -> None:
    """The built-in class takes rows of it, the other the whole."""
    with pytest.raises(MossError, match=rf"^{FUSED} in bad\.safetensors holds NaN"):
        load_moss(damaged(tmp_path, FUSED, float("nan"), "hot_fused_qkv", place), "fp16", True, engine)


@pytest.mark.parametrize("engine", ["builtin", "native"])
@pytest.mark.parametrize("part", "oqkv")
def test_a_value_too_large_for_the_dtype_is_named(part: str, engine: str, foreign: None, tmp_path: Path) -> None:
    """In q, k and v, too, which a class may join before it casts them."""
    file = damaged(tmp_path, f"layers.2.proj.{part}.weight", 1e5)  # bf16 holds it
    with pytest.raises(MossError, match=rf"^layers\.2\.proj\.{part}\.weight in bad\.safetensors does not fit fp16"):
        load_moss(file, "fp16", True, engine)
    load_moss(file, "bf16", True, engine)


@pytest.mark.parametrize("engine", ["builtin", "native"])
@pytest.mark.parametrize("dtype", ["fp16", "fp32"])
def test_finite_weights_with_a_sum_out_of_range_load(
    dtype: str, engine: str, foreign: None, small_pieces: None, tmp_path: Path
) -> None:
    tensors = {name: tensor.half() for name, tensor in golden("hot").items()}
    tensors[DAMAGED[2]][:] = 60000.0
    load_moss(str(save(tmp_path / "loud.safetensors", tensors)), dtype, True, engine)


def test_a_folded_weight_may_be_too_large_unfolded(tmp_path: Path) -> None:
    """fp16 holds 60000, and not 16 times as much: in fp32 it loads, in fp16 it is named."""
    tensors = golden("hot_fp16fix")
    tensors[key := "text_embedder.proj.weight"][0, 0] = 60000.0
    tensors = {name: tensor if name == "rope.bands" else tensor.half() for name, tensor in tensors.items()}
    file = str(save(tmp_path / "loud.safetensors", tensors, golden_metadata("hot_fp16fix")))
    loaded = load_moss(file, "fp32", True, "builtin").model.diffusion_model.state_dict()
    assert float(loaded[key][0, 0]) == float(tensors[key][0, 0]) * 16
    with pytest.raises(MossError, match=rf"^{key} in loud\.safetensors does not fit fp16: compute in bf16 or fp32"):
        load_moss(file, "fp16", True, "builtin")


@pytest.mark.parametrize("engine", ["builtin", "native"])
def test_a_folder_of_shards(engine: str, foreign: None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Read by ComfyUI's own reader, too."""
    whole = load("hot", "fp16", engine=engine).model.diffusion_model.state_dict()
    monkeypatch.delattr(reader.Checkpoint, "state_dict")
    folder = str(shard(tmp_path / "m", golden("hot")))
    parts = load_moss(folder, "fp16", True, engine).model.diffusion_model.state_dict()
    assert list(parts) == list(whole) and all(torch.equal(parts[key], whole[key]) for key in whole)


def test_what_breaks_a_class_that_got_half_of_its_weights_is_the_weight(
    foreign: None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    take = torch.nn.Module.load_state_dict

    def strict(self: torch.nn.Module, *args: Any, **kwargs: Any) -> Any:
        take(self, *args, **kwargs)
        raise ValueError("norm2 is not what it was")

    monkeypatch.setattr(torch.nn.Module, "load_state_dict", strict)
    with pytest.raises(MossError, match=rf"^{DAMAGED[0]} in bad\.safetensors holds NaN"):
        load_moss(damaged(tmp_path, DAMAGED[0], float("nan")), "fp16", True, "native")
    with pytest.raises(ValueError, match="norm2"):
        load("hot", engine="native")


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", ["hot", "hot_fp16fix_bf16", "hot_fused_qkv"])
def test_the_weights_are_those_of_the_stock_loader(name: str, dtype: str, foreign: None) -> None:
    theirs = stock(name, dtype).model.diffusion_model.state_dict()
    ours = load(name, dtype, engine="native", unfold=False).model.diffusion_model.state_dict()
    assert list(ours) == list(theirs)
    for key, weight in ours.items():
        assert weight.dtype == theirs[key].dtype and torch.equal(weight, theirs[key])


@pytest.fixture
def separate(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Sizes of the weights that get a look of their own."""
    sizes: list[int] = []
    look = checked_copy.is_finite

    def watched(tensor: torch.Tensor) -> bool:
        sizes.append(tensor.numel())
        return look(tensor)

    monkeypatch.setattr(checked_copy, "is_finite", watched)
    return sizes


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("engine", ["builtin", "native"])
@pytest.mark.parametrize("name", ["hot", "hot_fused_qkv", "hot_fp16fix"])
def test_nothing_is_read_twice(name: str, engine: str, dtype: str, foreign: None, separate: list[int]) -> None:
    load(name, dtype, engine=engine)
    assert sum(separate) < 1000  # at most a class's constant that it does not load


def load_dynamic(file: str, dtype: str, engine: str) -> Any:
    """As ComfyUI loads where it moves weights in as they are needed: taken over without a copy."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(comfy.model_patcher.ModelPatcher, "is_dynamic", lambda self: True)
        return load_moss(file, dtype, True, engine)


@pytest.mark.parametrize("engine", ["builtin", "native"])
def test_what_stays_in_the_file_is_read_only_when_a_run_breaks(
    engine: str, foreign: None, separate: list[int], tmp_path: Path
) -> None:
    sound = load_dynamic(str(DATA / "hot.safetensors"), "bf16", engine)
    sample(fixed(sound), conditioning("hot"), steps=1)
    model = fixed(load_dynamic(damaged(tmp_path, key := DAMAGED[2], float("nan")), "bf16", engine))
    assert separate == []
    sample(model, conditioning("hot"), steps=2)
    found = report(model)
    assert [said["key"] for said in found["messages"]] == ["black_image", "weights_broken"]
    assert found["messages"][1]["values"] == {"weights": [key], "dtype": "bf16"}


@pytest.mark.parametrize("engine", ["builtin", "native"])
def test_what_a_class_takes_in_another_way_is_looked_at(
    engine: str, foreign: None, separate: list[int], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """As a class whose layers keep what they are given."""
    take = torch.nn.Module.load_state_dict
    monkeypatch.setattr(
        torch.nn.Module,
        "load_state_dict",
        lambda self, state, strict=True, assign=False: take(self, state, strict, True),
    )
    load_moss(str(DATA / "hot.safetensors"), "bf16", True, engine)
    apart = [weight.numel() for key, weight in golden("hot").items() if key[-9:-7] not in (".q", ".k", ".v")]
    assert sum(separate) >= sum(apart)  # a class that joins q, k and v copies those
    with pytest.raises(MossError, match=rf"^{DAMAGED[2]} in bad\.safetensors holds NaN or infinity"):
        load_moss(damaged(tmp_path, DAMAGED[2], float("nan")), "bf16", True, engine)


@pytest.mark.parametrize("engine", ["builtin", "native"])
def test_weights_come_from_comfyuis_own_reader(engine: str, foreign: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """What it marks its memory with, to read a weight from the file again, is on the MODEL's weights."""
    read = comfy.utils.load_torch_file

    def marked(*args: Any, **kwargs: Any) -> Any:
        found = read(*args, **kwargs)
        for tensor in found.values():
            tensor.untyped_storage()._comfy_tensor_file_slice = "here"
        return found

    monkeypatch.setattr(comfy.utils, "load_torch_file", marked)
    model = load_dynamic(str(DATA / "hot.safetensors"), "fp32", engine)
    block = model.model.diffusion_model.layers[0]
    assert block.proj.o.weight.untyped_storage()._comfy_tensor_file_slice == "here"


@pytest.mark.parametrize("error", [KeyError("F8_E8M0"), OSError(5, "the drive went away"), MemoryError()])
def test_what_comfyui_cannot_read_the_packs_own_reader_reads(
    error: Exception, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Such as a dtype that ComfyUI's table of them lacks."""
    expected = load("hot").model.diffusion_model.state_dict()

    def fails(*_: Any, **__: Any) -> Any:
        raise error

    monkeypatch.setattr(comfy.utils, "load_torch_file", fails)
    found = load("hot").model.diffusion_model.state_dict()
    assert all(torch.equal(found[key], expected[key]) for key in expected)


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux tells what is mapped")
@pytest.mark.parametrize("mapped", [True, False])
def test_disable_mmap_counts(mapped: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whether a weight that is taken over lies in the file's memory."""
    monkeypatch.setattr(comfy.utils, "DISABLE_MMAP", not mapped)
    file = DATA / "hot.safetensors"
    weight = load_dynamic(str(file), "fp32", "builtin").model.diffusion_model.layers[0].proj.o.weight
    lines = [line.split() for line in Path("/proc/self/maps").read_text().splitlines() if line.endswith(str(file))]
    spans = [[int(end, 16) for end in line[0].split("-")] for line in lines]
    assert any(first <= weight.data_ptr() < last for first, last in spans) == mapped


@pytest.mark.parametrize("engine", ["builtin", "native"])
def test_a_cancelled_load_copies_nothing_more(engine: str, foreign: None, monkeypatch: pytest.MonkeyPatch) -> None:
    copied: list[int] = []

    def watched(source: torch.Tensor, target: torch.Tensor) -> bool:
        copied.append(source.numel())
        if len(copied) == 5:
            mm.interrupt_current_processing(True)
        return copy_checked(source, target)

    monkeypatch.setattr(checked_copy, "copy_checked", watched)
    try:
        with pytest.raises(mm.InterruptProcessingException):
            load("hot", "fp16", engine=engine)
        assert 5 <= len(copied) <= 7 and not mm.processing_interrupted()  # a join of q, k and v is one step
    finally:
        mm.interrupt_current_processing(False)


def test_progress_is_told_weight_by_weight(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[tuple[int, int]] = []
    monkeypatch.setattr(comfy.utils.ProgressBar, "update", lambda self, step: seen.append((step, self.total)))
    load("hot", "fp16")
    assert len(seen) == seen[0][1] > 20 and all(step == 1 for step, _ in seen)


def test_the_loaded_model_is_free_of_the_look() -> None:
    model = fixed(load("hot", "fp16"))
    assert all(type(weight) is torch.nn.Parameter for weight in model.model.diffusion_model.parameters())
    assert torch.utils._python_dispatch._get_current_dispatch_mode() is None


class Counted(torch.Tensor):
    """Any subclass."""


COPIES = {
    "whole": (lambda x: x, True),
    "rows": (lambda x: x[2:5], True),
    "columns": (lambda x: x[:, 1:], False),
    "turned": (lambda x: x.t(), False),
    "a subclass": (lambda x: x.as_subclass(Counted), False),
    "as integers": (lambda x: x.view(torch.int32), False),
    "another's": (lambda x: x.clone(), False),
}


@pytest.mark.parametrize("case", COPIES)
def test_only_whole_rows_of_what_is_watched_go_piece_by_piece(
    case: str, separate: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Anything else is copied as ever; the values are the same in each case."""
    make, watched = COPIES[case]
    pieces: list[int] = []
    monkeypatch.setattr(
        checked_copy, "copy_checked", lambda source, target: pieces.append(1) or copy_checked(source, target)
    )
    x = torch.randn(8, 6)
    part = make(x)
    copies = CheckedCopies({"x": x}, "file")
    with torch.no_grad(), copies:
        out = torch.zeros(part.shape, dtype=torch.bfloat16).copy_(part)
        wide = torch.zeros(2, *part.shape, dtype=part.dtype).copy_(part)  # another shape
        rows = torch.cat([part, part], 0)
        columns, mixed = torch.cat([part, part], 1), torch.cat([part, part.bfloat16()])
        again = torch.zeros(rows.shape).copy_(rows)
        with pytest.raises((RuntimeError, ValueError), match="non-empty"):
            torch.cat([])
    assert torch.equal(out, part.bfloat16()) and torch.equal(wide, torch.stack([part, part]))
    assert torch.equal(rows, wide.flatten(0, 1)) and torch.equal(columns, torch.cat([*wide], 1))
    assert torch.equal(mixed, torch.cat([part, part.bfloat16()])) and torch.equal(again, rows.float())
    assert len(pieces) == (4 if watched else 0)  # one copy, two joined, and the joined one's
    copies.refuse_not_finite(rest=True)
    assert separate == ([] if case == "whole" else [48])


def test_nothing_quantized_is_watched(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither codes nor their scales: an infinite scale is none of a weight's values."""
    seen: list[str] = []
    init = CheckedCopies.__init__

    def watched(self: CheckedCopies, weights: dict[str, torch.Tensor], where: str) -> None:
        seen.extend(weights)
        init(self, weights, where)

    monkeypatch.setattr(CheckedCopies, "__init__", watched)
    load_moss(str(quantize("hot", "fp8_scaled", tmp_path / "q.safetensors")), "bf16", True, "builtin")
    assert "layers.0.norm1.weight" in seen and not {name for name in seen if ".proj." in name and "layers." in name}


@given(st.integers(1, 12), st.sets(st.tuples(st.integers(0, 12), st.integers(0, 12)).map(lambda p: (min(p), max(p)))))
def test_parts_cover_a_span_where_every_byte_is_in_one(stop: int, parts: set[tuple[int, int]]) -> None:
    bytes_seen = {byte for first, last in parts for byte in range(first, last)}
    assert _covered((0, stop), parts) == (set(range(stop)) <= bytes_seen)


def test_the_command_line_and_the_loader_refuse_in_the_same_words(tmp_path: Path) -> None:
    for value in (float("nan"), 1e5):
        file = damaged(tmp_path, DAMAGED[0], value)
        said = []
        for run in (
            lambda path: load_moss(path, "fp16", True, "builtin"),
            lambda path: casting.load_model(reader.open_checkpoint(path), torch.float16),
        ):
            with pytest.raises(MossError) as refused:
                run(file)
            said.append(str(refused.value))
        assert said[0] == said[1]
