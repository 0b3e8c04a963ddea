"""Step 2: contextual mapping (Lemma A.6, Corollary A.7). Attention picks the largest token id left, loop by loop.

Token ids z lie in {0 .. B-1}. Loop j attends to the largest id z_(j) not picked yet, appends it as a digit,
s <- B s + z_(j), and pushes the picked token's key below zero. After N loops every token knows s = Σ_j z_(j) B^{N-j},
which names the whole sequence when its ids are distinct. Corollary A.7 also carries the last coordinate of z_(N), so
that 2 s - (that coordinate) leaves at least n - 1 unused ids wherever the coordinate wraps around.

Rows: id v, key, one, picked, s, last; last_picked, last_kept. Repeated ids are picked together: with two tokens (z, z)
the second loop finds both keys at z - 2B, averages to z again, and s = Bz + z is an id of its own; with three tokens
{x, x, y} and {x, y, y} end alike, which is the O(N^{2/p} δ^{d/p}) term of the theorem.
"""

from fractions import Fraction
from math import log

from fixedformer.loop.block import HALF, Attention, BlockBuilder, LoopedNetwork, Weight, enter, leave
from fixedformer.loop.grid import Grid


def add_picker(builder: BlockBuilder, base: int, sharpness: Weight = 1) -> None:
    """Lemma A.6: rows id, key, one, picked, s; three neurons, one head.

    The picked token's key falls by 4B ReLU(key - picked + 1/2) = 2B. Soft attention may move `picked` by 1/4: the key
    still falls by at least B, and no other key (at most picked - 1) falls at all. The paper's ε is our 1/2 and its
    M > (B-1)/ε becomes 4B, because softmax needs M >= 2B/ε.
    """
    builder.add_rows("id", "key", "one", "picked", "s")
    builder.add_head(query="one", key="key", value="id", output="picked", sharpness=sharpness)
    builder.add_neuron({"key": 1, "picked": -1}, HALF, {"key": -4 * base})
    builder.add_neuron({"picked": 1}, 0, {"picked": -1, "s": 1})
    builder.add_neuron({"s": 1}, 0, {"s": base - 1})


def add_last_coordinate(builder: BlockBuilder, sharpness: Weight = 1) -> None:
    """Corollary A.7 on top of `add_picker`: rows last, last_picked, last_kept; two neurons, one more head.

    last_kept holds, after each loop, the last coordinate of the id picked in it. Here the paper's (247) must read
    W_K = e_2, W_V = e_6, and its W2 must not touch s: the literal formula subtracts the coordinate from s.
    """
    builder.add_rows("last", "last_picked", "last_kept")
    builder.add_head(query="one", key="key", value="last", output="last_picked", sharpness=sharpness)
    builder.add_neuron({"last_picked": 1}, 0, {"last_picked": -1, "last_kept": 1})
    builder.add_neuron({"last_kept": 1}, 0, {"last_kept": -1})


def add_ceiling(builder: BlockBuilder, base: int, tokens: int) -> None:
    """Keep s from growing B-fold in the loops after step 2: s -= B ReLU(s - B^N). One neuron.

    While step 2 runs, s < B^N and the neuron is silent. Afterwards s stays at or below B^{N+1} + B: without this it
    passes float64's range within some 300 / log10(B) loops and turns the rows that read it into NaN.
    """
    builder.add_neuron({"s": 1}, -(base**tokens), {"s": -base})


def sequence_network(base: int, tokens: int, attention: Attention = "hard", sharpness: Weight = 1) -> LoopedNetwork:
    """Lemma A.6 alone: token ids (tokens, 1) -> s at every token, in `tokens` loops. Width 3, one head."""
    builder = BlockBuilder()
    add_picker(builder, base, sharpness)
    block = builder.build()
    first = enter(block, 1, {"id": {0: 1}, "key": {0: 1}}, {"one": 1})
    return LoopedNetwork(block, first, leave(block, [({"s": 1}, 0)]), loops=tokens, attention=attention)


def contextual_network(base: int, tokens: int, attention: Attention = "hard", sharpness: Weight = 1) -> LoopedNetwork:
    """Corollary A.7 alone: (id, last coordinate) of each token -> 2 s - (last coordinate of the least id).

    Eight rows, width 5, two heads, `tokens` loops. The paper's read-out (282), 2 x5 - x6, takes each token's own
    coordinate; x8 is meant.
    """
    builder = BlockBuilder()
    add_picker(builder, base, sharpness)
    add_last_coordinate(builder, sharpness)
    block = builder.build()
    first = enter(block, 2, {"id": {0: 1}, "key": {0: 1}, "last": {1: 1}}, {"one": 1})
    last = leave(block, [({"s": 2, "last_kept": -1}, 0)])
    return LoopedNetwork(block, first, last, loops=tokens, attention=attention)


def contextual_error(base: int, tokens: int, resolution: int, leak: float) -> float:
    """How far softmax can move a contextual id when its weights off the maximum sum to `leak`.

    Each picked id moves by at most (B - 1) leak and enters with 2 B^{N-j}; the last coordinate by at most (n - 1) leak.
    """
    return float((2 * (base**tokens - 1) + resolution - 1) * leak)


TOLERANCE = Fraction(1, 4)
"""How far a contextual id may be off: step 3 reads it through gadgets that are flat within 1/4 of every integer."""


def required_sharpness(grid: Grid) -> float:
    """The key weight λ from which softmax makes every contextual id right to within 1/4.

    The best key leads by 1 or more, so the others' weights sum to at most (N - 1) e^-λ: `contextual_error` solved for
    λ. One token needs none; 1 is returned.
    """
    if grid.tokens == 1:
        return 1.0
    worst = contextual_error(grid.base, grid.tokens, grid.resolution, grid.tokens - 1)
    return log(worst / float(TOLERANCE))
