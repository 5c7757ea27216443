"""Run examples and print their deviations: ``python -m examples [example ...]``."""

import argparse
import sys

from examples.run import EXAMPLES, measure


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m examples", description="Run examples and compare with one process."
    )
    parser.add_argument("example", nargs="*", help=f"of {', '.join(EXAMPLES)}; none is all")
    chosen = parser.parse_args().example
    if unknown := set(chosen) - set(EXAMPLES):
        parser.error(f"no such example: {', '.join(sorted(unknown))}; there are {', '.join(EXAMPLES)}")
    failed = 0
    print(f"{'example':<16} {'set-up':<56} {'encoder':>8} {'loss':>8}")
    for outcome in measure(chosen or EXAMPLES):
        print(f"{outcome.example:<16} {outcome.setup.name:<56} {outcome.text}", flush=True)
        failed += not outcome.ok
    return min(failed, 1)


if __name__ == "__main__":
    sys.exit(main())
