"""One rule an operation: from registers as linear forms to units and heads of the network.

Registers are 0 on the begin token (channel "begin" is 1 there alone, "token" is 1 elsewhere), so constants are
multiples of "token" and every unit is gated by it. See docs/theory/prompt.md, section 7.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from fractions import Fraction
from itertools import pairwise
from typing import Any

from fixedformer.errors import CapacityError, SpecError
from fixedformer.prompt.language.expressions import Expr
from fixedformer.prompt.language.program import Program
from fixedformer.prompt.language.values import EXACT, UNIT_ROUNDOFF, Channel, Form, Optional, Selection, Value
from fixedformer.prompt.network import Activation

# Order comparisons and rounding use one unit or more for each value that a register can take.
MOST_VALUES = 4096
ONE, HALF, ZERO = Fraction(1), Fraction(1, 2), Fraction(0)
Register = Value | Selection | Optional


@dataclass(frozen=True)
class Unit:
    """into = act(gate) * up."""

    into: str
    gate: Form
    up: Form
    activation: Activation


@dataclass(frozen=True)
class Attend:
    """into = the mean of `value` over the keys of maximal score sum query * key."""

    into: str
    pairs: tuple[tuple[Form, Form], ...]
    value: Form


class Lowering:
    """Turns a program's steps into `operations` for sequences of up to `length` tokens.

    `registers` maps a step (by id) to what it became; `channels` holds every channel's bounds. Raises SpecError where
    a step cannot be compiled faithfully, CapacityError where the length is too large for it.
    """

    def __init__(self, program: Program, length: int) -> None:
        self.program, self.length = program, length
        self.operations: list[Unit | Attend] = []
        size = float(len(program.alphabet))
        self.channels = {"token": Channel(1), "begin": Channel(1), "place": Channel(length), "id": Channel(size)}
        self._made: dict[Any, str] = {}
        self._ramps: dict[Any, Value] = {}
        self.registers: dict[int, Register] = {}
        for step in program.steps:
            rule: Callable[[Expr, Sequence[Any]], Register] = getattr(self, f"_{step.op}")
            self.registers[id(step)] = rule(step, [self.registers[id(arg)] for arg in step.args])

    # Channels and their bounds

    def size(self, form: Form) -> float:
        """Bound on every partial sum of the form."""
        return sum(float(abs(factor)) * self.channels[name].size for name, factor in form.items())

    def exact(self, value: Value) -> bool:
        """Is the register computed without rounding? Exact channels, and sums that float64 holds whatever the order."""
        dyadic = value.common & (value.common - 1) == 0 and value.varying == 1
        clean = all(
            self.channels[name].noise == 0 and Fraction(float(factor)) == factor for name, factor in value.form.items()
        )
        return dyadic and clean and self.size(value.form) * value.common <= EXACT

    def noise(self, value: Value) -> float:
        """Bound on |register - exact value|: what the channels bring, and the rounding of the sum and its factors."""
        if self.exact(value):
            return 0.0
        brought = sum(float(abs(factor)) * self.channels[name].noise for name, factor in value.form.items())
        return brought + (len(value.form) + 2) * UNIT_ROUNDOFF * self.size(value.form)

    def unit(self, gate: Form, up: Form, bounds: Channel, activation: Activation = "identity") -> str:
        """The channel act(gate) * up; made once."""
        key = (tuple(sorted(gate.items())), tuple(sorted(up.items())), activation)
        if key not in self._made:
            self._made[key] = self._channel(bounds)
            self.operations.append(Unit(self._made[key], gate, up, activation))
        return self._made[key]

    def attend(self, pairs: Sequence[tuple[Form, Form]], value: Form, bounds: Channel) -> str:
        """The channel with the mean of `value` over the selected keys; made once."""
        key = (
            tuple((tuple(sorted(q.items())), tuple(sorted(k.items()))) for q, k in pairs),
            tuple(sorted(value.items())),
        )
        if key not in self._made:
            self._made[key] = self._channel(bounds)
            self.operations.append(Attend(self._made[key], tuple(pairs), value))
        return self._made[key]

    def _channel(self, bounds: Channel) -> str:
        name = f"r{len(self.channels)}"
        self.channels[name] = bounds
        return name

    def ramp(self, value: Value) -> Value:
        """max(value, 0)."""
        if value.low >= 0:
            return value
        if value.high <= 0:
            return Value({}, ZERO, ZERO)
        bounds = Channel(float(value.high) + self.noise(value), self.noise(value))
        channel = self.unit(value.form, {"token": ONE}, bounds, "relu")
        return Value({channel: ONE}, ZERO, value.high, value.common, value.varying)

    def product(self, left: Value, right: Value) -> Value:
        """left * right, by a gated unit unless one of them is a constant."""
        for one, other in ((left, right), (right, left)):
            if one.low == one.high and set(one.form) <= {"token"}:
                return other.times(one.low)
        ends = [a * b for a in (left.low, left.high) for b in (right.low, right.high)]
        common, varying = left.common * right.common, left.varying * right.varying
        largest = max(float(abs(end)) for end in ends)
        a, b = self.noise(left), self.noise(right)
        noise = a * float(max(abs(right.low), abs(right.high))) + b * float(max(abs(left.low), abs(left.high))) + a * b
        if noise or not (common & (common - 1) == 0 and varying == 1 and largest * common <= EXACT):
            noise += 2 * UNIT_ROUNDOFF * (largest + noise)
        channel = self.unit(left.form, right.form, Channel(largest + noise, noise))
        return Value({channel: ONE}, min(ends), max(ends), common, varying)

    # Comparisons

    def at_least_zero(self, value: Value, what: str) -> Value:
        """The flag [value >= 0], exactly 0 or 1. Refused where rounding could decide it."""
        if value.low >= 0:
            return _constant(ONE)
        if value.high < 0:
            return _constant(ZERO)
        if not value.varying:
            raise SpecError(
                f"{self.program.name} cannot be compiled faithfully: {what} compares a mean of means, whose values can "
                "lie arbitrarily close; compare counts, or means of whole numbers"
            )
        if self.exact(value):  # whole numbers after scaling: relu(x + 1) - relu(x)
            whole = value.times(Fraction(value.common))
            return _flag(self.ramp(_shift(whole, ONE)).plus(self.ramp(whole), -ONE))
        noise = self.noise(value)
        if noise > value.gap / 8:
            raise CapacityError(
                f"{self.program.name} at length {self.length} cannot be compiled faithfully: {what} must tell apart "
                f"values {float(value.gap):.3g} apart, rounding may move them by {noise:.3g}; use a shorter length"
            )
        # u >= 5/4 where true, <= -1/4 where false, so 1 - relu(1 - relu(u)) is exactly 1 or 0
        steep = _shift(value.times(2 / value.gap), Fraction(3, 2))
        clipped = self.unit(steep.form, {"token": ONE}, Channel(self.size(steep.form) + 1, 1.0), "relu")
        rest = self.unit({"token": ONE, clipped: -ONE}, {"token": ONE}, Channel(1), "relu")
        return _flag(Value({"token": ONE, rest: -ONE}, ZERO, ONE))

    def at_least(self, value: Value, threshold: Fraction, what: str) -> Value:
        """The flag [value >= threshold]; thresholds of one register share their ramps."""
        key = (tuple(sorted(value.form.items())), threshold)
        if key not in self._ramps:
            self._ramps[key] = self.at_least_zero(_shift(value, -threshold), what)
        return self._ramps[key]

    def whole(self, value: Value, scale: int, what: str) -> Value:
        """scale * value, a whole number, without rounding: as it is, or rounded by counting thresholds."""
        if value.varying != 1:
            raise SpecError(
                f"{self.program.name} cannot be compiled faithfully: {what} selects by a mean, whose scores would not "
                "tie exactly; select by counts, positions or whole numbers"
            )
        scaled = value.times(Fraction(scale))
        scaled = Value(scaled.form, scaled.low, scaled.high)
        if self.exact(scaled):
            return scaled
        self._require_few(scaled, what)
        total = _constant(scaled.low)
        for step in range(int(scaled.low) + 1, int(scaled.high) + 1):
            total = total.plus(self.at_least(scaled, Fraction(step), what))
        # one channel again: what reads it would otherwise read every threshold
        rounded = self.unit(total.form, {"token": ONE}, Channel(float(max(abs(scaled.low), abs(scaled.high)))))
        return Value({rounded: ONE}, scaled.low, scaled.high)

    def _require_few(self, value: Value, what: str) -> None:
        if value.high - value.low + 1 > MOST_VALUES:
            raise CapacityError(
                f"{self.program.name} at length {self.length}: {what} would need a unit for each of "
                f"{int(value.high - value.low + 1)} values, at most {MOST_VALUES} are allowed; use a shorter length or "
                "select by =="
            )

    # Rules, one an operation: (step, registers of its arguments) -> register

    def _tokens(self, _: Expr, __: Sequence[Any]) -> Value:
        return Value({"id": ONE}, ZERO, Fraction(len(self.program.alphabet) - 1))

    def _position(self, _: Expr, __: Sequence[Any]) -> Value:
        return Value({"place": ONE}, ZERO, Fraction(self.length - 1))

    def _constant(self, step: Expr, _: Sequence[Any]) -> Value:
        return _constant(step.data)

    def _symbol(self, step: Expr, _: Sequence[Any]) -> Value:
        return _constant(Fraction(self.program.alphabet.index(step.data)))

    def _lookup(self, step: Expr, args: Sequence[Any]) -> Value:
        table = dict(step.data)
        numbers = [table[name] for name in self.program.alphabet]
        result = _constant(numbers[0])
        for number, (before, after) in enumerate(pairwise(numbers), 1):
            if after != before:
                result = result.plus(self.at_least(args[0], Fraction(number), "lookup"), after - before)
        common = math.lcm(*[number.denominator for number in numbers])
        return Value(result.form, min(numbers), max(numbers), common)

    def _add(self, _: Expr, args: Sequence[Any]) -> Value:
        left, right = args
        return left.plus(right)  # type: ignore[no-any-return]

    def _multiply(self, _: Expr, args: Sequence[Any]) -> Value:
        return self.product(*args)

    def _relu(self, _: Expr, args: Sequence[Any]) -> Value:
        return self.ramp(args[0])

    def _as_number(self, _: Expr, args: Sequence[Any]) -> Value:
        return args[0]  # type: ignore[no-any-return]

    def _compare(self, step: Expr, args: Sequence[Any]) -> Value:
        left, right = args
        what = f"'{step.data}'"
        ahead = left.plus(right, -ONE)
        behind = right.plus(left, -ONE)
        if step.data in ("==", "!="):
            both = self.at_least_zero(ahead, what).plus(self.at_least_zero(behind, what))
            same = _flag(_shift(both, -ONE))
            return same if step.data == "==" else _not(same)
        flag = self.at_least_zero(ahead if step.data in (">=", "<") else behind, what)
        return flag if step.data in (">=", "<=") else _not(flag)

    def _and(self, _: Expr, args: Sequence[Any]) -> Value:
        return _flag(self.product(*args))

    def _or(self, _: Expr, args: Sequence[Any]) -> Value:
        left, right = args
        return _flag(left.plus(right).plus(self.product(left, right), -ONE))

    def _not(self, _: Expr, args: Sequence[Any]) -> Value:
        return _not(args[0])

    def _choose(self, _: Expr, args: Sequence[Any]) -> Value:
        flag, then, other = args
        return _union(self.product(flag, then).plus(self.product(_not(flag), other)), then, other)

    def _select(self, step: Expr, args: Sequence[Any]) -> Selection:
        what = f"select by '{step.data}'"
        scale = math.lcm(args[0].common, args[1].common)
        keys, queries = (self.whole(value, scale, what) for value in args)
        return self._equal(keys, queries) if step.data == "==" else self._ordered(keys, queries, step.data)

    def _equal(self, keys: Value, queries: Value) -> Selection:
        """-(q - k)^2 = 2 q k - k^2 - q^2."""
        bound = max(abs(end) for value in (keys, queries) for end in (value.low, value.high))
        largest = 4 * int(bound) ** 2
        self._require_scores(largest, "select by '=='")
        squares = [self.product(value, value) for value in (keys, queries)]
        pairs = ((queries.times(Fraction(2)).form, keys.form), ({"token": -ONE}, squares[0].form),
                 (squares[1].times(-ONE).form, {"token": ONE}))  # fmt: skip
        return Selection(pairs, largest)

    def _ordered(self, keys: Value, queries: Value, operator: str) -> Selection:
        """sum_t [q = t] ([k op t] - 1), or with the parts of q and k exchanged where k takes fewer values."""
        what = f"select by '{operator}'"
        few, many = (keys, queries) if keys.high - keys.low < queries.high - queries.low else (queries, keys)
        self._require_few(few, what)
        swapped = few is keys
        mirror = {"<": ">", ">": "<", "<=": ">=", ">=": "<=", "!=": "!="}
        relation = mirror[operator] if swapped else operator  # many relation t
        pairs: list[tuple[Form, Form]] = []
        for step in range(int(few.low), int(few.high) + 1):
            t = Fraction(step)
            here = self.at_least(few, t, what).plus(self.at_least(few, t + 1, what), -ONE)
            misses = self._misses(many, relation, t, what)
            if misses.form:
                pairs.append((misses.form, here.form) if swapped else (here.form, misses.form))
        return Selection(tuple(pairs), 1)

    def _misses(self, value: Value, relation: str, t: Fraction, what: str) -> Value:
        """[value relation t] - 1."""
        low, high = self.at_least(value, t, what), self.at_least(value, t + 1, what)
        if relation in (">=", ">"):
            return _shift(low if relation == ">=" else high, -ONE)
        if relation in ("<", "<="):
            return (low if relation == "<" else high).times(-ONE)
        return high.plus(low, -ONE)  # != : -[value = t]

    def _select_all(self, _: Expr, __: Sequence[Any]) -> Selection:
        return Selection((), 0)

    def _both(self, _: Expr, args: Sequence[Any]) -> Selection:
        return Selection(args[0].pairs + args[1].pairs, args[0].largest + args[1].largest)

    def _aggregate(self, _: Expr, args: Sequence[Any]) -> Optional:
        selection, value = args
        pairs = (*selection.pairs, ({"token": -HALF}, {"begin": ONE}))  # the begin token: better than any miss
        noise = self.noise(value)
        size = float(max(abs(value.low), abs(value.high))) + noise
        noise += (self.length + 3) * UNIT_ROUNDOFF * size  # weights 1/m and a sum of at most `length` terms
        constant = value.low == value.high
        varying = 1 if constant else (self.length if value.varying == 1 else 0)
        return self._fetched(pairs, Value(value.form, value.low, value.high, value.common, varying), noise)

    def _first(self, _: Expr, args: Sequence[Any]) -> Optional:
        """Score N s - j with N = length > j: the first match is best; the begin token beats every miss, no match."""
        selection, value = args
        n = Fraction(self.length)
        self._require_scores((selection.largest + 1) * self.length * 2, "first")
        pairs: list[tuple[Form, Form]] = [
            ({name: factor * n for name, factor in query.items()}, key) for query, key in selection.pairs
        ]
        pairs += [({"token": -ONE}, {"place": ONE}), ({"token": HALF - n}, {"begin": ONE})]
        return self._fetched(pairs, value, self.noise(value))

    def _fetched(self, pairs: Sequence[tuple[Form, Form]], value: Value, noise: float) -> Optional:
        size = float(max(abs(value.low), abs(value.high))) + noise
        raw = self.attend(pairs, value.form, Channel(size, noise))
        missed = self.attend(pairs, {"begin": ONE}, Channel(1))  # exactly 1 or 0: the begin token alone, or not at all
        got = self.unit({raw: ONE}, {"token": ONE}, Channel(size, noise))
        lost = self.unit({missed: ONE}, {"token": ONE}, Channel(1))
        matched = _flag(Value({"token": ONE, lost: -ONE}, ZERO, ONE))
        return Optional(Value({got: ONE}, value.low, value.high, value.common, value.varying), matched)

    def _count(self, _: Expr, args: Sequence[Any]) -> Value:
        """The begin token ties with the m matches and has weight 1 / (m + 1); m = 1 / weight - 1."""
        most = float(self.length + 1)
        pairs: tuple[tuple[Form, Form], ...] = args[0].pairs or (({"token": ONE}, {}),)
        weight = self.attend(pairs, {"begin": ONE}, Channel(1, UNIT_ROUNDOFF))
        total = self.unit({weight: ONE}, {"token": ONE}, Channel(most, 3 * UNIT_ROUNDOFF * most), "reciprocal")
        return Value({total: ONE, "token": -ONE}, ZERO, Fraction(self.length))

    def _length(self, step: Expr, _: Sequence[Any]) -> Value:
        return self._count(step, [Selection((), 0)])

    def _matched(self, _: Expr, args: Sequence[Any]) -> Value:
        return args[0].matched  # type: ignore[no-any-return]

    def _otherwise(self, _: Expr, args: Sequence[Any]) -> Value:
        optional, default = args
        filled = optional.value.plus(self.product(_not(optional.matched), default))
        return _union(filled, optional.value, default)

    def _require_scores(self, largest: int, what: str) -> None:
        """Scores must be exact whole numbers, half ones included, or ties would break."""
        if 2 * largest > EXACT:
            raise CapacityError(
                f"{self.program.name} at length {self.length}: {what} needs scores up to {largest}, float64 holds "
                f"whole numbers only up to 2^53 exactly; use a shorter length or smaller numbers"
            )


def _constant(number: Fraction) -> Value:
    return Value({"token": number} if number else {}, number, number, number.denominator)


def _shift(value: Value, number: Fraction) -> Value:
    return value.plus(_constant(number))


def _flag(value: Value) -> Value:
    return Value(value.form, ZERO, ONE)


def _not(flag: Value) -> Value:
    return _flag(_constant(ONE).plus(flag, -ONE))


def _union(value: Value, first: Value, second: Value) -> Value:
    """The register `value`, which equals one or the other."""
    varying = max(first.varying, second.varying) if first.varying and second.varying else 0
    low, high = min(first.low, second.low), max(first.high, second.high)
    return Value(value.form, low, high, math.lcm(first.common, second.common), varying)
