"""The losses of open_clip's calls are, on W ranks, those of one process with open_clip's own losses."""

import copy
import re
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import contrastive_zoo as cz
from contrastive_zoo.adapters import open_clip as ours
from contrastive_zoo.testing.worlds import Worlds
from tests.helpers import close, numbers
from tools.comparison import Run, Wrap, measure
from tools.peer_losses import packages
from tools.peer_losses.losses import PeerLoss, runs, table

pytestmark = pytest.mark.peers  # their package is installed for these tests only
D = 4
PEERS = [peer for peer in table() if peer.package == "open-clip-torch" and peer.name in ours.__all__]


def original(name: str, **settings: Any) -> Any:
    if packages.missing(packages.FOLDER, {"open-clip-torch": packages.required()["open-clip-torch"]}):
        pytest.skip("open_clip_torch is not in the peers' folder; `make test-all` installs it")
    return getattr(packages.loaded("open_clip.loss"), name)(**settings)


def in_its_place(loss: Any, **options: Any) -> Any:
    return getattr(ours, type(loss).__name__)(**options)


def gathered(loss: Any, **_: Any) -> Any:
    """open_clip's own distributed loss, which is the mutant."""
    return original(type(loss).__name__, rank=dist.get_rank(), world_size=dist.get_world_size(), local_loss=True)


@pytest.mark.parametrize("wrap", [in_its_place, cz.DistributedLoss])
def test_training_is_that_of_one_process(wrap: Wrap, worlds: Worlds) -> None:
    original("ClipLoss")  # skips without the peers' folder
    for peer, compared in measure(worlds, PEERS, runs, wrap):
        assert [why for x in compared.values() if (why := peer.wrong(x))] == [], str(peer)


def even(_: PeerLoss) -> list[Run]:
    return [Run(((3, 3),))]


def test_open_clips_own_gather_is_detected(worlds: Worlds) -> None:
    original("ClipLoss")
    ((_, compared),) = measure(worlds, [x for x in PEERS if x.name == "ClipLoss"][:1], even, gathered)
    assert all(x.differences["encoder"] > 1e-3 for x in compared.values())


def test_a_loss_forgets_the_graph_of_the_model_and_has_no_parameters_of_it() -> None:
    loss = ours.SigLipLoss()
    z, scale, bias = numbers(4, D, seed=0), nn.Parameter(torch.tensor(2.0)), nn.Parameter(torch.tensor(-3.0))
    loss(z, z, scale, bias).backward()
    assert not [*loss.parameters()]
    close(copy.deepcopy(loss)(z, z, scale, bias).detach(), original("SigLipLoss")(z, z, scale, bias).detach())
    with pytest.raises(ValueError, match="temperature must be positive"):
        loss(z, z, torch.tensor(-1.0), bias)
    assert loss.contrastive.temperature == 1.0


def test_a_scale_of_bfloat16_is_inverted_in_float32() -> None:
    z, scale = numbers(4, D, seed=0), torch.tensor(93.0, dtype=torch.bfloat16)
    close(ours.ClipLoss()(z, z, scale), original("ClipLoss")(z, z, scale.double()), tolerance=1e-6)


def test_preferring_native_losses_names_the_adapter() -> None:
    with pytest.raises(ValueError, match=re.escape("contrastive_zoo.adapters.open_clip.ClipLoss()")):
        cz.DistributedLoss(original("ClipLoss"), prefer_native=True)
