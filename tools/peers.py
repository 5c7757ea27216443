"""Implementations of distributed losses in other libraries, as recipes; each library is imported when it is used."""

import os
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from importlib.util import find_spec
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from contrastive_zoo.testing.measurement import Call, Case
from tools.gallery.recipe import DenseInfoNCE, Recipe, rank_and_size

WIDTH = 8  # width to which embeddings are padded with zeros, for losses with a fixed width


@dataclass(frozen=True)
class Peer(Recipe):
    """A recipe that needs another library, which is imported by this name."""

    library: str

    @property
    def case(self) -> Case:
        return Case(partial(make, self.name), call=self.call, grad_reduction=self.grad_reduction, name=self.name)

    @property
    def importable(self) -> bool:
        return find_spec(self.library) is not None


PEERS: dict[str, Peer] = {}  # all peers by name, importable or not


def make(name: str) -> Any:
    return PEERS[name].make()


def peer(
    name: str, *, library: str, mistake: str | None, call: Call = "labels"
) -> Callable[[Callable[[], Any]], Callable[[], Any]]:
    """Register a peer; its docstring says what people write."""

    def register(make: Callable[[], Any]) -> Callable[[], Any]:
        PEERS[name] = Peer(name, make, mistake, call, "mean", (make.__doc__ or "").strip(), library)
        return make

    return register


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


_PML_WRAPPERS: tuple[tuple[str, str, str, dict[str, bool]], ...] = (
    ("pml wrapper", "times W", "ContrastiveLoss()", {}),
    ("pml wrapper, proxies", "times W", "ProxyAnchorLoss(...)", {}),
    ("pml wrapper, efficient", "uneven shards", "ContrastiveLoss()", {"efficient": True}),
    ("pml wrapper, efficient, proxies", "raises", "ProxyAnchorLoss(...)", {"efficient": True}),
)
"""Name, mistake, loss and settings of the wrapper."""

for _name, _mistake, _loss, _settings in _PML_WRAPPERS:
    _call = f"DistributedLossWrapper({', '.join([_loss, *(f'{x}={y}' for x, y in _settings.items())])})"
    _make, _about = partial(_wrapped, _loss.partition("(")[0], **_settings), f"pytorch-metric-learning's `{_call}`"
    PEERS[_name] = Peer(_name, _make, _mistake, "labels", "mean", _about, library="pytorch_metric_learning")


@peer("accelerate gather", library="accelerate", mistake="detached", call="views")
def _() -> Any:
    """Hugging Face Accelerate's `accelerator.gather(embeddings)`, whole loss on every rank"""
    from accelerate import Accelerator

    _set_torchrun_environment()
    accelerator = Accelerator(cpu=True)
    return DenseInfoNCE(gather=lambda x: accelerator.gather(x) + 0 * x.sum() if rank_and_size()[1] > 1 else x)


@peer("Fabric all_gather", library="lightning_fabric", mistake="uneven shards", call="views")
def _() -> Any:
    """Lightning Fabric's `fabric.all_gather(embeddings, sync_grads=True).flatten(0, 1)`, whole loss on every rank"""
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


@peer("sentence-transformers, gathered", library="sentence_transformers", mistake="uneven shards", call="views")
def _() -> Any:
    """sentence-transformers' `MultipleNegativesRankingLoss(model, gather_across_devices=True)`"""
    from sentence_transformers.sentence_transformer.losses import MultipleNegativesRankingLoss

    loss = MultipleNegativesRankingLoss(_PrecomputedEmbeddings(), gather_across_devices=rank_and_size()[1] > 1)  # type: ignore[arg-type]  # no model
    return lambda view1, view2: loss([{"sentence_embedding": view1}, {"sentence_embedding": view2}], torch.empty(0))


def _set_torchrun_environment() -> None:
    rank, size = map(str, rank_and_size())
    os.environ |= {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": size, "LOCAL_WORLD_SIZE": size, "GROUP_RANK": "0"}
    for name, value in {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0", "TORCHELASTIC_RUN_ID": "none"}.items():
        os.environ.setdefault(name, value)
