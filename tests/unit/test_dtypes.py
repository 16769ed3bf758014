"""Input dtypes and parameter dtypes: what is applied, to what, and what it costs."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import golden
import pytest
import torch
from golden import Case, relative, velocity
from hypothesis import given, settings
from hypothesis import strategies as st
from repo import DATA
from safetensors.torch import load_file

from fold.checkpoint.load import load_model
from fold.checkpoint.reader import open_checkpoint
from fold.cli import main
from fold.dtypes import NOTHING_APPLIED, AppliedDtypes, InputPolicy, apply_rules, parse_rules, stored_dtype
from fold.errors import MossError
from fold.model.forward import MossDiT
from fold.scaling.plan import StreamPlan

HALF = torch.float16
BLOCK = "layers.0.proj"


def applied(lines: str, fused: bool = False, compute: torch.dtype = HALF) -> AppliedDtypes:
    names = golden.model("hot").arch.expected_shapes(fused)
    return apply_rules(parse_rules(lines), names, lambda name: stored_dtype(name, compute))


def test_no_rules_apply_nothing() -> None:
    assert applied("") is NOTHING_APPLIED
    assert applied("\n  # a comment\n") is NOTHING_APPLIED


def test_lines_are_read() -> None:
    rules = parse_rules(["layers.* = fp32 # all", " a=bf16\n\nb = fp16"])
    assert [(rule.pattern, rule.dtype) for rule in rules] == [
        ("layers.*", torch.float32),
        ("a", torch.bfloat16),
        ("b", torch.float16),
    ]


@pytest.mark.parametrize("line", ["layers.*", "= fp32", "a = fp64", "a = ", "a == fp32", "a: fp32"])
def test_other_lines_are_refused(line: str) -> None:
    with pytest.raises(MossError, match="A parameter dtype is a line like"):
        parse_rules(line)


def test_a_glob_crosses_dots_and_names_blocks() -> None:
    found = applied("layers.*.o.weight = fp32")
    assert found.parameters == {f"layers.{i}.proj.o.weight": torch.float32 for i in range(4)}
    assert found.modules() == {f"layers.{i}.proj.o": torch.float32 for i in range(4)}
    assert found.record == {"layers.*.o.weight": {"dtype": "fp32", "matched": 4, "changed": 4}}


def test_a_later_line_overrides_an_earlier_one() -> None:
    found = applied("layers.* = fp32\nlayers.*.o.weight = bf16\nlayers.0.* = fp16")
    assert found.parameters[f"{BLOCK}.o.weight".replace("0", "1")] == torch.bfloat16
    assert not any(name.startswith("layers.0.proj") for name in found.parameters)
    assert found.parameters["layers.0.norm1.weight"] == HALF  # fp32 by default
    assert [row["changed"] for row in found.record.values()] == [15, 3, 4]


def test_what_equals_the_default_costs_nothing() -> None:
    found = applied("layers.*.proj.* = fp16\ntime_embedding.* = fp32\n*norm* = fp32")
    assert (found.parameters, found.modules()) == ({}, {})
    assert [row["changed"] for row in found.record.values()] == [0, 0, 0]


def test_conditioning_head_and_norms_are_fp32_by_default() -> None:
    found = applied("* = fp32").parameters
    kept = ("time_embedding", "shared_block_modulation", "video_head_modulation", "final_", "rope")
    assert not any(name.startswith(kept) or "norm" in name for name in found)
    assert "video_embedder.bias" in found


def test_norms_store_but_do_not_compute() -> None:
    found = applied("layers.0.* = bf16")
    assert found.parameters["layers.0.q_norm.weight"] == torch.bfloat16
    assert set(found.modules()) == {f"{BLOCK}.{name}" for name in ("q", "k", "v", "o", "ffn_up_gate", "ffn_down")}


@pytest.mark.parametrize(
    ("pattern", "near"),
    [
        ("layers.0.proj.out.weight", "layers.0.proj.o.weight"),
        ("layers.*.attn.o.weight", "proj.o.weight"),
        ("diffusion_model.time_embedding.0.weight", "time_embedding.0.weight"),
        ("zzz", "."),
        ("rope.bands", "."),
    ],
)
def test_a_pattern_that_matches_nothing_names_its_neighbours(pattern: str, near: str) -> None:
    with pytest.raises(MossError, match="No parameter of this model matches") as error:
        applied(f"{pattern} = fp32")
    assert near in str(error.value).split("nearest are")[1]


def test_split_names_in_a_fused_layout() -> None:
    whole = f"{BLOCK}.qkv.weight"
    assert applied("layers.0.proj.[qkv].weight = fp32", fused=True).parameters == {whole: torch.float32}
    found = applied(f"{whole} = fp32", fused=True)
    assert found.parameters == {whole: torch.float32}
    assert found.record[whole]["matched"] == 1


@pytest.mark.parametrize("lines", [f"{BLOCK}.q.weight = fp32", f"{BLOCK}.qkv.weight = fp32\n{BLOCK}.v.weight = bf16"])
def test_different_dtypes_in_one_matrix_are_refused(lines: str) -> None:
    with pytest.raises(MossError, match="holds q, k and v in one matrix"):
        applied(lines, fused=True)
    assert applied(lines).parameters


def test_the_fused_name_in_a_split_layout() -> None:
    found = applied(f"{BLOCK}.qkv.weight = fp32").parameters
    assert found == {f"{BLOCK}.{letter}.weight": torch.float32 for letter in "qkv"}


@settings(max_examples=50, deadline=None)
@given(
    st.lists(
        st.tuples(
            st.sampled_from(["*", "layers.*", "layers.1.*", "*.bias", "*norm*"]),
            st.sampled_from(["fp32", "bf16", "fp16"]),
        )
    )
)
def test_the_last_match_decides(rules: list[tuple[str, str]]) -> None:
    from fnmatch import fnmatchcase

    from fold.dtypes import DTYPES

    found = applied("\n".join(f"{pattern} = {dtype}" for pattern, dtype in rules)).parameters
    for name in golden.model("hot").arch.expected_shapes(False):
        if name == "rope.bands":
            continue
        last = [DTYPES[dtype] for pattern, dtype in rules if fnmatchcase(name, pattern)]
        wanted = last[-1] if last else stored_dtype(name, HALF)
        assert found.get(name, stored_dtype(name, HALF)) == wanted


def loaded(lines: str, source: str = "hot", compute: torch.dtype = HALF) -> MossDiT:
    with open_checkpoint(DATA / f"{source}.safetensors") as checkpoint:
        rules = apply_rules(parse_rules(lines), checkpoint.names(), lambda name: stored_dtype(name, compute))
        return load_model(checkpoint, compute, overrides=rules)


@pytest.fixture
def case() -> Case:
    return golden.cases_of("hot")[1]


def test_parameters_are_stored_as_ruled(case: Case) -> None:
    model = loaded("layers.0.* = fp32\nshared_block_modulation.* = bf16")
    for name, parameter in model.named_parameters():
        wanted = stored_dtype(name, HALF)
        wanted = torch.float32 if name.startswith("layers.0.") else wanted
        wanted = torch.bfloat16 if name.startswith("shared") else wanted
        assert parameter.dtype == wanted, name
    assert bool(velocity(case, StreamPlan("online", golden.UNIFORM), HALF, weights=model).isfinite().all())


def test_a_wider_linear_computes_in_its_own_dtype() -> None:
    x = torch.randn(3, 64, generator=torch.Generator().manual_seed(0)).to(HALF)
    wide, plain = loaded("layers.0.proj.o.weight = fp32").layers[0].proj.o, golden.model("hot").layers[0].proj.o
    assert torch.equal(wide(x), plain(x.float()).to(HALF))


def test_everything_in_fp32_is_closer() -> None:
    # not fp16, whose products a CPU may compute in fp32 anyway
    dtype, case, plan = torch.bfloat16, golden.cases_of("cool")[1], StreamPlan("fp32_residual")
    wide = velocity(case, plan, dtype, weights=loaded("* = fp32", "cool", dtype))
    assert relative(wide, velocity(case)) < relative(velocity(case, plan, dtype), velocity(case))


def test_bf16_modulation_is_that_of_a_bf16_runtime(case: Case) -> None:
    model = loaded("shared_block_modulation.* = bf16", compute=torch.float32)
    time = torch.randn(2, 64, generator=torch.Generator().manual_seed(0))
    source = golden.model("hot").shared_block_modulation
    half = torch.bfloat16
    wanted = torch.nn.functional.linear(time.to(half), source.weight.to(half), source.bias.to(half))
    assert torch.equal(model.shared_block_modulation(time), wanted.float())


def test_a_fused_model_takes_a_rule(case: Case) -> None:
    plan = StreamPlan("online", golden.UNIFORM)
    line = "layers.*.proj.[qkv].weight = fp32"
    fused, split = (velocity(case, plan, HALF, weights=loaded(line, s)) for s in ("hot_fused_qkv", "hot"))
    assert torch.equal(fused, split)


def test_input_policy_names_are_checked() -> None:
    with pytest.raises(MossError, match="The cond dtype is one of default"):
        InputPolicy(cond="fp64")
    assert InputPolicy().plain
    assert not InputPolicy(timestep="bf16").plain


@pytest.mark.parametrize(
    ("choice", "dtypes"),
    [
        ("default", (HALF, torch.float32, HALF)),
        ("fp32", (torch.float32,) * 3),
        ("bf16", (torch.bfloat16,) * 3),
        ("passthrough", (torch.float32, torch.bfloat16, HALF)),
    ],
)
def test_an_input_policy_gives_each_input_its_dtype(choice: str, dtypes: tuple[Any, ...]) -> None:
    given = (torch.ones(1), torch.ones(1, dtype=torch.bfloat16), torch.ones(1, dtype=HALF))
    out = InputPolicy(choice, choice, choice).apply(*given, HALF)
    assert tuple(tensor.dtype for tensor in out) == dtypes


def run_forward(tmp_path: Path, *options: str) -> tuple[torch.Tensor, dict[str, Any]]:
    out, report = tmp_path / "v.safetensors", tmp_path / "r.json"
    io = DATA / "hot_io.safetensors"
    args = ["--io", io, "--latent", "case1.latent", "--context", "case1.context", "--sigma", "0.3", "--dtype", "fp16"]
    line = ["forward", DATA / "hot.safetensors", *args, "--out", out, "--report", report, *options]
    assert main([str(part) for part in line]) == 0
    return load_file(out)["velocity"], json.loads(report.read_text())


def test_the_command_line_takes_both_and_reports_them(tmp_path: Path) -> None:
    plain, report = run_forward(tmp_path)
    assert report["input_dtypes"] == {"latents": "default", "cond": "default", "timestep": "default"}
    assert report["param_dtypes"] == {}
    other, report = run_forward(
        tmp_path, "--timestep-dtype=bf16", "--param-dtype", "layers.*.proj.o.weight=fp32", "--param-dtype=* = fp16"
    )
    assert not torch.equal(plain, other)
    assert report["input_dtypes"]["timestep"] == "bf16"
    assert list(report["param_dtypes"]) == ["layers.*.proj.o.weight", "*"]


def test_the_interior_keeps_its_rule_whatever_the_inputs_come_as(tmp_path: Path) -> None:
    plain, _ = run_forward(tmp_path)
    for choice in ("fp32", "fp16", "passthrough"):
        same, _ = run_forward(tmp_path, f"--latents-dtype={choice}", f"--cond-dtype={choice}")
        assert torch.equal(plain, same)
    rounded, _ = run_forward(tmp_path, "--latents-dtype=bf16")
    assert not torch.equal(plain, rounded)


@pytest.mark.parametrize(
    ("option", "sentence"),
    [
        ("--param-dtype=nothing.like.it=fp32", "No parameter of this model matches"),
        ("--param-dtype=layers.*", "A parameter dtype is a line like"),
        ("--cond-dtype=fp64", "--cond-dtype"),
    ],
)
def test_the_command_line_refuses(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], option: str, sentence: str
) -> None:
    line = ["forward", str(DATA / "hot.safetensors"), "--io", str(DATA / "hot_io.safetensors"), "--latent=case1.latent"]
    line += ["--context=case1.context", "--sigma=0.3", f"--out={tmp_path / 'v.safetensors'}", option]
    assert main(line) == 2
    assert sentence in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


def test_lines_beyond_all_measure_are_refused() -> None:
    with pytest.raises(MossError, match="100000 lines"):
        parse_rules("layers.*.proj.o.weight = fp32\n" * 100_000)
