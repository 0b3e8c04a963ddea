"""Programs that nothing compiled, for every kind of machine, and what it takes to be the same function."""

import torch
from machines import relative

import fixedformer as ff
from fixedformer.embedding.program import CompileReport


def a_spec(shape, kind):
    heads, layers, d_in, d_head, d_out = shape
    return ff.TargetSpec(heads, layers, d_in, d_head, d_out, "residual" in kind, "rotary" if "rotary" in kind else None)


def a_machine(spec, kind, seed=0):
    smallest = ff.widths(spec).minimal
    if "N" in kind:
        width = 3 * smallest // 2 if "1.5" in kind else max(smallest // 2, 1) if "/2" in kind else None
        return ff.RandomMachine(spec, seed, width, looped="looped" in kind)
    return ff.SparseMachine(spec, looped="looped" in kind)


def a_program(machine, seed=0, dtype=torch.float64):
    """A program that nothing compiled: as if trained."""
    spec, generator = machine.spec, torch.Generator().manual_seed(seed)
    size = 0.5 if machine.kind == "sparse" else 2 * spec.d_in**-0.5
    embedding = torch.randn(spec.d_in, machine.width, generator=generator, dtype=torch.float64) * size
    report = CompileReport(machine.width, machine.tree.count, embedding.nbytes, 1.0, 0.0, 1.0, 0.0)
    return ff.Program(embedding.to(dtype), spec, machine.describe(), machine.fingerprint(), report)


def same_function(machine, program, target, limit, seed=0):
    """Tokens and vectors, with and without a mask: outputs relative, attention absolute."""
    spec, generator = machine.spec, torch.Generator().manual_seed(seed)
    for X in (
        torch.randint(spec.d_in, (2, 7), generator=generator),
        torch.randn(2, 5, spec.d_in, generator=generator, dtype=torch.float64),
    ):
        for mask in (None, "causal"):
            assert relative(target(X, mask), machine.run(program, X, mask)) <= limit
            gap = target.attention(X, mask) - machine.attention(program, X, mask)
            assert float(gap.abs().max()) <= limit
