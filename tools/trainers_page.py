"""Run all examples and write the pages on trainers: ``python -m tools.trainers_page``.

Writes the tables of docs/pages/trainers.md, and into each page docs/pages/trainers/<example>.md the example itself and its
rows. Exits with 1 if a right set-up exceeds its bound or a mistake goes unnoticed.
"""

import argparse
import sys
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType

from contrastive_zoo.testing.check import examine
from examples.run import EXAMPLES, Outcome, measure, recipe_of
from tools.pages import PAGES, ROOT, fill, table

Diagnoses = Mapping[tuple[str, str], str]  # the doctor's diagnosis by example and set-up

_RIGHT = ("set-up", "processes", "shards", "encoder", "loss parameters", "bound")
_WRONG = ("mistake", "what happens", "fix", "encoder", "loss parameters", "doctor")

NO_FINDING, NOT_EXAMINED = "no finding", "—"
"""What the table says of a mistake outside of the step, and of one in a trainer that owns the step."""


def listing(example: str) -> str:
    path = Path("examples") / f"{example}.py"
    source = (ROOT / path).read_text(encoding="utf-8").rstrip()
    return f'```python title="{path.as_posix()}"\n{source}\n```'


def right_table(outcomes: Iterable[Outcome], titles: dict[str, str] | None = None) -> str:
    """Return the table of right set-ups: trainer × set-up × deviation; without titles, of one trainer."""
    rows = []
    for example, setup, deviation, _ in outcomes:
        if not setup.mistake:
            found = [f"{x:.0e}" for x in deviation] if deviation else ["failed", "failed"]
            bound = f"{setup.bound:.0e}{f': {setup.note}' if setup.note else ''}"
            rows.append([*_trainer(titles, example), setup.name, str(setup.processes), setup.shards, *found, bound])
    return table([*_trainer(titles), *_RIGHT], rows, texts=len(_RIGHT) + 1)


def wrong_table(
    outcomes: Iterable[Outcome], titles: dict[str, str] | None = None, diagnoses: Diagnoses = MappingProxyType({})
) -> str:
    """Return the table of mistakes: what each is, how to correct it, its deviation, and the doctor's diagnosis."""
    rows = []
    for example, setup, deviation, _ in outcomes:
        if setup.mistake:
            found = [f"{float(f'{100 * x:.2g}'):g} %" for x in deviation] if deviation else ["refused", "refused"]
            doctor = diagnoses.get((example, setup.name), NOT_EXAMINED)
            rows.append([*_trainer(titles, example), setup.name, setup.mistake, setup.fix, *found, doctor])
    return table([*_trainer(titles), *_WRONG], rows, texts=len(_WRONG) + 1)


def diagnosed(outcomes: Iterable[Outcome]) -> Diagnoses:
    found = {}
    for example, setup, *_ in outcomes:
        if setup.mistake and setup.step is not None:
            report = examine(setup.step, level="training_step", world_sizes=(1, 2), max_examples=6, name=setup.name)
            found[example, setup.name] = report.diagnosis.mistake if report.diagnosis else NO_FINDING
    return found


def _trainer(titles: dict[str, str] | None, example: str = "") -> list[str]:
    """Return the first cell of a row, or its heading; none in the tables of one trainer."""
    return [] if titles is None else [titles[example] if example else "trainer"]


def title(example: str) -> str:
    path = PAGES / "trainers" / f"{recipe_of(example)}.md"
    heading = path.read_text(encoding="utf-8").partition("\n")[0].removeprefix("# ")
    return f"[{heading}](trainers/{path.name})"


def write_tables(outcomes: Sequence[Outcome], diagnoses: Diagnoses) -> None:
    titles = {example: title(example) for example in EXAMPLES}
    tables = {"right set-ups": right_table(outcomes, titles), "mistakes": wrong_table(outcomes, titles, diagnoses)}
    fill(PAGES / "trainers.md", tables)
    for example in EXAMPLES:
        path = PAGES / "trainers" / f"{example}.md"
        own = [outcome for outcome in outcomes if recipe_of(outcome.example) == example]
        if path.exists() and own:
            deviations = right_table(own)
            if any(outcome.setup.mistake for outcome in own):
                deviations += f"\n\n{wrong_table(own, None, diagnoses)}"
            fill(path, {"deviations": deviations})


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tools.trainers_page", description=__doc__)
    parser.add_argument("--listings", action="store_true", help="write the listings only; run nothing")
    given = parser.parse_args(arguments)
    for path, example in ((PAGES / "trainers" / f"{example}.md", example) for example in EXAMPLES):
        if path.exists():
            fill(path, {"example": listing(example)})
    if given.listings:
        return 0
    outcomes = []
    for outcome in measure():
        print(f"{outcome.example:<16} {outcome.setup.name:<56} {outcome.text}", flush=True)
        outcomes.append(outcome)
    write_tables(outcomes, diagnosed(outcomes))
    return 0 if all(outcome.ok for outcome in outcomes) else 1


if __name__ == "__main__":
    sys.exit(main())
