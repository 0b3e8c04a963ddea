"""Task names of the command line and of recipes -> tasks."""

import inspect
from collections.abc import Callable, Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any

from fixedformer.errors import SpecError
from fixedformer.tasks.countdown import Countdown
from fixedformer.tasks.dyck import Dyck
from fixedformer.tasks.khop import KHop
from fixedformer.tasks.language import Language
from fixedformer.tasks.own import OwnData
from fixedformer.tasks.strings import EditDistance, LongestCommonSubsequence
from fixedformer.tasks.sudoku import Sudoku
from fixedformer.tasks.task import Task
from fixedformer.tasks.trees import DecisionTrees

KINDS: dict[str, Callable[..., Task]] = {
    "edit-distance": EditDistance, "lcs": LongestCommonSubsequence, "trees": DecisionTrees, "dyck": Dyck,
    "countdown": Countdown,
    **{f"{hops}-hop": KHop for hops in range(1, 5)},
}  # fmt: skip
NAMES = (*KINDS, "sudoku", "language")
CAUSAL = {"trees", "language", "dyck", "1-hop", "2-hop", "3-hop", "4-hop"}  # read from left to right


def build_task(name: str, options: Mapping[str, Any]) -> tuple[Task, Task]:
    """Where training sequences come from, and where those of validation and test do.

    options: fields of the task's class. Raises SpecError for an unknown name or option.
    """
    if name.endswith((".jsonl", ".csv")):
        if options:
            raise SpecError(f"your own data takes no options, got {', '.join(options)}")
        return OwnData.read(Path(name))
    if name == "sudoku":
        return _pair(Sudoku.read if "path" in options else Sudoku.generated, name, options)
    if name == "language":
        return _pair(Language.read, name, options)
    if name not in KINDS:
        raise SpecError(f"task must be one of {', '.join(NAMES)}, or a .jsonl or .csv file, got {name!r}")
    kind = KINDS[name]
    known = [f.name for f in fields(kind) if f.init]  # type: ignore[arg-type]
    if unknown := options.keys() - set(known):
        raise SpecError(f"{name} has no option {', '.join(sorted(unknown))}; it has {', '.join(known)}")
    given = {key: tuple(value) if isinstance(value, list) else value for key, value in options.items()}
    if name.endswith("-hop"):
        given["hops"] = int(name[0])
    task = _made(kind, name, given)
    return task, task.held_out() if isinstance(task, Countdown) else task


def _pair(make: Callable[..., tuple[Task, Task]], name: str, options: Mapping[str, Any]) -> tuple[Task, Task]:
    """Two tasks from a function whose parameters are the options; `path` is a file."""
    known = inspect.signature(make).parameters
    if unknown := options.keys() - known.keys():
        raise SpecError(f"{name} has no option {', '.join(sorted(unknown))}; it has {', '.join(known)}")
    pair: tuple[Task, Task] = _made(
        make, name, {key: Path(value) if key == "path" else value for key, value in options.items()}
    )
    return pair


def _made(make: Callable[..., Any], name: str, given: Mapping[str, Any]) -> Any:
    """make(**given), an option of the wrong type told as such."""
    try:
        return make(**given)
    except TypeError as error:
        told = ", ".join(f"{key}={value}" for key, value in given.items())
        raise SpecError(f"{name} cannot be made with {told}: an option has the wrong type ({error})") from None
