"""Train the target that ships with the package: parenthesis balancing, attention only, 4 heads, 2 layers, d_head 24.

    python tools/train_demo_target.py [--steps 6000] [--seed 0] [--out src/fixedformer/data/dyck.safetensors]

No residual, no positions, no norm; causal mask; scores scaled by 1/sqrt(d) while training, folded into W_Q afterwards;
AdamW with linear decay, gradient clipping, loss at "?" only; the checkpoint with the best accuracy on a separate
validation set is kept and reported on a test set that nothing was chosen by.
"""

import argparse
import sys
import time

import numpy as np
import torch
from torch import Tensor, nn

from fixedformer.files import save_target
from fixedformer.target import Card, Target, TargetSpec, Weights, forward
from fixedformer.tasks.dyck import Dyck
from fixedformer.tasks.task import Examples

SPEC = TargetSpec(heads=4, layers=2, d_in=4, d_head=24)


def scaled(weights: Weights) -> Weights:
    """The weights as they are used: 1/sqrt(d) folded into the queries."""
    named = weights.named()
    return Weights(**{**named, "query": named["query"] * SPEC.d_head**-0.5})


def predict(weights: Weights, examples: Examples) -> np.ndarray:
    with torch.no_grad():
        parts = torch.from_numpy(examples.inputs).split(1000)
        return torch.cat([forward(SPEC, weights, part, "causal").argmax(-1) for part in parts]).numpy()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=6000)
    parser.add_argument("--d-model", type=int, default=24)
    parser.add_argument("--batch", type=int, default=128)
    parser.add_argument("--rate", type=float, default=1e-3)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", default="src/fixedformer/data/dyck.safetensors")
    options = parser.parse_args()

    task = Dyck()
    data, held_out, fresh = (np.random.default_rng([options.seed, part]) for part in range(3))
    validation, test = task.sample(20_000, held_out), task.sample(100_000, fresh)
    start = Target.random(SPEC, seed=options.seed, dtype=torch.float32, d_model=options.d_model).weights
    start = Weights(**{**start.named(), "query": start.query * SPEC.d_head**0.5})
    weights = start.map(nn.Parameter)
    parameters: list[Tensor] = list(weights.named().values())
    optimizer = torch.optim.AdamW(parameters, lr=options.rate, weight_decay=0.0)
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda step: min(1.0, (step + 1) / 50) * (1 - step / options.steps)
    )
    best, kept, began = 0.0, weights.map(torch.clone), time.perf_counter()
    for step in range(1, options.steps + 1):
        examples = task.sample(options.batch, data)
        scored = torch.from_numpy(examples.scored)
        logits = forward(SPEC, scaled(weights), torch.from_numpy(examples.inputs), "causal")[scored]
        loss = nn.functional.cross_entropy(logits, torch.from_numpy(examples.labels)[scored])
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(parameters, 1.0)
        optimizer.step()
        schedule.step()
        if step % 250 == 0 or step == options.steps:
            accuracy = validation.accuracy(predict(scaled(weights), validation))
            if accuracy >= best:
                best, kept = accuracy, weights.map(lambda tensor: tensor.detach().clone())
            print(f"step {step:5d}  loss {loss.item():.4f}  validation {accuracy:.2%}  best {best:.2%}  "
                  f"{time.perf_counter() - began:.0f} s", file=sys.stderr)  # fmt: skip

    card = Card(task.vocabulary, "causal", "parenthesis balancing, strings up to 60, answer at '?'")
    target = Target(SPEC, **scaled(kept).named(), card=card)
    accuracy = test.accuracy(predict(target.weights, test))
    rules = ", ".join(f"{name} {share:.1%}" for name, share in task.trivial_rules(test).items())
    save_target(target, options.out)
    print(f"test accuracy {accuracy:.3%} on 100,000 fresh strings (trivial rules: {rules}); wrote {options.out}")


if __name__ == "__main__":
    main()
