"""How narrow a program can be made, and what that costs: rows for a table, for any machine, program and data."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from fixedformer.attention import Mask
from fixedformer.embedding.decompile import Decompiled, decompile
from fixedformer.embedding.distil import Agreement, agreement
from fixedformer.embedding.machine import Machine
from fixedformer.embedding.program import Program


@dataclass(frozen=True, eq=False)
class StudyRow:
    """One width. weighting: "exact", "plain" or "data". distance: the read-outs' change relative to their norm.

    agreements: with the program itself, by the name of the data; each holds on that data only.
    """

    width: int
    weighting: str
    distance: float
    agreements: Mapping[str, Agreement]
    target: Decompiled


def width_study(
    machine: Machine,
    program: Program,
    train: tuple[Any, Any],
    held_out: Mapping[str, tuple[Any, Any]],
    widths: Sequence[int],
    mask: Mask = None,
    steps: int = 0,
) -> Iterator[StudyRow]:
    """The exact width first, then every width below it by plain and by data weights.

    train and every entry of held_out: (inputs, where), as for `decompile`. `train` weighs and, with steps, distils; it
    is measured on nothing. distance also answers how near the program is to a compiled one of that width: for two
    layers no transformer of the width is nearer than the plain row.
    """
    exact = decompile(machine, program)
    wanted: list[tuple[str, int, dict[str, Any]]] = [("exact", exact.weights.d_model, {})]
    for width in widths:
        if width < exact.weights.d_model:
            wanted.append(("plain", width, {}))
            wanted.append(("data", width, {"data": train[0], "where": train[1], "mask": mask, "steps": steps}))
    for weighting, width, options in wanted:
        small = exact if weighting == "exact" else decompile(machine, program, width, **options)
        cut_off = small.report.truncation
        yield StudyRow(
            width,
            weighting,
            small.report.error if cut_off is None else cut_off.error / cut_off.size,
            {
                name: agreement(small, (machine, program), inputs, where=where, mask=mask)
                for name, (inputs, where) in held_out.items()
            },
            small,
        )
