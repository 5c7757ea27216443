"""Run examples and print their deviations: ``python -m examples [example ...]``.

Under torchrun, one set-up in the processes that it has started: ``torchrun … -m examples ddp --setup "NAME"``.
"""

import argparse
import os
import sys

from examples.run import EXAMPLES, measure, setups
from examples.setup import measured


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m examples", description="Run examples and compare with one process."
    )
    parser.add_argument("example", nargs="*", help=f"of {', '.join(EXAMPLES)}; none is all")
    parser.add_argument(
        "--setup", metavar="NAME", help="under torchrun: a set-up of the example; the default is its first"
    )
    given = parser.parse_args()
    if unknown := set(given.example) - set(EXAMPLES):
        parser.error(f"no such example: {', '.join(sorted(unknown))}; there are {', '.join(EXAMPLES)}")
    if "RANK" in os.environ:
        setup = next(x for x in setups(given.example[0]) if given.setup in (x.name, None))
        deviation = measured(setup)
        if os.environ["RANK"] == "0":
            print(f"{setup.name}: encoder {deviation.encoder:.1e}, loss parameters {deviation.loss:.1e}")
        return 0
    failed = 0
    print(f"{'example':<16} {'set-up':<56} {'encoder':>8} {'loss':>8}")
    for outcome in measure(given.example or EXAMPLES):
        print(f"{outcome.example:<16} {outcome.setup.name:<56} {outcome.text}", flush=True)
        failed += not outcome.ok
    return min(failed, 1)


if __name__ == "__main__":
    sys.exit(main())
