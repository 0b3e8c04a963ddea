"""One transformer block, looped, approximates any permutation-equivariant function.

The program is the loop's clock, or the weights.

Constructive half of "On Expressive Power of Looped Transformers: Theoretical Analysis and Enhancement via Timestep
Encoding" (Xu and Sato, arXiv 2410.01405): Theorem 3.6 and Theorem 4.2 as running code. See docs/loop.md and, for
statements, proofs and the paper's errata, docs/theory/loop.md.
"""

from fixedformer.loop.approximator import LoopedApproximator, Trace
from fixedformer.loop.block import Block, LoopedNetwork
from fixedformer.loop.context import required_sharpness
from fixedformer.loop.moduli import Lipschitz, lipschitz
from fixedformer.loop.program import LoopProgram

__all__ = [
    "Block",
    "Lipschitz",
    "LoopProgram",
    "LoopedApproximator",
    "LoopedNetwork",
    "Trace",
    "lipschitz",
    "required_sharpness",
]
