"""Implementations of distributed losses in other libraries, as recipes; each library is imported when it is used."""

import os
import warnings
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tools.gallery.recipe import DenseInfoNCE, rank_and_size, recipe

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


@recipe("accelerate gather", library="accelerate", mistake="detached")
def _accelerate() -> Any:
    from accelerate import Accelerator

    _set_torchrun_environment()
    accelerator = Accelerator(cpu=True)
    return DenseInfoNCE(gather=lambda x: accelerator.gather(x) + 0 * x.sum() if rank_and_size()[1] > 1 else x)


@recipe("Fabric all_gather", library="lightning_fabric", mistake="uneven shards")
def _fabric() -> Any:
    from lightning_fabric import Fabric

    _set_torchrun_environment()
    fabric = Fabric(accelerator="cpu", devices=rank_and_size()[1], strategy="ddp")
    fabric.launch()

    def gathered(x: Tensor) -> Tensor:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", FutureWarning)  # its torch function is deprecated, on every call
            gathered = fabric.all_gather(x, sync_grads=True)
        assert isinstance(gathered, Tensor)
        return gathered.flatten(0, 1)

    return DenseInfoNCE(gather=gathered)


class _PrecomputedEmbeddings(nn.Module):
    """A stand-in for a SentenceTransformer, which returns embeddings that are already computed."""

    def forward(self, features: dict[str, Tensor]) -> dict[str, Tensor]:
        return features


@recipe("sentence-transformers, gathered", library="sentence_transformers", mistake="uneven shards")
def _sentence_transformers() -> Any:
    from sentence_transformers.sentence_transformer.losses import MultipleNegativesRankingLoss

    loss = MultipleNegativesRankingLoss(_PrecomputedEmbeddings(), gather_across_devices=rank_and_size()[1] > 1)  # type: ignore[arg-type]  # no model
    return lambda view1, view2: loss([{"sentence_embedding": view1}, {"sentence_embedding": view2}], torch.empty(0))


def _set_torchrun_environment() -> None:
    rank, size = map(str, rank_and_size())
    os.environ |= {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": size, "LOCAL_WORLD_SIZE": size, "GROUP_RANK": "0"}
    for name, value in {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0", "TORCHELASTIC_RUN_ID": "none"}.items():
        os.environ.setdefault(name, value)
