"""What was claimed, what bounds it, what was measured: values that a person can read and a machine can check.

A family builds `Check`s and puts them in a `Certificate`; nothing here measures anything.
"""

import json
import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from fixedformer.errors import CertificateError


def peak(*values: float) -> float:
    """The largest value; NaN as soon as one is NaN, which Python's max would lose, so that no check holds by it."""
    return math.nan if any(math.isnan(value) for value in values) else max(values)


@dataclass(frozen=True)
class Check:
    """One claim with its bound and its measurement.

    claim:    what is said to hold, in words.
    bound:    the largest value of `measured` for which the claim holds.
    measured: what was seen (same unit as `bound`).
    cases:    how many cases were looked at.
    scope:    "exhaustive, ..." or "sampled, ...": what those cases say about the rest.
    source:   where the bound comes from.
    """

    claim: str
    bound: float
    measured: float
    cases: int
    scope: str
    source: str

    @property
    def holds(self) -> bool:
        """True when something was measured and it is within the bound. Zero cases, NaN and infinity never hold."""
        finite = math.isfinite(self.measured) and math.isfinite(self.bound)
        return self.cases > 0 and finite and self.measured <= self.bound


@dataclass(frozen=True)
class Certificate:
    """All checks of one subject. `holds` only when there is a check and every check holds.

    consequences: statements that follow from the checks (name -> sentence), printed below them.
    context: what is needed to repeat the measurement: seeds, fingerprints, dtype.
    """

    subject: str
    checks: tuple[Check, ...]
    consequences: Mapping[str, str] = field(default_factory=dict)
    context: Mapping[str, Any] = field(default_factory=dict)

    @property
    def holds(self) -> bool:
        return bool(self.checks) and all(check.holds for check in self.checks)

    def require(self) -> "Certificate":
        """Return self, or raise CertificateError naming the first check that does not hold."""
        for check in self.checks:
            if not check.holds:
                raise CertificateError(
                    f"{self.subject}: '{check.claim}' does not hold: measured {check.measured:.3g}, bound "
                    f"{check.bound:.3g} ({check.cases} cases, {check.scope}); compile again or look at the inputs"
                )
        if not self.checks:
            raise CertificateError(f"{self.subject}: nothing was checked; a certificate without checks never holds")
        return self

    def to_json(self) -> str:
        """The whole certificate as JSON text. Values that are not finite become null, so any reader can parse it."""
        finite = {"bound", "measured"}
        checks = [
            {k: (v if k not in finite or math.isfinite(v) else None) for k, v in asdict(check).items()}
            | {"holds": check.holds}
            for check in self.checks
        ]
        body = {
            "subject": self.subject,
            "holds": self.holds,
            "checks": checks,
            "consequences": dict(self.consequences),
            "context": dict(self.context),
        }
        return json.dumps(body, indent=2, allow_nan=False)

    def __str__(self) -> str:
        rows = [
            (
                "holds" if check.holds else "FAILS",
                check.claim,
                f"{check.measured:.1e} <= {check.bound:.1e}"
                if check.holds
                else f"{check.measured:.1e} > {check.bound:.1e}",
                f"{check.cases} cases, {check.scope}" if check.cases else "no cases",
            )
            for check in self.checks
        ]
        claim_width = max((len(row[1]) for row in rows), default=0)
        number_width = max((len(row[2]) for row in rows), default=0)
        lines = [f"{self.subject}: {'holds' if self.holds else 'DOES NOT HOLD'}"]
        lines += [f"  {verdict}  {claim:<{claim_width}}  {numbers:<{number_width}}  {scope}"
                  for verdict, claim, numbers, scope in rows]  # fmt: skip
        lines += [f"  {name}: {sentence}" for name, sentence in self.consequences.items()]
        return "\n".join(lines)
