"""Files of schedules (kind "schedule"), with the blocks they are for, and of unfinished searches (kind "schedule-
search")."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from fixedformer import storage
from fixedformer.errors import FixedformerError, StorageError
from fixedformer.schedule.blocks import FrozenBlocks
from fixedformer.schedule.program import Schedule
from fixedformer.storage import Header, PathLike

if TYPE_CHECKING:
    from fixedformer.schedule.solve import Search

KIND, SEARCH = "schedule", "schedule-search"


def save_schedule(blocks: FrozenBlocks, schedule: Schedule, path: PathLike) -> None:
    """Write a schedule and what its blocks are drawn from, atomically. Raises SpecError for other blocks' schedule."""
    blocks.require_own(schedule)
    tensors = {
        "order": torch.from_numpy(schedule.order.astype(np.uint8)),
        "durations": torch.from_numpy(np.ascontiguousarray(schedule.durations)),
        "remainders": torch.from_numpy(np.ascontiguousarray(schedule.remainders)),
    }
    body: dict[str, Any] = {
        "blocks": {"d": blocks.d, "seed": blocks.seed, "scale": blocks.scale, "causal": blocks.causal},
        "fingerprint": blocks.fingerprint(),
        "mode": schedule.mode,
        "substeps": schedule.substeps,
        "report": dict(schedule.report),
    }
    storage.write(path, KIND, tensors, body)


def load_schedule(path: PathLike) -> tuple[FrozenBlocks, Schedule]:
    """Read a schedule and draw its blocks again. Raises StorageError for a damaged, foreign or inconsistent file."""
    drawn: list[FrozenBlocks] = []

    def expect(header: Header) -> dict[str, tuple[int, ...]]:
        drawn.append(storage.parse_body(path, lambda: _blocks(header)))
        count = header.shapes.get("durations", (0,))[0]
        if header.dtypes.get("order") != "U8" or {header.dtypes.get(n) for n in ("durations", "remainders")} != {"F64"}:
            raise StorageError(f"{path}: a schedule is uint8 blocks with float64 durations; not written by fixedformer")
        return {"order": (count,), "durations": (count,), "remainders": (count,)}

    header, tensors = storage.read(path, KIND, expect)
    body = header.body

    def build() -> Schedule:
        return Schedule(
            tensors["order"].numpy(),
            tensors["durations"].numpy(),
            tensors["remainders"].numpy(),
            int(body["substeps"]),
            body["mode"],
            body["fingerprint"],
            dict(body["report"]),
        )

    return drawn[0], storage.parse_body(path, build)


def _blocks(header: Header) -> FrozenBlocks:
    given = header.body["blocks"]
    try:
        blocks = FrozenBlocks(int(given["d"]), int(given["seed"]), float(given["scale"]), bool(given["causal"]))
    except FixedformerError as error:
        raise ValueError(str(error)) from None
    if blocks.fingerprint() != header.body["fingerprint"]:
        raise ValueError("the blocks that its seed draws here have another fingerprint than it states")
    return blocks


ARRAYS = ("nodes", "durations", "best_nodes", "best_durations")
"""Arrays of a relaxation's state; the last two may be missing."""
LED = ("led.nodes", "led.durations", "led.end")


def save_search(search: Search, path: PathLike) -> None:
    """Write an unfinished search, atomically; `compile(resume=load_search(path))` goes on with the same numbers."""
    state = search.state
    tensors = {} if state is None else {n: v for n in ARRAYS if (v := getattr(state, n)) is not None}
    if search.durations is not None:
        tensors["found"] = search.durations
    if search.led is not None:
        tensors |= {name: getattr(search.led, name.removeprefix("led.")) for name in LED}
    if search.unfolding is not None:
        tensors["unfolding"] = search.unfolding.durations
    body: dict[str, Any] = {
        "problem": search.problem,
        "attempt": search.attempt,
        "leads": search.leads,
        "strain": None if search.led is None else search.led.strain,
        "unfolding": None if search.unfolding is None else [search.unfolding.trial, search.unfolding.share],
        "error": _number(search.error),
        "amplification": _number(search.amplification),
        "amplification_back": _number(search.amplification_back),
        "returns": _number(search.returns),
        "log": [{k: _number(v) if isinstance(v, float) else v for k, v in entry.items()} for entry in search.log],
        "seconds": dict(search.seconds),
    }
    if state is not None:
        body["state"] = {
            "iteration": state.iteration,
            "strength": state.strength,
            "damping": state.damping,
            "since": state.since,
            "lowest": _number(state.lowest),
            "lowest_back": _number(state.lowest_back),
            "best": _number(state.best),
            "finished": state.finished,
        }
    plain = {name: torch.from_numpy(np.ascontiguousarray(value)) for name, value in tensors.items()}
    storage.write(path, SEARCH, plain, body)


def load_search(path: PathLike) -> Search:
    """Read an unfinished search. Raises StorageError for a damaged or foreign file."""
    from fixedformer.schedule.relax import State
    from fixedformer.schedule.reversible import Unfolding
    from fixedformer.schedule.solve import Search
    from fixedformer.schedule.start import Lead

    header, tensors = storage.read(path, SEARCH, lambda header: _search_shapes(path, header))
    body, arrays = header.body, {name: tensor.numpy() for name, tensor in tensors.items()}

    def build() -> Search:
        state = None
        if "state" in body:
            saved = dict(body["state"])
            saved |= {name: _value(saved[name]) for name in ("lowest", "lowest_back", "best")}
            kept: dict[str, Any] = {name: arrays[name] for name in ARRAYS if name in arrays}
            state = State(**kept, **saved)
        led = None
        if LED[0] in arrays:
            led = Lead(arrays[LED[0]], arrays[LED[1]], arrays[LED[2]], float(body["strain"]))
        unfolding = Unfolding(arrays["unfolding"], *body["unfolding"]) if "unfolding" in arrays else None
        return Search(
            problem=str(body["problem"]),
            leads=int(body["leads"]),
            led=led,
            unfolding=unfolding,
            attempt=int(body["attempt"]),
            state=state,
            durations=arrays.get("found"),
            error=_value(body["error"]),
            amplification=_value(body["amplification"]),
            amplification_back=_value(body["amplification_back"]),
            returns=_value(body["returns"]),
            log=tuple(_entry(entry) for entry in body["log"]),
            seconds=dict(body["seconds"]),
        )

    return storage.parse_body(path, build)


def _search_shapes(path: PathLike, header: Header) -> dict[str, tuple[int, ...]]:
    if set(header.dtypes.values()) - {"F64"} or set(header.shapes) - {*ARRAYS, *LED, "found", "unfolding"}:
        raise StorageError(
            f"{path}: a search holds float64 nodes and durations; the file was not written by fixedformer"
        )
    nodes, durations = header.shapes.get("nodes"), header.shapes.get("durations")
    pairs = {"best_nodes": nodes, "best_durations": durations}
    if any(name in header.shapes and header.shapes[name] != shape for name, shape in pairs.items()):
        raise StorageError(f"{path}: its best nodes and durations differ in shape from the present ones")
    return dict(header.shapes)


NUMBERS = ("error", "amplification", "amplification backwards", "backwards error")
"""Entries of an attempt's log that may be infinite."""


def _entry(saved: dict[str, Any]) -> dict[str, Any]:
    return {name: _value(value) if name in NUMBERS else value for name, value in saved.items()}


def _number(value: float) -> float | None:
    """JSON has no infinity: None stands for it."""
    return float(value) if np.isfinite(value) else None


def _value(saved: float | None) -> float:
    return float("inf") if saved is None else float(saved)
