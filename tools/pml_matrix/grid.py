"""Losses of pytorch-metric-learning with a distance, a reducer, a regularizer and a miner at once, in shards.

``python -m tools.pml_matrix.grid [COUNT]`` draws so many combinations, computes each on two and on three processes with
uneven and empty shards, and on one, and prints how many have which result.
"""

import itertools
import random
import sys
from collections import Counter
from collections.abc import Iterator
from functools import partial

from pytorch_metric_learning import distances, miners, reducers

from contrastive_zoo.testing.worlds import Worlds
from contrastive_zoo.wrapper.distributed import DistributedLoss
from contrastive_zoo.wrapper.pml.table import LOSSES
from tools.comparison import Compared, Run, Wrap, measure
from tools.pml_matrix.cases import Case, parts

EVALUATED = [kind.__name__ for kind, meaning in LOSSES.items() if not isinstance(meaning.evaluate, str)]
PARTS: dict[str, list[str]] = {
    "distance": ["LpDistance, p=1", *parts(distances)],
    "reducer": ["PerAnchorReducer, above 0", *parts(reducers)],
    "embedding_regularizer": ["LpRegularizer", "CenterInvariantRegularizer"],
}
SPLITS = [(7, 5), (0, 11), (3, 1), (4, 0, 8), (6, 2, 3)]

in_shards = partial(DistributedLoss, mode="sharded", check_distinct=False)


def combinations() -> Iterator[Case]:
    """Yield all of them, whether or not the library accepts them."""
    of_parts = itertools.product(*([(part, x) for x in (None, *names)] for part, names in PARTS.items()))
    names = [*EVALUATED, "MultipleLosses"], (None, *parts(miners)), list(of_parts)
    for loss, miner, chosen in itertools.product(*names):
        # of FastAP's losses, which are 0 or next to it, the reducer counts those above 0
        if loss != "FastAPLoss" or not {"AvgNonZeroReducer", "PerAnchorReducer, above 0"} & {x for _, x in chosen}:
            yield Case(loss, miner, parts=tuple((part, x) for part, x in chosen if x is not None))


def verdict(compared: Compared) -> str:
    if compared.unsupported is not None:
        return "not accepted by the library"
    if "in shards" in (compared.words or ""):
        return "refused"
    return compared.wrong(1e-9) or "the same"


def verdicts(worlds: Worlds, count: int, seed: int, wrap: Wrap = in_shards) -> list[tuple[Case, Run, str]]:
    """Draw so many combinations, each with a split, and compare them."""
    draw = random.Random(seed)
    chosen = {case: [Run((draw.choice(SPLITS),))] for case in draw.sample([*combinations()], count)}
    rows = measure(worlds, chosen, chosen.__getitem__, wrap)
    return [(case, run, verdict(compared)) for case, of in rows for run, compared in of.items()]


def main() -> None:
    count = int([*sys.argv, "1000"][1])
    with Worlds() as worlds:
        found = verdicts(worlds, count, seed=0)
    print(f"{count:,} of {sum(1 for _ in combinations()):,} combinations")
    counts = Counter(verdict for _, _, verdict in found)
    for verdict, number in counts.most_common():
        print(f"{number:,} {verdict}", *(x[:2] for x in found if x[2] == verdict and number < 9))


if __name__ == "__main__":
    main()
