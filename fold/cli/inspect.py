"""``inspect``: what a checkpoint is, from its header alone."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING, Any

from ..checkpoint.reader import Checkpoint, open_checkpoint
from .common import add_command, add_json_option, human_bytes, print_json

if TYPE_CHECKING:
    from .common import Subparsers


def add(subparsers: Subparsers) -> None:
    """Declare the command."""
    parser = add_command(subparsers, "inspect", run, "Say what a checkpoint is, from its header alone.")
    parser.add_argument("path", help="a .safetensors file or an HF folder")
    add_json_option(parser)


def run(args: argparse.Namespace) -> int:
    """Print the description."""
    with open_checkpoint(args.path) as checkpoint:
        found = describe(checkpoint)
    if args.json:
        print_json(found)
        return 0
    arch = found["arch"]
    print(
        f"{checkpoint.where}: MOSS-Image, {arch['depth']} blocks of width {arch['dim']}, {found['dtype']}, "
        f"{human_bytes(found['bytes'])} in {found['tensors']} tensors"
    )
    for key in ("layout", "prefix", "quantization", "fold"):
        print(f"  {key:<13}{found[key] or 'none'}")
    print(found["advice"])
    return 0


def describe(checkpoint: Checkpoint) -> dict[str, Any]:
    """The facts as a JSON-able dict: arch, layout, prefix, dtype, quantization, fold, tensors, bytes, advice.

    ``tensors`` and ``bytes`` count the model's own tensors, with the scales of quantized ones.
    """
    return {
        "arch": checkpoint.arch.sizes(),
        "layout": "fused" if checkpoint.fused else "split",
        "prefix": checkpoint.prefix,
        "dtype": checkpoint.dtype,
        "quantization": checkpoint.quantization,
        "fold": checkpoint.record.to_dict() if checkpoint.record else None,
        "files": len(checkpoint.files),
        "tensors": len(checkpoint.names()) + len(checkpoint.companions),
        "bytes": checkpoint.nbytes,
        "other_tensors": len(checkpoint.foreign),
        "advice": advice(checkpoint),
    }


def advice(checkpoint: Checkpoint) -> str:
    """One or two sentences: how to run this file in fp16."""
    record = checkpoint.record
    if record is not None:
        exact = (
            "Its factors are powers of two, so unfolding it at load is exact."
            if record.factors.power_of_two
            else "Its factors are not powers of two, so unfolding it rounds once more."
        )
        return f"The weights carry a fold with c = {record.c:g}: run it in fp16 with fix = auto. {exact}"
    if checkpoint.quantization:
        return (
            "No fold is recorded: in fp16 use fix = online with c = 1/16, which touches no quantized tensor "
            "(export does the same as long as s_attn = s_ffn = 1)."
        )
    return (
        "No fold is recorded: in fp16 the base weights overflow, so use fix = online with c = 1/16, or write a fixed "
        "file with `export SRC DST --c 1/16`. A finetune that was trained to stay in range needs neither."
    )
