"""A program: an alphabet and one output register, with the expressions below it in an order of evaluation."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from fixedformer.errors import SpecError
from fixedformer.prompt.language.expressions import SELECTOR, Expr


@dataclass(frozen=True, eq=False)
class Program:
    """name, alphabet (token names, in the order of their ids), output register, and one line of description.

    steps: every expression below the output once, arguments first; equal expressions are one. Raises SpecError for an
    empty alphabet, a repeated token, an output that is a selector, a token outside the alphabet, a lookup with a token
    missing, and for an expression that contains itself.
    """

    name: str
    alphabet: tuple[str, ...]
    output: Expr
    description: str = ""
    steps: tuple[Expr, ...] = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "alphabet", tuple(self.alphabet))
        if not self.alphabet or len(set(self.alphabet)) != len(self.alphabet):
            raise SpecError(f"an alphabet needs one or more different tokens, got {self.alphabet!r}")
        if not isinstance(self.output, Expr) or self.output.type == SELECTOR:
            raise SpecError("ill-typed: a program's output is a number, flag or token register, not a selector")
        output, steps = _share(self.output)
        object.__setattr__(self, "output", output)
        object.__setattr__(self, "steps", steps)
        for step in steps:
            self._check_tokens(step)

    def _check_tokens(self, step: Expr) -> None:
        if step.op == "symbol" and step.data not in self.alphabet:
            raise SpecError(f"unknown token {step.data!r}: the alphabet is {' '.join(self.alphabet)}")
        if step.op == "lookup":
            named = {name for name, _ in step.data}
            if named != set(self.alphabet):
                wrong = sorted(named ^ set(self.alphabet))[0]
                raise SpecError(f"lookup must name each token of the alphabet {' '.join(self.alphabet)}; {wrong!r} is "
                                f"{'unknown' if wrong in named else 'missing'}")  # fmt: skip

    def read(self, sequence: Sequence[str]) -> list[int]:
        """Token ids of a sequence of token names. SpecError for an unknown token or an empty sequence."""
        if len(sequence) == 0:
            raise SpecError(f"{self.name}: the sequence is empty; a program needs at least one token")
        places = {token: number for number, token in enumerate(self.alphabet)}
        for token in sequence:
            if token not in places:
                raise SpecError(f"{self.name}: unknown token {token!r}; the alphabet is {' '.join(self.alphabet)}")
        return [places[token] for token in sequence]


def _share(output: Expr) -> tuple[Expr, tuple[Expr, ...]]:
    """The same expression with equal parts shared, and its parts in order of evaluation. Iterative: depth is free."""
    shared: dict[Any, Expr] = {}
    done: dict[int, Expr] = {}
    open_: set[int] = set()
    stack = [output]
    while stack:
        expr = stack[-1]
        if id(expr) in done:
            stack.pop()
            continue
        waiting = [arg for arg in expr.args if id(arg) not in done]
        if waiting:
            open_.add(id(expr))
            for arg in waiting:
                if id(arg) in open_:
                    raise SpecError(f"recursive program: the {arg.op} expression contains itself")
            stack.extend(waiting)
            continue
        args = tuple(done[id(arg)] for arg in expr.args)
        key = (expr.op, expr.data, *(id(arg) for arg in args))
        done[id(expr)] = shared.setdefault(key, Expr(expr.op, expr.type, args, expr.data))
        open_.discard(id(expr))
        stack.pop()
    return done[id(output)], tuple(shared.values())
