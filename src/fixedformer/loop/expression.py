"""Functions written as text, for the command line: parsed, checked name by name, never handed to `eval`.

    0.5*sin(3*x) + 0.25*cos(4*m)      with       m = mean(tanh(2*x));      before it

`x` is the token itself, all d entries; `x1`, `x2`, .. are its single entries. `mean`, `total`, `largest`, `smallest` go
over the tokens, entry by entry; everything else works entry by entry. Whatever can be written is therefore
permutation-equivariant.
"""

import ast
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from fixedformer.errors import SpecError
from fixedformer.loop.grid import Array

LONGEST = 2000
"""Characters; keeps the parser's recursion shallow."""

ENTRYWISE: Mapping[str, Callable[..., Array]] = {
    "sin": np.sin, "cos": np.cos, "tan": np.tan, "tanh": np.tanh, "exp": np.exp, "log": np.log, "sqrt": np.sqrt,
    "abs": np.abs, "floor": np.floor, "minimum": np.minimum, "maximum": np.maximum,
    "sigmoid": lambda v: 1 / (1 + np.exp(-v)), "relu": lambda v: np.maximum(v, 0.0),
}  # fmt: skip
OVER_TOKENS: Mapping[str, Callable[[Array], Array]] = {  # (tokens, d) -> (d,)
    "mean": lambda v: v.mean(0),
    "total": lambda v: v.sum(0),
    "largest": lambda v: v.max(0),
    "smallest": lambda v: v.min(0),
}
TWO = {"minimum", "maximum"}
CONSTANTS = {"pi": float(np.pi), "e": float(np.e)}
OPERATORS: Mapping[type, Callable[..., Any]] = {
    ast.Add: np.add,
    ast.Sub: np.subtract,
    ast.Mult: np.multiply,
    ast.Div: np.divide,
    ast.Pow: np.power,
    ast.USub: np.negative,
    ast.UAdd: np.positive,
}


class Expression:
    """A function (tokens, d) -> (tokens, d) from text. Raises SpecError for anything but the language above."""

    def __init__(self, text: str, d: int) -> None:
        self.text, self.d = text, d
        if len(text) > LONGEST:
            raise SpecError(f"an expression may have {LONGEST} characters, got {len(text)}; use module:function")
        try:
            statements = ast.parse(text.strip(), mode="exec").body
        except (SyntaxError, ValueError, MemoryError, RecursionError) as error:
            raise SpecError(f"the expression '{text}' cannot be parsed: {error}") from None
        if not statements or not isinstance(statements[-1], ast.Expr):
            raise SpecError("an expression must end with a value, such as '0.5*x + 0.5*mean(x)'")
        self._steps: list[tuple[str, ast.expr]] = []
        known = {"x", *(f"x{i + 1}" for i in range(d)), *CONSTANTS}
        for statement in statements[:-1]:
            name = self._assigned(statement)
            assert isinstance(statement, ast.Assign)  # what `_assigned` accepts
            self._check(statement.value, known)
            self._steps.append((name, statement.value))
            known.add(name)
        self._check(statements[-1].value, known)
        self._result = statements[-1].value

    def __call__(self, X: Array) -> Array:
        names: dict[str, Array] = {name: np.full((len(X), 1), value) for name, value in CONSTANTS.items()}
        names |= {"x": X} | {f"x{i + 1}": X[:, i : i + 1] for i in range(self.d)}
        # What is not finite is reported by the caller, with the input that made it so.
        with np.errstate(all="ignore"):
            for name, node in self._steps:
                names[name] = self._value(node, names)
            value = self._value(self._result, names)
        return np.broadcast_to(value, X.shape).copy()

    def _assigned(self, statement: ast.stmt) -> str:
        if isinstance(statement, ast.Assign) and len(statement.targets) == 1:
            target = statement.targets[0]
            if isinstance(target, ast.Name) and target.id not in ("x", *ENTRYWISE, *OVER_TOKENS):
                return target.id
        raise SpecError(f"only 'name = value;' may come before the value, got '{ast.unparse(statement)}'")

    def _check(self, node: ast.AST, known: set[str]) -> None:
        """Raise SpecError for the first part that the language does not have."""
        part = ast.unparse(node)
        if isinstance(node, ast.Constant):
            if isinstance(node.value, bool) or not isinstance(node.value, int | float):
                raise SpecError(f"'{part}' is no number")
            try:
                float(node.value)
            except OverflowError:
                raise SpecError(f"'{part[:20]}..' is too large for float64") from None
        elif isinstance(node, ast.Name):
            if node.id not in known:
                raise SpecError(f"unknown name '{part}'; known here are {', '.join(sorted(known))} and the functions "
                                f"{', '.join(sorted({*ENTRYWISE, *OVER_TOKENS}))}")  # fmt: skip
        elif isinstance(node, ast.BinOp | ast.UnaryOp) and type(node.op) in OPERATORS:
            for child in [node.left, node.right] if isinstance(node, ast.BinOp) else [node.operand]:
                self._check(child, known)
        elif isinstance(node, ast.Call):
            self._check_call(node, known, part)
        else:
            raise SpecError(f"'{part}' is not part of the expression language: + - * / **, numbers, x and functions")

    def _check_call(self, node: ast.Call, known: set[str], part: str) -> None:
        name = node.func.id if isinstance(node.func, ast.Name) else ""
        if name not in ENTRYWISE and name not in OVER_TOKENS:
            raise SpecError(
                f"'{part}' calls no known function; there are {', '.join(sorted({*ENTRYWISE, *OVER_TOKENS}))}"
            )
        wanted = 2 if name in TWO else 1
        if node.keywords or len(node.args) != wanted:
            raise SpecError(f"{name} takes {wanted} value(s), got '{part}'")
        for argument in node.args:
            self._check(argument, known)

    def _value(self, node: ast.expr, names: Mapping[str, Array]) -> Array:
        """The node's value at every token, (tokens, 1) or (tokens, d)."""
        if isinstance(node, ast.Constant):
            return np.full((len(names["x"]), 1), float(node.value))  # type: ignore[arg-type]  # checked: a number
        if isinstance(node, ast.Name):
            return names[node.id]
        if isinstance(node, ast.BinOp):
            sides = self._value(node.left, names), self._value(node.right, names)
            return np.asarray(OPERATORS[type(node.op)](*sides))
        if isinstance(node, ast.UnaryOp):
            return np.asarray(OPERATORS[type(node.op)](self._value(node.operand, names)))
        assert isinstance(node, ast.Call)  # nothing else passes `_check`
        assert isinstance(node.func, ast.Name)
        values = [self._value(argument, names) for argument in node.args]
        if node.func.id in ENTRYWISE:
            return ENTRYWISE[node.func.id](*values)
        return np.broadcast_to(OVER_TOKENS[node.func.id](values[0]), values[0].shape)
