"""Library programs: what they compute (plain solvers), and that network and interpreter agree."""

import random
import time
from collections import Counter

import pytest
import torch

from fixedformer.errors import SpecError
from fixedformer.prompt.construction import sharpen
from fixedformer.prompt.engine import run_dense
from fixedformer.prompt.language import LIBRARY, NO_MATCH, compile_program, interpret, library_program
from fixedformer.prompt.language.verify import all_words, compare_words, sample_words


def balanced(word: str, kinds: str) -> bool:
    """Brackets of several kinds, each kind counted alone."""
    for opening, closing in zip(kinds[::2], kinds[1::2]):
        depth = 0
        for token in word:
            depth += (token == opening) - (token == closing)
            if depth < 0:
                return False
        if depth:
            return False
    return True


def solve(name: str, word: str) -> list:
    n = len(word)
    match name:
        case "histogram":
            return [word.count(token) for token in word]
        case "reverse":
            return list(word[::-1])
        case "sort":
            return sorted(word)
        case "most_frequent":
            counts = Counter(word)
            return [min(counts, key=lambda token: (-counts[token], token))] * n
        case "dyck1":
            return [balanced(word, "()")] * n
        case "shuffle_dyck":
            return [balanced(word, "()[]")] * n
        case "fraction_before":
            return [NO_MATCH if i == 0 else word[:i].count("a") / i for i in range(n)]
    raise AssertionError(name)


def bracket_words(kinds: str, n: int, number: int, seed: int) -> list[str]:
    """Half random, half balanced with up to two tokens changed, so that both answers are frequent."""
    source = random.Random(seed)
    words = []
    for index in range(number):
        if index % 2:
            words.append("".join(source.choices(kinds, k=n)))
            continue
        word, depth = [], [0] * (len(kinds) // 2)
        while len(word) < n:
            kind = source.randrange(len(depth))
            if sum(depth) < n - len(word) and (depth[kind] == 0 or source.random() < 0.5):
                word.append(kinds[2 * kind])
                depth[kind] += 1
            elif depth[kind]:
                word.append(kinds[2 * kind + 1])
                depth[kind] -= 1
        for _ in range(source.choice([0, 0, 1, 2])):
            word[source.randrange(n)] = source.choice(kinds)
        words.append("".join(word))
    return words


@pytest.mark.parametrize("name", LIBRARY)
def test_the_interpreter_gives_what_the_program_promises(name: str) -> None:
    program = library_program(name)
    words = list(all_words(program, 5))[:400] + sample_words(program, 20, 40, seed=5)
    for word in words:
        expected = solve(name, "".join(word))
        got = interpret(program, word)
        assert [x if x is NO_MATCH or isinstance(x, str | bool) else float(x) for x in got] == expected


@pytest.mark.parametrize("name", LIBRARY)
def test_compiled_programs_agree_on_short_and_sampled_inputs(name: str) -> None:
    program = library_program(name)
    compiled = compile_program(program, 64, samples=16)
    assert compiled.verification is not None
    assert compiled.verification.holds
    worst, compared, example = compare_words(compiled, list(all_words(program, 4)))
    assert not example
    assert worst <= compiled.noise
    assert compared > 80


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("name", LIBRARY)
def test_all_inputs_up_to_length_8_and_1000_at_64(name: str) -> None:
    program = library_program(name)
    compiled = compile_program(program, 64, verify=False)
    words = list(all_words(program, 8))
    assert len(words) == sum(len(program.alphabet) ** n for n in range(1, 9))
    assert not compare_words(compiled, words)[2]
    source = random.Random(7)
    assert not compare_words(compiled, [tuple(source.choices(program.alphabet, k=64)) for _ in range(1000)])[2]


@pytest.mark.slow
@pytest.mark.parametrize(("name", "kinds"), [("shuffle_dyck", "()[]"), ("dyck1", "()")])
def test_brackets_at_length_30_on_10000_words(name: str, kinds: str) -> None:
    compiled = compile_program(library_program(name), 30)
    words = bracket_words(kinds, 30, 10_000, seed=3)
    truth = [balanced(word, kinds) for word in words]
    assert 0.1 < sum(truth) / len(truth) < 0.9
    assert [row[-1] for row in compiled.run(words)] == truth


def test_brackets_at_length_30() -> None:
    compiled = compile_program(library_program("shuffle_dyck"), 30)
    words = bracket_words("()[]", 30, 600, seed=4)
    truth = [[balanced(word, "()[]")] * 30 for word in words]
    assert 0.1 < sum(row[0] for row in truth) / len(truth) < 0.9
    assert compiled.run(words) == truth


@pytest.mark.slow
def test_compile_and_run_times_at_length_32() -> None:
    """Verified compilation under 2 s a program, 1,000 sequences under 1 s: processor time of one core, which other
    work on the machine does not change."""
    for name in LIBRARY:
        program = library_program(name)
        start = time.process_time()
        compiled = compile_program(program, 32)
        assert time.process_time() - start < 2, name
        ids = torch.randint(len(program.alphabet), (1000, 32), generator=torch.Generator().manual_seed(0))
        compiled.run_ids(ids[:1])
        start = time.process_time()
        compiled.run_ids(ids)
        assert time.process_time() - start < 1, name


@pytest.mark.parametrize("name", LIBRARY)
def test_definition_and_plain_softmax_give_the_same_answers(name: str) -> None:
    """The dense evaluation of the network, and the same weights on ordinary softmax with scores times 1000."""
    program = library_program(name)
    compiled = compile_program(program, 12, verify=False)
    ids = torch.randint(len(program.alphabet), (40, 12), generator=torch.Generator().manual_seed(0))
    values, matched = compiled.run_ids(ids)
    inputs = torch.nn.functional.pad(ids.double(), (1, 0))[..., None]
    engine = compiled._engines[12]
    for network in (compiled.network, sharpen(compiled.network, 1000.0)):
        state = run_dense(network, engine.constants, inputs)[:, 1:]
        assert (state[..., network.channel("out")] - values).abs().max() <= 1e-13
        assert torch.equal(state[..., network.channel("matched")] > 0.5, matched)


def test_one_network_for_all_inputs() -> None:
    compiled = compile_program(library_program("sort"), 6)
    before = compiled.fingerprint()
    compiled.run(["cab", "bbaacc"])
    assert compiled.fingerprint() == before == compile_program(library_program("sort"), 6).fingerprint()


def test_unknown_program() -> None:
    with pytest.raises(SpecError, match="the library has no program 'quicksort'; it has histogram"):
        library_program("quicksort")
