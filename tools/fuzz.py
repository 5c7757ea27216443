"""Call every public callable with nonsense; print examples tried and internal errors of each.

python -m tools.fuzz --examples 300
python -m tools.fuzz --examples 300 --out fuzz.json --docs     # continues, and writes the table to how-it-is-tested.md
"""

import argparse
import json
from collections import Counter
from collections.abc import Mapping
from pathlib import Path

from hypothesis import HealthCheck, Phase, given, seed, settings
from hypothesis import strategies as st

from tests import fuzzing
from tools import pages

LENIENT = settings(database=None, deadline=None, phases=[Phase.generate], suppress_health_check=list(HealthCheck))


def errors_of(name: str, examples: int, first: int) -> tuple[int, Counter[str]]:
    """The number of examples tried, and how often each internal error came."""
    target, found, tried = fuzzing.TARGETS[name](), Counter[str](), 0

    @seed(first)
    @settings(LENIENT, max_examples=examples)
    @given(st.data())
    def run(data: st.DataObject) -> None:
        nonlocal tried
        arguments = data.draw(fuzzing.calls(target))
        tried += 1
        if (problem := fuzzing.internal_error(target, arguments)) is not None:
            found[problem] += 1

    run()
    return tried, found


def table(results: Mapping[str, tuple[int, Mapping[str, int]]]) -> str:
    """A row for each public callable, and their sum.

    Examples:
        >>> print(table({"NTXent": (300, {}), "SupCon": (299, {"KeyError at losses/sup_con.py:1": 2})}))
        | entry point | examples | internal errors |
        | --- | ---: | ---: |
        | `NTXent` | 300 | 0 |
        | `SupCon` | 299 | 2 |
        | all 2 | 599 | 2 |
    """
    rows = [(f"`{name}`", tried, sum(found.values())) for name, (tried, found) in results.items()]
    rows.append((f"all {len(rows)}", sum(x[1] for x in rows), sum(x[2] for x in rows)))
    return pages.table(["entry point", "examples", "internal errors"], [[*map(str, row)] for row in rows], texts=1)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--examples", type=int, default=300)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", default="")
    parser.add_argument("--out", type=Path, help="keeps results; a run continues where an earlier one was stopped")
    parser.add_argument("--docs", action="store_true", help="write the table to the page")
    options = parser.parse_args()
    kept = json.loads(options.out.read_text()) if options.out and options.out.exists() else {}
    results: dict[str, tuple[int, Mapping[str, int]]] = dict(kept)
    for name in fuzzing.TARGETS:
        if options.only in name and name not in results:
            results[name] = errors_of(name, options.examples, options.seed)
            for text, count in results[name][1].items():
                print(f"{name}: {count} × {text}", flush=True)
            if options.out:
                options.out.write_text(json.dumps(results))
    ordered = {name: results[name] for name in fuzzing.TARGETS if name in results}
    print(table(ordered))
    if options.docs:
        pages.fill(pages.PAGES / "how-it-is-tested.md", {"fuzz": table(ordered)})


if __name__ == "__main__":
    main()
