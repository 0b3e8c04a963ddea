"""demo: the main job, shown as a table and a certificate."""

import sys
from pathlib import Path

from rich.console import Console
from rich.table import Table

from fixedformer.capacity import readable
from fixedformer.cli.options import Count, Seed
from fixedformer.embedding.files import save_program
from fixedformer.experiments.demo import Demo
from fixedformer.experiments.demo import demo as run_demo
from fixedformer.storage import write_atomic


def demo(*, out: Path | None = None, strings: Count = 1000, seed: Seed = 0) -> int:
    """A transformer trained on parenthesis balancing, compiled onto two fixed machines and run beside them.

    Args:
        out: a folder for the programs, their certificates and a picture of the attention matrices.
        strings: how many fresh strings to run.
        seed: seed of the strings and of the random machine.
    """
    if out is not None:
        out.mkdir(parents=True, exist_ok=True)
    result = run_demo(strings, seed, lambda step: print(f".. {step}", file=sys.stderr))
    show(result)
    if out is not None:
        _write(result, out)
    return 0 if all(of.certificate.holds for of in result.compiled) else 1


def show(result: Demo) -> None:
    """Print table, certificates, and what they mean."""
    wide = Console(width=max(Console().width, 120), soft_wrap=True)
    table = Table(title=f"Parenthesis balancing: {result.strings} fresh strings of up to 60 (seed {result.seed})")
    for name in ("", "width", "made for it", "compile s", "run s", "accuracy", "as target", "max |ΔA|", "max |ΔY|"):
        table.add_column(name, justify="left" if not name else "right")
    for row in result.rows:
        first = row is result.rows[0]
        table.add_row(
            row.name,
            str(row.width),
            readable(row.bytes),
            "-" if row.compile_seconds is None else f"{row.compile_seconds:.2f}",
            f"{row.run_seconds:.2f}",
            f"{row.accuracy:.1%}",
            "-" if first else f"{row.agree} of {result.strings}",
            "-" if first else f"{row.attention:.1e}",
            "-" if first else f"{row.output:.1e}",
        )
    wide.print(table)
    rules = ", ".join(f"'{name}' {share:.1%}" for name, share in result.trivial.items())
    print(f"Rules that understand nothing score: {rules}.")
    for of in result.compiled:
        print(f"\n{of.certificate}")
    print(
        "\nThe machines' own weights were fixed before the target was known (the sparse one's are zeros and ones);\n"
        "only the input embedding was made for it. ΔA: attention matrices, ΔY: outputs, against the target's."
    )


def _write(result: Demo, out: Path) -> None:
    from fixedformer.plots import attention_picture

    for of in result.compiled:
        save_program(of.program, out / f"{of.name}.safetensors")
        write_atomic(out / f"{of.name}.certificate.json", of.certificate.to_json().encode())
    write_atomic(out / "attention.png", attention_picture(result))
    print(f"wrote {', '.join(sorted(path.name for path in out.iterdir()))} to {out}", file=sys.stderr)
