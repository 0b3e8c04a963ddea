"""Tables 2, 3, 4, figure 5 and the probe of appendix D of "On Expressive Power of Looped Transformers", as recipes.

scale "paper": section 5 and appendix C as they stand, for a GPU; what they leave open is said beside each recipe. scale
"small": width 64 and short strings, so that the paper's effects can show on CPU cores: minutes a cell.
"""

from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

from fixedformer.errors import SpecError
from fixedformer.experiments.looped import LoopedRecipe
from fixedformer.experiments.tables import Row, Scale
from fixedformer.loop.looped_spec import setting
from fixedformer.training.fit import Schedule

TmltItem = Literal["tmlt-table2", "tmlt-table3", "tmlt-table4", "tmlt-figure5", "tmlt-probe"]
ITEMS: tuple[TmltItem, ...] = ("tmlt-table2", "tmlt-table3", "tmlt-table4", "tmlt-figure5", "tmlt-probe")
PLAIN, CLOCKED, GATED = "none", "adaln", "constant"
NAMES = {PLAIN: "", CLOCKED: ", timestep", GATED: ", gates without a clock"}

# Table 2: layers of the standard model and its accuracy; loops -> (looped, with timestep).
TABLE_2: dict[str, tuple[int, float, dict[int, tuple[float, float]]]] = {
    "sudoku": (6, 0.0, {4: (0.0, 0.0), 8: (0.0, 0.0), 16: (65.6, 62.0), 32: (87.9, 90.2)}),
    "countdown": (6, 53.8, {4: (28.3, 33.2), 8: (52.7, 54.4), 16: (81.0, 80.2), 32: (88.1, 90.5)}),
    "lcs-60": (12, 70.0, {5: (66.0, 68.5), 10: (81.8, 80.5), 50: (98.6, 99.3), 100: (96.9, 97.1)}),
    "lcs-100": (12, 39.8, {5: (39.6, 36.7), 10: (45.1, 45.6), 50: (93.5, 98.1), 100: (98.2, 98.6)}),
    "edit-distance-40": (12, 54.2, {5: (41.4, 44.8), 10: (57.9, 63.5), 50: (85.4, 94.5), 100: (90.4, 96.1)}),
    "edit-distance-60": (12, 41.4, {5: (23.8, 26.6), 10: (32.6, 38.9), 50: (47.3, 57.3), 100: (47.7, 88.3)}),
}
# Table 3: squared errors; table 4: test perplexities. Standard, looped, with timestep.
TABLE_3 = {"standard": 8.6e-3, PLAIN: 1.4e-2, CLOCKED: 1.7e-3}
TABLE_4 = {"standard": 20.5, PLAIN: 20.6, CLOCKED: 19.6}
PAPER_WIDTH: dict[str, Any] = {"width": 256, "heads": 4, "checkpointing": "nested", "biases": True}
BATCH, EPOCHS = 64, 50


def tmlt_rows(item: TmltItem, scale: Scale, data: Path | None = None) -> list[Row]:
    """Every row of an item. data: a Sudoku CSV for table 2, a text for table 4 and the probe; without it Sudoku puzzles
    are generated and the text is the standard library's documentation. SpecError for an unknown item."""
    if item == "tmlt-table2":
        return _table_2_paper(data) if scale == "paper" else _table_2_small(data)
    if item == "tmlt-table3":
        return _table_3(scale)
    if item == "tmlt-table4":
        return _table_4(scale, data)
    if item == "tmlt-figure5":
        return _figure_5(scale)
    if item == "tmlt-probe":
        return _probe(scale, data)
    raise SpecError(f"reproduce knows {', '.join(ITEMS)} of that paper, got {item!r}")


def cells(name: str, base: LoopedRecipe, plan: list[tuple[int, int, str]], papers: list[float | None],
          seeds: dict[tuple[int, int, str], int] | None = None) -> list[Row]:  # fmt: skip
    """Rows of one task: (layers, loops, timestep) each; loops = 0 for a standard model of so many layers.

    seeds: how many of them, where more than one.
    """
    made = []
    for cell, paper in zip(plan, papers):
        layers, loops, timestep = cell
        if loops:
            switches, kind = {**base.switches, "layers": layers, "loops": loops, "timestep": timestep}, "looped"
            variant = f"r = {loops}{NAMES[timestep]}" if layers == 1 else f"{layers} x {loops}{NAMES[timestep]}"
        else:
            switches, kind = {**base.switches, "layers": layers, "loops": 1, "injection": "none"}, "standard"
            switches.pop("loss_over", None)
            variant = f"L = {layers}"
        recipe = replace(base, switches=switches)
        count = (seeds or {}).get(cell, 1)
        made.append(Row(name, variant, kind, tuple(replace(recipe, seed=seed) for seed in range(count)), paper))
    return made


def _table_2_paper(data: Path | None) -> list[Row]:
    """Four heads, width 256, AdamW, weight decay 0.01, rate 1e-4 to 0 linearly after 5 warm-up steps, batch 64, 50
    epochs. Left open there, ours: learned positions, biases, GELU of 4 x 256, gradients clipped at 1, LCS over 26
    letters, the first answer of a fixed order as Countdown's label (fifteen places said at once agree on no other).
    """
    sets = {"sudoku": 3_000_000, "countdown": 5_000_000}
    tests = {"sudoku": 100_000}
    made = []
    for name, (layers, standard, numbers) in TABLE_2.items():
        task, _, length = name.rpartition("-") if name[-1].isdigit() else (name, "", "")
        options: dict[str, Any] = {"length": int(length)} if length else {}
        own: dict[str, dict[str, Any]] = {"lcs": {"letters": 26}, "countdown": {"label": "first"}}
        options |= own.get(task, {})
        if task == "sudoku" and data is not None:
            options = {"path": str(data), "limit": 3_100_000}
        size = sets.get(task, 1_000_000)
        schedule = Schedule(
            steps=size * EPOCHS // BATCH, batch=BATCH, rate=1e-4, warmup=5, decay="linear", weight_decay=0.01,
            validate_every=5000, validation=1000,
        )  # fmt: skip
        switches = {**setting("paper"), **PAPER_WIDTH, **({"loss_over": "all"} if task == "sudoku" else {})}
        # A Sudoku file is a finite set already, and generated puzzles are fresh ones.
        finite = None if task == "sudoku" else size
        base = LoopedRecipe(task, options, switches, finite, 0, schedule, tests.get(task, 1000))
        plan: list[tuple[int, int, str]] = [(layers, 0, PLAIN)]
        plan += [(1, loops, timestep) for loops in numbers for timestep in (PLAIN, CLOCKED)]
        made += cells(name, base, plan, [standard, *(value for pair in numbers.values() for value in pair)])
    return made


# Small scale: what was tried is in docs/loops.md. Rotary positions: learned ones take several times as many steps.
SMALL_SWITCHES: dict[str, Any] = {**setting("clean"), "width": 64, "heads": 4}


def _small(task: str, options: dict[str, Any], steps: int, **switches: Any) -> LoopedRecipe:
    schedule = Schedule(
        steps=steps, batch=32, rate=2e-3, warmup=200, decay="linear", weight_decay=0.01, validate_every=500,
        validation=2000,
    )  # fmt: skip
    return LoopedRecipe(task, options, {**SMALL_SWITCHES, **switches}, None, 0, schedule)


FEW, MORE = 2, 8
SMALL_PLAN: list[tuple[int, int, str]] = [
    (4, 0, PLAIN), (1, FEW, PLAIN), (1, MORE, PLAIN), (1, MORE, CLOCKED), (1, MORE, GATED), (1, FEW, CLOCKED),
]  # fmt: skip
HEADLINES = {(1, MORE, PLAIN): 3, (1, MORE, CLOCKED): 3, (1, FEW, PLAIN): 3, (4, 0, PLAIN): 3}


def _table_2_small(data: Path | None) -> list[Row]:
    """Table 2's comparison on short strings, easy Sudoku and two-digit Countdown."""
    sudoku: dict[str, Any] = {"path": str(data)} if data is not None else {"clues": 50, "pool": 100}
    countdown = {"numbers": 20, "high": 40, "largest": 60, "label": "first"}
    # rows, columns and boxes are places of their own, which rotary positions, being relative, cannot name
    grids = _small("sudoku", sudoku, 5000, loss_over="all", positions="learned")
    sums = _small("countdown", countdown, 10_000, positions="learned")
    grids, sums = (replace(base, schedule=replace(base.schedule, precision="bfloat16")) for base in (grids, sums))
    made = []
    for name, beside, base, plan in [
        ("edit-distance-6", "edit-distance-60", _small("edit-distance", {"length": 6, "letters": 3}, 6000), SMALL_PLAN),
        ("lcs-8", "lcs-100", _small("lcs", {"length": 8}, 5000), SMALL_PLAN),
        ("countdown", "countdown", sums, SMALL_PLAN[:4]),
        ("sudoku", "sudoku", grids, SMALL_PLAN[:4]),
    ]:
        papers = [_beside(beside, cell) for cell in plan]
        made += cells(name, base, plan, papers, HEADLINES if name[-1].isdigit() else None)
    return made


def _beside(name: str, cell: tuple[int, int, str]) -> float | None:
    """The cell of the paper's table that a small one stands beside: its standard model, its second number of loops for
    FEW, its largest for MORE; None for the control, which it does not have."""
    _, loops, timestep = cell
    _, standard, numbers = TABLE_2[name]
    if not loops:
        return standard
    if timestep == GATED:
        return None
    pair = list(numbers.values())[{FEW: 1, MORE: -1}[loops]]
    return pair[timestep == CLOCKED]


def _table_3(scale: Scale) -> list[Row]:
    """In-context decision trees. Paper: depth 4, 20 dimensions, 200,000 steps, a curriculum, L = r = 12.

    Left open there, ours: width 256 with 8 heads as Yang et al., rate 1e-4, batch 64, squared error at every x.
    """
    papers: list[float | None] = [TABLE_3["standard"], TABLE_3[PLAIN], TABLE_3[CLOCKED]]
    if scale == "paper":
        schedule = Schedule(steps=200_000, batch=64, rate=1e-4, warmup=5, decay="linear", weight_decay=0.01,
                            validate_every=2000, validation=500)  # fmt: skip
        switches = {**setting("paper"), **PAPER_WIDTH, "heads": 8, "loss_over": "all"}
        base = LoopedRecipe("trees", {}, switches, None, 0, schedule)
        return cells("trees", base, [(12, 0, PLAIN), (1, 12, PLAIN), (1, 12, CLOCKED)], papers)
    options = {"depth": 2, "dimensions": 3, "points": 20, "first_dimensions": 1, "first_points": 10, "point_step": 5,
               "every": 400}  # fmt: skip
    base = _small("trees", options, 2500, loss_over="all", positions="learned")
    loops = 8
    plan = [(loops, 0, PLAIN), (1, loops, PLAIN), (1, loops, CLOCKED), (1, loops, GATED)]
    seeds = {(1, loops, PLAIN): 3, (1, loops, CLOCKED): 3}
    return cells("trees", base, plan, [*papers, None], seeds)


def _table_4(scale: Scale, data: Path | None) -> list[Row]:
    """Language modelling, test perplexity. Paper: WikiText-103, GPT-2 byte pairs, width 768, 12 heads, r = 24, batch 48
    of 1024 tokens, 100,000 steps, 2e-4 to 6e-5 by a cosine after 2,000, betas .9 and .95, weight decay 1e-4.

    The table says L = 12 for the standard model, appendix C.3 six layers of width 512 with 8 heads; the row is the
    appendix's. Norms, read-out and start are the public code's.
    """
    papers: list[float | None] = [TABLE_4["standard"], TABLE_4[PLAIN], TABLE_4[CLOCKED]]
    path = {} if data is None else {"path": str(data)}
    if scale == "paper":
        schedule = Schedule(
            steps=100_000, batch=48, rate=2e-4, warmup=2000, decay="cosine", final_rate=6e-5, weight_decay=1e-4,
            betas=(0.9, 0.95), validate_every=1000, validation=96, precision="bfloat16",
        )  # fmt: skip
        switches = {**setting("code"), "width": 768, "heads": 12, "checkpointing": "nested"}
        options = {**path, "block": 1024, "tokeniser": "bpe", "vocabulary": 50_257}
        base = LoopedRecipe("language", options, switches, None, 0, schedule, 240)
        small = replace(base, switches={**switches, "width": 512, "heads": 8})
        return [*cells("language", small, [(6, 0, PLAIN)], papers[:1]),
                *cells("language", base, [(1, 24, PLAIN), (1, 24, CLOCKED)], papers[1:])]  # fmt: skip
    schedule = Schedule(steps=800, batch=16, rate=2e-3, warmup=50, decay="cosine", final_rate=2e-4, weight_decay=1e-4,
                        betas=(0.9, 0.95), validate_every=200, validation=100)  # fmt: skip
    switches = {**setting("code"), "width": 64, "heads": 4}
    base = LoopedRecipe("language", {**path, "block": 64}, switches, None, 0, schedule, 500)
    return cells("language", base, [(6, 0, PLAIN), (1, 6, PLAIN), (1, 6, CLOCKED)], papers)


def _figure_5(scale: Scale) -> list[Row]:
    """Train against test accuracy of runs on edit distance: finite training sets, with and without timesteps."""
    if scale == "paper":
        return [row for row in _table_2_paper(None) if row.task == "edit-distance-60"]
    base = replace(_small("edit-distance", {"length": 6, "letters": 3}, 1500), train_size=20_000)
    plan = [(1, loops, timestep) for loops in (2, 4, 8) for timestep in (PLAIN, CLOCKED)]
    return cells("edit-distance-6", base, plan, [None] * len(plan))


def _probe(scale: Scale, data: Path | None) -> list[Row]:
    """Appendix D: a tenth of the tokens replaced; memorisation and continuity with and without timesteps."""
    made = []
    for row in _table_4(scale, data):
        if row.machine == "looped":
            recipes = tuple(
                replace(r, options={**r.options, "replaced": 0.1}) for r in row.recipes if isinstance(r, LoopedRecipe)
            )
            made.append(replace(row, recipes=recipes, paper=None))  # what it prints stands in `probe_lines`
    return made
