"""Task names of the command line and of recipes -> tasks."""

import inspect
from collections.abc import Callable, Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any, get_type_hints

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
        if "hops" in given:
            raise SpecError(f"{name} has its hops in its name; leave the option hops out")
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


def _fits(value: object, hint: object) -> bool:
    """Whether a value is of one of the plain types that options have; everything else is left to the task."""
    if hint not in (bool, int, float, str):
        return True
    if isinstance(value, bool) or hint is bool:
        return isinstance(value, bool) and hint is bool
    return isinstance(value, (int, float) if hint is float else hint)


def _made(make: Callable[..., Any], name: str, given: Mapping[str, Any]) -> Any:
    """make(**given), an option of the wrong type told as such."""
    hints = get_type_hints(make.__init__ if inspect.isclass(make) else make)
    for key, value in given.items():
        if not _fits(value, hints.get(key)):
            wanted = getattr(hints[key], "__name__", hints[key])
            raise SpecError(f"{name}: option {key} must be of type {wanted}, got {value!r}")
    try:
        return make(**given)
    except TypeError as error:
        told = ", ".join(f"{key}={value}" for key, value in given.items())
        raise SpecError(f"{name} cannot be made with {told}: an option has the wrong type ({error})") from None
