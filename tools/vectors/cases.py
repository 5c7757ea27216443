"""The cases of the conformance vectors: each loss of the catalogue, and the options of those that have several."""

import math
import zlib
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from contrastive_zoo.loss_base.temperature import LearnableTemperature
from contrastive_zoo.testing.catalogue import CATALOGUE, Entry

Array = NDArray[Any]

SAMPLES, NEGATIVES, WIDTH, CLASSES = 8, 6, 4, 5

SPLITS: dict[int, list[list[int]]] = {
    SAMPLES: [[8], [4, 4], [5, 3], [3, 0, 5], [2, 2, 2, 2]],
    NEGATIVES: [[6], [3, 3], [2, 4], [0, 6, 0], [1, 2, 2, 1]],
}
"""Shard sizes of arguments by their length: one rank, equal shards, uneven shards, an empty shard, four ranks."""

LEFT_OUT = {entry.name: f"it draws {entry.draws}" for entry in CATALOGUE.values() if entry.draws}
"""Losses without vectors, and why."""


@dataclass(frozen=True)
class Case:
    """A class of losses, the kind of each argument (of :data:`KINDS`), and settings that differ from the defaults."""

    name: str
    loss: str
    kinds: dict[str, str]
    settings: dict[str, Any] = field(default_factory=dict)

    def arguments(self, draw: int = 0) -> dict[str, Array]:
        """Return the arguments of a call in float64 and int64; another ``draw`` has other numbers.

        Examples:
            >>> case = Case("a", "NTXent", {"view1": "rows", "view2": "rows"})
            >>> {name: x.shape for name, x in case.arguments().items()}
            {'view1': (8, 4), 'view2': (8, 4)}
        """
        generator = np.random.default_rng([zlib.crc32(self.name.encode()), draw])
        samples = generator.standard_normal((SAMPLES, WIDTH))
        return {name: KINDS[kind](generator, samples) for name, kind in self.kinds.items()}


def _near(generator: np.random.Generator, samples: Array) -> Array:
    return samples + 0.7 * generator.standard_normal(samples.shape)


KINDS: dict[str, Callable[[np.random.Generator, Array], Array]] = {
    "rows": _near,
    "labels": lambda *_: np.array([0, 1, 0, 2, 1, 0, 3, 1]),  # classes 2 and 3 have one sample: no positive
    "hierarchy": lambda *_: np.array([[0, 0], [1, 1], [0, 0], [0, 2], [1, 1], [0, 0], [1, 3], [1, 1]]),
    "binary": lambda *_: np.array([1, 0, 1, 1, 0, 0, 1, 0]),
    "counts": lambda *_: np.array([2, 0, 1, 1, 1, 1, 0, 2]),  # the counts of each shard add up to its number of rows
    "several": lambda g, x: np.stack([_near(g, x) for _ in range(3)], 1),
    "negatives": lambda g, x: g.standard_normal((NEGATIVES, WIDTH)),
    "token mask": lambda g, x: np.concatenate(
        [np.ones((SAMPLES, 1), dtype=np.int64), g.integers(2, size=(SAMPLES, 2))], 1
    ),
    "scores": lambda g, x: g.permutation(SAMPLES) / SAMPLES,
    "several scores": lambda g, x: g.standard_normal((SAMPLES, 3)),
}
"""How an argument of each kind is drawn, from a generator and the samples that its rows belong to."""

VIEWS = {"view1": "rows", "view2": "rows"}
LABELLED = {"embeddings": "rows", "labels": "labels"}
TOWERS = CATALOGUE["info-nce"].kinds
_TOKENS = CATALOGUE["max-sim"].kinds
_THREE_VIEWS = {**VIEWS, "view3": "rows"}
_MORE_NEGATIVES = {**TOWERS, "negatives": "negatives"}
_NT_XENT_OPTIONS = ({"temperature": 0.5}, {"temperature": 0.01}, {"normalize": False}, {"reduction": "sum"})
_SUP_CON_OPTIONS = ({"temperature": 0.07, "base_temperature": 0.07}, {"variant": "in", "reduction": "sum"})
_TRIPLET_OPTIONS = (
    {"mining": "hard", "average": "all"},
    {"mining": "hard", "soft": True, "margin": 0.0},
    {"mining": "hard", "metric": "squared distance", "margin": 0.3},
    {"mining": "semi-hard", "margin": 0.6},
    {"mining": "all", "soft": True},
    {"mining": "all", "metric": "similarity", "average": "all", "margin": 0.2},
)

_LEARNT = {
    "temperature": LearnableTemperature(1.0, max_scale=math.inf),
    "logit_bias": nn.Parameter(torch.tensor([0.0])),
}

_OPTIONS: tuple[tuple[str, str, dict[str, str], Iterable[dict[str, Any]]], ...] = (
    ("nt-xent", "NTXent", VIEWS, _NT_XENT_OPTIONS),
    ("nt-xent-three-views", "NTXent", _THREE_VIEWS, ({"temperature": 0.5},)),
    ("info-nce", "InfoNCE", TOWERS, ({"symmetric": True}, {"normalize": False}, {"label_smoothing": 0.1})),
    ("info-nce-negatives", "InfoNCE", _MORE_NEGATIVES, ({}, {"in_batch_negatives": False, "label_smoothing": 0.1})),
    ("info-nce-own-negatives", "InfoNCE", {**TOWERS, "negatives": "several"}, ({},)),
    ("sup-con", "SupCon", LABELLED, _SUP_CON_OPTIONS),
    ("sincere", "SINCERE", LABELLED, ({"reduction": "sum"},)),
    ("max-sim", "MaxSim", _TOKENS, ({"token_reduction": "mean", "temperature": 0.02},)),
    ("siglip", "SigLIP", CATALOGUE["siglip"].kinds, (_LEARNT,)),
    ("triplet", "Triplet", LABELLED, _TRIPLET_OPTIONS),
    ("contrastive", "Contrastive", LABELLED, ({"power": 2.0, "average": "all"}, {"metric": "squared distance"})),
    ("margin-mse", "MarginMSE", CATALOGUE["margin-mse"].kinds, ({"normalize": True},)),
)  # fmt: skip
"""Losses with further options: name, class, arguments, settings of each case."""


def of_entry(entry: Entry) -> Case:
    settings = dict(entry.settings)
    sizes = {"num_classes": CLASSES, "embedding_size": WIDTH, "out_dim": WIDTH}
    settings |= {name: size for name, size in sizes.items() if name in settings}
    return Case(entry.name, entry.cls, entry.kinds, settings)


_OF_OPTIONS = (
    Case(f"{name}-option-{number}", cls, kinds, settings)
    for name, cls, kinds, several in _OPTIONS
    for number, settings in enumerate(several, 1)
)
_OF_CATALOGUE = (of_entry(entry) for entry in CATALOGUE.values() if not entry.draws)

CASES = {case.name: case for case in (*_OF_CATALOGUE, *_OF_OPTIONS)}  # all cases by name
