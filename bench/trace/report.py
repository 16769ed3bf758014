"""`python -m bench trace`: every mode, size and device on fake tensors, as JSON and Markdown."""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Iterable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from ..files import REAL
from ..work import ROOT
from .calls import DEVICES, TEXT, Row, rows
from .cards import CARDS, estimate

NOTES = "## How to read it"
#: The size at which one block's traffic and kernels are shown.
REFERENCE = (1024, 2)


def main(argv: list[str] | None = None) -> int:
    """Trace everything and write trace.json and trace.md."""
    parser = argparse.ArgumentParser(prog="python -m bench trace", description=__doc__)
    parser.add_argument("--out", type=Path, default=ROOT / "docs", help="folder for trace.json and trace.md")
    parser.add_argument("--devices", nargs="+", choices=DEVICES, default=list(DEVICES))
    options = parser.parse_args(argv)
    os.environ["CUDA_VISIBLE_DEVICES"] = ""  # nothing is computed, so no card shall be asked anything
    found = []
    for row in rows(tuple(options.devices)):
        print(f"{row.device} {row.side} x {row.side}, batch {row.batch}, {row.mode}", file=sys.stderr, flush=True)
        found.append(row)
    write(options.out, found)
    return 0


def write(out: Path, found: Sequence[Row]) -> None:
    """trace.json keeps what was traced before a change under "before"; what people wrote from NOTES on is kept, too."""
    data, document = out / "trace.json", out / "trace.md"
    before = json.loads(data.read_text("utf-8")).get("before", []) if data.exists() else []
    notes = document.read_text("utf-8").partition(NOTES)[2] if document.exists() else ""
    estimates = {mode: [asdict(estimate(card, one, REAL.depth)) for card in CARDS] for mode, one in _modes(found)}
    sources = {card.name: card.source for card in CARDS}
    kept = {"before": before, "rows": [row.to_json() for row in found], "estimates": estimates, "sources": sources}
    data.write_text(json.dumps(kept, indent=1) + "\n", "utf-8")
    text = "\n".join([*_head(), *_tables(found, before), *_roofline(found, before)])
    document.write_text(f"{text}\n{NOTES}{notes}" if notes else f"{text}\n", "utf-8")


def _head() -> list[str]:
    return [
        "# What a model call does to a card, counted without one",
        "",
        "`python -m bench trace`: MOSS-Image 5B (D 3072, 42 blocks, FFN 8192), fp16, "
        f"{TEXT} text tokens, on fake tensors. Exact counts: nothing is computed and nothing is timed.",
        "",
    ]


def _modes(found: Iterable[Row], device: str = "cuda") -> list[tuple[str, Row]]:
    return [(row.mode, row) for row in found if (row.device, row.side, row.batch) == (device, *REFERENCE)]


def _tables(found: Sequence[Row], before: list[dict[str, Any]]) -> list[str]:
    lines = ["## One block, 1024 x 1024, batch 2", ""]
    lines += _table(["mode", "device", "kernels", "pointwise, GB", "before", "products, GB", "waits a call"])
    old = {(one["device"], one["side"], one["batch"], one["mode"]): one for one in before}
    for device in dict.fromkeys(row.device for row in found):
        for mode, row in _modes(found, device):
            was = old.get((device, *REFERENCE, mode))
            then = f"{was['kernels_block']} kernels, {was['pointwise_block'] / 1e9:.2f} GB" if was else ""
            lines.append(
                f"| {mode} | {device} | {row.kernels_block} | {row.pointwise_block / 1e9:.2f} | {then} | "
                f"{row.products_block / 1e9:.2f} | {row.waits} |"
            )
    clean = "none" if not any(row.wide or row.elsewhere for row in found) else "**some**"
    lines += ["", f"float64, or tensors of another device, in any mode, size or device: {clean}.", ""]
    lines += ["## Peak of the activations (cuda; the other devices are alike)", ""]
    sizes = list(dict.fromkeys((row.side, row.batch) for row in found))
    lines += _table(["mode", *(f"{side}², batch {batch}" for side, batch in sizes)])
    for mode in dict.fromkeys(row.mode for row in found):
        cells = []
        for size in sizes:
            row = next(row for row in found if (row.device, row.side, row.batch, row.mode) == ("cuda", *size, mode))
            was = old.get(("cuda", *size, mode))
            then = f" (was {was['peak'] / 1e9:.2f} GB = {was['streams']:.1f})" if was else ""
            cells.append(f"{row.peak / 1e9:.2f} GB = {row.streams:.1f}{then}")
        lines.append(f"| {mode} | {' | '.join(cells)} |")
    return [*lines, "", "In multiples of the residual stream in 16 bits. Weights are not in it.", ""]


def _roofline(found: Sequence[Row], before: list[dict[str, Any]]) -> list[str]:
    lines = ["## Roofline estimate, 1024 x 1024, batch 2", "", "An **estimate** from published peak figures.", ""]
    lines += _table(["card", "products, ms a block", "pointwise: before", "plain torch", "fused", "a call, s: before",
                     "plain torch", "fused", "source"])  # fmt: skip
    modes = dict(_modes(found))
    old = [Row(**one) for one in before if (one["device"], one["side"], one["batch"]) == ("cuda", *REFERENCE)]
    was = next((one for one in old if one.mode == "online"), None)
    for card in CARDS:
        plain, fast = (estimate(card, modes[name], REAL.depth) for name in ("online", "fused: online"))
        then = estimate(card, was, REAL.depth) if was else None
        lines.append(
            f"| {card.name} | {plain.products_ms:.1f} | {f'{then.pointwise_ms:.1f}' if then else ''} | "
            f"{plain.pointwise_ms:.1f} | {fast.pointwise_ms:.1f} | {f'{then.call_s:.2f}' if then else ''} | "
            f"{plain.call_s:.2f} | {fast.call_s:.2f} | {card.source} |"
        )
    return [*lines, ""]


def _table(head: list[str]) -> list[str]:
    return [f"| {' | '.join(head)} |", f"| {' | '.join(['---'] * len(head))} |"]
