"""Plant mutants in the modules that ranks rest on, and run the tests of each module: which mutants does no test notice?

python -m tools.mutants --count 200 --seed 0 --out mutants.json      # continues where an earlier run of it was stopped
python -m tools.mutants --report mutants.json

A mutant is one change of the syntax tree: a comparison, an operator, a number, a truth value, a condition, a maximum for a
minimum, or a statement left out. Texts of errors, docstrings, annotations and assertions are left as they are. The tests run
in a fork of a process that has imported torch and pytest already, in a copy of the repository.
"""

from __future__ import annotations

import argparse
import ast
import copy
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Iterator
from fnmatch import fnmatch
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).parent.parent
PACKAGE = "contrastive_zoo"

SOFTMAX = ["tests/engine/test_softmax.py", "tests/losses/test_softmax.py"]
ROWS = ["tests/engine/test_rowwise.py", "tests/losses/test_margins.py", "tests/losses/test_weights.py"]
STEPS = ["tests/test_distributed.py", "tests/test_bad_input.py", "tests/test_later_steps.py"]

TESTS: dict[str, list[str]] = {
    "engine/small_batch.py": ["tests/engine/test_small_batch.py", *SOFTMAX],
    "engine/precision.py": ["tests/engine/test_precision.py", *SOFTMAX],
    "engine/ring*.py": ["tests/engine/test_ring.py"],
    "engine/exchange.py": ["tests/engine/test_ring.py", *SOFTMAX],
    "engine/partners.py": [*SOFTMAX, "tests/engine/test_ring.py"],
    "engine/schedule.py": [*SOFTMAX, "tests/engine/test_ring.py"],
    "engine/softmax*.py": SOFTMAX,
    "engine/cross_entropy.py": SOFTMAX,
    "engine/tiling.py": [*SOFTMAX, *ROWS],
    "engine/similarity_budget.py": [*SOFTMAX, *ROWS],
    "engine/unit_rows.py": [*SOFTMAX, *ROWS],
    "engine/sigmoid.py": ["tests/losses/test_softmax.py", "tests/engine/test_softmax.py"],
    "engine/sinkhorn.py": ["tests/losses/test_statistics.py", "tests/losses/test_oracles.py"],
    "engine/moments.py": ["tests/losses/test_statistics.py"],
    "engine/class*.py": ["tests/losses/test_weights.py", "tests/losses/test_margins.py", "tests/losses/test_pairs.py"],
    "engine/derivatives.py": ["tests/losses/test_second_derivatives.py", *ROWS],
    "engine/dense_mode.py": ["tests/losses/test_second_derivatives.py", *ROWS],
    "engine/malloc.py": ["tests/engine/test_malloc.py"],
    "engine/row_statistics.py": [*ROWS, "tests/engine/test_ring.py"],
    "engine/*.py": ROWS,
    "collectives/*.py": ["tests/test_collectives.py", "tests/engine/test_softmax.py"],
    "distributed.py": STEPS,
    "distributed_step.py": STEPS,
    "handshake.py": ["tests/test_handshake.py", *STEPS],
    "messages.py": ["tests/test_faults.py"],
}
"""The tests of a module, fastest first; the first pattern that matches counts. Its doctests run before them."""

SECONDS = 120.0
"""For the tests of one mutant: a mutant that hangs is noticed, too."""

SWAPPED_NAMES = {
    "max": "min", "min": "max", "any": "all", "all": "any", "amax": "amin", "amin": "amax", "sum": "mean",
    "clamp": "abs", "zeros_like": "ones_like", "ones_like": "zeros_like", "exp": "expm1", "log": "log1p",
}  # fmt: skip
SWAPPED_OPERATORS: dict[type[ast.AST], type[ast.AST]] = {
    ast.Lt: ast.LtE, ast.LtE: ast.Lt, ast.Gt: ast.GtE, ast.GtE: ast.Gt, ast.Eq: ast.NotEq, ast.NotEq: ast.Eq,
    ast.Is: ast.IsNot, ast.IsNot: ast.Is, ast.In: ast.NotIn, ast.NotIn: ast.In, ast.Add: ast.Sub, ast.Sub: ast.Add,
    ast.Mult: ast.Div, ast.Div: ast.Mult, ast.FloorDiv: ast.Mult, ast.Mod: ast.FloorDiv, ast.And: ast.Or,
    ast.Or: ast.And, ast.Pow: ast.Mult, ast.BitAnd: ast.BitOr, ast.BitOr: ast.BitAnd, ast.MatMult: ast.Add,
}  # fmt: skip


class Mutant(NamedTuple):
    """One change.

    Args:
        path: the module, relative to the package.
        number: of the change in this module.
        line: of the original.
        change: what was changed, in words.
    """

    path: str
    number: int
    line: int
    change: str


def changes(tree: ast.Module) -> Iterator[tuple[ast.AST, str]]:
    """Yield each change of a tree in turn, as the changed node and words; the tree is changed while it is visited."""
    for node in _code(tree):
        if isinstance(node, ast.Compare) and type(node.ops[0]) in SWAPPED_OPERATORS:
            yield from _swap(node, "ops", node.ops, [SWAPPED_OPERATORS[type(node.ops[0])](), *node.ops[1:]])
        if isinstance(node, (ast.BinOp, ast.BoolOp, ast.AugAssign)) and type(node.op) in SWAPPED_OPERATORS:
            yield from _swap(node, "op", node.op, SWAPPED_OPERATORS[type(node.op)]())
        if isinstance(node, ast.UnaryOp) and isinstance(node.op, (ast.Not, ast.USub, ast.Invert)):
            yield from _swap(node, "operand", node.operand, ast.UnaryOp(node.op, node.operand))
        if isinstance(node, ast.Constant) and isinstance(node.value, bool):
            yield from _swap(node, "value", node.value, not node.value)
        elif isinstance(node, ast.Constant) and isinstance(node.value, (int, float)):
            yield from _swap(node, "value", node.value, node.value + 1)
        if isinstance(node, (ast.If, ast.IfExp)):
            yield from _swap(node, "test", node.test, ast.Constant(value=True))
        if isinstance(node, ast.Attribute) and node.attr in SWAPPED_NAMES:
            yield from _swap(node, "attr", node.attr, SWAPPED_NAMES[node.attr])
        if isinstance(node, ast.Name) and node.id in SWAPPED_NAMES and isinstance(node.ctx, ast.Load):
            yield from _swap(node, "id", node.id, SWAPPED_NAMES[node.id])
        for name in ("body", "orelse"):
            found: Any = getattr(node, name, [])
            statements: list[ast.stmt] = found if isinstance(found, list) else []
            for i, statement in enumerate(statements):
                if isinstance(statement, (ast.Expr, ast.AugAssign)) and not _is_text(statement):
                    removed = [*statements[:i], ast.Pass(), *statements[i + 1 :]]
                    yield from _swap(node, name, statements, removed, statement, "left out: ")


def _swap(
    node: ast.AST, name: str, before: Any, after: Any, shown: ast.AST | None = None, words: str = ""
) -> Iterator[tuple[ast.AST, str]]:
    original = ast.unparse(shown or node)
    setattr(node, name, after)
    mutated = "" if shown is not None else f" → {_first_line(ast.unparse(node))}"
    yield shown or node, f"{words}{_first_line(original)}{mutated}"
    setattr(node, name, before)


def _first_line(text: str) -> str:
    return text.partition("\n")[0]


def _is_text(node: ast.AST) -> bool:
    return isinstance(node, ast.Expr) and isinstance(node.value, (ast.Constant, ast.Yield))


def _code(node: ast.AST) -> Iterator[ast.AST]:
    """Yield all nodes but docstrings, annotations, errors, assertions, imports and decorators."""
    yield node
    left_out = (
        {"annotation", "returns", "decorator_list", "bases", "keywords"} if not isinstance(node, ast.Call) else set()
    )
    for name, value in ast.iter_fields(node):
        for child in value if isinstance(value, list) else [value]:
            skipped = isinstance(child, (ast.Raise, ast.Assert, ast.JoinedStr, ast.Import, ast.ImportFrom))
            if isinstance(child, ast.AST) and not skipped and name not in left_out and not _is_text(child):
                yield from _code(child)


def modules() -> list[str]:
    """The modules that are mutated, relative to the package."""
    found = sorted(str(path.relative_to(ROOT / PACKAGE)) for path in (ROOT / PACKAGE).rglob("*.py"))
    return [path for path in found if tests_of(path) and not path.endswith("__init__.py")]


def tests_of(path: str) -> list[str]:
    """The test files of a module."""
    return next((tests for pattern, tests in TESTS.items() if fnmatch(path, pattern)), [])


def mutants() -> list[Mutant]:
    """All mutants of all modules."""
    found = []
    for path in modules():
        tree = ast.parse((ROOT / PACKAGE / path).read_text())
        for number, (node, change) in enumerate(changes(tree)):
            found.append(Mutant(path, number, getattr(node, "lineno", 0), change))
    return found


def mutated(path: str, wanted: int) -> str:
    """The source of a module with one change."""
    tree = ast.parse((ROOT / PACKAGE / path).read_text())
    for number, _ in enumerate(changes(tree)):
        if number == wanted:
            return ast.unparse(ast.fix_missing_locations(copy.deepcopy(tree)))
    raise IndexError(f"{path} has no mutant {wanted}")


def verdict(mutant: Mutant, copied: Path) -> str:
    """``caught``, ``survived`` or ``timed out``, from the tests of the module in a copy of the repository."""
    file = copied / PACKAGE / mutant.path
    original = file.read_text()
    file.write_text(mutated(mutant.path, mutant.number))
    try:
        return _run([f"{PACKAGE}/{mutant.path}", *tests_of(mutant.path)], copied)
    finally:
        file.write_text(original)


def _run(tests: list[str], copied: Path) -> str:
    """Run pytest in a fork, whose ranks end with it."""
    pid = os.fork()
    if pid == 0:
        os.setsid()
        _pytest(tests, copied)
    deadline = time.monotonic() + SECONDS
    while time.monotonic() < deadline:
        ended, status = os.waitpid(pid, os.WNOHANG)
        if ended:
            return "survived" if os.waitstatus_to_exitcode(status) == 0 else "caught"
        time.sleep(0.05)
    os.killpg(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
    return "timed out"


def _pytest(tests: list[str], copied: Path) -> None:
    """Run the tests in this process, and end it."""
    code = 2
    try:
        os.chdir(copied)
        os.environ["PYTHONPATH"] = str(copied)
        sys.path[:] = [str(copied), *(x for x in sys.path if x not in ("", str(ROOT)))]
        null = os.open(os.devnull, os.O_WRONLY)
        os.dup2(null, 1)
        os.dup2(null, 2)
        import pytest

        code = int(
            pytest.main(
                ["-x", "-q", "-W", "ignore::pytest.PytestAssertRewriteWarning", "-p", "no:cacheprovider", *tests]
            )
        )
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def _imported() -> None:
    """Import what every test imports, but nothing of the package."""
    import hypothesis
    import jaxtyping
    import pytest
    import torch

    torch.set_num_threads(1)
    assert all(x is not None for x in (hypothesis, jaxtyping, pytest))
    assert not any(name.startswith(PACKAGE) for name in sys.modules if "testing.pytest" not in name), "imported already"


def report(results: list[dict[str, Any]]) -> None:
    """Print the score of each module, and the survivors."""
    by_module: dict[str, list[dict[str, Any]]] = {}
    for x in results:
        by_module.setdefault(x["path"], []).append(x)
    print("| module | mutants | caught |\n|---|---|---|")
    for path, of_module in sorted(by_module.items()):
        print(f"| {path} | {len(of_module)} | {sum(x['verdict'] != 'survived' for x in of_module)} |")
    caught = sum(x["verdict"] != "survived" for x in results)
    print(f"| all | {len(results)} | {caught} ({100 * caught / max(1, len(results)):.1f} %) |\n")
    for x in results:
        if x["verdict"] == "survived":
            print(f"survived: {x['path']}:{x['line']}: {x['change']}")


def main() -> None:
    """Try sampled mutants that the output does not have yet, once the tests have passed without any, and report."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--count", type=int, default=200)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--minutes", type=float, default=float("inf"))
    parser.add_argument("--out", type=Path, default=Path("mutants.json"))
    parser.add_argument("--report", type=Path, nargs="+", help="outputs to report together")
    parser.add_argument("--part", default="0/1", help="i/n: every n-th of the sampled mutants, from the i-th")
    parser.add_argument("--unchecked", action="store_true", help="do not run the tests without a mutant first")
    parser.add_argument("--again", action="store_true", help="try the survivors of --out again")
    options = parser.parse_args()
    if options.report:
        return report([x for path in options.report for x in json.loads(path.read_text())])
    part, parts = map(int, options.part.split("/"))
    sampled = random.Random(options.seed).sample(mutants(), options.count)[part::parts]
    results = json.loads(options.out.read_text()) if options.out.exists() else []
    if options.again:
        results = [x for x in results if x["verdict"] != "survived"]
    done = {(x["path"], x["number"]) for x in results}
    _imported()
    end = time.monotonic() + 60 * options.minutes
    with tempfile.TemporaryDirectory() as directory:
        copied = Path(directory) / "copy"
        files = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True).stdout.split(
            "\n"
        )
        for name in filter(None, files):
            (copied / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / name, copied / name)
        unchecked = [] if options.unchecked else [x for x in sampled if (x.path, x.number) not in done]
        for tests in {tuple(tests_of(x.path)) for x in unchecked}:
            assert _run(list(tests), copied) == "survived", f"without a mutant these tests fail: {tests}"
        for mutant in sampled:
            if (mutant.path, mutant.number) in done or time.monotonic() > end:
                continue
            results.append({**mutant._asdict(), "verdict": verdict(mutant, copied)})
            options.out.write_text(json.dumps(results, indent=1))
    report(results)


if __name__ == "__main__":
    main()
