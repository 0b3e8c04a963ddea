"""A program as trainable parameters: E (and U, if wanted) of a machine that stays fixed.

Training never forms the machine's m-wide state. Everything that E and U enter is computed once a batch, then the batch
runs in path space (engines.py; normed.py with LayerNorm). How the read-outs come from E depends on the machine:

sparse   they *are* entries of E; with U trained, leaf p is E_p U_p, one small product a leaf.
dense    inner read-outs are E times fixed columns (all_columns), made once. With U fixed so are the leaves. With U
         trained, leaf p = E R_V^p U meets in the middle: E runs forward through half of the layers, U backward through
         the rest.
"""

import torch
from torch import Tensor

from fixedformer.attention import Mask
from fixedformer.embedding.contexts import two_sights
from fixedformer.embedding.counted import run_counted_normed_paths, run_counted_paths
from fixedformer.embedding.engines import PathWeights, run_paths
from fixedformer.embedding.machine import Machine
from fixedformer.embedding.maps import apply_plainly, dense
from fixedformer.embedding.normed import run_normed_paths
from fixedformer.embedding.parameters import ProgramParameters
from fixedformer.embedding.program import CompileReport, Program
from fixedformer.embedding.rule import Rule
from fixedformer.embedding.solve import all_columns
from fixedformer.embedding.sparse import SparseMachine
from fixedformer.embedding.tree import PathTree
from fixedformer.errors import SpecError
from fixedformer.inputs import as_input
from fixedformer.target import Card


class TrainableProgram(ProgramParameters):
    """E (and U) of a fixed machine, evaluated in path space.

    rule: how layers are put together; by default as the machine's spec says. See ProgramParameters for the rest. Raises
    SpecError for rules that path space cannot evaluate (MLPs).
    """

    def __init__(
        self,
        machine: Machine,
        rule: Rule | None = None,
        train_unembedding: bool = False,
        deviation: float = 0.02,
        seed: int = 0,
        dtype: torch.dtype = torch.float32,
    ) -> None:
        super().__init__(machine, train_unembedding, deviation, seed, dtype)
        self.rule, spec = rule or Rule.of(machine.spec), machine.spec
        if spec.residual and not self.rule.residual:
            raise SpecError("a machine for residual targets is evaluated with its residual; use Rule(residual=True)")
        if self.rule.mlp_width:
            raise SpecError("a nonlinear MLP over the m coordinates ends path space; train it with CoordinateProgram")
        self.tree = PathTree(spec.heads, spec.layers, spec.d_head, spec.d_out, self.rule.residual)
        self._columns_ready = False

    def forward(self, X: Tensor, mask: Mask = "causal") -> Tensor:
        """Outputs (..., tokens, d_out) for token ids or vectors."""
        data = as_input(X, self.machine.spec.d_in, self.embedding.dtype, self.embedding.device)
        if self.rule.plain:
            return run_paths(self.machine.spec, self.path_weights(), data, mask)
        return run_normed_paths(self.machine, self.rule, self.embedding, self.exit(), data, mask)

    def at(self, X: Tensor, mask: Mask, places: Tensor) -> Tensor:
        """Outputs (places, d_out) at the flagged places (batch, tokens) alone, in their order.

        With two layers and no positions both layers run over distinct contexts (contexts.py).
        """
        data = as_input(X, self.machine.spec.d_in, self.embedding.dtype, self.embedding.device)
        sights = two_sights(self.machine.spec, data, mask, places)
        if sights is None:
            return super().at(data, mask, places)
        if self.rule.plain:
            return run_counted_paths(self.machine.spec, self.path_weights(), sights)
        return run_counted_normed_paths(self.machine, self.rule, self.embedding, self.exit(), sights)

    def path_weights(self) -> PathWeights:
        """Read-outs of E and U as path weights, differentiable in both."""
        machine, trained = self.machine, self.unembedding
        if isinstance(machine, SparseMachine) and self.rule.residual == machine.spec.residual:
            whole = self.embedding[:, : self.tree.count]
            if trained is None:
                return PathWeights.of(whole, self.tree)
            if not machine.looped and not self.rule.residual:
                return PathWeights.of(whole, self.tree).with_leaves(self._sparse_leaves(trained))
        if trained is None:
            return PathWeights.of(self.embedding @ self._fixed_columns(), self.tree)
        inner = PathWeights.of(self.embedding @ self._fixed_columns(), self.tree)
        return inner.with_leaves(self._leaves_meeting_in_the_middle(trained))

    def to_program(self, card: Card | None = None) -> Program:
        """The trained program as a file-able Program of the same machine; refused for normalised rules."""
        if not self.rule.plain or self.rule.residual != self.machine.spec.residual:
            raise SpecError(
                f"{self.rule} is no rule that {self.machine!r} runs by: its programs live in training checkpoints; "
                "only attention, with residual as the machine's spec says, becomes a Program"
            )
        embedding = self.embedding.detach().clone()
        report = CompileReport(
            width=self.machine.width,
            columns=self.tree.count,
            bytes=embedding.nbytes,
            condition=None,
            residual=None,
            norm=float(embedding.abs().max()),
            seconds=0.0,
        )
        out = None if self.unembedding is None else self.unembedding.detach().clone()
        machine = self.machine
        return Program(embedding, machine.spec, machine.describe(), machine.fingerprint(), report, card or Card(), out)

    def _fixed_columns(self) -> Tensor:
        """R_all (m, N) with the machine's own U, in the parameters' precision; made once, it never changes."""
        if not self._columns_ready:
            columns = all_columns(self.machine, self.tree).to(self.embedding.dtype)
            self.register_buffer("_columns", columns.to(self.embedding.device), persistent=False)
            self._columns_ready = True
        return self.get_buffer("_columns")

    def _sparse_leaves(self, unembedding: Tensor) -> Tensor:
        """Leaf p of the plain sparse machine: E_p U_p, because R_V^p has masked every other coordinate away."""
        tree = self.tree
        columns = tree.columns(tree.layers)  # (H^L, d_out)
        leaves = self.embedding[:, columns.flatten()].unflatten(1, columns.shape).transpose(0, 1)  # (H^L, d_in, d_out)
        rows = unembedding[columns.flatten()].unflatten(0, columns.shape)  # (H^L, d_out, d_out)
        shown = torch.bmm(leaves, rows)  # (H^L, d_in, d_out), first branch most significant
        return shown.reshape(*(tree.branching,) * tree.layers, *shown.shape[1:])

    def _leaves_meeting_in_the_middle(self, unembedding: Tensor) -> Tensor:
        """E R_V^p U for all p, (B,) * L + (d_in, d_out): half of the layers from the left, half from the right."""
        tree, half = self.tree, self.tree.layers // 2
        left = self.embedding.unsqueeze(0)  # (B^t, d_in, m), paths in order of their first branch
        for layer in range(half):
            left = self._step(left, layer)
        right = unembedding.unsqueeze(0)  # (B^{L-t}, m, d_out)
        for layer in reversed(range(half, tree.layers)):
            right = self._step_back(right, layer)
        shown = left.flatten(0, 1) @ right.transpose(0, 1).flatten(1)  # (B^half d_in, B^rest d_out)
        shown = shown.reshape(left.shape[0], left.shape[1], right.shape[0], right.shape[2]).transpose(1, 2)
        return shown.reshape(*(tree.branching,) * tree.layers, left.shape[1], right.shape[2])

    def _step(self, left: Tensor, layer: int) -> Tensor:
        """(paths, d_in, m) -> (paths * B, d_in, m): every path one branch longer at its end."""
        steps = [left] if self.rule.residual else []
        steps += [apply_plainly(self.machine.mover(layer, head), (left,))[0] for head in range(self.tree.heads)]
        return torch.stack(steps, dim=1).flatten(0, 1)

    def _step_back(self, right: Tensor, layer: int) -> Tensor:
        """(paths, m, d_out) -> (B * paths, m, d_out): every path one branch longer at its beginning."""
        steps = [right] if self.rule.residual else []
        joint = right.transpose(0, 1).flatten(1)  # (m, paths * d_out)
        for head in range(self.tree.heads):
            moved = dense(self.machine.mover(layer, head), right.dtype) @ joint
            steps.append(moved.unflatten(1, (right.shape[0], right.shape[2])).transpose(0, 1))
        return torch.cat(steps)
