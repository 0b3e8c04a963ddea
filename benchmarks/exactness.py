"""How exact: relative output and attention error of every kind of machine over many random targets.

    python benchmarks/exactness.py [--targets 200] [--widest 600]

float64, the definition as engine (`engine="dense"`), token ids and vectors, random masks; the worst and the median over
all targets, and the condition numbers. Random machines at the minimal width N and at 1.5 N.
"""

import argparse
import random
import statistics

import torch

import fixedformer as ff


def sampled_spec(draw: random.Random, residual: bool, widest: int) -> ff.TargetSpec:
    while True:
        rotary = draw.random() < 0.3
        spec = ff.TargetSpec(
            heads=draw.randint(1, 4),
            layers=draw.randint(1, 4),
            d_in=draw.randint(1, 30),
            d_out=draw.randint(1, 30),
            d_head=2 * draw.randint(1, 15) if rotary else draw.randint(1, 30),
            residual=residual,
            positions="rotary" if rotary else None,
        )
        if ff.widths(spec).minimal <= widest:
            return spec


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--targets", type=int, default=200)
    parser.add_argument("--widest", type=int, default=600)
    options = parser.parse_args()
    kinds = {
        "sparse": lambda spec, _: ff.SparseMachine(spec),
        "sparse, looped": lambda spec, _: ff.SparseMachine(spec, looped=True),
        "sparse, residual": lambda spec, _: ff.SparseMachine(spec),
        "random, N": lambda spec, seed: ff.RandomMachine(spec, seed),
        "random, 1.5 N": lambda spec, seed: ff.RandomMachine(spec, seed, 3 * ff.widths(spec).minimal // 2),
        "random, N, looped": lambda spec, seed: ff.RandomMachine(spec, seed, looped=True),
        "random, 1.5 N, looped": lambda spec, seed: ff.RandomMachine(
            spec, seed, 3 * ff.widths(spec).minimal // 2, looped=True
        ),
        "random, N, residual": lambda spec, seed: ff.RandomMachine(spec, seed),
    }
    print(f"{options.targets} random targets a row, widths up to {options.widest}")
    heads = ("machine", "output: worst", "median", "attention: worst", "condition: worst", "median")
    print("{:24}{:>15}{:>10}{:>18}{:>18}{:>10}".format(*heads))
    for name, build in kinds.items():
        outputs, attentions, conditions = [], [], []
        for seed in range(options.targets):
            draw, generator = random.Random(seed), torch.Generator().manual_seed(seed)
            spec = sampled_spec(draw, "residual" in name, options.widest)
            target = ff.Target.random(spec, seed=seed, d_model=draw.randint(1, 48), d_value=draw.randint(1, 24))
            machine = build(spec, seed)
            program = machine.compile(target)
            tokens = draw.randint(1, 12)
            X = torch.randint(spec.d_in, (2, tokens), generator=generator)
            if draw.random() < 0.5:
                X = torch.randn(2, tokens, spec.d_in, generator=generator, dtype=torch.float64)
            mask = (torch.rand(tokens, tokens, generator=generator) < 0.6) | torch.eye(tokens, dtype=torch.bool)
            truth = target(X, mask)
            outputs.append(float((machine.run(program, X, mask, "dense") - truth).abs().max() / truth.abs().max()))
            gap = machine.attention(program, X, mask, "dense") - target.attention(X, mask)
            attentions.append(float(gap.abs().max()))
            conditions.append(program.report.condition)
        print(f"{name:24}{max(outputs):15.1e}{statistics.median(outputs):10.1e}{max(attentions):18.1e}"
              f"{max(conditions):18.1e}{statistics.median(conditions):10.1e}", flush=True)  # fmt: skip


if __name__ == "__main__":
    main()
