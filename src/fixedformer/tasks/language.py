"""Language modelling on a text file: the next token at every place, in windows of the text.

The offline default is the text of Python's own reference (`pydoc_data.topics`, about 465,000 characters of technical
English). Tokens are bytes, or byte pairs merged by the `tokenizers` library (the extra `text`): trained on the training
part of the text, or read from a tokenizer.json (GPT-2's, say). The last tenth of the text is held out.
"""

from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np

from fixedformer.errors import SpecError
from fixedformer.tasks.task import Array, Examples, Ids

HELD_OUT = 10  # the last tenth


@cache
def default_text() -> str:
    """Every topic of the standard library's `pydoc_data.topics`, in its order."""
    from pydoc_data import topics

    return "\n".join(str(text) for text in topics.topics.values())


@dataclass(frozen=True, eq=False)
class Language:
    """Windows of `block` tokens out of `ids`; labels are the tokens one further.

    replaced: this share of the tokens, drawn once with `seed`, is replaced by random ones (the paper's appendix D).
    `read` makes the training and the held-out part.
    """

    ids: Ids
    vocabulary: tuple[str, ...]
    block: int = 64
    replaced: float = 0.0
    seed: int = 0
    bytes_each: float = 1.0  # bytes of text a token stands for
    text: Ids = field(init=False)

    name = "language"

    def __post_init__(self) -> None:
        if not 0 <= self.replaced <= 1 or self.block < 1:
            raise SpecError(f"needed block >= 1 and replaced in 0..1, got {self.block}, {self.replaced}")
        if len(self.ids) < self.block + 2:
            raise SpecError(f"a text of {len(self.ids)} tokens has no window of {self.block}; take a smaller block")
        generator = np.random.default_rng([68, self.seed])
        noise = generator.integers(0, len(self.vocabulary), len(self.ids))
        changed = generator.random(len(self.ids)) < self.replaced
        object.__setattr__(self, "text", np.where(changed, noise, self.ids))

    @property
    def tokens(self) -> int:
        return self.block

    @classmethod
    def read(
        cls,
        path: Path | None = None,
        block: int = 64,
        tokeniser: str = "bytes",
        vocabulary: int = 1024,
        replaced: float = 0.0,
        seed: int = 0,
    ) -> tuple["Language", "Language"]:
        """Training and held-out part of a UTF-8 file, or of the default text.

        tokeniser: "bytes", "bpe" (trained here, to `vocabulary` tokens), or the path of a tokenizer.json. Raises
        SpecError for a file that is missing or no UTF-8, and where the tokenizers library is needed and missing.
        """
        text = default_text() if path is None else _read(path)
        cut = len(text) - len(text) // HELD_OUT
        parts = text[:cut], text[cut:]
        if tokeniser == "bytes":
            names = tuple(repr(bytes([b]))[2:-1] for b in range(256))
            ids = [np.frombuffer(part.encode(), dtype=np.uint8).astype(np.int64) for part in parts]
        else:
            names, ids = _byte_pairs(parts, tokeniser, vocabulary)
        return tuple(  # type: ignore[return-value]
            cls(part, names, block, replaced, seed, len(text_of.encode()) / max(1, len(part)))
            for part, text_of in zip(ids, parts)
        )

    def half(self, which: int) -> "Language":
        """The first or the second half of the text (the whole where a half has no window)."""
        middle = len(self.ids) // 2
        parts = (self.ids[:middle], self.ids[middle:])
        if len(parts[0]) < self.block + 2:
            return self
        return Language(parts[which], self.vocabulary, self.block, self.replaced, self.seed, self.bytes_each)

    def sample(self, count: int, generator: np.random.Generator) -> Examples:
        starts = generator.integers(0, len(self.text) - self.block, count)
        windows = self.text[starts[:, None] + np.arange(self.block + 1)]
        scored = np.ones((count, self.block), dtype=np.bool_)
        return Examples(windows[:, :-1], windows[:, 1:], scored)

    def solve(self, inputs: list[int]) -> list[int]:
        """The continuation, where the text holds the sequence; SpecError where it does not."""
        window = np.lib.stride_tricks.sliding_window_view(self.text[:-1], len(inputs))
        found = np.flatnonzero((window == np.asarray(inputs)).all(1))
        if not found.size:
            raise SpecError("the sequence is not in the text")
        return [int(t) for t in self.text[found[0] + 1 : found[0] + 1 + len(inputs)]]

    def measures(self, examples: Examples, predictions: Array) -> dict[str, float]:  # noqa: ARG002
        """Bytes of text a token stands for: loss / that / log 2 is bits a byte; exp(loss) is the perplexity."""
        return {"bytes a token": self.bytes_each}

    def trivial_rules(self, examples: Examples) -> dict[str, float]:
        """The commonest token; the commonest after the token before (counted on this part of the text)."""
        size = len(self.vocabulary)
        common = np.bincount(self.text, minlength=size).argmax()
        pairs, counts = np.unique(self.text[:-1] * size + self.text[1:], return_counts=True)
        after = np.full(size, common)
        order = counts.argsort(kind="stable")  # the last writer, the commonest, wins
        after[pairs[order] // size] = pairs[order] % size
        guesses = {"commonest token": np.full_like(examples.labels, common), "commonest pair": after[examples.inputs]}
        return {name: examples.accuracy(guess) for name, guess in guesses.items()}


def _read(path: Path) -> str:
    if not path.is_file():
        raise SpecError(f"{path}: no such file; leave `path` out for the standard library's documentation")
    try:
        return path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise SpecError(f"{path}: not UTF-8 text ({error.reason} at byte {error.start})") from None


def _byte_pairs(parts: tuple[str, str], tokeniser: str, size: int) -> tuple[tuple[str, ...], list[Ids]]:
    """Names of the tokens, and the ids of both parts."""
    try:
        import tokenizers
    except ImportError:
        raise SpecError("byte pairs need the tokenizers library: pip install 'fixedformer[text]'; or bytes") from None
    if tokeniser == "bpe":
        made: Any = tokenizers.ByteLevelBPETokenizer()
        made.train_from_iterator([parts[0]], vocab_size=size, show_progress=False)
    else:
        if not Path(tokeniser).is_file():
            raise SpecError(f"tokeniser is bytes, bpe or a tokenizer.json, got {tokeniser!r}")
        made = tokenizers.Tokenizer.from_file(tokeniser)
    names = tuple(str(made.id_to_token(i)) for i in range(made.get_vocab_size()))
    return names, [np.asarray(made.encode(part).ids, dtype=np.int64) for part in parts]
