"""Change the modules that ranks rest on, one place at a time, and count the changes that no test notices.

python -m tools.mutants --count 200      # continues where an earlier run was stopped: results are in mutants.json
python -m tools.mutants --count 0 --docs # writes the score to docs/pages/how-it-is-tested.md

A mutant is one change of the syntax tree: a comparison, an operator, a number, a truth value, a condition, a maximum for a
minimum, or a statement left out. Texts of errors, docstrings, annotations and assertions stay as they are. It is written
into a copy of the repository, where the tests of its room run until the first one fails.
"""

import argparse
import ast
import json
import os
import random
import re
import shutil
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from tools import pages
from tools.mutants.changes import PACKAGE, Mutant, Name, modules, mutants_of, mutated

TESTS = {
    "engine": "losses/test_definitions.py test_contract.py test_explain.py engine losses kernels test_precision.py "
    "test_accelerator.py test_accelerated_ranks.py test_solved_batches.py test_bad_input.py adapters/test_native.py "
    "test_monitor.py test_natural_mistakes.py",
    "ranks": "test_collectives.py test_handshake.py test_averaging.py test_late_checks.py test_state.py "
    "test_faults.py test_distributed.py test_bad_input.py test_accelerated_ranks.py test_spmd_types.py engine",
    "wrapper": "test_distributed.py losses/test_signatures.py test_state.py test_late_checks.py test_bad_input.py "
    "test_gradcache.py adapters/test_third_party.py",
}
"""The tests of a mutated room, and doctests of the module; those of whole trainings take longer."""

RESULTS = Path("mutants.json")
WORLD_TIMEOUT = 20  # seconds of a job of several ranks
SECONDS = 1800.0  # limit of the tests of one mutant

Result = dict[str, Any]


def equivalent() -> dict[Name, str]:
    """Return why no test can notice a mutant: the library promises the same with it."""
    rows = json.loads(Path(__file__).with_name("equivalent.json").read_text(encoding="utf-8"))
    return {(x["path"], x["function"], x["change"]): x["why"] for x in rows}


@contextmanager
def planted(mutant: Mutant, root: Path) -> Iterator[None]:
    file = root / PACKAGE.name / mutant.path
    before = file.read_text(encoding="utf-8")
    file.write_text(ast.unparse(mutated(before, mutant.number)), encoding="utf-8")
    try:
        yield
    finally:
        file.write_text(before, encoding="utf-8")


def tests_of(mutant: Mutant) -> list[str]:
    """Return the module's doctests, the test files that import it, and the tests of its room."""
    room, name = mutant.path.partition("/")[0], ".".join((PACKAGE.name, *Path(mutant.path).with_suffix("").parts))
    files = sorted((pages.ROOT / "tests").rglob("test_*.py"))
    named = [str(x.relative_to(pages.ROOT)) for x in files if f"from {name} import" in x.read_text(encoding="utf-8")]
    return [f"{PACKAGE.name}/{mutant.path}", *named, *(f"tests/{x}" for x in TESTS[room].split())]


def verdict(tests: Sequence[str], root: Path, seconds: float = SECONDS) -> Result:
    options = ["-x", "-q", "-p", "no:cacheprovider", "--no-header", f"--world-timeout={WORLD_TIMEOUT}"]
    command = [sys.executable, "-B", "-m", "pytest", *options, *tests]
    environment = os.environ | {"PYTHONPATH": str(root)}
    try:
        done = subprocess.run(command, cwd=root, env=environment, capture_output=True, text=True, timeout=seconds)
    except subprocess.TimeoutExpired:
        return {"verdict": "timed out", "by": ""}
    failed = re.search(r"^(?:FAILED|ERROR) (\S+)", done.stdout, re.MULTILINE)
    assert failed or done.returncode == 0, done.stdout + done.stderr
    return {"verdict": "caught" if failed else "survived", "by": failed[1] if failed else ""}


def attempts(todo: Sequence[Mutant]) -> Iterator[tuple[Mutant, Result]]:
    """Try mutants one after the other in a copy of the repository."""
    ignored = shutil.ignore_patterns(".*", "__pycache__", "site", "shared")
    with tempfile.TemporaryDirectory() as folder:
        root = Path(shutil.copytree(pages.ROOT, Path(folder, "copy"), ignore=ignored))
        for mutant in todo:
            with planted(mutant, root):
                yield mutant, verdict(tests_of(mutant), root)


def untried(results: list[Result]) -> list[Mutant]:
    """Forget results of mutants that the code no longer has; return all others that it has, in random order."""
    every = {x.name: x for path in modules() for x in mutants_of(path)}
    results[:] = [x for x in results if name_of(x) in every]
    todo = [x for x in every.values() if x.name not in set(map(name_of, results))]
    random.Random(0).shuffle(todo)
    return todo


def name_of(result: Result) -> Name:
    return result["path"], result["place"][0], result["change"]


def outcome(result: Result) -> str:
    """Return what is counted of a mutant; a survivor of the list of equivalent ones apart."""
    is_equivalent = result["verdict"] == "survived" and name_of(result) in equivalent()
    return "equivalent" if is_equivalent else str(result["verdict"])


def report(results: Sequence[Result]) -> str:
    """Return the score in a sentence.

    Examples:
        >>> mutant = {"path": "engine/exchange.py", "place": ["f", 1], "change": "1 → 2", "verdict": "caught"}
        >>> report([mutant])
        '1 mutants, 1 noticed: 100.0 % without equivalent ones, 100.0 % of all.'
    """
    counts = Counter(map(outcome, results))
    noticed, tried = counts["caught"] + counts["timed out"], len(results) - counts["equivalent"]
    return (
        f"{len(results)} mutants, {noticed} noticed: {100 * noticed / max(1, tried):.1f} % without "
        f"equivalent ones, {100 * noticed / max(1, len(results)):.1f} % of all."
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--count", type=int, default=200)
    parser.add_argument("--docs", action="store_true", help="write the report to the page")
    options = parser.parse_args()
    results = json.loads(RESULTS.read_text()) if RESULTS.exists() else []
    todo = untried(results)
    for mutant, result in attempts(todo[: max(0, options.count - len(results))]):
        results.append(mutant._asdict() | result)
        RESULTS.write_text(json.dumps(results, indent=1))
    for x in (x for x in results if outcome(x) == "survived"):
        print(f"survived: {x['path']}:{x['place'][1]} {x['place'][0]}: {x['change']}")
    print(report(results))
    if options.docs:
        pages.fill(pages.PAGES / "how-it-is-tested.md", {"mutants": report(results)})


if __name__ == "__main__":
    main()
