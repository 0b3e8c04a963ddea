"""What the compiler knows of a register: a linear form over channels, its range, its grid, and its rounding.

Precision is derived, not assumed. Every channel has a bound on its size and on its *noise* (how far the float64 number
may lie from the exact one); every register lies in a *grid*, the union of Z / (common * k) for k = 1..varying, so that
two different values differ by at least 1 / (common * varying). A comparison is compiled only where the noise is less
than an eighth of that gap; otherwise the program is refused.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from fractions import Fraction

UNIT_ROUNDOFF = 2.0**-53
EXACT = 2**53  # float64 holds every whole number up to this
Form = Mapping[str, Fraction]


@dataclass(frozen=True)
class Channel:
    """Bounds of one channel: |value| <= size, |value - exact value| <= noise. noise = 0: exact, a multiple of step."""

    size: float
    noise: float = 0.0


@dataclass(frozen=True)
class Value:
    """A number, flag (0 or 1) or token id as a linear form over channels; 0 on the begin token, as all registers.

    low, high: range of the exact value. common, varying: the grid; varying = 0 where no grid is known.
    """

    form: Form
    low: Fraction
    high: Fraction
    common: int = 1
    varying: int = 1

    @property
    def gap(self) -> Fraction:
        """Smallest difference between two values of the grid."""
        return Fraction(1, self.common * self.varying)

    def plus(self, other: "Value", factor: Fraction = Fraction(1)) -> "Value":
        """self + factor * other."""
        form = dict(self.form)
        for name, coefficient in other.form.items():
            form[name] = form.get(name, Fraction(0)) + factor * coefficient
        ends = (factor * other.low, factor * other.high)
        return Value(
            {name: coefficient for name, coefficient in form.items() if coefficient},
            self.low + min(ends),
            self.high + max(ends),
            math.lcm(self.common, other.common * factor.denominator),
            self.varying * other.varying,
        )

    def times(self, factor: Fraction) -> "Value":
        """factor * self."""
        return Value({}, Fraction(0), Fraction(0)).plus(self, factor)


@dataclass(frozen=True)
class Selection:
    """A selector as query and key forms: the score is 0 where j is selected by i, else at most -1; whole numbers.

    largest: a bound on |score|.
    """

    pairs: tuple[tuple[Form, Form], ...]
    largest: int


@dataclass(frozen=True)
class Optional:
    """A value that is 0 where there is no match, and the flag that says whether there is one."""

    value: Value
    matched: Value
