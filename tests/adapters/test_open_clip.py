"""Training with the losses of open_clip's calls is, on W ranks, the training of one process with open_clip's own losses."""

from __future__ import annotations

import copy
import inspect
import math
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import contrastive_zoo as cz
from contrastive_zoo.adapters import open_clip as ours
from contrastive_zoo.testing.worlds import Worlds
from tests.helpers import close, distance, numbers
from tools.peer_losses import packages

N, D, TOKENS, WORDS, STEPS = 6, 4, 5, 7, 3
SPLITS = [(6,), (4, 2), (3, 0, 3)]
COCA = {"caption_loss_weight": 2.0, "clip_loss_weight": 0.5}
CASES = {"ClipLoss": {}, "SigLipLoss": {}, "CoCaLoss": COCA, "DistillClipLoss": {}}


class Model(nn.Module):
    """What open_clip's models return: unit features, the scale, a bias, and the logits of captions."""

    def __init__(self, name: str, *, bias: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.name, self.image, self.text = name, nn.Linear(3, D), nn.Linear(3, D)
        self.logit_scale = nn.Parameter(torch.tensor(4.5))  # the clamp to log 100 acts in the first step
        self.logit_bias = nn.Parameter(torch.tensor(-1.0)) if bias else None
        if name == "CoCaLoss":
            self.words = nn.Linear(D, TOKENS * WORDS)

    def forward(self, images: Tensor, texts: Tensor, captions: Tensor) -> dict[str, Tensor]:
        found = {
            "image_features": F.normalize(self.image(images), dim=-1),
            "text_features": F.normalize(self.text(texts), dim=-1),
            "logit_scale": self.logit_scale.exp(),
        }
        if self.logit_bias is not None:
            found["logit_bias"] = self.logit_bias
        if self.name == "CoCaLoss":
            found |= {"logits": self.words(found["image_features"]).unflatten(1, (TOKENS, WORDS)), "labels": captions}
        if self.name == "DistillClipLoss":
            teacher = {"image_features": images, "text_features": texts, "logit_scale": torch.tensor(3.0).double()}
            found |= {f"dist_{key}": x for key, x in teacher.items()}
        return found


def trained(name: str, loss: Any, rows: slice, *, bias: bool, accumulated: int = 1) -> tuple[Tensor, dict[str, Tensor]]:
    """Return the losses of a few steps of open_clip's loop, and what it leaves of the model."""
    model: Any = Model(name, bias=bias).double()
    if dist.is_initialized():
        model = DistributedDataParallel(model)
    core = getattr(model, "module", model)
    optimizer, found = torch.optim.SGD(model.parameters(), lr=0.5), []
    for step in range(STEPS):
        images, texts = numbers(N, 3, seed=2 * step)[rows], numbers(N, 3, seed=2 * step + 1)[rows]
        captions = torch.randint(0, WORDS, (N, TOKENS), generator=torch.Generator().manual_seed(step))[rows]
        optimizer.zero_grad()
        chunks = [x.chunk(accumulated) for x in (images, texts, captions)]
        with torch.no_grad():
            features = [core(*chunk) for chunk in zip(*chunks, strict=True)]
        for j, chunk in enumerate(zip(*chunks, strict=True)):
            out = model(*chunk)
            if accumulated > 1:  # the features of the other micro-batches are open_clip's negatives
                for key in set(out) - {"logit_scale", "logit_bias"}:
                    out[key] = torch.cat([x[key] if k != j else out[key] for k, x in enumerate(features)])
            losses = loss(**out, output_dict=True)
            sum(losses.values()).backward()
            found.append(torch.stack([x.detach() for x in losses.values()]))
        optimizer.step()
        with torch.no_grad():
            core.logit_scale.clamp_(0, math.log(100))
    return torch.stack(found), {key: x.detach().clone() for key, x in core.state_dict().items()}


def original(name: str, **settings: Any) -> Any:
    if packages.missing(packages.FOLDER, {"open-clip-torch": packages.required()["open-clip-torch"]}):
        pytest.skip("open_clip_torch is not in the peers' folder; `make test` installs it")
    return getattr(packages.loaded("open_clip.loss"), name)(**CASES[name], **settings)


def adapted(name: str) -> Any:
    return getattr(ours, name)(**CASES[name])


def wrapped(name: str) -> Any:
    return cz.DistributedLoss(original(name))


def gathered(name: str) -> Any:
    """open_clip's own distributed loss, which is the mutant."""
    return original(name, rank=dist.get_rank(), world_size=dist.get_world_size(), local_loss=True)


def on_rank(name: str, make: Callable[[str], Any], shards: tuple[int, ...], **settings: Any) -> Any:
    start = sum(shards[: dist.get_rank()])
    return trained(name, make(name), slice(start, start + shards[dist.get_rank()]), **settings)


def assert_same(found: list[Any], expected: Any) -> None:
    for values, parameters in found:
        close(values, expected[0])
        assert parameters.keys() == expected[1].keys()
        for key, x in expected[1].items():
            close(parameters[key], x)


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("make", [adapted, wrapped])
def test_training_is_that_of_one_process(name: str, make: Callable[[str], Any], worlds: Worlds) -> None:
    bias = name in ("SigLipLoss", "ClipLoss")
    expected = trained(name, original(name), slice(None), bias=bias)
    for shards in SPLITS:
        if make is adapted or shards == (4, 2):
            assert_same(worlds.run(len(shards), on_rank, name, make, shards, bias=bias), expected)


def test_accumulated_features_are_those_of_one_process(worlds: Worlds) -> None:
    expected = trained("ClipLoss", original("ClipLoss"), slice(None), bias=False, accumulated=2)
    assert_same(worlds.run(2, on_rank, "ClipLoss", adapted, (4, 2), bias=False, accumulated=2), expected)


def test_open_clips_own_gather_is_detected(worlds: Worlds) -> None:
    expected = trained("ClipLoss", original("ClipLoss"), slice(None), bias=False)
    for _, parameters in worlds.run(2, on_rank, "ClipLoss", gathered, (3, 3), bias=False):
        assert distance(parameters["image.weight"], expected[1]["image.weight"]) > 1e-3


def test_a_loss_forgets_the_graph_of_the_model_and_has_no_parameters_of_it() -> None:
    loss = adapted("SigLipLoss")
    z, scale, bias = numbers(4, D, seed=0), nn.Parameter(torch.tensor(2.0)), nn.Parameter(torch.tensor(-3.0))
    loss(z, z, scale, bias).backward()
    assert not [*loss.parameters()]
    close(copy.deepcopy(loss)(z, z, scale, bias).detach(), original("SigLipLoss")(z, z, scale, bias).detach())
    with pytest.raises(ValueError, match="temperature must be positive"):
        loss(z, z, torch.tensor(-1.0), bias)
    assert loss.contrastive.temperature == 1.0


def test_a_scale_of_bfloat16_is_inverted_in_float32() -> None:
    z, scale = numbers(4, D, seed=0), torch.tensor(93.0, dtype=torch.bfloat16)
    close(adapted("ClipLoss")(z, z, scale), original("ClipLoss")(z, z, scale.double()), tolerance=1e-6)


def test_every_loss_that_open_clip_creates_is_replaced() -> None:
    original("ClipLoss")  # skips without the peers' folder
    source = inspect.getsource(packages.loaded("open_clip.loss"))
    assert {*re.findall(r"^class (\w+Loss)\(", source, re.MULTILINE)} == {*ours.__all__} == {*CASES}


def test_preferring_native_losses_names_the_adapter() -> None:
    with pytest.raises(ValueError, match=re.escape("contrastive_zoo.adapters.open_clip.CoCaLoss()")):
        cz.DistributedLoss(original("CoCaLoss"), prefer_native=True)
