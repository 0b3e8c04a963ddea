"""The language itself: types, no match, precision, refusals, random programs, text and drawings."""

import random
import re
from dataclasses import replace
from fractions import Fraction
from itertools import product
from pathlib import Path

import pytest
import torch

from fixedformer.errors import CapacityError, SpecError
from fixedformer.prompt.language import (
    LIBRARY,
    NO_MATCH,
    Expr,
    Program,
    absolute,
    aggregate,
    as_number,
    choose,
    compare,
    compile_program,
    constant,
    count,
    draw,
    equal,
    exists,
    first,
    interpret,
    length,
    library_program,
    lookup,
    matched,
    maximum,
    minimum,
    otherwise,
    parse,
    position,
    relu,
    select,
    select_all,
    symbol,
    to_dot,
    to_text,
    tokens,
)
from fixedformer.prompt.language.verify import all_words, compare_words, sample_words, verify_program
from fixedformer.prompt.network import Block, GatedMap, Network


def agree(program: Program, up_to: int, at: int = 12, samples: int = 40) -> None:
    compiled = compile_program(program, at, verify=False)
    words = list(all_words(program, up_to)) + sample_words(program, at, samples, seed=1)
    assert compare_words(compiled, words)[2] == ""


EARLIER = select(position, position, "<")
SAME = select(tokens, tokens, "==")
PROGRAMS: dict[str, Expr] = {
    "no match is its own value": aggregate(SAME & EARLIER, position),
    "first, no match": first(SAME & EARLIER, tokens),
    "matched": matched(first(SAME & select(position, position, ">"), position)),
    "exists": exists(SAME & EARLIER),
    "otherwise": otherwise(aggregate(SAME & EARLIER, position), -7),
    "otherwise, register": otherwise(first(SAME & EARLIER, tokens), tokens),
    "mean of thirds": aggregate(EARLIER, lookup(tokens, {"a": Fraction(1, 3), "b": Fraction(-2, 3), "c": 0})),
    "means compared": as_number(otherwise(aggregate(EARLIER, equal(tokens, symbol("a"))), 0)
                                < otherwise(aggregate(select(position, position, ">"), tokens_are_b := compare(
                                    tokens, "==", symbol("b"))), 0)),
    "mean equals": equal(otherwise(aggregate(SAME, position), 0), 1),
    "mean differs": compare(otherwise(aggregate(EARLIER, tokens_are_b), 0), "!=", Fraction(1, 3)),
    "select by count": aggregate(select(count(SAME), count(SAME), "=="), position),
    "select by order of counts": count(select(count(SAME), position, ">")),
    "select !=": count(select(tokens, tokens, "!=") & select(position, 1, ">=")),
    "select by thirds": count(select(position * Fraction(1, 3), count(SAME) * Fraction(1, 3), "<=")),
    "products": position * length - relu(position - 2) * count(SAME),
    "flags": (position < 2) & ~equal(tokens, symbol("a")) | (length >= 6),
    "max and min": maximum(position, 3) - minimum(count(SAME), position) + absolute(position - 2),
    "choose": choose(tokens_are_b, position, length * -1),
    "choose tokens": choose(position < 1, symbol("c"), tokens),
    "constant": constant(Fraction(2, 7)),
    "constant token": symbol("b"),
    "mean of everything": aggregate(select_all(), position),
    "first flag": first(SAME, position > 1),
    "mean of a mean": aggregate(EARLIER, otherwise(aggregate(EARLIER, position), 0)),
    "empty selector": aggregate(select(position, -1, "=="), position),
}  # fmt: skip


@pytest.mark.parametrize("name", PROGRAMS)
def test_programs_agree_with_the_interpreter(name: str) -> None:
    agree(Program("test", "abc", PROGRAMS[name]), up_to=5)


def test_no_match_is_not_zero() -> None:
    """The mean of zeros is 0, the mean of nothing is not: the network tells them apart, and so does its output."""
    program = Program("zeros", "ab", aggregate(SAME & EARLIER, constant(0)))
    assert interpret(program, "aab") == [NO_MATCH, 0, NO_MATCH]
    assert compile_program(program, 4).run(["aab"]) == [[NO_MATCH, 0.0, NO_MATCH]]


def random_expression(source: random.Random, depth: int, kind: str) -> Expr:
    """A random well-typed expression."""
    if depth == 0:
        leaves = {
            "number": [position, length, constant(source.randint(-2, 3)), lookup(tokens, {"a": 1, "b": -1})],
            "flag": [equal(tokens, symbol("a")), position < 2],
            "token": [tokens, symbol("b")],
            "selector": [select(tokens, tokens, "=="), select(position, position, "<"), select_all()],
        }
        return source.choice(leaves[kind])

    def sub(of: str) -> Expr:
        return random_expression(source, depth - 1, of)

    def whole() -> Expr:
        return source.choice([position, count(sub("selector")), lookup(tokens, {"a": 2, "b": 0}), length])

    operator = source.choice(["<", "<=", ">", ">=", "==", "!="])
    options = {
        "number": [
            lambda: sub("number") + sub("number"),
            lambda: sub("number") * source.choice([2, -1, Fraction(1, 2), Fraction(1, 3)]),
            lambda: relu(sub("number")),
            lambda: as_number(sub("flag")),
            lambda: choose(sub("flag"), sub("number"), sub("number")),
            lambda: otherwise(aggregate(sub("selector"), whole()), source.choice([0, whole()])),
            lambda: otherwise(first(sub("selector"), sub("number")), 0),
            lambda: count(sub("selector")),
        ],
        "flag": [
            lambda: compare(sub("number"), operator, whole()),
            lambda: sub("flag") & sub("flag"),
            lambda: ~sub("flag") | sub("flag"),
            lambda: exists(sub("selector")),
        ],
        "token": [
            lambda: otherwise(first(sub("selector"), sub("token")), tokens),
            lambda: choose(sub("flag"), sub("token"), tokens),
        ],
        "selector": [
            lambda: select(whole(), whole(), operator),
            lambda: select(sub("token"), sub("token"), source.choice(["==", "!="])),
            lambda: sub("selector") & sub("selector"),
        ],
    }
    return source.choice(options[kind])()


@pytest.mark.parametrize("seed", range(40))
def test_random_programs_agree_or_are_refused(seed: int) -> None:
    """Whatever compiles is right; the only other outcome is a refusal that names the program."""
    source = random.Random(seed)
    program = Program("random", "ab", random_expression(source, 3, source.choice(["number", "flag", "token"])))
    try:
        compile_program(program, 7, verify=False)
    except SpecError as error:
        refusal = str(error)
    else:
        agree(program, up_to=4, at=7, samples=20)
        return
    assert "random cannot be compiled faithfully" in refusal


def test_most_random_programs_compile() -> None:
    compiled = 0
    for seed in range(100, 140):
        source = random.Random(seed)
        program = Program("random", "ab", random_expression(source, 3, "number"))
        try:
            compile_program(program, 6, verify=False)
            compiled += 1
        except SpecError:
            continue
    assert compiled >= 30


# Precision


def test_noise_is_a_bound_and_not_an_idle_one() -> None:
    program = Program("mean", "ab", aggregate(select(position, position, "<="), lookup(tokens, {"a": 1, "b": -1})))
    compiled = compile_program(program, 60, verify=False)
    words = sample_words(program, 60, 200, seed=0)
    worst = compare_words(compiled, words)[0]
    assert compiled.noise / 1000 < worst <= compiled.noise < 1e-13


def test_precision_follows_the_length() -> None:
    """Means over n^2-many positions differ by 1/n^2: fine at 64, refused where rounding could decide."""
    a, b = (otherwise(aggregate(select(position, position, way), equal(tokens, symbol("a"))), 0) for way in ("<", ">"))
    program = Program("close", "ab", a * b * a * b < b * a * a * Fraction(1, 3))
    compile_program(program, 10, samples=8)
    with pytest.raises(CapacityError, match=r"close at length 500 cannot be compiled faithfully: '<' must tell apart"):
        compile_program(program, 500)


def test_refusal_sets_in_where_rounding_reaches_an_eighth_of_the_gap() -> None:
    """The first length that is refused: rounding is above gap / 8 there, and not far above."""
    a, b = (otherwise(aggregate(select(position, position, way), equal(tokens, symbol("a"))), 0) for way in ("<", ">"))
    program = Program("close", "ab", a * b * a * b < b * a * a * Fraction(1, 3))
    fine, refused, message = 10, 300, ""
    while refused - fine > 1:
        middle = (fine + refused) // 2
        try:
            compile_program(program, middle, verify=False)
            fine = middle
        except CapacityError as error:
            refused, message = middle, str(error)
    gap, noise = (float(number) for number in re.findall(r"values (\S+) apart, .* by (\S+);", message)[0])
    assert gap / 8 <= noise < gap / 4


def test_what_cannot_be_compiled_faithfully_is_refused() -> None:
    mean = otherwise(aggregate(EARLIER, position), 0)
    with pytest.raises(SpecError, match="selects by a mean"):
        compile_program(Program("p", "ab", count(select(mean, position, "=="))), 8)
    twice = otherwise(aggregate(EARLIER, mean), 0)
    with pytest.raises(SpecError, match="compares a mean of means"):
        compile_program(Program("p", "ab", twice < 1), 8)
    with pytest.raises(CapacityError, match="would need a unit for each of 5000 values"):
        compile_program(Program("p", "ab", count(select(position, position, "<"))), 5000)
    with pytest.raises(CapacityError, match="float64 holds whole numbers only up to"):
        compile_program(library_program("histogram"), 10**8)
    with pytest.raises(CapacityError, match=r"needs scores up to \d+"):
        compile_program(Program("p", "ab", count(select(position * 10**8, position, "=="))), 60)


def test_long_sequences() -> None:
    """Position squares are exact far beyond what is run here; length 3,000 in one go."""
    program = Program("previous", "ab", first(select(position, position - 1, "=="), tokens))
    word = "".join(random.Random(0).choices("ab", k=3000))
    assert compile_program(program, 3000, verify=False).run([word]) == [[NO_MATCH, *word[:-1]]]


# Verification at build


def tampered(network: Network) -> Network:
    """The same network with the last map's weights 1 % larger."""
    last = network.blocks[-1]
    token_map = GatedMap(last.map.gate * 1.01, last.map.up, last.map.down, last.map.activations)
    return replace(network, blocks=(*network.blocks[:-1], Block(last.heads, token_map, last.rule)))


def test_verification_finds_a_wrong_network() -> None:
    compiled = compile_program(library_program("histogram"), 6)
    wrong = replace(compiled, network=tampered(compiled.network), _engines={})
    with pytest.raises(
        SpecError, match=r"histogram was not compiled faithfully: a at position 0: the network says 1\.01"
    ):
        verify_program(wrong)
    certificate = verify_program(wrong, require=False)
    assert not certificate.holds
    assert all(check.measured > check.bound for check in certificate.checks)


def test_verification_says_its_scope() -> None:
    short = compile_program(library_program("dyck1"), 4).verification
    assert [check.scope for check in short.checks] == ["exhaustive, all sequences up to length 4"]
    assert short.checks[0].cases == 2 * 1 + 4 * 2 + 8 * 3 + 16 * 4
    long = compile_program(library_program("dyck1"), 20, samples=10).verification
    assert [check.scope.split(",")[0] for check in long.checks] == ["exhaustive", "sampled"]


# Types and bad input


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (lambda: aggregate(EARLIER, position) + 1, r"add needs a number, got a optional number; .*otherwise"),
        (lambda: position + tokens, "ill-typed: add needs a number, got a token"),
        (lambda: (position < 1) + 1, "turn it into 0 and 1 with as_number"),
        (lambda: tokens < tokens, "ill-typed: < needs a number, got a token"),
        (lambda: select(tokens, position, "=="), "ill-typed: == needs a number, got a token"),
        (lambda: select(position, position, "=<"), "a comparison is one of"),
        (lambda: count(position), "count needs a selector, got a number"),
        (lambda: ~position, "~ needs a flag"),
        (lambda: EARLIER | SAME, r"selectors have no \|"),
        (lambda: choose(position < 1, position, tokens), "choose needs two registers of one type"),
        (lambda: otherwise(position, 0), "otherwise takes an optional register"),
        (lambda: matched(position), "matched takes an optional register"),
        (lambda: first(EARLIER, EARLIER), "first takes a number, flag or token register, got selector"),
        (lambda: constant(float("nan")), "must be finite"),
        (lambda: constant(True), "a constant is a number"),
        (lambda: symbol(3), "a symbol is a string"),
        (lambda: bool(position < 1), "use &, | and ~"),
        (lambda: Program("p", "ab", EARLIER), "not a selector"),
        (lambda: Program("p", "aa", tokens), "different tokens"),
        (lambda: Program("p", "", tokens), "one or more different tokens"),
        (lambda: Program("p", "ab", equal(tokens, symbol("x"))), "unknown token 'x': the alphabet is a b"),
        (lambda: Program("p", "ab", lookup(tokens, {"a": 1})), "'b' is missing"),
        (lambda: Program("p", "a", lookup(tokens, {"a": 1, "b": 2})), "'b' is unknown"),
        (lambda: interpret(library_program("sort"), ""), "the sequence is empty"),
        (lambda: interpret(library_program("sort"), "abx"), "unknown token 'x'"),
        (lambda: compile_program(library_program("sort"), 0), "length must be"),
    ],
)
def test_refusals(build, message: str) -> None:
    with pytest.raises(SpecError, match=message):
        build()


def test_a_cyclic_expression_is_refused() -> None:
    loop = position + 1
    object.__setattr__(loop, "args", (loop, position))
    with pytest.raises(SpecError, match="recursive program"):
        Program("p", "ab", loop)


def test_run_refuses() -> None:
    compiled = compile_program(library_program("sort"), 4)
    with pytest.raises(SpecError, match="sequences of 1 to 4 tokens"):
        compiled.run(["aaaaa"])
    with pytest.raises(SpecError, match="unknown token 'x'"):
        compiled.run(["ax"])
    with pytest.raises(SpecError, match="the sequence is empty"):
        compiled.run([""])
    with pytest.raises(SpecError, match=r"ids must lie in 0\.\.2, got 0\.\.3"):
        compiled.run_ids(torch.tensor([[0, 3]]))


def test_equal_expressions_are_shared() -> None:
    program = Program("p", "ab", count(select(tokens, tokens, "==")) + count(select(tokens, tokens, "==")))
    assert [step.op for step in program.steps] == ["tokens", "select", "count", "add"]


def test_mixed_lengths_keep_their_order() -> None:
    compiled = compile_program(library_program("reverse"), 5)
    words = ["abc", "a", "bca", "cb"]
    assert compiled.run(words) == [list(word[::-1]) for word in words]


# Text and drawings


@pytest.mark.parametrize("name", LIBRARY)
def test_text_round_trip(name: str) -> None:
    program = library_program(name)
    again = parse(to_text(program))
    assert to_text(again) == to_text(program)
    assert (again.name, again.alphabet) == (program.name, program.alphabet)
    for word in sample_words(program, 6, 10, seed=0):
        assert interpret(again, word) == interpret(program, word)


@pytest.mark.parametrize("name", PROGRAMS)
def test_text_of_every_operation(name: str) -> None:
    program = Program("p", "abc", PROGRAMS[name])
    again = parse(to_text(program))
    for word in product("abc", repeat=3):
        assert interpret(again, word) == interpret(program, word)


def test_text_may_define_late() -> None:
    text = "program p\nalphabet a b\noutput = half + exists(same)*1\nsame = select(tokens, tokens, '==')\nhalf = 1/2\n"
    with pytest.raises(SpecError, match=r"line 3: ill-typed: .* as_number"):
        parse(text)
    program = parse(text.replace("exists(same)*1", "as_number(exists(same))"))
    assert interpret(program, "ab") == [Fraction(3, 2), Fraction(3, 2)]


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ("output = output + 1", "recursive program: output -> output"),
        ("x = y + 1\ny = relu(x)\noutput = x", "recursive program: x -> y -> x"),
        ("output = __import__('os')", "line 3: not part of the language"),
        ("output = tokens.__class__", "line 3: not part of the language"),
        ("output = count(nothing)", "line 3: unknown name 'nothing'"),
        ("output = position +", "line 3: cannot read"),
        ("output = position / 2", "line 3: only"),
        ("output = 1 / 0", "line 3: only"),
        ("output = count()", "line 3: .*missing"),
        ("output = position\noutput = length", "line 4: 'output' is defined already"),
        ("tokens = position\noutput = tokens", "line 3: 'tokens' is defined already"),
        ("nonsense", "line 3: needed"),
        ("x = position", "needs the lines"),
        ("output = True", "line 3: not part"),
        ("output = 'a' < position", "line 3: "),
    ],
)
def test_bad_text(body: str, message: str) -> None:
    with pytest.raises(SpecError, match=message):
        parse(f"program p\nalphabet a b\n{body}\n")


def test_drawings(tmp_path: Path) -> None:
    program = library_program("sort")
    dot = to_dot(program)
    assert dot.count(" -> ") == sum(len(step.args) for step in program.steps)
    assert 'label="otherwise(·, 0)' in to_dot(library_program("dyck1"))  # constants stand in labels
    assert dot.count("peripheries=2") == 1
    assert 'label="lookup \\":1' in to_dot(Program("q", ('"',), lookup(tokens, {'"': 1})))
    draw(program, tmp_path / "sort.png")
    assert (tmp_path / "sort.png").read_bytes().startswith(b"\x89PNG")
