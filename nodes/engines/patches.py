"""Other nodes' block patches in our forward: those it runs, those MOSS-Image has no place for, and the rest, by name.

As ComfyUI's own DiT classes do, it passes over what is meant for parts that the model does not have: double blocks, and
the input, middle and output blocks and the cross-attention of a UNet. Nothing is lost by that.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from comfy.ldm.modules.attention import optimized_attention
from torch import Tensor

from ...fold.arch import MossArch
from ...fold.model.forward import Attention, BlockReplacement, sdpa

log = logging.getLogger(__name__)

Options = Mapping[str, Any]

#: Runs after a joint block's attention, before its output projection: Normalized Attention Guidance, for one.
AFTER_ATTENTION = "attn1_output_patch"
#: Patches of parts that only a UNet has.
_UNET_PATCHES = frozenset(
    {
        "input_block_patch", "input_block_patch_after_skip", "middle_block_patch", "middle_block_after_patch",
        "output_block_patch", "attn2_patch", "attn2_output_patch", "emb_patch", "forward_timestep_embed_patch",
    }
)  # fmt: skip
_UNET_BLOCKS = ("input", "middle", "output")
_BLOCK = "single_block"
#: What ScaleROPE sets when it changes nothing.
_PLAIN_ROPE = {"scale_x": 1.0, "scale_y": 1.0, "scale_t": 1.0, "shift_x": 0.0, "shift_y": 0.0, "shift_t": 0.0}

UNET_ONLY = (
    "Another node replaces the attention {key}, which belongs to a UNet's block, and works on what it finds there "
    "(Self-Attention Guidance does): MOSS-Image has no such block. Take that node out."
)


def unsupported(options: Options) -> list[str]:
    """Names of patches of other nodes that MOSS-Image could run and our forward cannot."""
    patches = {name: found for name, found in options.get("patches", {}).items() if found}
    # a patch after the attention may undo what its partner did before it, so it is named, too
    runs = {AFTER_ATTENTION} if "attn1_patch" not in patches else set()
    odd = [f"the block patch {name}" for name in patches if name not in _UNET_PATCHES | runs]
    odd += [
        f"the replace patch {group} {key}"
        for group, key in _replaced(options)
        if not (_is_block(group, key) or _has_no_place(group, key))
    ]
    odd += [] if _is_plain(options.get("rope_options")) else ["the position options of a Scale ROPE node"]
    return odd


def note_passed_over(options: Options, depth: int) -> None:
    """One line in the log for what other nodes patch and MOSS-Image does not have."""
    names = [f"the block patch {name}" for name, found in options.get("patches", {}).items() if found]
    names = [name for name in names if name.rpartition(" ")[2] in _UNET_PATCHES]
    names += [
        f"the replace patch {group} {key}"
        for group, key in _replaced(options)
        if _has_no_place(group, key) or (_is_block(group, key) and key[1] >= depth)
    ]
    if names:
        _say_passed_over(tuple(names))


@functools.lru_cache(maxsize=64)
def _say_passed_over(names: tuple[str, ...]) -> None:
    more = f" and {len(names) - 3} more" if len(names) > 3 else ""
    log.info("MOSS-Image has no part for %s%s, which another node has set: passed over.", ", ".join(names[:3]), more)


def needs_unet(options: Options) -> str | None:
    """Why a node of the call cannot work on a transformer, as a sentence; None where there is no such node."""
    for key in options.get("patches_replace", {}).get("attn1", {}):
        if _has_no_place("attn1", key) and len(key) > 2:
            return UNET_ONLY.format(key=key)
    return None


def replacements(arch: MossArch, options: Options, image_tokens: int) -> dict[int, BlockReplacement]:
    """ComfyUI's ("single_block", i) patches, skip-layer guidance among them, as our block replacements."""
    found = options.get("patches_replace", {}).get("dit", {})
    return {
        key[1]: _replacement(patch, _in_block(arch, options, key[1], image_tokens))
        for key, patch in found.items()
        if _is_block("dit", key)
    }


def _replacement(patch: Callable[..., Any], options: Options) -> BlockReplacement:
    def replaced(x: Tensor, run: Callable[[Tensor], Tensor]) -> Tensor:
        def original(args: dict[str, Any]) -> dict[str, Any]:
            return {**args, "img": run(args["img"])}

        out: Tensor = patch({"img": x, "transformer_options": options}, {"original_block": original})["img"]
        return out

    return replaced


def attention_of(arch: MossArch, options: Options, image_tokens: int = 0) -> Attention:
    """ComfyUI's attention of choice; with a mask torch's own, since not every one of ComfyUI's takes a key mask.

    In a joint block it gets the options that ComfyUI's own classes give there, and what other nodes run after it.
    """
    after = options.get("patches", {}).get(AFTER_ATTENTION, ())

    def attention(q: Tensor, k: Tensor, v: Tensor, keep: Tensor | None, layer: int | None = None) -> Tensor:
        here = options if layer is None else _in_block(arch, options, layer, image_tokens)
        out: Tensor
        if keep is not None:
            out = sdpa(q, k, v, keep)
        else:
            out = optimized_attention(q, k, v, arch.heads, skip_reshape=True, transformer_options=here)
        for patch in after if layer is not None else ():
            out = patch(out, here)
        return out

    return attention


def _in_block(arch: MossArch, options: Options, layer: int, image_tokens: int) -> dict[str, Any]:
    """The options as ComfyUI's own classes give them inside a block. The image's tokens come first in the stream."""
    place = {"block_type": "single", "block_index": layer, "total_blocks": arch.depth, "img_slice": [0, image_tokens]}
    return {**options, **place}


def _replaced(options: Options) -> Iterator[tuple[str, Any]]:
    for group, found in options.get("patches_replace", {}).items():
        for key in found:
            yield group, key


def _is_block(group: str, key: Any) -> bool:
    return group == "dit" and isinstance(key, tuple) and len(key) == 2 and key[0] == _BLOCK


def _has_no_place(group: str, key: Any) -> bool:
    """Whether a replace patch is for a part that MOSS-Image does not have."""
    kind = key[0] if isinstance(key, tuple) and key else key
    return (group == "dit" and kind == "double_block") or (group in ("attn1", "attn2") and kind in _UNET_BLOCKS)


def _is_plain(rope: Any) -> bool:
    return not isinstance(rope, dict) or all(_PLAIN_ROPE.get(name) == value for name, value in rope.items())
