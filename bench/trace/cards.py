"""Cards that are not here: published peak figures, and what they make of a trace. An estimate, not a measurement.

Roofline: a product takes the longer of its multiply-adds at the peak rate and its bytes at the peak bandwidth;
pointwise work takes its bytes at the peak bandwidth. Real kernels reach perhaps 50 to 90 percent of both.
"""

from __future__ import annotations

from dataclasses import dataclass

from .calls import Row


@dataclass(frozen=True)
class Card:
    """tflops: dense fp16 products with the accumulation that PyTorch uses (fp32). gbs: memory bandwidth, GB/s."""

    name: str
    tflops: float
    gbs: float
    source: str


CARDS = (
    Card("T4", 65.0, 320.0, "NVIDIA T4 datasheet: 65 TFLOPS mixed precision, 320+ GB/s"),
    Card("RTX 2060", 26.0, 336.0, "NVIDIA Turing whitepaper: half of 51.6 TFLOPS for fp32 accumulation, 336 GB/s"),
    Card("RTX 2080 Ti", 53.8, 616.0, "NVIDIA Turing whitepaper: 53.8 TFLOPS fp16 with fp32 accumulation, 616 GB/s"),
    Card("V100", 112.0, 900.0, "NVIDIA V100 datasheet (PCIe): 112 TFLOPS tensor, 900 GB/s"),
    Card("RTX 3060", 25.5, 360.0, "NVIDIA Ampere GA102 whitepaper's rates scaled to 28 SM at 1.78 GHz; 360 GB/s"),
    Card("RTX 4090", 165.2, 1008.0, "NVIDIA Ada whitepaper: 165.2 TFLOPS fp16 with fp32 accumulation, 1008 GB/s"),
    Card("M2", 3.6, 100.0, "Apple M2 (10-core GPU) announcement: 3.6 TFLOPS (fp32), 100 GB/s"),
)


@dataclass(frozen=True)
class Estimate:
    """Milliseconds a block: products (attention among them) and pointwise work; seconds a call of all blocks."""

    card: str
    products_ms: float
    pointwise_ms: float
    call_s: float


def estimate(card: Card, one: Row, depth: int) -> Estimate:
    """The roofline of one traced block on a card."""
    flops, bandwidth = card.tflops * 1e12, card.gbs * 1e9
    products = max(one.product_flops_block / flops, one.products_block / bandwidth)
    products += max(one.attention_flops_block / flops, one.attention_block / bandwidth)
    pointwise = one.pointwise_block / bandwidth
    return Estimate(card.name, 1e3 * products, 1e3 * pointwise, depth * (products + pointwise))
