"""Files of inputs: conditioning as the Save node writes it and node and command line read it, and single tensors.

A conditioning file is safetensors with `context` [B, T, text_dim] and, optionally, `attention_mask` [B, T], nonzero
where a text token is real.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from ..checkpoint.header import read_header
from ..dtypes import NAMES, dtype_name
from ..errors import MossError
from ..files import save_tensors

FORMAT = "moss_fp16.conditioning/1"


def save_conditioning(file: Path, context: Tensor, mask: Tensor | None) -> None:
    """Write context [B, T, text_dim] and mask [B, T] or None, whole or not at all.

    MossError as `save_tensors`, and for what `read_conditioning` would refuse.
    """
    tensors = {"context": context} if mask is None else {"context": context, "attention_mask": mask}
    pick(tensors, "context", file, ("B", "T", "width"))
    if mask is not None:
        pick_mask(tensors, "attention_mask", file, tuple(context.shape[:2]))
    save_tensors(file, tensors, {"format": FORMAT})


def read_conditioning(
    file: str | Path, batch: int | None = None, text_dim: int | None = None
) -> tuple[Tensor, Tensor | None]:
    """Context [B, T, text_dim] fp32, and its mask [B, T] bool or None.

    batch, text_dim: what these sizes have to be; None for any. Raises MossError naming the file and the tensor.
    """
    tensors = read_tensors(file)
    context = pick(tensors, "context", file, (batch or "B", "T", text_dim or "width")).float()
    if "attention_mask" not in tensors:
        return context, None
    return context, pick_mask(tensors, "attention_mask", file, tuple(context.shape[:2]))


def read_tensors(file: str | Path) -> dict[str, Tensor]:
    """All tensors of a safetensors file of inputs."""
    read_header(Path(file))
    try:
        return load_file(file)
    except SafetensorError as error:
        raise MossError(f"{Path(file).name} cannot be read: {error}.") from None


def pick(tensors: Mapping[str, Tensor], key: str, file: str | Path, shape: tuple[int | str, ...]) -> Tensor:
    """One floating tensor of the given shape (letters stand for any size but 0); MossError naming file and key."""
    name = Path(file).name
    if key not in tensors:
        raise MossError(f"{name} has no tensor {key!r}; it has {', '.join(sorted(tensors)[:8]) or 'none'}.")
    tensor = tensors[key]
    wanted = list(shape)
    if tensor.dim() != len(wanted) or any(
        size == 0 or (isinstance(want, int) and size != want) for size, want in zip(tensor.shape, wanted, strict=True)
    ):
        listed = ", ".join(str(want) for want in wanted)
        empty = ", none of them 0" if 0 in tensor.shape else ""
        raise MossError(f"{key} in {name} has shape {list(tensor.shape)}, but [{listed}] is needed{empty}.")
    if not tensor.is_floating_point():
        raise MossError(f"{key} in {name} holds {dtype_name(tensor.dtype)}, but floating numbers are needed.")
    if tensor.dtype not in NAMES:
        tensor = tensor.float()  # not every device has the dtype
    if not bool(tensor.isfinite().all()):
        raise MossError(f"{key} in {name} holds NaN or infinity.")
    return tensor


def pick_mask(tensors: Mapping[str, Tensor], key: str, file: str | Path, shape: tuple[int, ...]) -> Tensor:
    """A mask of the given shape as bool: what is not zero is real."""
    if key in tensors and not tensors[key].is_floating_point():
        tensors = {**tensors, key: (tensors[key] != 0).float()}
    return pick(tensors, key, file, shape) != 0
