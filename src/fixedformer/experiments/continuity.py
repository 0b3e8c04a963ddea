"""The probe of appendix D: how far outputs move when inputs move a little, and how well the text was memorised.

The paper gives no formula. Here the coefficient of a sequence is ‖ΔH‖ / ‖ΔE‖ for its embedding E (after the read-in,
positions included) and final state H, with ΔE Gaussian of a hundredth of ‖E‖: mean and largest over sequences. It
grows with the size of H, which the last norm divides out; so beside it stand the same of relative changes,
(‖ΔH‖ / ‖H‖) / (‖ΔE‖ / ‖E‖), and that of the read-outs in H's place: how much of what the model says is moved.
"""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fixedformer.experiments.run import Run
from fixedformer.experiments.tables import Row
from fixedformer.loop.looped_files import load_looped
from fixedformer.loop.transformer import LoopedTransformer
from fixedformer.storage import write_atomic
from fixedformer.training.fit import Trainer

SEQUENCES, RELATIVE = 200, 0.01


@dataclass(frozen=True)
class Continuity:
    """Mean and largest coefficient over `sequences` sequences, perturbations of `relative` the embedding's norm; means
    of the coefficients of relative changes, of the state and of the read-outs."""

    mean: float
    largest: float
    sequences: int
    relative: float
    of_state: float
    of_readouts: float


@torch.no_grad()
def continuity(model: LoopedTransformer, inputs: Tensor, relative: float = RELATIVE, seed: int = 0) -> Continuity:
    """Continuity coefficients of a model at `inputs`, ids (count, tokens) or vectors (count, tokens, d_in)."""
    embedded = model.embedded(inputs)
    generator = torch.Generator().manual_seed(seed)
    noise = torch.randn(embedded.shape, generator=generator, dtype=embedded.dtype).to(embedded.device)
    noise *= relative * _norms(embedded)[:, None, None] / _norms(noise)[:, None, None]
    states = [model.final_state(start) for start in (embedded, embedded + noise)]
    moved = _norms(states[1] - states[0]) / _norms(noise)
    of_state, of_readouts = (
        float((_norms(after - before) / _norms(before) / relative).mean())
        for before, after in (states, [model.read(state) for state in states])
    )
    return Continuity(float(moved.mean()), float(moved.max()), len(inputs), relative, of_state, of_readouts)


def _norms(x: Tensor) -> Tensor:
    norms: Tensor = torch.linalg.vector_norm(x.flatten(1), dim=1)
    return norms


def probe_run(run: Run) -> None:
    """Write probe.json of a finished run: loss on the text it was trained on, and continuity there. Once."""
    path = run.folder / "probe.json"
    if path.exists():
        return
    model = load_looped(run.folder / "model.safetensors").to(run.device)
    train, held_out = run.recipe.build_tasks()
    examples = train.sample(SEQUENCES, np.random.default_rng([run.recipe.seed, 3]))
    trainer = Trainer(model, train, run.recipe.schedule, run.recipe.seed, None, run.device, held_out)
    found = continuity(model, torch.from_numpy(examples.inputs).to(run.device))
    body = {"memorisation": trainer.evaluate(examples).loss, "mean": found.mean, "largest": found.largest,
            "sequences": found.sequences, "relative": found.relative, "of_state": found.of_state,
            "of_readouts": found.of_readouts}  # fmt: skip
    write_atomic(path, json.dumps(body, indent=2).encode())


def probe_lines(rows: list[Row], folder: Path) -> list[str]:
    """The probe's own small table, in Markdown, of the runs that have one."""
    lines = [
        f"Loss on the text trained on (nats a token) and ‖ΔH‖/‖ΔE‖ at noise {RELATIVE:g} ‖E‖; the paper's 4.32 -> 4.18",
        "and 130.6 -> 21.5 are of WikiText-103 models and of a coefficient that it does not define. It grows with ‖H‖,",
        "which the last norm divides out; relative: (‖ΔH‖/‖H‖)/(‖ΔE‖/‖E‖), and the same of the read-outs.", "",
        "| model | memorisation | continuity, mean | largest | relative | of read-outs |", "|---|---|---|---|---|---|",
    ]  # fmt: skip
    for row in rows:
        for recipe in row.recipes:
            path = folder / "runs" / row.name / f"seed-{recipe.seed}" / "probe.json"
            if path.exists():
                found: dict[str, Any] = json.loads(path.read_text())
                lines.append(
                    f"| {row.variant}, seed {recipe.seed} | {found['memorisation']:.3f} | {found['mean']:.2f} | "
                    f"{found['largest']:.2f} | {found['of_state']:.2f} | {found['of_readouts']:.2f} |"
                )
    return lines
