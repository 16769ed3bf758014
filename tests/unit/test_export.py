"""Export: equal to the golden files, streamed, and there whole or not at all."""

from __future__ import annotations

import errno
import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from raw_files import golden, golden_metadata, quantized, save, shard
from repo import DATA, ROOT
from safetensors import safe_open
from safetensors.torch import load_file
from torch import Tensor

from fold import files
from fold.checkpoint import export
from fold.checkpoint.export import export_checkpoint
from fold.errors import MossCancelledError, MossError
from fold.files import new_file, save_tensors
from fold.scaling.factors import DEFAULT, Factors
from fold.scaling.record import RECORD_KEY, FoldRecord

SPLIT = Factors((1 / 16,), (1 / 2,), (1 / 4,))
O_WEIGHT = "layers.1.proj.o.weight"


@pytest.fixture(params=["nameless", "part"])
def drafts(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Both ways of writing a draft; the first only where the system has it."""
    if request.param == "part":
        monkeypatch.setattr(files, "_can_be_nameless", lambda folder: False)
    return str(request.param)


def listing(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def raw(tensor: Tensor) -> Tensor:
    return tensor.reshape(-1).view(torch.uint8)


def metadata_of(file: Path) -> dict[str, str]:
    with safe_open(file, "pt") as opened:
        return dict(opened.metadata() or {})


def assert_same(file: Path, expected: dict[str, Tensor]) -> None:
    found = load_file(file)
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        assert found[name].dtype == tensor.dtype and found[name].shape == tensor.shape, name
        assert torch.equal(raw(found[name]), raw(tensor)), name


@pytest.mark.parametrize("model", ["hot", "warm"])
@pytest.mark.parametrize(
    ("suffix", "factors", "dtype"), [("", DEFAULT, "fp16"), ("_bf16", DEFAULT, "bf16"), ("_s", SPLIT, "fp16")]
)
def test_exports_equal_the_golden_files(
    tmp_path: Path, drafts: str, model: str, suffix: str, factors: Factors, dtype: str
) -> None:
    target = tmp_path / "out.safetensors"
    result = export_checkpoint(DATA / f"{model}.safetensors", target, factors, dtype=dtype)
    name = f"{model}_fp16fix{suffix}"
    assert_same(target, golden(name))
    assert metadata_of(target) == {"title": model} | golden_metadata(name)
    assert result.nbytes == target.stat().st_size
    assert listing(tmp_path) == [target.name]


@pytest.mark.parametrize("small", [True, False])
def test_chunks_do_not_show(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, small: bool) -> None:
    """Row by row or all at once: the same bytes. The modulation's scale per row is cut along with its rows."""
    if small:
        monkeypatch.setattr(export, "_CHUNK_BYTES", 300)
    export_checkpoint(DATA / "hot.safetensors", tmp_path / "out.safetensors", SPLIT, dtype="fp16")
    assert_same(tmp_path / "out.safetensors", golden("hot_fp16fix_s"))


def test_unfolding_gives_the_original_file_byte_for_byte(tmp_path: Path) -> None:
    folded, back = tmp_path / "folded.safetensors", tmp_path / "back.safetensors"
    export_checkpoint(DATA / "burst.safetensors", folded, SPLIT, dtype="keep")
    result = export_checkpoint(folded, back, unfold=True)
    assert back.read_bytes() == (DATA / "burst.safetensors").read_bytes()
    assert result.record is None and result.replaced == FoldRecord.of(SPLIT)


def test_a_recorded_fold_is_replaced(tmp_path: Path) -> None:
    """Folded with (1/16, 1/2, 1/4), exported with (1/16, 1, 1): as if exported from the original."""
    source, target = tmp_path / "source.safetensors", tmp_path / "out.safetensors"
    export_checkpoint(DATA / "hot.safetensors", source, SPLIT, dtype="bf16")
    with_extra = json.dumps(json.loads(metadata_of(source)[RECORD_KEY]) | {"made_by": "someone"})
    save(source, load_file(source), {RECORD_KEY: with_extra, "title": "x"})
    result = export_checkpoint(source, target, DEFAULT, dtype="fp16")
    assert_same(target, golden("hot_fp16fix"))
    assert json.loads(metadata_of(target)[RECORD_KEY]) == FoldRecord.of(DEFAULT).to_dict() | {"made_by": "someone"}
    assert metadata_of(target)["title"] == "x"
    assert result.replaced is not None and "taken out" in result.notes[0]


def test_the_same_fold_again_changes_nothing(tmp_path: Path) -> None:
    """Also for factors that are not exact, and for a quantized file with s != 1, which could not be rescaled."""
    source, target = tmp_path / "source.safetensors", tmp_path / "out.safetensors"
    factors = Factors((0.1,), (0.3,), (0.7,))
    for tensors in (golden("hot"), quantized("int8")):
        save(source, tensors, {RECORD_KEY: FoldRecord.of(factors).to_json()})
        export_checkpoint(source, target, factors, overwrite=True)
        assert_same(target, tensors)


@pytest.mark.parametrize(("source", "fused"), [("hot", True), ("hot_fused_qkv", False), ("hot_fused_qkv", None)])
def test_export_splits_and_joins_q_k_v_to_the_golden_files(tmp_path: Path, source: str, fused: bool | None) -> None:
    target = tmp_path / "out.safetensors"
    export_checkpoint(DATA / f"{source}.safetensors", target, dtype="keep", fused=fused)
    assert_same(target, golden("hot" if fused is False else "hot_fused_qkv"))


def test_prefixed_and_all_in_one_files(tmp_path: Path) -> None:
    """The prefix stays, and what is not the model's is copied bit for bit, whatever its dtype."""
    others = {
        "vae.x": torch.tensor([float("nan"), 1e30]),
        "text_encoders.y": torch.arange(5),
        "vae.z": torch.tensor(2.0, dtype=torch.bfloat16),
        "vae.none": torch.zeros(0, 3),
    }
    source, target = tmp_path / "source.safetensors", tmp_path / "out.safetensors"
    save(source, load_file(DATA / "hot_prefixed.safetensors") | others)
    result = export_checkpoint(source, target, DEFAULT, dtype="fp16")
    assert_same(
        target, {f"model.diffusion_model.{key}": value for key, value in golden("hot_fp16fix").items()} | others
    )
    assert any("4 tensors of other components" in note for note in result.notes)


def test_hf_folders_become_one_file(tmp_path: Path) -> None:
    folder = shard(tmp_path / "model" / "transformer", golden("hot"), {"format": "pt"})
    export_checkpoint(folder.parent, tmp_path / "out.safetensors", DEFAULT, dtype="fp16")
    assert_same(tmp_path / "out.safetensors", golden("hot_fp16fix"))
    assert metadata_of(tmp_path / "out.safetensors") == {"format": "pt"} | golden_metadata("hot_fp16fix")


def test_rope_bands_are_kept_in_fp32_or_absent(tmp_path: Path) -> None:
    source, target = tmp_path / "source.safetensors", tmp_path / "out.safetensors"
    tensors = golden("cool")
    save(source, tensors | {"rope.bands": tensors["rope.bands"].bfloat16()})
    export_checkpoint(source, target, DEFAULT, dtype="fp16")
    assert load_file(target)["rope.bands"].dtype == torch.float32
    del tensors["rope.bands"]
    save(source, tensors)
    export_checkpoint(source, target, DEFAULT, dtype="fp16", overwrite=True)
    assert "rope.bands" not in load_file(target)


@pytest.mark.parametrize("kind", ["int8", "fp8_scaled", "nvfp4"])
def test_export_leaves_quantized_tensors_alone_or_refuses(tmp_path: Path, kind: str) -> None:
    """With s = 1 no quantized tensor is touched; with s != 1 one would be, and that is refused."""
    source, target = tmp_path / "source.safetensors", tmp_path / "out.safetensors"
    tensors = quantized(kind)
    save(source, tensors)
    result = export_checkpoint(source, target, DEFAULT, dtype="fp16")
    found = load_file(target)
    for name, tensor in found.items():
        if name.startswith("layers.") and ".proj." in name:
            assert tensor.dtype == tensors[name].dtype
            assert torch.equal(raw(tensor), raw(tensors[name])), name
    assert torch.equal(found["video_embedder.weight"], (tensors["video_embedder.weight"].float() / 16).half())
    assert any(kind in note for note in result.notes)
    target.unlink()
    with pytest.raises(
        MossError, match=rf"layers\.0\.proj\.\w+\.weight of source\.safetensors is stored as {kind}.*s_attn"
    ):
        export_checkpoint(source, target, SPLIT)
    with pytest.raises(MossError, match="layout"):
        export_checkpoint(source, target, DEFAULT, fused=True)
    assert listing(tmp_path) == ["source.safetensors"]


def test_plain_fp8_is_rescaled_only_into_a_wider_dtype(tmp_path: Path) -> None:
    source, target = tmp_path / "source.safetensors", tmp_path / "out.safetensors"
    tensors = {name: tensor.to(torch.float8_e4m3fn) for name, tensor in golden("cool").items() if name != "rope.bands"}
    save(source, tensors)
    with pytest.raises(MossError, match="16 or 32 bits"):
        export_checkpoint(source, target, DEFAULT)
    export_checkpoint(source, target, DEFAULT, dtype="fp16")
    expected = (tensors["video_embedder.weight"].float() / 16).half()
    assert torch.equal(load_file(target)["video_embedder.weight"], expected)
    assert load_file(target)[O_WEIGHT].dtype == torch.float16


# --- refusals --------------------------------------------------------------------------------------------------------


def test_values_too_large_for_the_dtype_are_refused(tmp_path: Path, drafts: str) -> None:
    source = save(tmp_path / "source.safetensors", golden("cool") | {O_WEIGHT: torch.full((64, 64), 70000.0)})
    with pytest.raises(MossError, match=rf"{O_WEIGHT} has values too large for F16: export to bf16"):
        export_checkpoint(source, tmp_path / "out.safetensors", DEFAULT, dtype="fp16")
    assert listing(tmp_path) == ["source.safetensors"]
    export_checkpoint(source, tmp_path / "out.safetensors", DEFAULT, dtype="bf16")


def test_values_that_the_fold_brings_into_range_are_fine(tmp_path: Path) -> None:
    source = save(tmp_path / "source.safetensors", golden("cool") | {O_WEIGHT: torch.full((64, 64), 70000.0)})
    export_checkpoint(source, tmp_path / "out.safetensors", SPLIT, dtype="fp16")
    assert load_file(tmp_path / "out.safetensors")[O_WEIGHT][0, 0] == 35008.0


@pytest.mark.parametrize("dtype", ["keep", "bf16"])
def test_broken_weights_are_refused(tmp_path: Path, drafts: str, dtype: str) -> None:
    tensors = golden("cool")
    tensors[O_WEIGHT][63, 63] = float("nan")
    source = save(tmp_path / "source.safetensors", tensors)
    with pytest.raises(MossError, match=rf"{O_WEIGHT} holds NaN or infinity"):
        export_checkpoint(source, tmp_path / "out.safetensors", DEFAULT, dtype=dtype)
    assert listing(tmp_path) == ["source.safetensors"]


HOT = DATA / "hot.safetensors"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"factors": Factors((0.5, 0.25, 0.5, 0.5))}, "Per-block"),
        ({"factors": Factors((0.5,) * 3)}, "c has 3 values, but this model has 4 blocks"),
        ({"unfold": True}, "nothing to unfold"),
        ({"dtype": "fp64"}, "dtype must be one of"),
        ({"target": "out.ckpt"}, r"must end in \.safetensors"),
        ({"target": "no/out.safetensors"}, "does not exist"),
        ({"target": "taken.safetensors"}, "exists already"),
        ({"target": "folder.safetensors", "overwrite": True}, "it is a folder"),
        ({"source": "missing.safetensors"}, "does not exist"),
    ],
)
def test_what_cannot_be_done_is_said_and_nothing_written(
    tmp_path: Path, change: dict[str, object], message: str
) -> None:
    (tmp_path / "taken.safetensors").write_text("mine")
    (tmp_path / "folder.safetensors").mkdir()
    before = listing(tmp_path)
    options: dict[str, object] = {"source": HOT, "target": "out.safetensors", "factors": DEFAULT} | change
    options["target"] = tmp_path / str(options["target"])
    with pytest.raises(MossError, match=message):
        export_checkpoint(**options)  # type: ignore[arg-type]
    assert listing(tmp_path) == before
    assert (tmp_path / "taken.safetensors").read_text() == "mine"


@pytest.mark.parametrize("how", ["same", "hard link", "symlink", "shard"])
def test_the_source_is_never_overwritten(tmp_path: Path, how: str) -> None:
    source: Path = tmp_path / "source.safetensors"
    target = tmp_path / "other.safetensors"
    shutil.copy(HOT, source)
    match how:
        case "same":
            target = source
        case "hard link":
            os.link(source, target)
        case "symlink":
            target.symlink_to(source)
        case "shard":
            source = shard(tmp_path / "m", golden("hot"))
            target = source / "diffusion_pytorch_model-00001-of-00002.safetensors"
    before = target.read_bytes()
    with pytest.raises(MossError, match="is the source itself"):
        export_checkpoint(source, target, DEFAULT, overwrite=True)
    assert target.read_bytes() == before


def test_overwriting_replaces_in_one_step(tmp_path: Path, drafts: str) -> None:
    target = tmp_path / "out.safetensors"
    target.write_text("old")
    seen: list[str] = []
    export_checkpoint(
        HOT, target, DEFAULT, dtype="fp16", overwrite=True, progress=lambda *_: seen.append(target.read_text())
    )
    assert set(seen) == {"old"}
    assert_same(target, golden("hot_fp16fix"))


def test_a_full_disk_is_noticed_before(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(free=1000))
    with pytest.raises(MossError, match="has only"):
        export_checkpoint(HOT, tmp_path / "out.safetensors", DEFAULT)
    assert listing(tmp_path) == []


def test_a_disk_that_fills_up_leaves_nothing(tmp_path: Path, drafts: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(descriptor: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(MossError, match=r"out\.safetensors cannot be written: the disk is full"):
        export_checkpoint(HOT, tmp_path / "out.safetensors", DEFAULT)
    assert listing(tmp_path) == []


@pytest.mark.skipif(not hasattr(os, "fdatasync"), reason="nothing is flushed early here")
@pytest.mark.parametrize("failing", [1, 3])
def test_an_early_flush_that_fails_is_noticed(
    tmp_path: Path, drafts: str, monkeypatch: pytest.MonkeyPatch, failing: int
) -> None:
    calls: list[int] = []

    def flush(descriptor: int) -> None:
        calls.append(descriptor)
        if len(calls) == failing:
            raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr(files, "_FLUSH_BYTES", 8)
    monkeypatch.setattr(os, "fdatasync", flush)
    with (
        pytest.raises(MossError, match=r"out\.safetensors cannot be written: Input/output error"),
        new_file(tmp_path / "out.safetensors") as write,
    ):
        for _ in range(10_000):
            write(bytes(8))
    assert len(calls) >= failing and not listing(tmp_path)


@pytest.mark.parametrize("error", [KeyboardInterrupt, RuntimeError])
def test_an_interrupt_leaves_nothing(tmp_path: Path, drafts: str, error: type[BaseException]) -> None:
    def stop(done: int, total: int) -> None:
        if done > total // 2:
            raise error

    with pytest.raises(error):
        export_checkpoint(HOT, tmp_path / "out.safetensors", DEFAULT, progress=stop)
    assert listing(tmp_path) == []


def test_a_cancelled_export_leaves_nothing(tmp_path: Path, drafts: str) -> None:
    answers: Iterator[bool] = iter([False] * 5 + [True] * 99)
    with pytest.raises(MossCancelledError, match="cancelled"):
        export_checkpoint(HOT, tmp_path / "out.safetensors", DEFAULT, cancel=lambda: next(answers))
    assert listing(tmp_path) == []


def test_progress_counts_every_byte(tmp_path: Path) -> None:
    seen: list[tuple[int, int]] = []
    result = export_checkpoint(HOT, tmp_path / "out.safetensors", DEFAULT, progress=lambda *at: seen.append(at))
    counts = [done for done, _ in seen]
    assert counts == sorted(counts) and seen[-1] == (result.nbytes, result.nbytes)


KILL_ME = """
import os, sys
from fold import files
from fold.checkpoint.export import export_checkpoint
from fold.scaling.factors import DEFAULT
if sys.argv[3] == "part":
    files._can_be_nameless = lambda folder: False
def progress(done, total):
    if done > total // 2:
        print(flush=True)
        sys.stdin.read()
export_checkpoint(sys.argv[1], sys.argv[2], DEFAULT, progress=progress)
"""


@pytest.mark.skipif(os.name == "nt", reason="kill -9 is a POSIX thing")
@pytest.mark.parametrize("how", ["nameless", "part"])
def test_a_killed_export_leaves_no_result(tmp_path: Path, how: str) -> None:
    target = tmp_path / "out.safetensors"
    command = [sys.executable, "-c", KILL_ME, str(HOT), str(target), how]
    with subprocess.Popen(command, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None and process.stdin is not None
        process.stdout.readline()
        during = listing(tmp_path)
        # While it runs, its part file is left alone by others.
        with new_file(target) as write:
            write(b"other")
        assert listing(tmp_path) == sorted([*during, target.name])
        target.unlink()
        process.send_signal(signal.SIGKILL)
        process.wait()
    left = listing(tmp_path)
    nameless = how == "nameless" and files._can_be_nameless(tmp_path)
    assert left == ([] if nameless else [f"out.safetensors.part-{process.pid}"])
    export_checkpoint(HOT, target, DEFAULT)
    assert listing(tmp_path) == [target.name]


def test_parts_of_this_process_number_and_other_files_beside(tmp_path: Path, drafts: str) -> None:
    """In a container every start may have the same process number: an old part must not be in the way."""
    target = tmp_path / "out.safetensors"
    (tmp_path / f"out.safetensors.part-{os.getpid()}").write_text("old")
    kept = {
        "out.safetensors.part-",
        "out.safetensors.part-x",
        "xout.safetensors.part-99999999",
        "out.safetensors.part-1x",
    }
    for name in kept:
        (tmp_path / name).write_text("keep")
    save_tensors(target, {"a": torch.ones(2)})
    assert set(listing(tmp_path)) == kept | {target.name}


def test_one_target_is_written_once_at_a_time(tmp_path: Path, drafts: str) -> None:
    target = tmp_path / "x"
    with new_file(target) as write:
        write(b"a")
        with pytest.raises(MossError, match="being written already"), new_file(target):
            pass
    assert target.read_bytes() == b"a"


def test_a_target_that_appears_meanwhile_is_not_replaced(tmp_path: Path, drafts: str) -> None:
    target = tmp_path / "x"
    with pytest.raises(MossError, match="exists already"), new_file(target) as write:
        write(b"a")
        target.write_text("theirs")
    assert target.read_text() == "theirs" and listing(tmp_path) == ["x"]


@pytest.mark.skipif(sys.platform != "linux", reason="reads peak memory the Linux way")
def test_memory_does_not_grow_with_the_file(tmp_path: Path) -> None:
    """A file of 150 MB, most of it one tensor: about half of that in memory."""
    from fold.demo import demo_arch, write_demo

    source = tmp_path / "source.safetensors"
    write_demo(tmp_path / "demo.safetensors", demo_arch(512, 3, 4))
    tensors = load_file(tmp_path / "demo.safetensors")
    save(source, tensors | {"vae.big": torch.zeros(120_000_000, dtype=torch.uint8)})
    code = (
        "import resource, sys, torch\n"
        "from fold.checkpoint.export import export_checkpoint; from fold.scaling.factors import DEFAULT\n"
        "start = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss\n"
        "export_checkpoint(sys.argv[1], sys.argv[2], DEFAULT, dtype='fp16')\n"
        "print((resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - start) * 1024)"
    )
    command = [sys.executable, "-c", code, str(source), str(tmp_path / "out.safetensors")]
    done = subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True)
    assert int(done.stdout) < 90e6
