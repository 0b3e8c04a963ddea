"""Flags of `train --model looped` (or standard), and the recipe that they make."""

from dataclasses import dataclass
from typing import Annotated, Any, Literal

from cyclopts import Parameter

from fixedformer.errors import SpecError
from fixedformer.experiments.looped import LoopedRecipe
from fixedformer.loop.looped_spec import setting as switches_of
from fixedformer.training.fit import Schedule

# What two CPU cores train in minutes; the paper's own numbers are `reproduce tmlt-table2 --scale paper`.
LAPTOP = {"steps": 5000, "batch": 64, "rate": 1e-3, "warmup": 100, "decay": "linear", "weight_decay": 0.01}


@Parameter(name="*")
@dataclass(frozen=True)
class LoopedFlags:
    """Switches of a looped transformer; --width, --heads, --layers, --mlp-width and --mask count too."""

    loops: int | None = None
    """looped: how often the block is applied."""
    setting: Literal["paper", "code", "clean"] = "paper"
    """looped: where the other switches start: the paper's, its public code's, or rotary and nothing else changed."""
    timestep: Literal["none", "constant", "adaln", "free"] | None = None
    """looped: what a loop knows of its number."""
    injection: Literal["none", "add"] | None = None
    """looped: whether the input embedding is added at every loop."""
    rms_norm: Literal["none", "pre"] | None = None
    """looped: RMSNorm before attention and MLP, or nowhere."""
    rms_gain: bool | None = None
    """looped: whether those norms have a gain."""
    rms_final: bool | None = None
    """looped: RMSNorm before the read-out."""
    positions: Literal["none", "learned", "sinusoidal", "rotary"] | None = None
    """looped: positions."""
    tied: bool | None = None
    """looped: the read-out is the embedding transposed."""
    biases: bool | None = None
    """looped: biases in the matrices of a layer."""
    loss_over: str | None = None
    """looped: read-outs of which loops are in the loss: last, all, or a number of last ones."""
    backprop_loops: int | None = None
    """looped: gradients through so many last loops only."""
    checkpointing: Literal["none", "loop", "nested"] | None = None
    """looped: keep everything, each loop's state, or about the square root of that, for the backward pass."""
    train_size: int | None = None
    """looped: a training set of so many different sequences; fresh ones at every step otherwise."""
    option: Annotated[list[str] | None, Parameter(name=["--option", "-O"], consume_multiple=True)] = None
    """looped: fields of the task as name=value, e.g. length=40."""
    compile: bool = False
    """looped: torch.compile."""

    def switches(self, model: str, sizes: dict[str, Any]) -> dict[str, Any]:
        """Fields of LoopedSpec; sizes: width, heads, .. as given on the command line, None where not."""
        given = {
            "loops": self.loops, "timestep": self.timestep, "injection": self.injection, "norm": self.rms_norm,
            "norm_gain": self.rms_gain, "final_norm": self.rms_final, "positions": self.positions, "tied": self.tied,
            "biases": self.biases, "backprop_loops": self.backprop_loops, "checkpointing": self.checkpointing,
            **sizes,
        }  # fmt: skip
        if self.loss_over is not None:
            given["loss_over"] = int(self.loss_over) if self.loss_over.isdigit() else self.loss_over
        found = switches_of(self.setting) | {name: value for name, value in given.items() if value is not None}
        if model == "standard":
            for flag in ("loops", "timestep", "injection", "loss_over", "backprop_loops"):
                if getattr(self, flag) is not None:
                    name = flag.replace("_", "-")
                    raise SpecError(f"a standard transformer has --layers and nothing looped: leave out --{name}")
            found |= {"layers": found.get("layers", 6), "loops": 1, "injection": "none"}
        return found


def looped_recipe(
    task: str, model: str, flags: LoopedFlags, sizes: dict[str, Any], timing: dict[str, Any], seed: int
) -> LoopedRecipe:
    """The recipe of one command; timing: Schedule's fields that were given."""
    return LoopedRecipe(
        task=task,
        options=dict(_pair(text) for text in flags.option or []),
        switches=flags.switches(model, sizes),
        train_size=flags.train_size,
        seed=seed,
        schedule=Schedule(**{**LAPTOP, **timing}),
        compiled=flags.compile,
    )


def _pair(text: str) -> tuple[str, Any]:
    """length=40 -> ("length", 40); numbers are read as numbers, true and false as such, a,b as a tuple."""
    name, sign, value = text.partition("=")
    if not sign or not name:
        raise SpecError(f"--option takes name=value, got {text!r}")
    return name.replace("-", "_"), tuple(map(_value, value.split(","))) if "," in value else _value(value)


def _value(text: str) -> Any:
    if text.lower() in ("true", "false"):
        return text.lower() == "true"
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            continue
    return text
