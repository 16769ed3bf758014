"""Worker: what the proof says of classes that are MOSS-Image and of classes that are not.

job: {comfyui, part: "alarms", "misses" or "settings", quick}. result: {rows: [...]}, see the functions of these names.
"""

from __future__ import annotations

import contextlib
import itertools
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import comfy_process
from fix_settings import FOLDS, SETTINGS

MODELS = ("cool", "warm", "hot", "burst")
STEPS = 8

#: of what is refused, these are looked at: the other settings on our own forward come out as "managed" does
PICTURES = (*FOLDS, "managed")
#: in what a class differs: name -> fields of the foreign pack's `Built`
BUILT: dict[str, dict[str, Any]] = {
    **{f"writer {a:g}": {"writer": a} for a in (1e-4, 1e-3, 1e-2, 2e-2, 0.1, 0.5, 1.0, 10.0)},
    **{f"later writer {a:g}": {"writer": a, "later": True} for a in (0.02, 0.5)},
    **{f"RoPE centre {a:g}": {"rope": a} for a in (1 / 8, 0.5, 2.5)},
    "time halves swapped": {"swapped": True},
    "text mask dropped": {"drops_mask": True},
    **{f"eps {a:g}": {"eps": a} for a in (1.1e-6, 1e-5, 1e-4, 1e-7)},
}
#: those of whole runs; the first two and a moved RoPE centre were seen to give wrong pictures without a proof
SEEN = (
    "writer 0.5", "writer 0.02", "later writer 0.5", "RoPE centre 0.5", "RoPE centre 2.5", "time halves swapped",
    "text mask dropped", "eps 0.0001",
)  # fmt: skip
QUICK = ("writer 0.001", "writer 0.5", "RoPE centre 0.5", "time halves swapped", "text mask dropped", "eps 1e-05")


def main() -> None:
    job = comfy_process.job()
    comfy_process.enter(job["comfyui"])
    import logging

    import torch

    logging.disable(logging.WARNING)
    with torch.inference_mode():
        found = list({"alarms": alarms, "misses": misses, "settings": settings}[job["part"]](job["quick"]))
    comfy_process.answer({"rows": found})


@contextlib.contextmanager
def registered(**built: Any) -> Iterator[None]:
    """ComfyUI with a class of its own, built like this; no proof of another one is remembered."""
    from comfy_runs import foreign_pack, unload
    from moss_fp16_pack.nodes.guard import self_check

    pack = foreign_pack()
    self_check.forget_all()
    pack.register(pack.Built(**built))
    try:
        yield
    finally:
        pack.register.undo()
        unload()


def prompt_of(name: str, padded: bool) -> Any:
    """A golden prompt; padded: with six masked tokens behind it."""
    import torch
    from comfy_runs import conditioning

    if not padded:
        return conditioning(name)
    ((context, _),) = conditioning(name)
    junk = torch.randn(1, 6, context.shape[2], generator=torch.Generator().manual_seed(3))
    mask = torch.cat((torch.ones(1, context.shape[1]), torch.zeros(1, 6)), dim=1)
    return [[torch.cat((context, junk), dim=1), {"attention_mask": mask}]]


def proof_of(make: Callable[[], Any], prompt: Any, options: dict[str, Any], size: tuple[int, int]) -> dict[str, Any]:
    """What the self-check says of one call."""
    from comfy_runs import fixed, report, sample
    from moss_fp16_pack.nodes.guard import self_check

    self_check.forget_all()
    model = fixed(make(), guard="off", accept_unproven=True, **options)
    sample(model, prompt, steps=1, size=size)
    found = report(model)["self_check"]
    return {key: found[key] for key in ("result", "difference", "bound")}


def alarms(quick: bool) -> Iterator[dict[str, Any]]:
    """Classes that are MOSS-Image: every difference is noise.

    {kind, model, class, dtype, setting, result, difference, bound}
    """
    from adapter_files import KINDS, adapter, with_adapter
    from comfy_runs import DTYPES, load, stock
    from quantized_files import FORMATS, make_file

    models, dtypes = (("cool", "warm") if quick else MODELS), (("fp16",) if quick else ("fp32", "fp16", "bf16"))
    sizes = ((6, 4),) if quick else ((6, 4), (16, 12))

    def rows(kind: str, name: str, style: str, dtype: str, make: Callable[[], Any]) -> Iterator[dict[str, Any]]:
        for setting, padded, size in itertools.product(SETTINGS, (False, True), sizes):
            found = proof_of(make, prompt_of(name.removesuffix("_fp16fix"), padded), SETTINGS[setting], size)
            yield {"kind": kind, "model": name, "class": style, "dtype": dtype, "setting": setting, **found}

    for style in ("fused", "plain"):
        with registered(plain=style == "plain"):
            for name, dtype in itertools.product((*models, "hot_fp16fix"), dtypes):
                model = stock(name, dtype)
                yield from rows("plain weights", name, style, dtype, lambda model=model: model)
            for kind in KINDS[:1] if quick else KINDS:
                model = with_adapter(stock("hot", "fp16"), adapter(kind, stock("hot", "fp32")))
                yield from rows(f"adapter {kind}", "hot", style, "fp16", lambda model=model: model)
    for name, dtype in itertools.product(models, dtypes):
        model = with_block_patch(load(name, dtype))
        yield from rows("built-in class, harmless block patch", name, "built-in", dtype, lambda model=model: model)
    with registered(), tempfile.TemporaryDirectory() as folder:
        import comfy.sd

        for kind in list(FORMATS)[:2] if quick else (*FORMATS, "scaled_fp8"):
            model = comfy.sd.load_diffusion_model(str(make_file("hot_fused_qkv", kind, Path(folder))), {})
            model.set_model_compute_dtype(DTYPES["fp16"])
            yield from rows(f"quantized {kind}", "hot", "fused", "fp16", lambda model=model: model)


def with_block_patch(model: Any) -> Any:
    """Without another pack's part on it there is nothing to prove of the built-in class."""
    model = model.clone()
    model.set_model_patch_replace(lambda args, extra: extra["original_block"](args), "dit", "single_block", 1)
    return model


def misses(quick: bool) -> Iterator[dict[str, Any]]:
    """Classes that are not: what the proof says, and how far the picture would be off.

    {built, model, class, setting, result, difference, bound, picture}; both in fp32, so that nothing of it is what fp16
    rounds.
    """
    from comfy_runs import fixed, rel, sample, stock

    size = (6, 4)
    for style, built in itertools.product(("fused", "plain"), QUICK if quick else BUILT):
        with registered(plain=style == "plain", **BUILT[built]):
            for name in ("hot",) if quick else MODELS:
                model, prompt = stock(name, "fp32"), prompt_of(name, built == "text mask dropped")
                own = sample(model, prompt, steps=STEPS, size=size)
                for setting, options in SETTINGS.items():
                    found = proof_of(lambda model=model: model, prompt, options, size)
                    if found["result"] != "passed" and setting not in PICTURES:
                        continue
                    # what a clamp changes is what was asked for
                    unclamped = options if "clamp" not in options else SETTINGS["managed"]
                    as_asked = fixed(model, guard="off", self_check=False, **unclamped)
                    yield {"built": built, "model": name, "class": style, "setting": setting, **found,
                           "picture": rel(sample(as_asked, prompt, steps=STEPS, size=size), own)}  # fmt: skip


def settings(quick: bool) -> Iterator[dict[str, Any]]:
    """Whole runs in fp16 with every setting. {built, model, setting, how: "as the class", "own forward" or "refused",
    error: relative L2 to the class's own run in fp32, bf16: that of its own run in bf16, wrong}."""
    from comfy_runs import fixed, rel, report, sample, stock
    from moss_fp16_pack.fold.errors import MossError
    from moss_fp16_pack.nodes.guard import self_check

    classes = {"MOSS-Image": {}} | {name: BUILT[name] for name in SEEN}
    for built, fields in classes.items():
        with registered(**fields):
            for name in ("hot",) if quick else ("cool", "warm", "hot"):
                prompt = prompt_of(name, built == "text mask dropped")
                run = {"steps": 3, "cfg": 3.0, "negative": prompt_of(name, False)}
                own = sample(stock(name, "fp32"), prompt, **run)
                bf16 = rel(sample(stock(name, "bf16"), prompt, **run), own)
                for setting, options in SETTINGS.items():
                    self_check.forget_all()
                    model, error = fixed(stock(name, "fp16"), **options), 0.0
                    try:
                        error = rel(sample(model, prompt, **run), own)
                        failed = (report(model)["self_check"] or {}).get("result") == "failed"
                        how = "own forward" if failed else "as the class"
                    except MossError:
                        how = "refused"
                    yield {"built": built, "model": name, "setting": setting, "how": how, "error": error,
                           "bf16": bf16, "wrong": error > max(bf16, 1e-3)}  # fmt: skip


if __name__ == "__main__":
    main()
