"""The cases of the conformance vectors: each loss of the catalogue, and the options of those that have several."""

import zlib
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from contrastive_zoo.catalogue import CATALOGUE

Array = NDArray[Any]

SAMPLES, NEGATIVES, WIDTH, CLASSES = 8, 6, 4, 5

SPLITS: dict[int, list[list[int]]] = {
    SAMPLES: [[8], [4, 4], [5, 3], [3, 0, 5], [2, 2, 2, 2]],
    NEGATIVES: [[6], [3, 3], [2, 4], [0, 6, 0], [1, 2, 2, 1]],
}
"""Shard sizes of arguments by their length: one rank, equal shards, uneven shards, an empty shard, four ranks."""

LEFT_OUT = {
    "sigreg": "it draws directions from torch's random generator in each call",
    "lejepa": "its SIGReg draws directions from torch's random generator in each call",
}
"""Losses without vectors, and why."""


@dataclass(frozen=True)
class Case:
    """A loss with settings, and the kinds of its arguments.

    Args:
        name: name of the case and of its file.
        loss: name of the class in :mod:`contrastive_zoo`.
        kinds: the kind of each argument, by name; a key of :data:`KINDS`.
        settings: constructor arguments that differ from the defaults.
    """

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
    "binary": lambda *_: np.array([1, 0, 1, 1, 0, 0, 1, 0]),
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
_BY_CALL = {"views": VIEWS, "labels": LABELLED}  # a loss that is called otherwise has a row in the table below
TOWERS = {"queries": "rows", "keys": "rows"}
_SCORED = {**TOWERS, "scores": "scores"}

_TOKENS = {
    "queries": "several",
    "documents": "several",
    "query_mask": "token mask",
    "document_mask": "token mask",
}

_OTHER: dict[str, dict[str, str]] = {
    "max-sim": _TOKENS,
    "max-sim-pairwise": _TOKENS,
    "info-nce": TOWERS,
    "clip": {"images": "rows", "texts": "rows"},
    "siglip": {"images": "rows", "texts": "rows"},
    "clip-distillation": {"images": "rows", "texts": "rows", "teacher_images": "rows", "teacher_texts": "rows"},
    "multi-positive": {**TOWERS, "ids": "labels"},
    "mnrl": {"queries": "rows", "documents": "rows", "negatives": "negatives"},
    "gist": {"anchors": "rows", "positives": "rows", "guide_anchors": "rows", "guide_positives": "rows"},
    "mil-nce": {"videos": "rows", "texts": "several"},
    "cosent": _SCORED,
    "angle": _SCORED,
    "online-contrastive": {**TOWERS, "labels": "binary"},
    "margin-mse": {"queries": "rows", "positives": "rows", "negatives": "several", "margins": "several scores"},
    "score-distillation": {"queries": "rows", "candidates": "several", "scores": "several scores"},
    "koleo": {"embeddings": "rows"},
    "orthogonal-regularization": {"embeddings": "rows"},
    "negative-cosine": {"predictions": "rows", "targets": "rows"},
    "instance": {"x": "rows", "y": "rows", "labels": "labels"},
    "dino": {"student": "rows", "teacher": "rows"},
    "ressl": {"student": "rows", "teacher": "rows"},
    "nnclr": {"projections1": "rows", "projections2": "rows", "predictions1": "rows", "predictions2": "rows"},
    "dynamic-soft-margin": {"anchors": "rows", "positives": "rows"},
}
"""Arguments of the losses whose call form has names of its own."""

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

_OPTIONS: tuple[tuple[str, str, dict[str, str], Iterable[dict[str, Any]]], ...] = (
    ("nt-xent", "NTXent", VIEWS, _NT_XENT_OPTIONS),
    ("nt-xent-three-views", "NTXent", _THREE_VIEWS, ({"temperature": 0.5},)),
    ("info-nce", "InfoNCE", TOWERS, ({"symmetric": True}, {"normalize": False}, {"reduction": "sum"})),
    ("info-nce-negatives", "InfoNCE", _MORE_NEGATIVES, ({}, {"in_batch_negatives": False})),
    ("info-nce-own-negatives", "InfoNCE", {**TOWERS, "negatives": "several"}, ({},)),
    ("sup-con", "SupCon", LABELLED, _SUP_CON_OPTIONS),
    ("sincere", "SINCERE", LABELLED, ({"reduction": "sum"},)),
    ("mil-nce", "MILNCE", _OTHER["mil-nce"], ({"denominator": "reference", "normalize": True},)),
    ("max-sim", "MaxSim", _TOKENS, ({"symmetric": True, "token_reduction": "mean", "temperature": 0.02},)),
    ("siglip", "SigLIP", _OTHER["siglip"], ({"temperature": 1.0, "logit_bias": 0.0},)),
    ("triplet", "Triplet", LABELLED, _TRIPLET_OPTIONS),
    ("contrastive", "Contrastive", LABELLED, ({"power": 2.0, "average": "all"}, {"metric": "squared distance"})),
    ("margin-mse", "MarginMSE", _OTHER["margin-mse"], ({"normalize": True},)),
)  # fmt: skip
"""Losses with further options: name, class, arguments, settings of each case."""


def _of_catalogue() -> Iterable[Case]:
    for entry in CATALOGUE.values():
        if entry.name in LEFT_OUT:
            continue
        settings = dict(entry.settings)
        sizes = {"num_classes": CLASSES, "embedding_size": WIDTH, "out_dim": WIDTH}
        settings |= {name: size for name, size in sizes.items() if name in settings}
        yield Case(
            entry.name, entry.cls, _OTHER.get(entry.name, VIEWS if entry.call == "views" else LABELLED), settings
        )


def _of_options() -> Iterable[Case]:
    for name, cls, kinds, several in _OPTIONS:
        for number, settings in enumerate(several, 1):
            yield Case(f"{name}-option-{number}", cls, kinds, settings)


CASES = {case.name: case for case in (*_of_catalogue(), *_of_options())}
"""All cases by name."""
