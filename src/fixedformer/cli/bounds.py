"""bounds: how wide a universal machine must be, by depth: what is proven necessary beside what is built."""

import json as text
from pathlib import Path
from typing import Annotated

from cyclopts import Parameter

import fixedformer as ff
from fixedformer.cli.options import Count
from fixedformer.storage import write_atomic


def bounds(
    *,
    heads: int = 2,
    layers: Count = 6,
    d_in: int = 1,
    d_head: int = 1,
    residual: bool = False,
    out: Annotated[Path | None, Parameter(name=["--out", "-o"])] = None,
    json: bool = False,
) -> int:
    """Lower and upper bounds on the width of a machine that serves all targets of 1, 2, .. LAYERS layers.

    Args:
        heads: heads of the targets.
        layers: the deepest targets looked at.
        d_in: width of inputs and outputs.
        d_head: width of queries and keys.
        residual: targets with residual connections.
        out: a .png for the plot.
        json: print JSON instead of the table.
    """
    depths = list(range(1, layers + 1))
    specs = [ff.TargetSpec(heads=heads, layers=n, d_in=d_in, d_head=d_head, residual=residual) for n in depths]
    curves = {
        "lower bound, attention given, E and U chosen": [ff.lower_bound(spec).shared_attention for spec in specs],
        "lower bound, attention given, E chosen": [ff.lower_bound(spec).embedding_only for spec in specs],
        "whole machine, E chosen": [ff.widths(spec).minimal for spec in specs],
    }
    if not residual:
        curves["shared-attention machine"] = [ff.SharedAttentionMachine(spec).width for spec in specs]
    if json:
        print(text.dumps({"layers": depths} | curves))
    else:
        for name, values in [("layers", depths), *curves.items()]:
            print(f"{name:46}" + "".join(f" {value:>11}" for value in values))
    if out is not None:
        from fixedformer.plots import width_bounds

        skip = ", residual" if residual else ""
        write_atomic(out, width_bounds(depths, curves, f"H = {heads}, d_in = {d_in}, d = {d_head}{skip}"))
    return 0
