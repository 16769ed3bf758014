"""Does a folded file need the exact eps? Both readings of it against the original, on saved inputs, in fp32."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from ..checkpoint.load import load_model
from ..checkpoint.reader import open_checkpoint
from ..scaling.plan import StreamPlan, plan_for
from ..scaling.record import StoredFold
from .compare import difference


@dataclass(frozen=True)
class EpsCheck:
    """Relative L2 of the folded file's velocity against the source's: with eps c^2 times 1e-6, and with 1e-6."""

    exact: float
    stock: float

    def to_json(self) -> dict[str, float]:
        return {"exact": self.exact, "stock": self.stock}

    def sentence(self) -> str:
        """For people."""
        return (
            f"Against the source in fp32: relative L2 {self.exact:.2e} with the exact eps, {self.stock:.2e} with the "
            "stock eps that other runtimes keep."
        )


@torch.no_grad()
def check_eps(source: str | Path, folded: str | Path, latent: Tensor, context: Tensor, sigma: float) -> EpsCheck:
    """Run both files once in fp32 on latent [B, C, h, w] and context [B, T, text_dim] at `sigma`.

    A fold that the source carries itself is taken out for the reference. Raises MossError as loading does.
    """
    level = torch.full((latent.shape[0],), sigma)
    with open_checkpoint(source) as checkpoint:
        model = load_model(checkpoint, torch.float32)
    reference = model(latent, level, context, plan=StreamPlan())
    with open_checkpoint(folded) as checkpoint:
        stored = StoredFold(checkpoint.record)
        model = load_model(checkpoint, torch.float32, unfold=False)
    exact, stock = (
        model(latent, level, context, plan=plan_for("none", half=False, stored=stored, eps=eps))
        for eps in ("exact", "stock")
    )
    return EpsCheck(difference(exact, reference).relative_l2, difference(stock, reference).relative_l2)
