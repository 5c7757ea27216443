"""Draws the figures of the documentation: ``python docs/figures.py`` writes docs/pages/figures/*.svg.

They are drawings of the collectives. Text is large enough for a phone.
"""

import sys
from pathlib import Path

import matplotlib as mpl
from matplotlib import pyplot as plt
from matplotlib.axes import Axes
from matplotlib.patches import FancyArrowPatch, Rectangle

FIGURES = Path(__file__).parent / "pages" / "figures"
RANK_COLOURS = ("#9ecae9", "#ffcf9a", "#b5dfae")
INK, FAINT, ZERO = "#222222", "#8a8a8a", "#f1f1f1"
FORWARD, BACKWARD = "#3a6ea5", "#b0413e"

# ------------------------------------------------------------------------------------------------ the six collectives

Block = tuple[str, tuple[int, ...]]  # its text, and the ranks it is made of: none, one, or all that were added up
Stack = list[Block]
Side = list[Stack]  # one stack for each rank
WORLD = 3
ALL_RANKS = tuple(range(WORLD))


def only_0(block: Block, rest: str = "0") -> Side:
    return [[block] if r == 0 else [(rest, ())] for r in ALL_RANKS]


def slices(letter: str) -> Side:
    return [[(f"{letter}{SUBSCRIPTS[r]}[{s}]", (s,)) for s in ALL_RANKS] for r in ALL_RANKS]


def sums_of_slices(letter: str) -> Side:
    return [[(f"Σᵣ {letter}ᵣ[{r}]", (r,))] for r in ALL_RANKS]


SUBSCRIPTS = "₀₁₂"
X, G = ([[(f"{letter}{SUBSCRIPTS[r]}", (r,))] for r in ALL_RANKS] for letter in "xg")
X0, G0 = ([side[0]] * WORLD for side in (X, G))
X_STACKED, G_STACKED = ([block for (block,) in side] for side in (X, G))
SUM_X, SUM_G = ("x₀+x₁+x₂", ALL_RANKS), ("g₀+g₁+g₂", ALL_RANKS)
PARAMETER: Side = [[("φ", ())]] * WORLD

ALL_TO_ALL = [(a, b) for a in ALL_RANKS for b in ALL_RANKS]
STAY = [(r, r) for r in ALL_RANKS]
FROM_0 = [(0, r) for r in ALL_RANKS]
TO_0 = [(r, 0) for r in ALL_RANKS]

COLLECTIVES: dict[str, tuple[Side, Side, list[tuple[int, int]], Side, Side, list[tuple[int, int]]]] = {
    # name: inputs, outputs, who sends to whom; gradients of outputs, of inputs, who sends to whom
    "reduce": (X, only_0(SUM_X), TO_0, only_0(("g₀", (0,)), "not read"), G0, FROM_0),
    "all_reduce": (X, [[SUM_X]] * WORLD, ALL_TO_ALL, G, [[SUM_G]] * WORLD, ALL_TO_ALL),
    "scatter": ([X_STACKED, [], []], X, FROM_0, G, [G_STACKED, [], []], TO_0),
    "gather": (X, [X_STACKED, [], []], TO_0, [G_STACKED, [], []], G, FROM_0),
    "all_gather": (X, [X_STACKED] * WORLD, ALL_TO_ALL, slices("g"), sums_of_slices("g"), ALL_TO_ALL),
    "broadcast": (only_0(("x₀", (0,)), "not read"), X0, FROM_0, G, only_0(SUM_G), TO_0),
    "reduce_scatter": (slices("x"), sums_of_slices("x"), ALL_TO_ALL, G, [G_STACKED] * WORLD, ALL_TO_ALL),
    "replicated": (PARAMETER, PARAMETER, STAY, G, [[SUM_G]] * WORLD, ALL_TO_ALL),
}

WIDE, HIGH, PITCH = 1.0, 0.34, 1.3


def draw_stack(ax: Axes, stack: Stack, left: float, bottom: float) -> None:
    if not stack:
        ax.add_patch(Rectangle((left, bottom), WIDE, HIGH, fill=False, ec=FAINT, ls=(0, (3, 3)), lw=0.8))
        ax.text(left + WIDE / 2, bottom + HIGH / 2, "no rows", ha="center", va="center", fontsize=7.5, color=FAINT)
    for index, (text, made_of) in enumerate(reversed(stack)):
        y = bottom + index * HIGH
        for part, rank in enumerate(made_of):
            share = WIDE / len(made_of)
            ax.add_patch(Rectangle((left + part * share, y), share, HIGH, fc=RANK_COLOURS[rank], lw=0))
        ax.add_patch(Rectangle((left, y), WIDE, HIGH, fc="none" if made_of else ZERO, ec=INK, lw=0.8))
        colour = FAINT if text == "not read" else INK
        size = 7.5 if text == "not read" else 9.5
        ax.text(left + WIDE / 2, y + HIGH / 2, text, ha="center", va="center", fontsize=size, color=colour)


def draw_half(ax: Axes, top: Side, bottom: Side, arrows: list[tuple[int, int]], *, back: bool, base: float) -> None:
    """Draw inputs above and outputs below; arrows point down, or up in the backward pass."""
    assert max(len(stack) for stack in bottom) * HIGH < base
    for rank in ALL_RANKS:
        draw_stack(ax, bottom[rank], rank * PITCH, 0)
        draw_stack(ax, top[rank], rank * PITCH, base)
    for source, target in arrows:
        start, end = source * PITCH + WIDE / 2, target * PITCH + WIDE / 2
        source_stack = (bottom if back else top)[source]
        colour = INK if not source_stack else (BACKWARD if back else FORWARD)
        low_of = bottom[source if back else target]
        low = max(1, len(low_of)) * HIGH + 0.05 if low_of else HIGH + 0.05
        ends = ((start, low), (end, base - 0.05)) if back else ((start, base - 0.05), (end, low))
        ax.add_patch(
            FancyArrowPatch(*ends, arrowstyle="-|>", mutation_scale=8, lw=1.0, color=colour, shrinkA=0, shrinkB=0)
        )


def draw_collective(name: str) -> None:
    """Draw the forward pass above the backward pass, so that both fit the width of a phone."""
    inputs, outputs, sends, g_outputs, g_inputs, returns = COLLECTIVES[name]
    low = max(len(stack) for stack in [*outputs, *g_outputs]) * HIGH
    high = max(len(stack) for stack in [*inputs, *g_inputs]) * HIGH
    base = low + 0.75
    width, height = WORLD * PITCH + 0.5, base + high + 0.62
    figure = plt.figure(figsize=(width * 0.95, 2 * (height + 0.2) * 0.95))
    halves = (("forward", FORWARD, inputs, outputs, sends), ("backward", BACKWARD, g_inputs, g_outputs, returns))
    for half, (title, colour, top, bottom, arrows) in enumerate(halves):
        ax = figure.add_axes((0, (1 - half) / 2, 1, 0.5))
        ax.set_xlim(-0.75, width - 0.75)
        ax.set_ylim(-0.2, height)
        ax.axis("off")
        middle = ((WORLD - 1) * PITCH + WIDE) / 2
        ax.text(middle, height - 0.16, title, ha="center", va="center", color=colour, fontsize=11, weight="bold")
        for rank in ALL_RANKS:
            place = (rank * PITCH + WIDE / 2, height - 0.44)
            ax.text(*place, f"rank {rank}", ha="center", va="center", fontsize=8, color=FAINT)
        for y, text in ((base + high / 2, "in"), (low / 2, "out")):
            label, size = (f"∂L/∂{text}", 7.5) if half else (text, 9)
            ax.text(-0.12, y, label, ha="right", va="center", fontsize=size, color=FAINT)
        draw_half(ax, top, bottom, arrows, back=bool(half), base=base)
    save(figure, name)


def save(figure: plt.Figure, name: str) -> None:
    figure.savefig(FIGURES / f"{name}.svg", metadata={"Date": None}, facecolor="white")
    if len(sys.argv) > 1:  # a folder for PNG copies, to look at
        figure.savefig(Path(sys.argv[1]) / f"{name}.png", dpi=130, facecolor="white")
    plt.close(figure)


if __name__ == "__main__":
    mpl.rcParams.update({"svg.hashsalt": "contrastive_zoo", "font.family": "DejaVu Sans"})
    FIGURES.mkdir(parents=True, exist_ok=True)
    for collective in COLLECTIVES:
        draw_collective(collective)
