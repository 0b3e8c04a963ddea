"""k-hop induction heads (Sanford, Hsu, Telgarsky 2024), as the paper generates them (appendix H.1).

A string of characters without adjacent repeats. The 0-hop string is the string itself, each place its own source. The
next hop of place i looks back from the source for the most recent earlier occurrence of the source's character; the
character behind that occurrence is the answer and its place the new source; where there is none, the answer is "~".
Input: the hop token, then the string without its last two characters; labels: a blank, then the hop string likewise.
"""

from dataclasses import dataclass

import numpy as np

from fixedformer.errors import SpecError
from fixedformer.tasks.task import Examples, Ids

LETTERS = "abcdefghijklmnopqrstuvwxyz"


@dataclass(frozen=True)
class KHop:
    """hops: the fixed number k, or (low, high) for k uniform. Vocabulary: characters, hop tokens "1".., blank, "~".

    The paper's vocabulary has 30 entries: 4 characters, 24 hop tokens, blank and "~" make that number here, with
    max_hops = 24; only the hop tokens asked for ever occur.
    """

    hops: int | tuple[int, int] = 1
    characters: int = 4
    tokens: int = 99
    max_hops: int = 24

    def __post_init__(self) -> None:
        if not 2 <= self.characters <= len(LETTERS) or self.tokens < 2 or self.max_hops < 1:
            raise SpecError(
                f"needed 2..{len(LETTERS)} characters, at least 2 tokens and 1 of max_hops, got {self.characters}, "
                f"{self.tokens}, {self.max_hops}"
            )
        low, high = (self.hops, self.hops) if isinstance(self.hops, int) else self.hops
        if not 1 <= low <= high <= self.max_hops:
            raise SpecError(f"hops must lie in 1..max_hops = {self.max_hops}, got {self.hops}")

    @property
    def name(self) -> str:
        return f"{self.hops}-hop" if isinstance(self.hops, int) else f"{self.hops[0]}-to-{self.hops[1]}-hop"

    @property
    def vocabulary(self) -> tuple[str, ...]:
        return (*LETTERS[: self.characters], *(str(k) for k in range(1, self.max_hops + 1)), "_", "~")

    @property
    def blank(self) -> int:
        return self.characters + self.max_hops

    @property
    def none(self) -> int:
        return self.characters + self.max_hops + 1

    def sample(self, count: int, generator: np.random.Generator) -> Examples:
        length = self.tokens + 1  # the string; its last two characters are cut off, and the hop token comes first
        low, high = (self.hops, self.hops) if isinstance(self.hops, int) else self.hops
        hops = generator.integers(low, high + 1, count)
        # Each character differs from the one before: add 1..characters-1, modulo the number of characters.
        steps = generator.integers(1, self.characters, (count, length))
        steps[:, 0] = generator.integers(0, self.characters, count)
        text = steps.cumsum(1) % self.characters
        answers = self._hop(text, hops, high)
        inputs = np.concatenate([self.characters + hops[:, None] - 1, text[:, :-2]], axis=1)
        blank = np.full((count, 1), self.blank, dtype=np.int64)
        labels = np.concatenate([blank, answers[:, :-2]], axis=1)
        return Examples(inputs, labels, np.ones(inputs.shape, dtype=np.bool_))

    def _hop(self, text: Ids, hops: Ids, high: int) -> Ids:
        """The hop string of every row, each with its own number of hops."""
        count, length = text.shape
        # last[i] = most recent j < i with text[j] == text[i], -1 where there is none: what one look back finds
        place = np.arange(length)
        seen = np.where(text[:, :, None] == np.arange(self.characters), place[:, None], -1)
        latest = np.maximum.accumulate(seen, axis=1)
        before = np.concatenate([np.full((count, 1, self.characters), -1), latest[:, :-1]], axis=1)
        last = np.take_along_axis(before, text[:, :, None], axis=2)[:, :, 0]
        step = np.where(last >= 0, last + 1, -1)  # the place behind it is the next source
        source = np.broadcast_to(place, text.shape).copy()
        for hop in range(high):
            moved = np.take_along_axis(step, np.maximum(source, 0), axis=1)
            moved[source < 0] = -1
            source = np.where(hops[:, None] > hop, moved, source)
        return np.where(source >= 0, np.take_along_axis(text, np.maximum(source, 0), axis=1), self.none)

    def solve(self, inputs: list[int]) -> list[int]:
        hops, text, labels = inputs[0] - self.characters + 1, inputs[1:], [self.blank]
        for source in range(len(text)):
            at: int | None = source
            for _ in range(hops):
                if at is None:
                    break
                found = [j for j in range(at) if text[j] == text[at]]
                at = found[-1] + 1 if found else None
            labels.append(self.none if at is None else text[at])
        return labels

    def trivial_rules(self, examples: Examples) -> dict[str, float]:
        """Always the commonest label; copy the character here; copy the one before. The first place says blank."""
        inputs, labels = examples.inputs, examples.labels
        counts = np.bincount(labels[:, 1:].ravel(), minlength=len(self.vocabulary))
        guesses = {
            "commonest label": np.full_like(labels, counts.argmax()),
            "copy x[i]": inputs.copy(),
            "copy x[i-1]": np.concatenate([inputs[:, :1], inputs[:, :-1]], axis=1),
        }
        for guess in guesses.values():
            guess[:, 0] = self.blank
        return {name: examples.accuracy(guess) for name, guess in guesses.items()}
