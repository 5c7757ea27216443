"""Run all examples and write the pages on trainers: ``python -m tools.trainers_page``.

Writes into each page docs/pages/trainers/<example>.md the tables of its set-ups. Exits with 1 if a
right set-up exceeds its bound or a mistake goes unnoticed.
"""

import sys
from collections.abc import Iterable, Sequence

from examples.run import EXAMPLES, Outcome, measure, recipe_of
from tools.pages import PAGES, fill, table

_RIGHT = ("set-up", "encoder", "loss parameters", "processes", "bound")
_WRONG = ("mistake", "encoder", "loss parameters", "what happens", "fix")


def right_table(outcomes: Iterable[Outcome]) -> str:
    """Return the table of right set-ups and their deviations."""
    rows = []
    for _, setup, deviation, _ in outcomes:
        if not setup.mistake:
            found = [f"{x:.0e}" for x in deviation] if deviation else ["failed", "failed"]
            bound = f"{setup.bound:.0e}{f': {setup.note}' if setup.note else ''}"
            rows.append([setup.name, *found, str(setup.processes), bound])
    return table(_RIGHT, rows, texts=len(_RIGHT))


def wrong_table(outcomes: Iterable[Outcome]) -> str:
    """Return the table of mistakes: their deviations, what happens, and how to correct them."""
    rows = []
    for _, setup, deviation, _ in outcomes:
        if setup.mistake:
            found = [f"{float(f'{100 * x:.2g}'):g} %" for x in deviation] if deviation else ["refused", "refused"]
            rows.append([setup.name, *found, setup.mistake, setup.fix])
    return table(_WRONG, rows, texts=len(_WRONG))


def write_tables(outcomes: Sequence[Outcome]) -> None:
    for example in EXAMPLES:
        path = PAGES / "trainers" / f"{example}.md"
        own = [outcome for outcome in outcomes if recipe_of(outcome.example) == example]
        if path.exists() and own:
            deviations = right_table(own)
            if any(outcome.setup.mistake for outcome in own):
                deviations += f"\n\n{wrong_table(own)}"
            fill(path, {"deviations": deviations})


def main() -> int:
    outcomes = []
    for outcome in measure():
        print(f"{outcome.example:<16} {outcome.setup.name:<56} {outcome.text}", flush=True)
        outcomes.append(outcome)
    write_tables(outcomes)
    return 0 if all(outcome.ok for outcome in outcomes) else 1


if __name__ == "__main__":
    sys.exit(main())
