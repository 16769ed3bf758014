"""What a workflow names as a file stays inside ComfyUI's folders: a workflow comes from anywhere."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import folder_paths
import pytest
import torch
from moss_fp16_pack.fold.errors import MossError
from moss_fp16_pack.fold.measure.conditioning import read_conditioning
from moss_fp16_pack.nodes.conditioning import (
    FOLDER,
    MossFP16LoadConditioning,
    MossFP16SaveConditioning,
    conditioning_files,
    conditioning_path,
)
from moss_fp16_pack.nodes.loader import MossFP16Loader
from moss_fp16_pack.nodes.loading.files import model_names, model_path
from repo import DATA
from safetensors.torch import save_file

SECRET = "secret.safetensors"


@pytest.fixture
def places(base: Path, tmp_path: Path) -> Any:
    """A conditioning inside input, one outside of everything, and links that lead there."""
    inside, outside = Path(folder_paths.get_input_directory()), tmp_path / "elsewhere"
    outside.mkdir()
    for file in (inside / "fine.safetensors", inside / "sub" / "fine.safetensors", outside / SECRET):
        file.parent.mkdir(exist_ok=True)
        save_file({"context": torch.zeros(1, 3, 48)}, file)
    save_file({"context": torch.zeros(1, 3, 48)}, inside.parent / SECRET)
    links = [inside / "link.safetensors", inside / "linked"]
    links[0].symlink_to(outside / SECRET)
    links[1].symlink_to(outside, target_is_directory=True)
    yield outside
    for link in links:
        link.unlink()
    (inside / "fine.safetensors").unlink()
    (inside / "sub" / "fine.safetensors").unlink()
    (inside.parent / SECRET).unlink()


HOSTILE = [
    "", ".", "..", "/", "\\", "[output] ", "[output] ..", f"../{SECRET}", f"sub/../../{SECRET}", f"./../{SECRET}",
    f"[output] ../{SECRET}", f"[output] ../../{SECRET}", f"..\\{SECRET}", f"sub\\..\\..\\{SECRET}", "/etc/passwd",
    "//etc/passwd", "file:///etc/passwd", "~/.ssh/id_rsa", "C:\\secret.safetensors", "C:/secret.safetensors",
    "C:secret.safetensors", "\\\\server\\share\\x.safetensors", "\\\\?\\C:\\x.safetensors", "fine.safetensors\0.png",
    "\0", "a" * 5000, "a/" * 3000 + "b.safetensors", "link.safetensors", f"linked/{SECRET}", f"linked/../{SECRET}",
    "sub", "sub/", "fine.safetensors/x", "none.safetensors", "fine.pt", "con.safetensors",
    "nul", "\ud800.safetensors", "fine.safetensors\n", "[output] [output] fine.safetensors",
]  # fmt: skip


@pytest.mark.parametrize("name", HOSTILE, ids=lambda name: ascii(name[:40]))
def test_conditioning_names(places: Path, name: str) -> None:
    said = MossFP16LoadConditioning.validate_inputs(name)
    assert isinstance(said, str) and said.endswith(".") and "\n" not in said and len(said) < 400
    assert MossFP16LoadConditioning.fingerprint_inputs(name) is None
    with pytest.raises(MossError):
        MossFP16LoadConditioning.execute(name)


def test_conditioning_outside_by_its_full_name(places: Path) -> None:
    for name in (str(places / SECRET), os.path.relpath(places / SECRET, folder_paths.get_input_directory())):
        assert isinstance(MossFP16LoadConditioning.validate_inputs(name), str)
        with pytest.raises(MossError, match="inside"):
            conditioning_path(name)


@pytest.mark.parametrize("name", ["link.safetensors", f"linked/{SECRET}"])
def test_a_link_that_leads_out_is_called_one(places: Path, name: str) -> None:
    with pytest.raises(MossError, match=r"is a link that leads out of ComfyUI's input folder.*copy the file there"):
        conditioning_path(name)
    copy = Path(folder_paths.get_input_directory()) / "copied.safetensors"
    copy.write_bytes((places / SECRET).read_bytes())  # what the sentence says, done
    assert conditioning_path("copied.safetensors") == copy.resolve()
    copy.unlink()


def test_a_link_inside_the_input_folder_is_inside_it(places: Path) -> None:
    inside = Path(folder_paths.get_input_directory())
    link = inside / "within.SAFETENSORS"
    link.symlink_to(inside / "sub" / "fine.safetensors")
    try:
        assert conditioning_path("within.SAFETENSORS").name == "fine.safetensors"
        assert "within.SAFETENSORS" in conditioning_files()
    finally:
        link.unlink()


def test_what_is_inside_works(places: Path) -> None:
    for name in ("fine.safetensors", "sub/fine.safetensors"):
        assert MossFP16LoadConditioning.validate_inputs(name) is True
        assert conditioning_path(name).is_file()
        assert name in conditioning_files()
    assert not any("link" in name for name in conditioning_files()), "the list offers what would be refused"


@pytest.mark.parametrize(
    ("tensors", "message"),
    [
        ({}, "context"),
        ({"context": torch.zeros(3, 48)}, "context"),
        ({"context": torch.zeros(1, 0, 48)}, "context"),
        ({"context": torch.zeros(1, 3, 48, dtype=torch.int32)}, "context"),
        ({"context": torch.full((1, 3, 48), float("nan"))}, "NaN"),
        ({"context": torch.zeros(1, 3, 48), "attention_mask": torch.ones(1, 4)}, "attention_mask"),
        ({"context": torch.zeros(1, 3, 48), "attention_mask": torch.ones(3)}, "attention_mask"),
    ],
)
def test_conditioning_files_that_are_none(tmp_path: Path, tensors: dict[str, torch.Tensor], message: str) -> None:
    file = tmp_path / "odd.safetensors"
    save_file(tensors, file)
    with pytest.raises(MossError, match=f"(?s){message}") as caught:
        read_conditioning(file)
    assert "odd.safetensors" in str(caught.value)


def test_conditioning_files_that_are_damaged(tmp_path: Path) -> None:
    file = tmp_path / "odd.safetensors"
    save_file({"context": torch.zeros(1, 3, 48)}, file)
    raw = file.read_bytes()
    for content in (b"", raw[:-1], raw + b"\0", b"\x80\x02}q\x00.", raw[:8] + b"[" * (len(raw) - 8)):
        file.write_bytes(content)
        with pytest.raises(MossError, match=r"odd\.safetensors"):
            read_conditioning(file)


@pytest.mark.parametrize(
    "prefix", ["../out", "/tmp/out", "a/../../../out", "..\\..\\out", "C:\\out", "\0", "a" * 400, "~/out"],
    ids=lambda prefix: ascii(prefix[:20]),
)  # fmt: skip
def test_saving_stays_in_the_output_folder(base: Path, prefix: str) -> None:
    """Whatever the prefix is: nothing appears outside, and what is refused is refused in words."""
    output = Path(folder_paths.get_output_directory())
    before = set(base.parent.glob("*out*")) | set(Path("/tmp").glob("out*"))
    conditioning = [[torch.zeros(1, 3, 48), {}]]
    try:
        MossFP16SaveConditioning.execute(conditioning, prefix)
    except Exception as error:
        assert str(error) and "Traceback" not in str(error)
    after = set(base.parent.glob("*out*")) | set(Path("/tmp").glob("out*"))
    assert after == before
    for file in output.rglob("*.safetensors"):
        assert file.resolve().is_relative_to(output.resolve())


def test_saved_is_loaded(base: Path) -> None:
    context = torch.randn(1, 5, 48)
    mask = torch.tensor([[1, 1, 1, 0, 0]])
    shown = MossFP16SaveConditioning.execute([[context, {"attention_mask": mask}]], f"{FOLDER}/t").ui["moss_fp16_files"]
    (found,) = MossFP16LoadConditioning.execute(f"[output] {shown[0]['filename']}").result[0]
    assert torch.equal(found[0], context) and torch.equal(found[1]["attention_mask"], mask)


MODELS = [
    "", "..", "../x.safetensors", "/etc/passwd", str(DATA / "hot.safetensors"), "diffusers/..", "diffusers/",
    "diffusers/../diffusion_models", "checkpoints/../diffusion_models/hot.safetensors", "C:\\hot.safetensors",
    "hot.safetensors\0", "none.safetensors", "checkpoints/none.safetensors", "a" * 5000, "\ud800",
    "diffusion_models/hot.safetensors", "./hot.safetensors", "HOT.SAFETENSORS",
]  # fmt: skip


@pytest.mark.parametrize("name", MODELS, ids=lambda name: ascii(name[-30:]))
def test_model_names(base: Path, name: str) -> None:
    assert name not in model_names()
    with pytest.raises(MossError, match="not among the models") as caught:
        model_path(name)
    assert len(str(caught.value)) < 400 and "\n" not in str(caught.value)
    assert MossFP16Loader.fingerprint_inputs(model_name=name) is None


def test_a_model_that_is_in_the_list(base: Path) -> None:
    assert Path(model_path("hot.safetensors")).name == "hot.safetensors"


def test_an_hf_folder_that_is_a_link(base: Path, tmp_path: Path) -> None:
    """ComfyUI lets users link model folders to other disks; a list entry is a folder's name, never a path."""
    roots = folder_paths.get_folder_paths("diffusers")
    if not roots:
        pytest.skip("this ComfyUI has no diffusers folder")
    for name in model_names():
        assert ".." not in name and "\\" not in name and not name.startswith("/")
