"""Programs of the language, ready to compile: what is computed, and how, in a few registers each."""

from collections.abc import Callable, Sequence

from fixedformer.errors import SpecError
from fixedformer.prompt.language.expressions import (
    Expr,
    aggregate,
    as_number,
    compare,
    count,
    equal,
    first,
    length,
    lookup,
    otherwise,
    position,
    select,
    select_all,
    symbol,
    tokens,
)
from fixedformer.prompt.language.program import Program


def histogram(alphabet: Sequence[str] = "abc") -> Program:
    """How often the token of each position occurs."""
    return Program("histogram", tuple(alphabet), count(select(tokens, tokens, "==")), histogram.__doc__ or "")


def reverse(alphabet: Sequence[str] = "abc") -> Program:
    """The sequence backwards. (Every position has a partner, so the output's "no match" never happens.)"""
    partner = select(position, length - 1 - position, "==")
    return Program("reverse", tuple(alphabet), first(partner, tokens), reverse.__doc__ or "")


def sort(alphabet: Sequence[str] = "abc") -> Program:
    """The tokens in the order of the alphabet: each goes to the place that says how many come before it."""
    rank = lookup(tokens, {token: number for number, token in enumerate(alphabet)})
    smaller = count(select(rank, rank, "<"))
    earlier = count(select(rank, rank, "==") & select(position, position, "<"))
    return Program(
        "sort", tuple(alphabet), first(select(smaller + earlier, position, "=="), tokens), sort.__doc__ or ""
    )


def most_frequent(alphabet: Sequence[str] = "abc") -> Program:
    """The most frequent token, at every position; of equally frequent ones the first in the alphabet.

    frequency * |alphabet| - rank orders the tokens without ties; the winner has nothing above it.
    """
    size = len(alphabet)
    rank = lookup(tokens, {token: number for number, token in enumerate(alphabet)})
    order = count(select(tokens, tokens, "==")) * size - rank
    above = count(select(order, order, ">"))
    winner = first(select(above, 0, "=="), tokens)
    return Program("most_frequent", tuple(alphabet), winner, (most_frequent.__doc__ or "").split("\n")[0])


def balance(opening: str, closing: str, others: Sequence[str] = ()) -> Expr:
    """A flag, equal at every position: are these brackets balanced? Other tokens are passed over.

    The mean of +1, -1 and 0 over the positions up to i is the depth there over i + 1: it must never be negative, and 0
    at the end. Means lie in Z / k, k <= n, so 1/n tells them apart.
    """
    step = lookup(tokens, {opening: 1, closing: -1, **dict.fromkeys(others, 0)})
    depth = otherwise(aggregate(select(position, position, "<="), step), 0)
    never_negative = equal(count(select(as_number(depth < 0), 1, "==")), 0)
    return never_negative & equal(otherwise(aggregate(select_all(), step), 0), 0)


def dyck1() -> Program:
    """Balanced brackets of one kind: true at every position, or false at every position."""
    return Program("dyck1", ("(", ")"), balance("(", ")"), dyck1.__doc__ or "")


def shuffle_dyck() -> Program:
    """Two kinds of brackets, each balanced when the other is ignored: "([)]" is accepted."""
    both = balance("(", ")", "[]") & balance("[", "]", "()")
    return Program("shuffle_dyck", ("(", ")", "[", "]"), both, shuffle_dyck.__doc__ or "")


def fraction_before(token: str = "a", alphabet: Sequence[str] = "abc") -> Program:
    """The fraction of `token` among the earlier positions; "no match" at the first."""
    before = select(position, position, "<")
    return Program("fraction_before", tuple(alphabet), aggregate(before, compare(tokens, "==", symbol(token))),
                   fraction_before.__doc__ or "")  # fmt: skip


LIBRARY: dict[str, Callable[[], Program]] = {
    "histogram": histogram,
    "reverse": reverse,
    "sort": sort,
    "most_frequent": most_frequent,
    "dyck1": dyck1,
    "shuffle_dyck": shuffle_dyck,
    "fraction_before": fraction_before,
}


def library_program(name: str) -> Program:
    """The library's program of that name, over its default alphabet. SpecError for an unknown name."""
    if name not in LIBRARY:
        raise SpecError(f"the library has no program {name!r}; it has {', '.join(LIBRARY)}")
    return LIBRARY[name]()
