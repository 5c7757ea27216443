"""Implementations of distributed losses in other libraries, as recipes; each library is imported when it is used."""

from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tools.gallery.recipe import rank_and_size, recipe

WIDTH = 8  # width to which embeddings are padded with zeros, for losses with a fixed width


class _Padded(nn.Module):
    """A loss of embeddings that are padded with zeros to :data:`WIDTH`."""

    def __init__(self, loss: nn.Module) -> None:
        super().__init__()
        self.loss = loss

    def forward(self, embeddings: Tensor, labels: Tensor) -> Tensor:
        return self.loss(F.pad(embeddings, (0, WIDTH - embeddings.shape[1])), labels)


def _wrapped(loss: str, **settings: Any) -> nn.Module:
    from pytorch_metric_learning import losses
    from pytorch_metric_learning.utils.distributed import DistributedLossWrapper

    settings_of_proxies = {"num_classes": 256, "embedding_size": WIDTH} if loss == "ProxyAnchorLoss" else {}
    return _Padded(DistributedLossWrapper(getattr(losses, loss)(**settings_of_proxies), **settings))


_peer = partial(recipe, library="pytorch_metric_learning", call="labels")

_peer("pml wrapper", mistake="times W")(partial(_wrapped, "ContrastiveLoss"))
_peer("pml wrapper, proxies", mistake="times W")(partial(_wrapped, "ProxyAnchorLoss"))
_peer("pml wrapper, efficient", mistake="uneven shards")(partial(_wrapped, "ContrastiveLoss", efficient=True))
_peer("pml wrapper, efficient, proxies", mistake="raises")(partial(_wrapped, "ProxyAnchorLoss", efficient=True))


class _PrecomputedEmbeddings(nn.Module):
    """A stand-in for a SentenceTransformer, which returns embeddings that are already computed."""

    def forward(self, features: dict[str, Tensor]) -> dict[str, Tensor]:
        return features


@recipe("sentence-transformers, gathered", library="sentence_transformers", mistake="uneven shards")
def _sentence_transformers() -> Any:
    from sentence_transformers.sentence_transformer.losses import MultipleNegativesRankingLoss

    loss = MultipleNegativesRankingLoss(_PrecomputedEmbeddings(), gather_across_devices=rank_and_size()[1] > 1)  # type: ignore[arg-type]  # no model
    return lambda view1, view2: loss([{"sentence_embedding": view1}, {"sentence_embedding": view2}], torch.empty(0))
