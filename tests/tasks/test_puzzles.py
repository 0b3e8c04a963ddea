"""Sudoku and Countdown: every label is checked by a solver that shares nothing with the generator."""

import itertools

import numpy as np
import pytest

import fixedformer as ff
from fixedformer.tasks.countdown import WAYS, Countdown, equations, results, search
from fixedformer.tasks.famous import FAMOUS
from fixedformer.tasks.sudoku import Sudoku, solutions


def plain_solutions(grid, limit=2):
    """Count solutions by trying digits cell by cell, the cell with the fewest first; sets, no bits."""

    def seen(cell):
        row, column = divmod(cell, 9)
        box = [(row // 3 * 3 + i) * 9 + column // 3 * 3 + j for i in range(3) for j in range(3)]
        return {grid[i] for i in [*range(row * 9, row * 9 + 9), *range(column, 81, 9), *box]}

    blanks = [(9 - len(seen(cell) - {0}), cell) for cell in range(81) if not grid[cell]]
    if not blanks:
        return 1
    _, cell = min(blanks)
    count = 0
    for digit in set(range(1, 10)) - seen(cell):
        grid[cell] = digit
        count += plain_solutions(grid, limit - count)
        grid[cell] = 0
        if count >= limit:
            break
    return count


def test_a_dozen_famous_grids_have_one_solution_each():
    assert len(FAMOUS) >= 12
    for name, text in FAMOUS.items():
        puzzle = [int(c) for c in text]
        found = solutions(puzzle)
        assert len(found) == 1, name
        grid = np.array(found[0]).reshape(9, 9)
        boxes = grid.reshape(3, 3, 3, 3).swapaxes(1, 2).reshape(9, 9)
        for lines in (grid, grid.T, boxes):
            assert (np.sort(lines, 1) == np.arange(1, 10)).all(), name
        assert all(clue in (0, digit) for clue, digit in zip(puzzle, found[0])), name


def test_generated_puzzles_have_one_solution():
    train, held_out = Sudoku.generated(pool=4, clues=34)
    for task, count in ((train, 8), (held_out, 3)):
        examples = task.sample(count, np.random.default_rng(0))
        for puzzle, solved in zip(examples.inputs.tolist(), examples.labels.tolist()):
            assert plain_solutions(list(puzzle)) == 1
            assert task.solve(puzzle) == solved
        assert ((examples.inputs == 0) == examples.scored).all()
    many = train.sample(3000, np.random.default_rng(1))
    assert len({row.tobytes() for row in many.inputs}) > 2990, "symmetries make fresh puzzles"
    assert many.inputs.astype(bool).sum(1).min() >= 34
    rules = train.trivial_rules(many)
    assert rules["always 1"] == pytest.approx(1 / 9, abs=0.02)
    assert 0.2 < rules["smallest free digit"] < 0.8
    assert train.measures(many, many.labels)["whole grids"] == 1
    wrong = many.labels.copy()
    wrong[:1500, :] = 0
    assert train.measures(many, wrong)["whole grids"] == 0.5


def test_sudoku_from_a_file(tmp_path):
    task, _ = Sudoku.generated(pool=4, clues=40)
    examples = task.sample(40, np.random.default_rng(0))
    text = ["".join(map(str, row)) for row in examples.inputs.tolist()]
    solved = ["".join(map(str, row)) for row in examples.labels.tolist()]
    path = tmp_path / "s.csv"
    path.write_text("source,q,a,rating\n" + "".join(f"x,{p.replace('0', '.')},{s},1\n" for p, s in zip(text, solved)))
    train, held_out = Sudoku.read(path)
    assert (len(train.puzzles), len(held_out.puzzles)) == (36, 4)
    found = held_out.sample(5, np.random.default_rng(0))
    assert all(held_out.solve(p) == s for p, s in zip(found.inputs.tolist(), found.labels.tolist()))
    assert len(Sudoku.read(path, limit=20)[0].puzzles) == 18
    cases = [
        ("puzzle,answer\n", "needed columns puzzle and solution"), ("puzzle,solution\n", "at least 10 puzzles"),
        ("puzzle,solution\n" + f"{text[0]},{solved[0]}\n" * 9 + "12,34\n", "line 11: needed 81 digits"),
        ("puzzle,solution\n" + f"{text[0]},{solved[1]}\n" * 10, "line 2: the second grid is no solution"),
        ("puzzle,solution\n" + f"{'0' * 81},{solved[1]}\n" * 10, "has 2 or more solutions"),
        ("puzzle,solution\n" + f"{'x' * 81},{solved[1]}\n" * 10, "line 2: needed digits"),
    ]  # fmt: skip
    for body, message in cases:
        path.write_text(body)
        with pytest.raises(ff.SpecError, match=message):
            Sudoku.read(path)
    with pytest.raises(ff.SpecError, match="no such file"):
        Sudoku.read(tmp_path / "none.csv")
    with pytest.raises(ff.SpecError, match="has more than one solution"):
        task.solve([0] * 81)


def test_countdown_labels_are_right():
    task = Countdown()
    examples = task.sample(300, np.random.default_rng(0))
    assert task.measures(examples, examples.labels) == {"exactly the label": 1.0, "right answers": 1.0}
    words = [task.vocabulary[i] for i in examples.labels[0].tolist()]
    assert words[8] == words[13] == words[18] == "="
    assert words[-1] == "."
    for inputs, labels in zip(examples.inputs[:60].tolist(), examples.labels[:60].tolist()):
        assert inputs[:5] == labels[:5]
        assert task.right(inputs, task.solve(inputs)[5:20])


def test_countdown_counts_any_right_answer():
    """The paper's example; another order of its first two steps; and what is wrong."""
    task = Countdown()
    code = {word: i for i, word in enumerate(task.vocabulary)}
    inputs = [58, 84, 48, 62, 96, *[0] * 15, code["."]]

    def right(text):
        return task.right(inputs, [code[word] for word in text.split()])

    assert right("62 - 58 = 4 48 / 4 = 12 84 + 12 = 96")
    assert right("62 - 58 = 4 48 / 4 = 12 12 + 84 = 96"), "operands in the other order"
    assert not right("62 - 58 = 4 48 / 4 = 12 84 + 11 = 95"), "a number that is not there"
    assert not right("62 - 58 = 4 48 / 4 = 12 84 - 12 = 72"), "another target"
    assert not right("62 - 58 = 5 48 / 4 = 12 84 + 12 = 96"), "wrong arithmetic"
    assert not right("62 58 - = 4 48 / 4 = 12 84 + 12 = 96"), "no equation"


def test_countdown_knows_every_way():
    """Results of all 1152 ways against equations written out; and no problem is solvable only by plain search."""
    generator = np.random.default_rng(1)
    numbers = generator.integers(1, 25, (6, 4))
    found = results(numbers, 100)
    assert found.shape == (6, len(WAYS)) == (6, 1152)
    for row, way in itertools.product(range(6), range(0, 1152, 7)):
        steps = equations(numbers[row].tolist(), way)
        allowed = all(1 <= result <= 100 and (sign != "/" or high % low == 0) for high, sign, low, result in steps)
        assert found[row, way] == (steps[-1][3] if allowed else 0)
    for row in range(6):
        reached = set(found[row].tolist()) - {0}
        for target in range(1, 60, 3):
            assert (search(numbers[row].tolist(), target, 100) is not None) == (target in reached)


def test_countdown_holds_targets_out():
    train = Countdown()
    held_out = train.held_out()
    assert len(held_out.targets) == 9
    assert len(train.targets) == 82
    assert not set(train.targets) & set(held_out.targets)
    examples = held_out.sample(200, np.random.default_rng(0))
    assert set(examples.inputs[:, 4]) <= set(held_out.targets)
    assert not set(train.sample(500, np.random.default_rng(0)).inputs[:, 4]) & set(held_out.targets)


@pytest.mark.parametrize(("options", "message"), [
    ({"low": 50, "high": 40}, "low <= high"), ({"numbers": 101}, "numbers <= largest"), ({"held": "some"}, "held must"),
    ({"largest": 200, "high": 100}, "largest is at most 181"),
])  # fmt: skip
def test_countdown_refuses(options, message):
    with pytest.raises(ff.SpecError, match=message):
        Countdown(**options)


def test_sudoku_refuses():
    with pytest.raises(ff.SpecError, match=r"17\.\.80 clues"):
        Sudoku.generated(clues=10)


def test_countdown_labels_the_first_way():
    """The label of the same problem is always the same, right, and no earlier way hits."""
    task = Countdown(numbers=9, high=20, largest=30, label="first")
    drawn = task.sample(200, np.random.default_rng(0))
    for given, label in zip(drawn.inputs.tolist(), drawn.labels.tolist()):
        assert task.right(given, label[5:20])
        hits = np.flatnonzero(results(np.array([given[:4]]), 30)[0] == given[4])
        flat = [x for high, sign, low, result in equations(given[:4], int(hits[0])) for x in (high, sign, low, result)]
        names = [task.vocabulary[token] for token in label[5:20]]
        assert [name for name in names if name != "="] == [str(x) for x in flat]


def test_a_sudoku_that_comes_again_is_on_one_side(tmp_path):
    one, _ = Sudoku.generated(pool=3, clues=40)
    texts = [["".join(map(str, grid)) for grid in grids] for grids in (one.puzzles, one.solved)]
    lines = [f"{puzzle},{solved}" for puzzle, solved in zip(*texts)]
    (tmp_path / "s.csv").write_text("puzzle,solution\n" + "\n".join(lines * 7) + "\n")
    train, held_out = Sudoku.read(tmp_path / "s.csv")
    assert not {row.tobytes() for row in train.puzzles} & {row.tobytes() for row in held_out.puzzles}
