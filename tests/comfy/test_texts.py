"""Conditionings as nodes leave them: without a token, joined, with a mask of another length.

One sentence before the run where they cannot be used, and what the sentence says to do works.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from comfy_runs import conditioning, fixed, load, report, sample, stock
from moss_fp16_pack.fold.errors import MossError
from moss_fp16_pack.fold.measure.probe import ProbeSettings
from moss_fp16_pack.nodes.conditioning import MossFP16SaveConditioning
from moss_fp16_pack.nodes.probe import measure, prompts_of

from nodes import ConditioningCombine, ConditioningConcat

MODELS = {
    "builtin": lambda: fixed(load("cool", "fp16"), fix="online"),
    "native": lambda: fixed(stock("cool", "fp16"), fix="online"),
    "managed": lambda: fixed(stock("cool", "fp16"), fix="online", engine="managed"),
}


@pytest.fixture(params=MODELS)
def model(request: pytest.FixtureRequest, foreign: None) -> Any:
    return MODELS[request.param]()


def padded(case: str = "case0") -> list[Any]:
    """A prompt with two tokens of padding and the mask that says so."""
    context = conditioning("cool", case)[0][0]
    mask = torch.nn.functional.pad(torch.ones(context.shape[:2]), (0, 2))
    return [[torch.nn.functional.pad(context, (0, 0, 0, 2)), {"attention_mask": mask}]]


@pytest.mark.parametrize("side", ["positive", "negative"])
def test_a_conditioning_without_tokens(model: Any, side: str) -> None:
    empty, prompt = [[torch.zeros(1, 0, 48), {}]], conditioning("cool")
    positive, negative = (empty, prompt) if side == "positive" else (prompt, empty)
    with pytest.raises(MossError, match=r"has no tokens .*Load one that Save MOSS Conditioning wrote"):
        sample(model, positive, negative=negative, cfg=3.0)
    assert report(model)["model_calls"] == 0, "it was said before the run"
    assert sample(model, prompt, negative=prompt, cfg=3.0).isfinite().all()


def test_a_negative_that_is_not_used_may_have_none(model: Any) -> None:
    assert sample(model, conditioning("cool"), negative=[[torch.zeros(1, 0, 48), {}]], cfg=1.0).isfinite().all()


@pytest.mark.parametrize("kind", ["builtin", "managed"])
def test_joined_conditionings_are_not_blamed_on_the_text_encoder(kind: str, foreign: None) -> None:
    model, first, second = MODELS[kind](), padded(), padded("case1")
    (joined,) = ConditioningConcat().concat(first, second)
    with pytest.raises(MossError, match=r"covers 7 of .* 18 tokens\. Conditioning Concat does that") as caught:
        sample(model, joined)
    assert "text encode node" not in str(caught.value)
    assert report(model)["model_calls"] == 0
    (combined,) = ConditioningCombine().combine(first, second)  # what the sentence says, done
    assert sample(model, combined).isfinite().all()


@pytest.mark.parametrize("kind", ["builtin", "managed"])
def test_a_mask_for_more_tokens_than_there_are(kind: str, foreign: None) -> None:
    model, prompt = MODELS[kind](), padded()
    cut = [[prompt[0][0][:, :3], prompt[0][1]]]
    with pytest.raises(MossError, match=r"is for 7 tokens, but the conditioning has 3: a node after"):
        sample(model, cut)
    assert sample(model, prompt).isfinite().all()


@pytest.mark.parametrize("kind", ["builtin", "managed"])
def test_a_conditioning_of_another_model_is_named_before_the_run(kind: str, foreign: None) -> None:
    model = MODELS[kind]()
    with pytest.raises(MossError, match=r"takes \[batch, tokens, 48\]"):
        sample(model, [[torch.zeros(1, 3, 64), {}]])
    assert report(model)["model_calls"] == 0


UNUSABLE = {
    "no tokens": ([[torch.zeros(1, 0, 48), {}]], "has no tokens", r"\[B, T, width\] is needed"),
    "another width": ([[torch.zeros(1, 3, 64), {}]], r"takes \[batch, tokens, 48\]", None),
    "short mask": ([[torch.zeros(1, 3, 48), {"attention_mask": torch.ones(1, 2)}]], "covers 2 of", "attention_mask"),
    "NaN": ([[torch.full((1, 3, 48), float("nan")), {}]], None, "NaN"),
}


@pytest.mark.parametrize("case", UNUSABLE)
def test_the_probe_and_the_save_node_say_it_too(case: str) -> None:
    """Nothing is measured that would not run, and nothing is saved that would not load."""
    prompt, probed, saved = UNUSABLE[case]
    settings = ProbeSettings(sizes=((96, 96),), sigmas=(1.0,))
    if probed is not None:
        with pytest.raises(MossError, match=probed):
            measure(load("cool"), prompts_of(prompt), settings)
    if saved is not None:
        with pytest.raises(MossError, match=saved):
            MossFP16SaveConditioning.execute(prompt, "moss_conditioning/unusable")
    assert MossFP16SaveConditioning.execute(padded(), "moss_conditioning/usable").ui["moss_fp16_files"]
