"""What is trained on a fixed machine: E, and U if wanted. The engines share it and differ in how they evaluate it."""

import torch
from torch import Tensor, nn

from fixedformer.attention import Mask
from fixedformer.embedding.machine import Machine


class ProgramParameters(nn.Module):
    """`embedding` (d_in, m) and, with train_unembedding, `unembedding` (m, d_out) of one fixed machine.

    Both start Gaussian with standard deviation `deviation` (0.02 in the paper), drawn from `seed`; without
    train_unembedding U is the machine's own, which on the sparse machine trains far better. The machine is no
    parameter: an optimiser cannot reach it.
    """

    def __init__(
        self, machine: Machine, train_unembedding: bool, deviation: float, seed: int, dtype: torch.dtype
    ) -> None:
        super().__init__()
        self.machine, spec = machine, machine.spec
        generator = torch.Generator().manual_seed(seed)

        def draw(*shape: int) -> nn.Parameter:
            return nn.Parameter((torch.randn(shape, generator=generator, dtype=torch.float64) * deviation).to(dtype))

        self.embedding = draw(spec.d_in, machine.width)
        self.unembedding = draw(machine.width, spec.d_out) if train_unembedding else None
        self.register_buffer("fixed_unembedding", machine.dense_unembed(dtype), persistent=False)

    def exit(self) -> Tensor:
        """U (m, d_out): the trained one, or the machine's."""
        return self.get_buffer("fixed_unembedding") if self.unembedding is None else self.unembedding

    def at(self, X: Tensor, mask: Mask, places: Tensor) -> Tensor:
        """Outputs (places, d_out) at the flagged places (batch, tokens) alone; an engine may know a shorter way."""
        outputs: Tensor = self(X, mask)
        return outputs[places]
