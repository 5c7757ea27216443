"""Losses of trainers of embedding models, by their own code on one process, beside the lines that replace them.

The page "Coming from another library" has the same lines.
"""

import os
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor

import contrastive_zoo as cz
from contrastive_zoo.loss_base.loss import Loss
from tools.comparison import Run
from tools.peer_losses.arguments import TOKENS, Argument, Samples, documents, rows, unit_rows, unit_tokens
from tools.peer_losses.losses import PeerLoss, Reading, runs
from tools.peer_losses.packages import loaded

Call = Callable[..., Tensor]


def and_alone(peer: PeerLoss) -> list[Run]:
    """Return the runs of every loss, and one on one process, where the replacement is compared, too."""
    return [runs(peer)[0].alone(), *runs(peer)]


@dataclass(frozen=True)
class Replacement(PeerLoss):
    """A loss of a trainer, and what replaces it.

    Args:
        ours: our loss.
        calls: our call with the same arguments, from the wrapped loss; None if it is the same.
        theirs: the same of their class, if it is not called so, too.
    """

    ours: Loss = field(kw_only=True)
    calls: Callable[[Call], Call] | None = None
    theirs: Callable[[Any], Call] | None = None

    def construct(self) -> Call:
        found = getattr(loaded(self.module), self.name)
        return super().construct() if self.theirs is None else self.theirs(found)

    @property
    def options(self) -> dict[str, Any]:
        return {"replacement": self}


def replaced(_: Call, replacement: Replacement, **options: Any) -> Call:
    loss_fn = cz.DistributedLoss(replacement.ours, **options)
    return _in_order(loss_fn) if replacement.calls is None else replacement.calls(loss_fn)


def _in_order(loss_fn: Call) -> Call:
    return lambda **named: loss_fn(*named.values())


def _passages(positives: Tensor, negatives: Tensor) -> Tensor:
    """Return the passages of all queries one after the other, the positive first."""
    return torch.cat([positives[:, None], negatives], 1).flatten(0, 1)


def _candidates_of_all(loss_fn: Call) -> Call:
    return lambda queries, positives, negatives: loss_fn(queries, positives, negatives.flatten(0, 1))


def _tevatron(kind: Any) -> Call:
    loss = kind(n_target=3)
    return lambda queries, positives, negatives: loss(queries, _passages(positives, negatives))


def _flag_embedding(kind: Any) -> Call:
    model = kind.__new__(kind)
    torch.nn.Module.__init__(model)
    model.temperature, model.cross_entropy = 0.5, torch.nn.CrossEntropyLoss()
    return lambda queries, positives, negatives: model._compute_in_batch_neg_loss(
        queries, _passages(positives, negatives)
    )[1]


def _swift(kind: Any, **variables: str) -> Call:
    vars(sys.modules[kind.__module__])["strtobool"] = lambda text: text == "True"  # of transformers

    def call(queries: Tensor, positives: Tensor, negatives: Tensor) -> Tensor:
        sentences = torch.cat([queries[:, None], positives[:, None], negatives], 1).flatten(0, 1)
        labels = torch.tensor([1, 0, 0]).repeat(len(queries))
        with patch.dict(os.environ, variables):
            value: Tensor = kind(None, None)({"last_hidden_state": sentences}, labels)
        return value

    return call


def _swift_as_qwen3(kind: Any) -> Call:
    names = ("INCLUDE_QQ", "INCLUDE_DD", "MASK_FAKE_NEGATIVE")
    return _swift(kind, **{f"INFONCE_{name}": "True" for name in names})


def _token_features(batch: Samples, view: int) -> list[dict[str, Tensor]]:
    ones = torch.ones(len(batch.index()), TOKENS, dtype=torch.long)
    rows = [unit_tokens.value(batch, view + x) for x in range(2)]
    return [{"token_embeddings": x, "input_ids": ones, "attention_mask": ones.clone()} for x in rows]


def _of_features(loss_fn: Call) -> Call:
    def call(sentence_features: list[dict[str, Tensor]]) -> Tensor:
        queries, documents = sentence_features
        mask = documents["attention_mask"]
        return loss_fn(queries["token_embeddings"], documents["token_embeddings"], None, mask)

    return call


_GROUPS = {"queries": rows, "positives": rows, "negatives": documents}
_PAIRS = {"queries": rows, "documents": rows}
_TOKENS = {"query_embeddings": unit_tokens, "doc_embeddings": unit_tokens}
_NEMO, _COLPALI = "nemo_automodel.components.loss.infonce", "colpali_engine.loss.late_interaction_losses"
_QWEN3 = cz.MNRL(
    temperature=0.1,
    normalize=False,
    directions=("query_to_doc", "query_to_query", "doc_to_doc"),
    false_negative_margin=0.1,
    mask_doc_to_doc=False,
)

REPLACEMENTS = [
    Replacement(
        *("tevatron", "tevatron.loss", "SimpleContrastiveLoss", _GROUPS),
        ours=cz.MNRL(temperature=1.0, normalize=False), calls=_candidates_of_all, theirs=_tevatron,
    ),
    Replacement(
        *("FlagEmbedding", "FlagEmbedding.finetune.embedder.encoder_only.base.modeling", "BiEncoderOnlyEmbedderModel"),
        _GROUPS, ours=cz.MNRL(temperature=0.5, normalize=False), calls=_candidates_of_all, theirs=_flag_embedding,
    ),
    Replacement(
        *("ms-swift", "swift.loss.embedding", "InfonceLoss", _GROUPS),
        ours=cz.MNRL(temperature=0.1, normalize=False), calls=_candidates_of_all, theirs=_swift,
    ),
    Replacement(
        *("ms-swift", "swift.loss.embedding", "InfonceLoss", _GROUPS),
        ours=_QWEN3, calls=_candidates_of_all, theirs=_swift_as_qwen3,
    ),
    Replacement(
        *("nemo-automodel", _NEMO, "InfoNCELoss", {**_PAIRS, "hard_negatives": documents}),
        {"temperature": 0.5, "cross_device_negatives": False}, ours=cz.InfoNCE(temperature=0.5),
    ),
    Replacement(
        *("nemo-automodel", _NEMO, "InfoNCELoss", _PAIRS),
        {"temperature": 0.5, "cross_device_negatives": False, "direction": "symmetric"},
        ours=cz.InfoNCE(temperature=0.5, symmetric=True),
    ),
    Replacement(
        *("pylate", "pylate.losses.contrastive", "Contrastive"),
        {"sentence_features": Argument("2 dicts of unit tokens", _token_features)}, {"model": Reading()},
        ours=cz.MaxSim(temperature=1.0), calls=_of_features,
    ),
    Replacement(
        *("colpali-engine", _COLPALI, "ColbertLoss", _TOKENS, {"temperature": 0.5, "normalize_scores": True}),
        ours=cz.MaxSim(temperature=0.5, token_reduction="mean", normalize=False),
    ),
    Replacement(
        *("colpali-engine", "colpali_engine.loss.bi_encoder_losses", "BiEncoderLoss"),
        {"query_embeddings": unit_rows, "doc_embeddings": unit_rows}, {"temperature": 0.5},
        ours=cz.InfoNCE(temperature=0.5, normalize=False),
    ),
]  # fmt: skip
