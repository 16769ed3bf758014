"""The table of module names: everything follows from it, and a module of another name is one entry of it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import golden
import pytest
import torch
from repo import DATA, ROOT
from safetensors import safe_open
from safetensors.torch import save_file

from fold.arch import MossArch
from fold.checkpoint.reader import open_checkpoint
from fold.demo import demo_arch, write_demo
from fold.dtypes import AppliedDtypes, apply_rules, parse_rules, stored_dtype
from fold.errors import MossError
from fold.names import OFFICIAL, ModuleNames, Role
from fold.qkv import block_keys, keys_with
from fold.scaling.factors import Factors
from fold.scaling.weights import row_scale

ARCH = golden.model("hot").arch
#: Another name for every module there is one of, every list of blocks, and every module of a block.
OTHERS = {
    **{part.path: f"renamed.{name}" for name, part in OFFICIAL.parts.items()},
    **{f"{OFFICIAL.text.blocks}.*.{part.path}": f"in.{name}_" for name, part in OFFICIAL.text.parts.items()},
    **{f"{OFFICIAL.joint.blocks}.*.{part.path}": f"{name}.own" for name, part in OFFICIAL.joint.parts.items()},
    OFFICIAL.text.blocks: "refiner.stack",
    OFFICIAL.joint.blocks: "stack",
    OFFICIAL.rope_bands: "bands.of_rope",
}
RENAMED = OFFICIAL.renamed(OTHERS)


def other_key(key: str) -> str:
    """A golden file's key under the other names."""
    for index in range(10):
        for block, other in ((OFFICIAL.text, RENAMED.text), (OFFICIAL.joint, RENAMED.joint)):
            for name, part in block.parts.items():
                if key.rpartition(".")[0].endswith(block.path(index, part)):
                    return key.replace(block.path(index, part), other.path(index, other.parts[name]))
    for name, part in OFFICIAL.parts.items():
        if part.path in key:
            return key.replace(part.path, RENAMED.parts[name].path)
    return key.replace(OFFICIAL.rope_bands, RENAMED.rope_bands)


@pytest.fixture(scope="module")
def renamed_data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The golden files with every module under another name."""
    folder = tmp_path_factory.mktemp("renamed")
    (folder / "names.json").write_text(json.dumps(OTHERS))
    for file in sorted(DATA.glob("*.safetensors")):
        if file.stem.endswith("_io"):
            continue
        with safe_open(file, "pt") as source:
            tensors = {other_key(key): source.get_tensor(key) for key in source.keys()}  # noqa: SIM118
            save_file(tensors, folder / file.name, source.metadata())
    return folder


def test_the_golden_suite_holds_with_every_module_renamed(renamed_data: Path) -> None:
    with open_checkpoint(renamed_data / "hot.safetensors", RENAMED) as checkpoint:
        assert not {*checkpoint.names()} & {*ARCH.expected_shapes(False)}
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", "tests/unit/test_golden.py"]
    renamed = {**os.environ, "MOSS_GOLDEN_RENAMED": str(renamed_data)}
    done = subprocess.run(command, cwd=ROOT, env=renamed, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-3000:]


@pytest.mark.parametrize("fused", [False, True])
def test_the_fold_scales_the_same_rows_under_other_names(fused: bool) -> None:
    factors = Factors((1 / 16,), (1 / 2,), (1 / 4,))
    arch = MossArch(**{**ARCH.sizes(), "names": RENAMED})  # type: ignore[arg-type]
    for name in ARCH.expected_shapes(fused):
        own, other = row_scale(name, ARCH, factors), row_scale(other_key(name), arch, factors)
        assert str(own) == str(other), name


def test_the_files_own_names_are_not_those_of_the_official_table(renamed_data: Path) -> None:
    with pytest.raises(MossError, match="is not a MOSS-Image model"):
        open_checkpoint(renamed_data / "hot.safetensors")


def test_renaming_what_is_not_in_the_table_is_an_error() -> None:
    with pytest.raises(KeyError, match=r"layers\.3\.proj\.o"):
        OFFICIAL.renamed({"layers.3.proj.o": "out"})
    assert OFFICIAL.renamed({}) == OFFICIAL
    assert OFFICIAL.renamed({"layers.*.proj.o": "out"}).joint.path(3, OFFICIAL.joint.o) == "layers.3.proj.o"


def test_a_table_is_never_changed_and_has_no_other_fields() -> None:
    table = OFFICIAL.joint.replaced()
    with pytest.raises(AttributeError, match=r"JointBlock\.o cannot be set"):
        table.o = table.q
    with pytest.raises(AttributeError, match=r"JointBlock\.o cannot be deleted"):
        del table.o
    assert table == OFFICIAL.joint
    with pytest.raises(TypeError, match="JointBlock has no field ffn_dwn"):
        table.replaced(ffn_dwn=table.ffn_down)


def test_a_table_is_shown_by_what_is_its_own() -> None:
    assert repr(OFFICIAL) == "ModuleNames()"
    shown = repr(OFFICIAL.renamed({"layers.*.proj.o": "out", "layers": "stack"}))
    assert shown.startswith("ModuleNames(joint=JointBlock(blocks='stack', o=Part(path='out', role=")
    assert shown.count("Part(") == 1


@pytest.mark.parametrize("names", [OFFICIAL, RENAMED], ids=["official", "renamed"])
def test_every_module_is_found_by_its_path_and_by_no_other(names: ModuleNames) -> None:
    arch = MossArch(64, 12, 2, 96, 48, 2, 96, 128, 256, names=names)
    for fused in (True, False):
        found = dict(arch.modules(fused))
        assert {path: names.of(path) for path in found} == found
    assert names.of(names.joint.path(11)) is None and names.of("") is None
    assert names.of(f"{names.joint.blocks}.x.{names.joint.o.path}") is None


def test_roles_give_the_lists_that_the_paths_need() -> None:
    assert ARCH.paths(Role.STREAM_WRITER) == (
        "video_embedder", "text_embedder.proj",
        "text_embedder.blocks.0.proj", "text_embedder.blocks.0.ffn_down",
        "text_embedder.blocks.1.proj", "text_embedder.blocks.1.ffn_down",
    )  # fmt: skip
    assert len(ARCH.paths(Role.STREAM_NORM)) == 2 * (2 + 4) + 1
    assert not any(path.endswith(("q_norm", "k_norm")) for path in ARCH.paths(Role.STREAM_NORM))
    assert ARCH.paths(Role.GATES) == ("shared_block_modulation",)
    assert ARCH.block_paths()[:3] == ("text_embedder.blocks.0", "text_embedder.blocks.1", "layers.0")


@pytest.mark.parametrize("names", [OFFICIAL, RENAMED], ids=["official", "renamed"])
def test_what_is_stored_in_fp32(names: ModuleNames) -> None:
    arch = MossArch(64, 4, 2, 96, 48, 2, 96, 128, 256, names=names)
    wide = {key for key in arch.expected_shapes(False) if stored_dtype(key, torch.float16, names) == torch.float32}
    big = {f"{path}.weight" for path, part in arch.modules(False) if part.role in (Role.LINEAR, Role.STREAM_WRITER)}
    assert names.rope_bands in wide and not wide & big
    assert len(wide) == 1 + 4 * (2 + 4) + 1 + 1 + 2 * 4  # bands, block norms, final norm, final linear, four with bias


def test_the_keys_of_q_k_and_v_name_their_block() -> None:
    keys = block_keys(RENAMED, 3)
    assert keys.fused == "stack.3.qkv.own.weight" and keys.split[1] == "stack.3.k.own.weight"
    assert {keys_with(key, RENAMED) for key in (keys.fused, *keys.split)} == {keys}
    for other in ("stack.3.o.own.weight", "refiner.stack.1.in.qkv_.weight", "stack.3.q.own.bias"):
        assert keys_with(other, RENAMED) is None


def test_dtype_rules_go_by_the_other_names() -> None:
    arch = MossArch(**{**ARCH.sizes(), "names": RENAMED})  # type: ignore[arg-type]

    def applied(text: str) -> AppliedDtypes:
        keys = arch.expected_shapes(True)
        return apply_rules(parse_rules(text), keys, lambda key: stored_dtype(key, torch.float16, RENAMED), RENAMED)

    rules = "\n".join(f"stack.*.{letter}.own.weight = fp32" for letter in "qkv")
    assert set(applied(rules).parameters) == {block_keys(RENAMED, index).fused for index in range(4)}
    norms = applied("*norm1_.weight = fp16")
    assert norms.parameters and norms.modules(RENAMED) == {}


def test_the_demo_has_the_other_names_and_its_massive_channels(tmp_path: Path) -> None:
    arch = MossArch(**{**demo_arch(64, 2, 2).sizes(), "names": RENAMED})  # type: ignore[arg-type]
    write_demo(tmp_path / "demo.safetensors", arch)
    with open_checkpoint(tmp_path / "demo.safetensors", RENAMED) as checkpoint:
        assert checkpoint.tensor("renamed.video_embedder.bias").abs().max() == 64.0
        assert checkpoint.tensor("stack.1.ffn_down.own.weight")[:, 0].abs().max() == 1.0
