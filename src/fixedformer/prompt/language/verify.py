"""Verify at build: the compiled network against the interpreter, exhaustively where that is short, sampled beyond."""

import random
from collections.abc import Iterator, Sequence
from itertools import product
from typing import TYPE_CHECKING, Any

import torch

from fixedformer.certificate import Certificate, Check, peak
from fixedformer.errors import SpecError
from fixedformer.prompt.language.expressions import NO_MATCH
from fixedformer.prompt.language.interpreter import interpret
from fixedformer.prompt.language.program import Program

if TYPE_CHECKING:
    from fixedformer.prompt.language.compiler import CompiledProgram

Word = tuple[str, ...]


def all_words(program: Program, length: int) -> Iterator[Word]:
    """Every sequence of 1 to `length` tokens, shortest first."""
    for n in range(1, length + 1):
        yield from product(program.alphabet, repeat=n)


def sample_words(program: Program, length: int, samples: int, seed: int) -> list[Word]:
    """Random sequences: half of them at the full length, the others at random lengths; half from two tokens only.

    Few different tokens make long runs and large counts, where rounding and ranges are put to the test.
    """
    source = random.Random(seed)
    words = []
    for number in range(samples):
        n = length if number % 2 == 0 else source.randint(1, length)
        few = number % 4 >= 2 and len(program.alphabet) > 2
        alphabet = source.sample(program.alphabet, 2) if few else program.alphabet
        words.append(tuple(source.choices(alphabet, k=n)))
    return words


def exhaustive_length(program: Program, length: int, inputs: int) -> int:
    """The largest length up to which there are at most `inputs` sequences."""
    total, n = 0, 0
    while n < length and total + len(program.alphabet) ** (n + 1) <= inputs:
        n += 1
        total += len(program.alphabet) ** n
    return n


def compare_words(compiled: "CompiledProgram", words: Sequence[Word]) -> tuple[float, int, str]:
    """The network against the interpreter on these words: largest difference, outputs compared, first counterexample.

    A difference beyond the derived rounding bound, a wrong flag or token, and a value where there should be none (or
    none where there should be one) all count as differences; the last two as infinite.
    """
    program = compiled.program
    by_length: dict[int, list[Word]] = {}
    for word in words:
        by_length.setdefault(len(word), []).append(word)
    worst, compared, example = 0.0, 0, ""
    for group in by_length.values():
        ids = torch.tensor([program.read(word) for word in group])
        values, matched = compiled.run_ids(ids)
        for word, row, known in zip(group, values.tolist(), matched.tolist()):
            truth = interpret(program, word)
            for place, exact in enumerate(truth):
                difference = _difference(compiled, row[place], known[place], exact)
                compared += 1
                if difference > compiled.noise and not example:
                    got = row[place] if known[place] else NO_MATCH
                    example = f"{' '.join(word)} at position {place}: the network says {got}, the program {exact}"
                worst = peak(worst, difference)
    return worst, compared, example


def _difference(compiled: "CompiledProgram", value: float, known: bool, exact: Any) -> float:
    if known != (exact is not NO_MATCH):
        return float("inf")
    if not known:
        return 0.0
    if isinstance(exact, str):
        exact = compiled.program.alphabet.index(exact)
    difference = abs(value - float(exact))
    return difference if difference == difference else float("inf")  # NaN is no agreement


def verify_program(
    compiled: "CompiledProgram", inputs: int = 400, samples: int = 64, seed: int = 0, require: bool = True
) -> Certificate:
    """A certificate of agreement: all words while there are at most `inputs`, then `samples` random ones.

    require: raise SpecError with a counterexample where the network and the program differ.
    """
    program = compiled.program
    n = exhaustive_length(program, compiled.length, inputs)
    checks, example = [], ""
    parts = [(list(all_words(program, n)), f"exhaustive, all sequences up to length {n}")]
    if n < compiled.length:
        words = sample_words(program, compiled.length, samples, seed)
        parts.append((words, f"sampled, {len(words)} sequences up to length {compiled.length}, seed {seed}"))
    for words, scope in parts:
        if not words:
            continue
        worst, compared, found = compare_words(compiled, words)
        example = example or found
        checks.append(
            Check(
                f"{program.name}: network and interpreter agree",
                compiled.noise,
                worst,
                compared,
                scope,
                "rounding bound derived register by register, docs/theory/prompt.md, section 7",
            )
        )
    if require and example:
        raise SpecError(f"{program.name} was not compiled faithfully: {example}")
    context = {"length": compiled.length, "blocks": compiled.network.depth, "fingerprint": compiled.fingerprint()}
    return Certificate(f"compiled program {program.name}", tuple(checks), {}, context)
