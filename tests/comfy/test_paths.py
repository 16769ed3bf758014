"""The fix through ComfyUI's own sampler: built-in class and a foreign one, native and managed path."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from comfy_runs import conditioning, fixed, load, rel, report, sample, stock
from moss_fp16_pack.fold.errors import MossError

HOT = ("hot", "burst")


@pytest.fixture(params=["builtin", "native", "managed"])
def make(request: pytest.FixtureRequest) -> Any:
    """(name, dtype) -> unfixed MODEL, with options a fixed one; once per class and path, which is `make.engine`."""
    engine = request.param
    if engine != "builtin":
        request.getfixturevalue("foreign")

    def model(name: str, dtype: str, **options: Any) -> Any:
        loaded = load(name, dtype) if engine == "builtin" else stock(name, dtype)
        own = {} if engine == "builtin" else {"engine": engine}
        return fixed(loaded, **own, **options) if options else loaded

    model.engine = engine  # type: ignore[attr-defined]
    return model


@pytest.mark.parametrize("name", ["cool", *HOT])
def test_fp32_fold_is_bit_equal(make: Any, name: str) -> None:
    prompt = conditioning(name)
    model = make(name, "fp32")
    before = sample(model, prompt)
    folded = fixed(model, fix="online", c=1 / 16, **({} if make.engine == "builtin" else {"engine": make.engine}))
    out = sample(folded, prompt)
    assert report(folded)["summary"]["peak"] > 0
    if report(folded)["engine"] == "managed":
        assert rel(out, before) < 2e-6  # another forward than the class's own
    else:
        assert torch.equal(out, before)
    assert torch.equal(sample(model, prompt), before), "the MODEL that was fixed is no longer as it was"


def test_fp16_is_finite_with_the_fix(make: Any, golden: dict[str, Any]) -> None:
    for name in HOT:
        prompt, factors = conditioning(name), golden["factors"][name]
        reference = sample(make(name, "fp32"), prompt)
        whole = {"c": factors["c"], "s_ffn": factors["s_ffn"]}
        native = make(name, "fp16", fix="online", c=1 / 16, guard="off")
        needs_s = factors["s_ffn"] != 1.0 and report_engine(native) == "native"
        model = native if needs_s or name == "hot" else make(name, "fp16", fix="online", guard="off", **whole)
        out = sample(model, prompt)
        found = report(model)
        if needs_s:
            # the native path has no s: the counters say what happened
            assert found["summary"]["saturated"] + found["summary"]["non_finite"] > 0
            continue
        assert out.isfinite().all()
        assert rel(out, reference) < 4e-3
        assert found["summary"]["saturated"] == found["summary"]["non_finite"] == 0
        assert found["summary"]["headroom_bits"] > 1


def report_engine(model: Any) -> str:
    from moss_fp16_pack.nodes.state import fix_of

    fix = fix_of(model)
    assert fix is not None
    return fix.path


@pytest.mark.parametrize("name", HOT)
def test_rescue_keeps_the_image(make: Any, name: str) -> None:
    """A plan that overflows is climbed out of; the result is as good as one started on a safe rung."""
    prompt = conditioning(name)
    reference = sample(make(name, "fp32"), prompt)
    model = make(name, "fp16", fix="none", guard="rescue")
    out = sample(model, prompt)
    found = report(model)
    assert out.isfinite().all()
    assert rel(out, reference) < 4e-3
    assert len(found["rescues"]) == 1 and found["rescues"][0]["step"] == 1
    assert found["summary"]["saturated"] == found["summary"]["non_finite"] == 0


def test_copies_for_other_gpus_are_refused() -> None:
    model = fixed(load("cool", "fp16"), fix="online", c=1 / 16)
    with pytest.raises(MossError, match="one GPU"):
        model.deepclone_multigpu()
    spread = load("cool", "fp16")
    spread.set_additional_models("multigpu", [load("cool", "fp16")])
    with pytest.raises(MossError, match="one GPU"):
        fixed(spread, fix="online")
