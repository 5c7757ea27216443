"""Call every public callable with nonsense; print examples tried and internal errors of each.

python -m tools.fuzz --examples 300
"""

from __future__ import annotations

import argparse
from collections import Counter

from hypothesis import HealthCheck, Phase, given, seed, settings
from hypothesis import strategies as st

from tests import fuzzing


def errors_of(name: str, examples: int, first: int) -> tuple[int, Counter[str]]:
    """The number of examples tried, and how often each internal error came."""
    target, found, tried = fuzzing.TARGETS[name](), Counter[str](), 0

    @seed(first)
    @settings(
        max_examples=examples,
        database=None,
        deadline=None,
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
    @given(st.data())
    def run(data: st.DataObject) -> None:
        nonlocal tried
        arguments = data.draw(fuzzing.calls(target))
        tried += 1
        if (problem := fuzzing.internal_error(target, arguments)) is not None:
            found[problem] += 1

    run()
    return tried, found


def main() -> None:
    """Print a row for each public callable."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--examples", type=int, default=300)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", default="")
    options = parser.parse_args()
    total = bad = 0
    print("| entry point | examples | internal errors |\n|---|---|---|")
    for name in fuzzing.TARGETS:
        if options.only in name:
            tried, found = errors_of(name, options.examples, options.seed)
            total, bad = total + tried, bad + found.total()
            print(f"| {name} | {tried} | {found.total()} |", flush=True)
            for text, count in found.most_common():
                print(f"    {count} × {text}")
    print(f"| all {len(fuzzing.TARGETS)} | {total} | {bad} |")


if __name__ == "__main__":
    main()
