"""What a program means, position by position, in exact rational arithmetic: the judge of the compiler.

Plain Python, no tensors, and no code shared with the compiler.
"""

import operator
from collections.abc import Callable, Sequence
from fractions import Fraction
from typing import Any

from fixedformer.prompt.language.expressions import NO_MATCH, Expr
from fixedformer.prompt.language.program import Program

_COMPARE: dict[str, Callable[[Any, Any], bool]] = {
    "==": operator.eq,
    "!=": operator.ne,
    "<": operator.lt,
    "<=": operator.le,
    ">": operator.gt,
    ">=": operator.ge,
}


def interpret(program: Program, sequence: Sequence[str]) -> list[Any]:
    """The output at each position: an int or Fraction, a bool, a token, or NO_MATCH.

    Raises SpecError for an unknown token or an empty sequence.
    """
    program.read(sequence)  # validates
    registers: dict[int, Any] = {}
    for step in program.steps:
        arguments = [registers[id(arg)] for arg in step.args]
        registers[id(step)] = _RULES[step.op](step, arguments, list(sequence))
    return list(registers[id(program.output)])


def _plain(value: Fraction) -> int | Fraction:
    """Whole numbers as int: Python adds those much faster."""
    return value.numerator if value.denominator == 1 else value


def _select(step: Expr, arguments: list[Any], _: list[str]) -> list[list[bool]]:
    keys, queries = arguments
    compare = _COMPARE[step.data]
    return [[compare(key, query) for key in keys] for query in queries]


def _aggregate(_: Expr, arguments: list[Any], __: list[str]) -> list[Any]:
    selector, values = arguments
    result: list[Any] = []
    for row in selector:
        chosen = [value for value, use in zip(values, row) if use]
        result.append(_plain(Fraction(sum(chosen)) / len(chosen)) if chosen else NO_MATCH)
    return result


def _first(_: Expr, arguments: list[Any], __: list[str]) -> list[Any]:
    selector, values = arguments
    return [values[row.index(True)] if True in row else NO_MATCH for row in selector]


def _compare(step: Expr, arguments: list[Any], _: list[str]) -> list[bool]:
    return [_COMPARE[step.data](left, right) for left, right in zip(*arguments)]


def _lookup(step: Expr, arguments: list[Any], _: list[str]) -> list[Any]:
    table = {name: _plain(value) for name, value in step.data}
    return [table[token] for token in arguments[0]]


_RULES: dict[str, Callable[[Expr, list[Any], list[str]], Any]] = {
    "tokens": lambda _, __, word: word,
    "position": lambda _, __, word: list(range(len(word))),
    "length": lambda _, __, word: [len(word)] * len(word),
    "constant": lambda step, _, word: [_plain(step.data)] * len(word),
    "symbol": lambda step, _, word: [step.data] * len(word),
    "lookup": _lookup,
    "add": lambda _, args, __: [a + b for a, b in zip(*args)],
    "multiply": lambda _, args, __: [a * b for a, b in zip(*args)],
    "relu": lambda _, args, __: [max(a, 0) for a in args[0]],
    "as_number": lambda _, args, __: [int(a) for a in args[0]],
    "compare": _compare,
    "and": lambda _, args, __: [a and b for a, b in zip(*args)],
    "or": lambda _, args, __: [a or b for a, b in zip(*args)],
    "not": lambda _, args, __: [not a for a in args[0]],
    "choose": lambda _, args, __: [a if flag else b for flag, a, b in zip(*args)],
    "select": _select,
    "select_all": lambda _, __, word: [[True] * len(word) for _ in word],
    "both": lambda _, args, __: [[a and b for a, b in zip(*rows)] for rows in zip(*args)],
    "aggregate": _aggregate,
    "first": _first,
    "count": lambda _, args, __: [sum(row) for row in args[0]],
    "matched": lambda _, args, __: [a is not NO_MATCH for a in args[0]],
    "otherwise": lambda _, args, __: [b if a is NO_MATCH else a for a, b in zip(*args)],
}
