"""Programs as text: `to_text` prints one register a line, `parse` reads it back.

    program histogram
    alphabet a b c
    r0 = select(tokens, tokens, "==")
    output = count(r0)

The text is Python's expression syntax with the functions of `expressions`; nothing is executed: it is read with `ast`
and only names, calls, numbers, strings, dictionaries and operators are allowed. == and != compare registers here. Names
may be used before they are defined, but not in a circle.
"""

import ast
from collections.abc import Callable
from fractions import Fraction
from typing import Any

from fixedformer.errors import SpecError
from fixedformer.prompt.language import expressions as language
from fixedformer.prompt.language.expressions import Expr
from fixedformer.prompt.language.program import Program

_FUNCTIONS: dict[str, Callable[..., Expr]] = {
    name: getattr(language, name)
    for name in (
        *("lookup", "select", "select_all", "aggregate", "first", "count", "exists", "matched", "otherwise", "choose"),
        *("relu", "maximum", "minimum", "absolute", "as_number", "symbol", "constant"),
    )
}
_REGISTERS = {"tokens": language.tokens, "position": language.position, "length": language.length}
_COMPARE: dict[type[ast.cmpop], str] = {
    ast.Eq: "==", ast.NotEq: "!=", ast.Lt: "<", ast.LtE: "<=", ast.Gt: ">", ast.GtE: ">=",
}  # fmt: skip


def to_text(program: Program) -> str:
    """One register a line, arguments before uses; registers used once are written where they are used."""
    uses: dict[int, int] = {}
    for step in program.steps:
        for arg in step.args:
            uses[id(arg)] = uses.get(id(arg), 0) + 1
    lines = [f"program {program.name}"]
    if program.description:
        lines.append(f"# {program.description}")
    lines.append("alphabet " + " ".join(program.alphabet))
    names: dict[int, str] = {}
    for step in program.steps:
        text = _expression(step, [_argument(step, arg, names[id(arg)]) for arg in step.args])
        if step is program.output:
            lines.append(f"output = {text}")
        elif step.args and (uses[id(step)] > 1 or len(text) > 60):
            name = f"r{sum(line.startswith('r') for line in lines)}"
            lines.append(f"{name} = {text}")
            names[id(step)] = name
            continue
        names[id(step)] = text
    return "\n".join(lines) + "\n"


def _argument(step: Expr, arg: Expr, text: str) -> str:
    """Constants stand bare where a number will do."""
    bare = arg.op == "constant" and step.op not in ("aggregate", "first", "relu")
    return _number(arg.data) if bare else text


def _expression(step: Expr, args: list[str]) -> str:
    infix = {"add": "+", "multiply": "*", "and": "&", "or": "|", "both": "&"}
    if step.op in _REGISTERS:
        return step.op
    if step.op == "constant":
        return f"constant({_number(step.data)})"
    if step.op == "symbol":
        return f"symbol({step.data!r})"
    if step.op == "lookup":
        table = ", ".join(f"{name!r}: {_number(value)}" for name, value in step.data)
        return f"lookup({args[0]}, {{{table}}})"
    if step.op == "add" and args[1].startswith("(-1 * "):
        return f"({args[0]} - {args[1].removeprefix('(-1 * ').removesuffix(')')})"
    if step.op == "add" and args[1].startswith("-"):  # a negative constant
        return f"({args[0]} - {args[1][1:]})"
    if step.op in infix:
        return f"({args[0]} {infix[step.op]} {args[1]})"
    if step.op == "not":
        return f"(~{args[0]})"
    if step.op == "compare":
        return f"({args[0]} {step.data} {args[1]})"
    if step.op == "select":
        return f'select({args[0]}, {args[1]}, "{step.data}")'
    return f"{step.op}({', '.join(args)})"


def _number(value: Fraction) -> str:
    """3, -1 or (1/3)."""
    return str(value) if value.denominator == 1 else f"({value})"


def parse(text: str) -> Program:
    """Read a program. Raises SpecError with the line for what is not one; recursive definitions are refused."""
    name, alphabet, description = "", None, ""
    definitions: dict[str, tuple[int, str]] = {}
    for number, raw in enumerate(text.splitlines(), 1):
        line = raw.strip()
        head, _, rest = line.partition(" ")
        if line.startswith("#"):
            description = description or line[1:].strip()
        elif head == "program":
            name = rest.strip()
        elif head == "alphabet":
            alphabet = tuple(rest.split())
        elif line:
            target, equals, body = line.partition("=")
            target = target.strip()
            if not equals or not target.isidentifier() or body.startswith("="):
                raise SpecError(f"line {number}: needed 'program', 'alphabet' or 'name = expression', got {line!r}")
            if target in definitions or target in _FUNCTIONS or target in _REGISTERS:
                raise SpecError(f"line {number}: {target!r} is defined already")
            definitions[target] = (number, body.strip())
    if not name or alphabet is None or "output" not in definitions:
        raise SpecError("a program needs the lines 'program NAME', 'alphabet TOKENS' and 'output = EXPRESSION'")
    return Program(name, alphabet, _Reader(definitions).register("output"), description)


class _Reader:
    """Evaluates definitions on demand; a definition that needs itself is recursive."""

    def __init__(self, definitions: dict[str, tuple[int, str]]) -> None:
        self._definitions = definitions
        self._done: dict[str, Expr] = {}
        self._open: list[str] = []

    def register(self, name: str) -> Expr:
        if name in self._done:
            return self._done[name]
        if name in self._open:
            circle = " -> ".join([*self._open[self._open.index(name) :], name])
            raise SpecError(f"recursive program: {circle}; every register must come from earlier ones")
        number, body = self._definitions[name]
        self._open.append(name)
        try:
            value = self._value(ast.parse(body, mode="eval").body)
        except SyntaxError as error:
            raise SpecError(f"line {number}: cannot read {body!r} ({error.msg})") from None
        except (TypeError, RecursionError) as error:
            raise SpecError(f"line {number}: {error}") from None
        except SpecError as error:
            prefix = "" if str(error).startswith(("line ", "recursive ")) else f"line {number}: "
            raise SpecError(f"{prefix}{error}") from None
        self._open.pop()
        if not isinstance(value, Expr):
            value = language.constant(value)
        self._done[name] = value
        return value

    def _value(self, node: ast.expr) -> Any:
        match node:
            case ast.Name(id=name):
                if name in _REGISTERS:
                    return _REGISTERS[name]
                if name in self._definitions:
                    return self.register(name)
                raise SpecError(f"unknown name {name!r}")
            case ast.Constant(value=value) if isinstance(value, int | float | str) and not isinstance(value, bool):
                return value
            case ast.Dict(keys=keys, values=values):
                return {self._value(key) if key else None: self._value(value) for key, value in zip(keys, values)}
            case ast.Call(func=ast.Name(id=name), args=args, keywords=[]) if name in _FUNCTIONS:
                return _FUNCTIONS[name](*[self._value(arg) for arg in args])
            case ast.BinOp(left=left, op=op, right=right):
                return self._binary(op, self._value(left), self._value(right))
            case ast.UnaryOp(op=ast.USub(), operand=operand):
                return -self._value(operand)
            case ast.UnaryOp(op=ast.Invert(), operand=operand):
                return ~self._value(operand)
            case ast.Compare(left=left, ops=[op], comparators=[right]) if type(op) in _COMPARE:
                return language.compare(self._value(left), _COMPARE[type(op)], self._value(right))
        raise SpecError(f"not part of the language: {ast.unparse(node)}")

    def _binary(self, op: ast.operator, left: Any, right: Any) -> Any:
        match op:
            case ast.Add():
                return left + right
            case ast.Sub():
                return left - right
            case ast.Mult():
                return left * right
            case ast.BitAnd():
                return left & right
            case ast.BitOr():
                return left | right
            case ast.Div() if isinstance(left, int | Fraction) and isinstance(right, int) and right:
                return Fraction(left) / right
        raise SpecError("only + - * & | are operators of the language, and / between whole numbers")
