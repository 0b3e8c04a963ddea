"""The sequence language: registers over positions, made by select, aggregate and map; every expression has a type.

    same = select(tokens, tokens, "==")        # for each position, the positions with an equal token
    histogram = count(same)                    # a number at each position

Numbers are rational, exactly. A selector that picks nothing gives "no match", a value of its own: `aggregate` and
`first` have an optional type, which arithmetic refuses until `otherwise` or `matched` has dealt with it.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from fractions import Fraction
from typing import Any, Literal

from fixedformer.errors import SpecError

Kind = Literal["number", "flag", "token", "selector"]
OPERATORS = ("==", "!=", "<", "<=", ">", ">=")
Number = int | float | Fraction


class _NoMatch:
    """The value of an aggregate over nothing."""

    def __repr__(self) -> str:
        return "no match"


NO_MATCH = _NoMatch()


@dataclass(frozen=True)
class Type:
    """number, flag (true or false), token or selector; optional: may also be "no match"."""

    kind: Kind
    optional: bool = False

    def __str__(self) -> str:
        return f"optional {self.kind}" if self.optional else self.kind


@dataclass(frozen=True, eq=False)
class Expr:
    """One operation on earlier registers. Made by the functions of this module, which check the types.

    Operators: + - * on numbers; < <= > >= between numbers; & | ~ on flags; & between selectors. For equality use
    `equal`, since == compares the Python objects.
    """

    op: str
    type: Type
    args: tuple["Expr", ...] = ()
    data: Any = None

    def __add__(self, other: "Expr | Number") -> "Expr":
        return _arithmetic("add", self, other)

    def __radd__(self, other: Number) -> "Expr":
        return _arithmetic("add", other, self)

    def __sub__(self, other: "Expr | Number") -> "Expr":
        return _arithmetic("add", self, _arithmetic("multiply", -1, other))

    def __rsub__(self, other: Number) -> "Expr":
        return _arithmetic("add", other, _arithmetic("multiply", -1, self))

    def __mul__(self, other: "Expr | Number") -> "Expr":
        return _arithmetic("multiply", self, other)

    def __rmul__(self, other: Number) -> "Expr":
        return _arithmetic("multiply", other, self)

    def __neg__(self) -> "Expr":
        return _arithmetic("multiply", -1, self)

    def __lt__(self, other: "Expr | Number") -> "Expr":
        return compare(self, "<", other)

    def __le__(self, other: "Expr | Number") -> "Expr":
        return compare(self, "<=", other)

    def __gt__(self, other: "Expr | Number") -> "Expr":
        return compare(self, ">", other)

    def __ge__(self, other: "Expr | Number") -> "Expr":
        return compare(self, ">=", other)

    def __and__(self, other: "Expr") -> "Expr":
        if isinstance(other, Expr) and self.type == other.type == SELECTOR:
            return Expr("both", SELECTOR, (self, other))
        return Expr("and", FLAG, (_want(self, FLAG, "&"), _want(other, FLAG, "&")))

    def __or__(self, other: "Expr") -> "Expr":
        if isinstance(other, Expr) and SELECTOR in (self.type, other.type):
            raise SpecError("selectors have no |; select by one predicate, or combine counts and aggregates")
        return Expr("or", FLAG, (_want(self, FLAG, "|"), _want(other, FLAG, "|")))

    def __invert__(self) -> "Expr":
        return Expr("not", FLAG, (_want(self, FLAG, "~"),))

    def __bool__(self) -> bool:
        raise SpecError("a flag register has one value a position; use &, | and ~ instead of and, or and not")


NUMBER, FLAG, TOKEN, SELECTOR = Type("number"), Type("flag"), Type("token"), Type("selector")
tokens = Expr("tokens", TOKEN)
position = Expr("position", NUMBER)  # 0, 1, 2, ...
length = Expr("length", NUMBER)


def constant(value: Number) -> Expr:
    """The same number at every position. Floats are taken as the rational numbers that they are."""
    if isinstance(value, bool) or not isinstance(value, int | float | Fraction):
        raise SpecError(f"ill-typed: a constant is a number, got {value!r}")
    try:
        return Expr("constant", NUMBER, data=Fraction(value))
    except (ValueError, OverflowError):
        raise SpecError(f"a constant must be finite, got {value!r}") from None


def symbol(name: str) -> Expr:
    """The same token at every position."""
    if not isinstance(name, str):
        raise SpecError(f"ill-typed: a symbol is a string, got {name!r}")
    return Expr("symbol", TOKEN, data=name)


def lookup(register: Expr, table: Mapping[str, Number]) -> Expr:
    """A number for each token: every token of the alphabet must stand in `table`."""
    entries = {name: constant(value).data for name, value in table.items()}
    return Expr("lookup", NUMBER, (_want(register, TOKEN, "lookup"),), tuple(sorted(entries.items())))


def compare(left: "Expr | Number", operator: str, right: "Expr | Number") -> Expr:
    """A flag: left operator right, for two numbers, or == and != for two tokens."""
    if operator not in OPERATORS:
        raise SpecError(f"a comparison is one of {' '.join(OPERATORS)}, got {operator!r}")
    first, second = _lift(left), _lift(right)
    if first.type == second.type == TOKEN and operator in ("==", "!="):
        return Expr("compare", FLAG, (first, second), operator)
    return Expr("compare", FLAG, (_want(first, NUMBER, operator), _want(second, NUMBER, operator)), operator)


def equal(left: "Expr | Number", right: "Expr | Number") -> Expr:
    """A flag: left equals right."""
    return compare(left, "==", right)


def relu(x: Expr) -> Expr:
    """max(x, 0)."""
    return Expr("relu", NUMBER, (_want(x, NUMBER, "relu"),))


def maximum(a: "Expr | Number", b: "Expr | Number") -> Expr:
    """The larger number, as the MaxMin brick computes it: b + relu(a - b)."""
    return _lift(b) + relu(_lift(a) - b)


def minimum(a: "Expr | Number", b: "Expr | Number") -> Expr:
    """The smaller number: a - relu(a - b)."""
    return _lift(a) - relu(_lift(a) - b)


def absolute(x: Expr) -> Expr:
    """relu(x) + relu(-x)."""
    return relu(x) + relu(-x)


def as_number(flag: Expr) -> Expr:
    """1 where the flag is true, 0 elsewhere."""
    return Expr("as_number", NUMBER, (_want(flag, FLAG, "as_number"),))


def choose(flag: Expr, then: "Expr | Number", otherwise_: "Expr | Number") -> Expr:
    """`then` where the flag is true, else `otherwise_`; both of one type."""
    first, second = _lift(then), _lift(otherwise_)
    if first.type != second.type or first.type.optional or first.type == SELECTOR:
        raise SpecError(f"ill-typed: choose needs two registers of one type, got {first.type} and {second.type}")
    return Expr("choose", first.type, (_want(flag, FLAG, "choose"), first, second))


def select(keys: "Expr | Number", queries: "Expr | Number", operator: str) -> Expr:
    """A selector: position i selects every j with keys[j] operator queries[i]. Numbers, or tokens with == and !=."""
    flag = compare(keys, operator, queries)  # the same types are allowed
    return Expr("select", SELECTOR, flag.args, operator)


def select_all() -> Expr:
    """Every position selects every position."""
    return Expr("select_all", SELECTOR)


def aggregate(selector: Expr, values: Expr) -> Expr:
    """The mean of the selected values (flags count 0 and 1): optional, "no match" where nothing is selected."""
    if isinstance(values, Expr) and values.type == FLAG:
        values = as_number(values)
    args = (_want(selector, SELECTOR, "aggregate"), _want(values, NUMBER, "aggregate"))
    return Expr("aggregate", Type("number", optional=True), args)


def first(selector: Expr, values: Expr) -> Expr:
    """The value at the first selected position: optional, "no match" where nothing is selected."""
    if not isinstance(values, Expr) or values.type.optional or values.type == SELECTOR:
        raise SpecError(f"ill-typed: first takes a number, flag or token register, got {_kind(values)}")
    return Expr("first", Type(values.type.kind, optional=True), (_want(selector, SELECTOR, "first"), values))


def count(selector: Expr) -> Expr:
    """How many positions are selected."""
    return Expr("count", NUMBER, (_want(selector, SELECTOR, "count"),))


def exists(selector: Expr) -> Expr:
    """A flag: is anything selected?"""
    return matched(aggregate(selector, constant(0)))


def matched(optional: Expr) -> Expr:
    """A flag: is there a value (and not "no match")?"""
    if not isinstance(optional, Expr) or not optional.type.optional:
        raise SpecError(f"ill-typed: matched takes an optional register, got {_kind(optional)}")
    return Expr("matched", FLAG, (optional,))


def otherwise(optional: Expr, default: "Expr | Number") -> Expr:
    """The value where there is one, else `default`."""
    if not isinstance(optional, Expr) or not optional.type.optional:
        raise SpecError(f"ill-typed: otherwise takes an optional register, got {_kind(optional)}")
    plain = Type(optional.type.kind)
    return Expr("otherwise", plain, (optional, _want(_lift(default), plain, "otherwise")))


def _arithmetic(op: str, left: "Expr | Number", right: "Expr | Number") -> Expr:
    first_, second = _want(_lift(left), NUMBER, op), _want(_lift(right), NUMBER, op)
    if first_.op == second.op == "constant":
        return constant(first_.data + second.data if op == "add" else first_.data * second.data)
    return Expr(op, NUMBER, (first_, second))


def _lift(value: "Expr | Number") -> Expr:
    return value if isinstance(value, Expr) else constant(value)


def _kind(value: Any) -> str:
    return str(value.type) if isinstance(value, Expr) else repr(value)


def _want(value: Any, wanted: Type, where: str) -> Expr:
    if isinstance(value, Expr) and value.type == wanted:
        return value
    hint = ""
    if isinstance(value, Expr) and value.type.optional and value.type.kind == wanted.kind:
        hint = "; it may have no match: say what then with otherwise(x, default), or test it with matched(x)"
    elif isinstance(value, Expr) and value.type == FLAG and wanted == NUMBER:
        hint = "; turn it into 0 and 1 with as_number"
    raise SpecError(f"ill-typed: {where} needs a {wanted}, got a {_kind(value)}{hint}")
