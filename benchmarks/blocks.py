"""Machines with MLPs, biases and norms: how exact, how well conditioned, how fast.

    python benchmarks/blocks.py [--draws 50]     (about four minutes on one core)

float64; errors are relative to the largest output, on vectors, causal, the worse of both engines where the definition
fits. Random machines are given with their two condition numbers and with the multiple
error / (2^-53 x cond(P_0) x cond(B)), cond(B) multiplied over the layers: the certificate allows 1000.
"""

import argparse
import statistics
import time

import torch

import fixedformer as ff
from fixedformer.embedding.blocks.layout import Layout

SMALL = {"heads": 2, "layers": 2, "d_in": 2, "d_head": 1, "mlp_width": 2}
SPECS = {
    "SwiGLU": ff.BlockSpec(**SMALL),
    "GeGLU": ff.BlockSpec(**SMALL, activation="gelu"),
    "ReGLU": ff.BlockSpec(**SMALL, activation="relu"),
    "SwiGLU, no skip": ff.BlockSpec(**SMALL, residual=False),
    "GELU, biases": ff.BlockSpec(**SMALL, mlp="plain", activation="gelu", bias=True),
    "GELU, LayerNorm, biases": ff.BlockSpec(
        **SMALL, mlp="plain", activation="gelu", bias=True, norm="layer", d_model=3
    ),
    "GELU, RMSNorm, biases": ff.BlockSpec(**SMALL, mlp="plain", activation="gelu", bias=True, norm="rms", d_model=3),
    "SwiGLU, RMSNorm": ff.BlockSpec(**SMALL, norm="rms", d_model=2),
}
LARGE = {
    "Llama-like, 1 layer": ff.BlockSpec(
        heads=8, layers=1, d_in=64, d_head=8, d_model=64, mlp_width=172, norm="rms", positions="rotary", key_heads=4
    ),
    "GPT-2-like, 1 layer": ff.BlockSpec(
        heads=4, layers=1, d_in=80, d_out=64, d_head=16, d_model=64, mlp="plain", mlp_width=256,
        activation="gelu_tanh", norm="layer", bias=True,
    ),
    "SwiGLU, no norm, 1 layer": ff.BlockSpec(heads=8, layers=1, d_in=64, d_head=8, mlp_width=172),
    "SwiGLU, RMSNorm, 2 layers": ff.BlockSpec(
        heads=2, layers=2, d_in=4, d_head=2, d_model=4, mlp_width=8, norm="rms"
    ),
}  # fmt: skip


def relative(a: torch.Tensor, b: torch.Tensor) -> float:
    return float((a - b).abs().max() / b.abs().max())


def exactness(draws: int) -> None:
    kinds = {
        "sparse": lambda spec, _: ff.SparseBlockMachine(spec),
        "random": lambda spec, seed: ff.RandomBlockMachine(spec, seed),
        "random, 1.3 m": lambda spec, seed: ff.RandomBlockMachine(spec, seed, int(1.3 * Layout(spec).width)),
        "random, 1.5 neurons, 1.3 m": lambda spec, seed: ff.RandomBlockMachine(
            spec, seed, int(1.3 * Layout(spec, 1.5).width), neurons_per_target=1.5
        ),
    }
    heads = ("target", "machine", "width", "worst", "median", "cond(P0)", "cond(B)", "multiple")
    print("{:26}{:28}{:>7}{:>10}{:>10}{:>10}{:>10}{:>10}".format(*heads))
    for name, spec in SPECS.items():
        for kind, build in kinds.items():
            errors, systems, neurons, multiples, width = [], [], [], [], 0
            for seed in range(draws):
                if kind != "sparse" and (Layout(spec).width > 600 or ("1.5" in kind and seed >= 20)):
                    break  # minutes each: square systems of more than a thousand
                target, machine = ff.BlockTarget.random(spec, seed=seed), build(spec, seed)
                program, width = machine.compile(target), machine.width
                generator = torch.Generator().manual_seed(seed)
                X = torch.randn(2, 5, spec.d_in, dtype=torch.float64, generator=generator)
                truth = target(X, "causal")
                error = max(relative(machine.run(program, X, "causal", e), truth) for e in ("path", "dense"))
                report = program.report
                errors.append(error)
                systems.append(report.condition)
                neurons.append(report.neuron_condition)
                multiples.append(error / (2**-53 * report.condition * report.neuron_condition))
            if errors:
                print(f"{name:26}{kind:28}{width:7}{max(errors):10.1e}{statistics.median(errors):10.1e}"
                      f"{max(systems):10.1e}{max(neurons):10.1e}{max(multiples):10.1e}", flush=True)  # fmt: skip


def sizes() -> None:
    print("\n{:28}{:>9}{:>9}{:>9}{:>10}{:>10}{:>12}{:>10}".format(
        "target", "width", "consts", "MB", "ratio", "compile/s", "run 16/ms", "error"))  # fmt: skip
    for name, spec in LARGE.items():
        target, machine = ff.BlockTarget.random(spec), ff.SparseBlockMachine(spec)
        program, X = machine.compile(target), torch.randint(spec.d_in, (1, 16))
        found = machine.run(program, X, "causal")  # the first run compares the columns that are kept once
        times = []
        for _ in range(7):
            began = time.perf_counter()
            machine.run(program, X, "causal")
            times.append(time.perf_counter() - began)
        report = program.report
        print(f"{name:28}{report.width:9}{report.constants:9}{report.bytes / 1e6:9.1f}{report.ratio:10.0f}"
              f"{report.seconds:10.2f}{1e3 * statistics.median(times):12.1f}"
              f"{relative(found, target(X, 'causal')):10.1e}", flush=True)  # fmt: skip


def shared_attention() -> None:
    print("\n{:8}{:>8}{:>12}{:>10}{:>12}{:>10}".format("heads", "layers", "excluded <", "width", "whole m", "error"))
    for heads in (2, 3):
        for layers in range(1, 7):
            spec = ff.TargetSpec(heads=heads, layers=layers, d_in=1, d_head=1)
            machine, target = ff.SharedAttentionMachine(spec), ff.Target.random(spec)
            X = torch.randn(5, 1, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
            error = relative(machine.run(machine.compile(target), X, target.attention(X)), target(X))
            print(f"{heads:5}{layers:11}{ff.lower_bound(spec).shared_attention:12}{machine.width:10}"
                  f"{ff.widths(spec).minimal:12}{error:10.1e}")  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--draws", type=int, default=50)
    exactness(parser.parse_args().draws)
    sizes()
    shared_attention()


if __name__ == "__main__":
    main()
