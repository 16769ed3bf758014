"""The probe node on a real ComfyUI: its factors bring a run into range; a fix or a kept fold does not mislead it."""

from __future__ import annotations

from typing import Any

import pytest
from comfy_runs import conditioning, fixed, load, rel, report, sample
from moss_fp16_pack.fold.errors import MossError
from moss_fp16_pack.fold.measure.probe import ProbeSettings
from moss_fp16_pack.nodes.probe import MossFP16Probe, measure, prompts_of

SMALL: dict[str, Any] = {"sizes": "96x64", "sigmas": "1, 0.5", "seed": 3}


@pytest.mark.parametrize("name", ["hot", "burst"])
def test_the_factors_bring_the_run_into_range(name: str) -> None:
    prompt = conditioning(name)
    factors, text = MossFP16Probe.execute(load(name, "fp16"), prompt, **SMALL).args
    assert '"schema": "moss_fp16.factors/1"' in text
    model = fixed(load(name, "fp16"), fix="online", factors=factors, guard="report")
    out = sample(model, prompt)
    found = report(model)["summary"]
    assert rel(out, sample(load(name, "fp32"), prompt)) < 4e-3
    assert found["saturated"] == found["non_finite"] == 0 and found["headroom_bits"] > 2


def test_a_fix_or_a_kept_fold_measures_the_same_function() -> None:
    prompts = prompts_of(conditioning("hot"))
    settings = ProbeSettings(((96, 64),), (1.0, 0.5), 3)
    plain = measure(load("hot", "fp32"), prompts, settings)
    under_fix = measure(fixed(load("hot", "fp32"), fix="online", c=1 / 16), prompts, settings)
    assert under_fix.peaks == plain.peaks
    kept = measure(load("hot_fp16fix", "fp32", unfold=False), prompts, settings)
    assert kept.peaks.stream == pytest.approx(plain.peaks.stream / 16, rel=1e-3)


def test_bad_texts_are_refused() -> None:
    for wrong, words in (({"sizes": "1024"}, "1024x1024"), ({"sigmas": "1, half"}, "numbers like")):
        with pytest.raises(MossError, match=words):
            MossFP16Probe.execute(load("hot", "fp16"), conditioning("hot"), **{**SMALL, **wrong})
