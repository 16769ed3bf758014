"""Every node of ComfyUI's own that takes and gives a MODEL, with its defaults, on a MODEL of ours: as without the fix.

The nodes are read from ComfyUI's registry, so that one which a later ComfyUI brings along is tried, too. It runs and
does what it does to the same model in fp32 without a fix, or it is named here with the reason why not.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import folder_paths
import pytest
import torch
from comfy_runs import conditioning, fixed, load, rel, sample, stock
from core_nodes import apply_node, inputs_of, model_nodes
from moss_fp16_pack.fold.errors import MossError
from moss_fp16_pack.nodes.engines import patches
from safetensors.torch import save_file

MODEL = "cool"
STEPS, CFG = 3, 3.0
BOUND = 2e-2

#: What only another model's files can give: a node that needs it has no use here.
OTHER_MODELS = {
    "MODEL_PATCH": "a part made for another model (a control net, an adapter)",
    "VAE": "a VAE, to encode pictures for a video model",
    "AUDIO": "sound, for a video model",
    "COMFY_DYNAMICCOMBO_V3": "the settings of a video model",
    "a file for hypernetwork_name": "a hypernetwork, of which there are none for MOSS-Image",
}
#: Nodes made for UNets, which fail on every transformer, and others that cannot run: what is raised on our own class,
#: by our forward over a class of ComfyUI's own, by that class itself, and why. A MossError is a sentence; None: it
#: runs, and has no effect.
Raised = type[Exception] | None
FAILS: dict[str, tuple[Raised, Raised, Raised, str]] = {
    "SelfAttentionGuidance": (MossError, MossError, MossError, "looks into the middle block of a UNet"),
    "HyperTile": (MossError, MossError, TypeError, "takes q, k and v the way a UNet lays them out"),
    "TomePatchModel": (MossError, MossError, TypeError, "takes q, k and v the way a UNet lays them out"),
    "FluxKVCache": (MossError, MossError, None, "keeps k and v of FLUX's reference pictures"),
    "ModelSamplingSD3": (None, MossError, None, "multiplies the timestep by 1000, which only our forward undoes"),
    "MiniMaxH3SigmaShift": (None, MossError, None, "multiplies the timestep by 1000, as ModelSamplingSD3"),
    "FreeU": (None, KeyError, KeyError, "reads model_channels in the config, which only our class has"),
    "FreeU_V2": (None, KeyError, KeyError, "reads model_channels in the config, which only our class has"),
}
#: Compiling takes minutes; test_lifecycle.py does it with another backend.
ELSEWHERE = {"TorchCompileModel"}
#: What fp16 rounding alone changes as much: caches that answer for the model by a threshold, and twice every weight.
NOT_COMPARED = {"EasyCache", "LazyCache", "ModelMergeAdd"}
#: Put a multiplier of 1000 on the timestep. Our forward takes it out again; a class of ComfyUI's own sees it.
TIMES_1000 = {"ModelSamplingSD3", "MiniMaxH3SigmaShift"}

ENGINES: dict[str, Callable[[], Any]] = {
    "builtin": lambda: fixed(load(MODEL, "fp16"), fix="online", c=1 / 16),
    "native": lambda: fixed(stock(MODEL, "fp16"), fix="online", c=1 / 16, engine="native"),
    "managed": lambda: fixed(stock(MODEL, "fp16"), fix="online", c=1 / 16, engine="managed"),
}


@pytest.fixture(scope="module")
def lora() -> Any:
    """A LoRA in ComfyUI's folder, for the nodes that load one."""
    torch.manual_seed(1)
    weights = {}
    for layer in range(4):
        weights[f"diffusion_model.layers.{layer}.proj.o.lora_A.weight"] = torch.randn(2, 64) * 0.1
        weights[f"diffusion_model.layers.{layer}.proj.o.lora_B.weight"] = torch.randn(64, 2) * 0.1
    file = Path(folder_paths.get_folder_paths("loras")[0]) / "core_nodes.safetensors"
    file.parent.mkdir(exist_ok=True, parents=True)
    save_file(weights, file)
    yield weights
    file.unlink()


def run(model: Any) -> torch.Tensor:
    return sample(model, conditioning(MODEL), negative=conditioning(MODEL, "case1"), cfg=CFG, steps=STEPS)


def outcome(cls: Any, model: Any, lora: dict[str, torch.Tensor]) -> torch.Tensor | Exception:
    """The latent of a run with the node, or why there is none."""
    given = {
        "MODEL": model,
        "CONDITIONING": conditioning(MODEL, "case2"),
        "LATENT": {"samples": torch.zeros(1, 128, 6, 4)},
        "IMAGE": torch.zeros(1, 64, 96, 3),
        "MASK": torch.zeros(1, 64, 96),
        "CLIP": None,
        "LATENT_OPERATION": lambda latent, **_: latent,
        "LORA_MODEL": lora,
    }

    def supply(kind: str, _name: str) -> Any:
        if kind not in given:
            raise LookupError(kind)
        return given[kind]

    try:
        return run(apply_node(cls, supply))
    except Exception as error:
        return error


def complaint(name: str, engine: str, found: torch.Tensor | Exception, plain: torch.Tensor | Exception) -> str | None:
    """What is wrong with an outcome; None where it is as it should be. plain: without the fix, in fp32."""
    if isinstance(found, LookupError) and found.args[0] in OTHER_MODELS:
        return None
    expected = dict(zip(("builtin", "managed", "native"), FAILS.get(name, (None, None, None)), strict=False))[engine]
    if isinstance(found, Exception):
        if expected is None or type(found) is not expected:
            return f"{name} fails: {type(found).__name__}: {found}"
        if expected is MossError and not re.search(r"(Use|Load|Take) .*\.$", str(found)):
            return f"{name} has no way out: {found}"
        return None
    if expected is not None:
        return f"{name} runs, which is not what stands here"
    if not found.isfinite().all():
        return f"{name} gives what is not finite"
    if isinstance(plain, torch.Tensor) and name not in NOT_COMPARED and not (error := rel(found, plain)) < BOUND:
        return f"{name} is {error:.1e} off what it does without the fix"
    return None


def test_every_core_node_runs_or_is_named(foreign: None, lora: Any) -> None:
    known = {name: cls for name, cls in model_nodes().items() if name not in ELSEWHERE}
    assert len(known) > 80, "the registry was not read"
    plain, our_plain = stock(MODEL, "fp32"), load(MODEL, "fp32")
    expected = {name: outcome(cls, plain, lora) for name, cls in known.items()}
    ours = expected | {name: outcome(known[name], our_plain, lora) for name in TIMES_1000}
    complaints = []
    for engine, make in ENGINES.items():
        model = make()
        before = run(model)
        for name, cls in known.items():
            reference = (expected if engine == "native" else ours)[name]
            said = complaint(name, engine, outcome(cls, model, lora), reference)
            complaints += [f"{engine}: {said}"] if said else []
        assert torch.equal(run(model), before), f"{engine}: a node left something on the MODEL it was given"
    assert not complaints, "\n".join(complaints)


@pytest.mark.parametrize("name", [*FAILS, *ELSEWHERE, *NOT_COMPARED, *TIMES_1000])
def test_the_named_nodes_exist(name: str) -> None:
    assert name in model_nodes()


def test_skip_layer_guidance_as_it_comes() -> None:
    """Double blocks by default, of which there are none; the single blocks that there are do count."""
    from comfy_extras.nodes_slg import SkipLayerGuidanceDiT

    prompt = {"negative": conditioning("hot", "case1"), "cfg": CFG, "steps": 50}
    plain = fixed(load("hot", "fp16"), fix="online")
    defaults = {
        name: options["default"] for name, _, options in inputs_of(SkipLayerGuidanceDiT) if "default" in options
    }
    model = SkipLayerGuidanceDiT.execute(model=plain, **defaults).result[0]
    found = sample(model, conditioning("hot"), **prompt)
    assert torch.equal(found, sample(plain, conditioning("hot"), **prompt))  # it has no block 7 either
    model = SkipLayerGuidanceDiT.execute(model=plain, **defaults | {"single_layers": "1"}).result[0]
    assert rel(sample(model, conditioning("hot"), **prompt), found) > 1e-3


@pytest.mark.parametrize("engine", ["builtin", "managed"])
def test_what_has_no_place_is_passed_over_in_words(
    engine: str, foreign: None, caplog: pytest.LogCaptureFixture
) -> None:
    patches._say_passed_over.cache_clear()
    model = ENGINES[engine]()
    model.set_model_patch_replace(lambda args, extra: args, "dit", "double_block", 7)
    with caplog.at_level("INFO"):
        run(model)
    said = [message for message in caplog.messages if "passed over" in message]
    assert len(said) == 1 and "the replace patch dit ('double_block', 7)" in said[0]


def test_positions_that_a_node_scales_are_not_ignored(foreign: None) -> None:
    model = ENGINES["managed"]()
    model.set_model_rope_options(2.0, 0.0, 1.0, 0.0, 1.0, 0.0)
    with pytest.raises(MossError, match="the position options of a Scale ROPE node"):
        run(model)


@pytest.mark.parametrize("padded", [False, True])
def test_guidance_after_the_attention_does_what_it_does_in_a_class_of_comfyui(padded: bool, foreign: None) -> None:
    """Normalized Attention Guidance, which changes the image's tokens of every joint block, with and without a mask."""
    from comfy_extras.nodes_nag import NAGuidance

    def guided(model: Any, positive: Any, negative: Any) -> torch.Tensor:
        model = NAGuidance.execute(model, 20.0, 1.0, 5.0).result[0]
        return sample(model, positive, negative=negative, cfg=CFG, steps=STEPS)

    context = conditioning(MODEL)[0][0]
    both = context, -context  # of one length, or they would not be in one batch
    expected = guided(stock(MODEL, "fp32"), *([[text, {}]] for text in both))
    plain = sample(stock(MODEL, "fp32"), [[both[0], {}]], negative=[[both[1], {}]], cfg=CFG, steps=STEPS)
    assert rel(expected, plain) > 5 * BOUND
    prompts: list[Any] = [[[text, {}]] for text in both]
    if padded:
        mask = torch.nn.functional.pad(torch.ones(context.shape[:2]), (0, 2))
        prompts = [[[torch.nn.functional.pad(text, (0, 0, 0, 2)), {"attention_mask": mask}]] for text in both]
    for engine in ("builtin", "managed"):
        assert rel(guided(ENGINES[engine](), *prompts), expected) < BOUND
