"""Sudoku: 81 cells, 0 blank, row by row; the label of every cell is its digit in the only solution.

Puzzles come from a CSV of the user's (a header; columns `puzzle,solution`, as in Radcliffe's 3-million set, or the
field's `source,q,a,rating`), or are generated: full grids are drawn, cells are removed as long as one solution remains,
and every sample is one of these under a random symmetry of the game (digits, rows and columns in bands, bands,
transposition), which keeps the solution unique. Training and held-out puzzles come from different ones.
"""

import csv
from dataclasses import dataclass
from functools import cache
from itertools import islice
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from fixedformer.errors import SpecError
from fixedformer.tasks.task import Array, Examples, Ids, half_of

CELLS, ALL = 81, (1 << 9) - 1
BLANK = 0
Digits = NDArray[np.uint8]
HELD_OUT = 10  # every tenth puzzle of a file


def _units() -> tuple[list[list[int]], list[list[int]]]:
    """The 27 rows, columns and boxes; and for each cell the three it lies in (row, 9 + column, 18 + box)."""
    of = [[c // 9, 9 + c % 9, 18 + c // 27 * 3 + c % 9 // 3] for c in range(CELLS)]
    return [[c for c in range(CELLS) if u in of[c]] for u in range(27)], of


UNITS, UNIT_OF = _units()


def solutions(puzzle: list[int], limit: int = 2, order: list[int] | None = None) -> list[list[int]]:
    """Up to `limit` solutions of 81 digits (0 blank), by always filling the cell with the fewest candidates.

    order: in which order digits 1..9 are tried. An inconsistent puzzle has none.
    """
    used, grid = [0] * 27, list(puzzle)
    for cell, digit in enumerate(grid):
        if digit:
            bit = 1 << (digit - 1)
            if any(used[u] & bit for u in UNIT_OF[cell]):
                return []
            for u in UNIT_OF[cell]:
                used[u] |= bit
    found: list[list[int]] = []
    _fill(grid, used, [c for c in range(CELLS) if not grid[c]], found, limit, order or list(range(1, 10)))
    return found


def _fill(
    grid: list[int], used: list[int], blanks: list[int], found: list[list[int]], limit: int, order: list[int]
) -> None:
    """Fill the blanks in every way until `limit` are found; `grid` and `used` are as before afterwards."""
    if not blanks:
        found.append(list(grid))
        return
    best, choices = -1, 10
    for place, cell in enumerate(blanks):
        row, column, box = UNIT_OF[cell]
        open_ = (ALL & ~(used[row] | used[column] | used[box])).bit_count()
        if open_ < choices:
            best, choices = place, open_
            if open_ <= 1:
                break
    if choices == 0:
        return
    cell, rest = blanks[best], blanks[:best] + blanks[best + 1 :]
    row, column, box = UNIT_OF[cell]
    free = ALL & ~(used[row] | used[column] | used[box])
    for digit in order:
        bit = 1 << (digit - 1)
        if not free & bit:
            continue
        grid[cell] = digit
        for u in (row, column, box):
            used[u] |= bit
        _fill(grid, used, rest, found, limit, order)
        grid[cell] = BLANK
        for u in (row, column, box):
            used[u] &= ~bit
        if len(found) >= limit:
            return


def puzzle_of(generator: np.random.Generator, clues: int) -> tuple[list[int], list[int]]:
    """A puzzle with one solution, and that solution: cells are removed in random order while `clues` remain and the
    solution stays the only one (so it may keep more)."""
    start = [0] * CELLS
    start[0:9] = [int(d) for d in generator.permutation(9) + 1]
    grid = solutions(start, 1, [int(d) for d in generator.permutation(9) + 1])[0]
    puzzle, left = list(grid), CELLS
    for cell in generator.permutation(CELLS).tolist():
        if left <= clues:
            break
        digit, puzzle[cell] = puzzle[cell], BLANK
        if len(solutions(puzzle, 2)) > 1:
            puzzle[cell] = digit
        else:
            left -= 1
    return puzzle, grid


@cache
def _generated(count: int, clues: int, seed: int) -> tuple[Digits, Digits]:
    generator = np.random.default_rng([81, seed])
    pairs = [puzzle_of(generator, clues) for _ in range(count)]
    puzzles, solved = (np.array([pair[i] for pair in pairs], dtype=np.uint8) for i in range(2))
    return puzzles, solved


@dataclass(frozen=True, eq=False)
class Sudoku:
    """Every blank cell is scored. `puzzles`, `solved` (count, 81): what samples are drawn from; vary: under a random
    symmetry. `generated` and `read` make them."""

    puzzles: Digits
    solved: Digits
    vary: bool = True

    def half(self, which: int) -> "Sudoku":
        """Every other puzzle, from the first or the second on (the same where there is only one)."""
        rows = half_of(self.puzzles, which)
        return Sudoku(self.puzzles[rows], self.solved[rows], self.vary)

    name = "sudoku"
    vocabulary = tuple("0123456789")
    tokens = CELLS

    @classmethod
    def generated(cls, pool: int = 200, clues: int = 32, seed: int = 0) -> tuple["Sudoku", "Sudoku"]:
        """Training and held-out task over pools of generated puzzles of about `clues` clues (17..80)."""
        if not 17 <= clues <= 80 or pool < 1:
            raise SpecError(f"a puzzle has 17..80 clues and a pool at least one, got {clues} clues, a pool of {pool}")
        return cls(*_generated(pool, clues, 2 * seed)), cls(*_generated(max(1, pool // 4), clues, 2 * seed + 1))

    @classmethod
    def read(cls, path: Path, limit: int | None = None, check: int = 100) -> tuple["Sudoku", "Sudoku"]:
        """Training and held-out task of a CSV file, every tenth different puzzle held out; up to `limit` puzzles, the
        first `check` of them solved again.

        Raises SpecError, naming the line, for columns that are not there, for a line that is no puzzle with its
        solution, and for a puzzle with more than one.
        """
        if not path.is_file():
            raise SpecError(f"{path}: no such file; leave `path` out to generate puzzles")
        with open(path, newline="", encoding="utf-8") as file:
            reader = csv.reader(file)
            header = next(reader, [])
            names = next((pair for pair in (("puzzle", "solution"), ("q", "a")) if set(pair) <= set(header)), None)
            if names is None:
                raise SpecError(f"{path}: needed columns puzzle and solution, or q and a, got {', '.join(header)}")
            columns = [header.index(name) for name in names]
            lines = [[line[c].strip() if c < len(line) else "" for c in columns] for line in islice(reader, limit)]
        if len(lines) < HELD_OUT:
            raise SpecError(f"{path}: needs at least {HELD_OUT} puzzles, to train on and to hold out; got {len(lines)}")
        puzzles, solved = (_grids(path, [line[i] for line in lines]) for i in range(2))
        _check(path, puzzles, solved, check)
        _, first, which = np.unique(puzzles, axis=0, return_index=True, return_inverse=True)
        order = np.argsort(np.argsort(first))[which.reshape(-1)]  # a puzzle that comes again is the same puzzle
        held = order % HELD_OUT == 0
        if held.all():
            raise SpecError(f"{path}: needs at least two different puzzles, to train on and to hold out")
        return cls(puzzles[~held], solved[~held], False), cls(puzzles[held], solved[held], False)

    def sample(self, count: int, generator: np.random.Generator) -> Examples:
        rows = generator.integers(0, len(self.puzzles), count)
        puzzles, solved = self.puzzles[rows].astype(np.int64), self.solved[rows].astype(np.int64)
        if self.vary:
            puzzles, solved = _symmetry(puzzles, solved, generator)
        return Examples(puzzles, solved, puzzles == BLANK)

    def solve(self, inputs: list[int]) -> list[int]:
        found = solutions(inputs, 2)
        if len(found) != 1:
            raise SpecError(f"the puzzle has {'no' if not found else 'more than one'} solution")
        return found[0]

    def measures(self, examples: Examples, predictions: Array) -> dict[str, float]:
        """Share of whole grids right (the clues are given: only blanks count)."""
        right = (predictions == examples.labels) | ~examples.scored
        return {"whole grids": float(right.all(1).mean())}

    def trivial_rules(self, examples: Examples) -> dict[str, float]:
        """One digit everywhere; the smallest digit that is still free in row, column and box."""
        inputs = examples.inputs
        seen = np.zeros((len(inputs), 27, 10), dtype=np.bool_)
        units = np.array(UNIT_OF)
        rows = np.arange(len(inputs))[:, None]
        for kind in range(3):
            seen[rows, units[:, kind], inputs] = True
        free = ~(seen[:, units[:, 0]] | seen[:, units[:, 1]] | seen[:, units[:, 2]])[:, :, 1:]
        return {
            "always 1": examples.accuracy(np.ones_like(inputs)),
            "smallest free digit": examples.accuracy(free.argmax(-1) + 1),
        }


def _symmetry(puzzles: Ids, solved: Ids, generator: np.random.Generator) -> tuple[Ids, Ids]:
    """Each row under its own random symmetry: new digits, rows and columns within bands, bands, transposition."""
    count = len(puzzles)
    digits = np.zeros((count, 10), dtype=np.int64)
    digits[:, 1:] = generator.random((count, 9)).argsort(1) + 1

    def lines() -> Ids:
        bands = generator.random((count, 3)).argsort(1)
        inner = generator.random((count, 3, 3)).argsort(2)
        return (3 * bands[:, :, None] + np.take_along_axis(inner, bands[:, :, None], 1)).reshape(count, 9)

    rows, columns = lines(), lines()
    turned = generator.random(count) < 0.5
    place = rows[:, :, None] * 9 + columns[:, None, :]
    place[turned] = place[turned].swapaxes(1, 2)
    flat = place.reshape(count, CELLS)
    index = np.arange(count)[:, None]
    return digits[index, puzzles[index, flat]], digits[index, solved[index, flat]]


def _grids(path: Path, texts: list[str]) -> Digits:
    """Lines of 81 characters, digits or a dot for blank, as (count, 81)."""
    for number, text in enumerate(texts, 2):
        if len(text) != CELLS or not text.isascii():
            raise SpecError(f"{path}, line {number}: needed 81 digits (0 or . blank), got {text[:90]!r}")
    characters = np.frombuffer("".join(texts).encode(), dtype=np.uint8).reshape(-1, CELLS)
    grids: Digits = np.where(characters == ord("."), 0, characters - ord("0")).astype(np.uint8)
    if (grids > 9).any():
        raise SpecError(f"{path}, line {int((grids > 9).any(1).argmax()) + 2}: needed digits (0 or . blank)")
    return grids


def _check(path: Path, puzzles: Digits, solved: Digits, check: int) -> None:
    """Every solution is a full valid grid that fits its clues; the first `check` puzzles are solved again."""
    units = np.sort(solved[:, np.array(UNITS)], axis=-1)  # (count, 27, 9)
    valid = (units == np.arange(1, 10)).all((1, 2))
    fits = ((puzzles == BLANK) | (puzzles == solved)).all(1)
    if not (valid & fits).all():
        line = int((~(valid & fits)).argmax()) + 2
        raise SpecError(f"{path}, line {line}: the second grid is no solution of the first")
    for line, (puzzle, grid) in enumerate(zip(puzzles[:check].tolist(), solved[:check].tolist()), 2):
        if (found := solutions(puzzle)) != [grid]:
            raise SpecError(f"{path}, line {line}: the puzzle has {len(found)} or more solutions, not one")
