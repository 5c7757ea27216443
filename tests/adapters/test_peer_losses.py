"""Losses of other libraries, as they come: on several processes they are what they are on one, or they are refused."""

import copy
import os
import re
import sys
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any
from unittest.mock import patch
from zlib import crc32

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import contrastive_zoo as cz
from contrastive_zoo.adapters import open_clip
from contrastive_zoo.testing.worlds import Worlds
from tests.helpers import EVERY_CASE, assert_same, close, need, numbers
from tests.helpers import peer as class_of
from tools.comparison import Wrap, measure
from tools.peer_losses import packages
from tools.peer_losses.losses import PeerLoss, Reading, runs, table

pytestmark = pytest.mark.peers

Loss = Callable[..., Tensor]

PACKAGES = list(dict.fromkeys(peer.package for peer in table()))
ALWAYS = {"NTXentLoss()", "DirectCLRLoss(loss_dim=4)", "CO2Regularizer()"}
"""Losses of lightly that have failed: their buffers are empty, and one is never set."""


def of_package(package: str) -> list[PeerLoss]:
    need(package)
    return [peer for peer in table() if peer.package == package]


@pytest.mark.parametrize("package", PACKAGES)
def test_losses_are_on_several_ranks_what_they_are_on_one(package: str, worlds: Worlds) -> None:
    first, *others = of_package(package)
    drawn = [x for x in others if EVERY_CASE or str(x) in ALWAYS or crc32(f"{package} {x}".encode()) % 8 == 0]
    for peer, compared in measure(worlds, [first, *drawn], runs):
        assert {len(run.steps[0]) for run in compared} == {2, 3}
        assert [why for of in compared.values() if (why := peer.wrong(of))] == [], (package, str(peer))


def times_size(loss: Any, **_: Any) -> Any:
    loss_fn = cz.DistributedLoss(loss)
    return lambda **named: 2 * loss_fn(**named)


@pytest.mark.parametrize("mutant", [lambda loss, **_: loss, times_size], ids=["bare", "times size"])
def test_a_wrong_wrapper_is_detected(mutant: Callable[..., Any], worlds: Worlds) -> None:
    losses = [x for x in of_package("open-clip-torch") if x.name == "SigLipLoss"]
    ((peer, compared),) = measure(worlds, losses, runs, mutant)
    assert all("differs by" in (peer.wrong(of) or "") for of in compared.values())


def passages(positives: Tensor, negatives: Tensor) -> Tensor:
    """Return the passages of all queries one after the other, the positive first."""
    return torch.cat([positives[:, None], negatives], 1).flatten(0, 1)


def tevatron(kind: Any) -> Loss:
    loss = kind(n_target=3)
    return lambda queries, *of: loss(queries, passages(*of))


def flag_embedding(kind: Any) -> Loss:
    model = kind.__new__(kind)
    nn.Module.__init__(model)
    model.temperature, model.cross_entropy = 0.5, nn.CrossEntropyLoss()
    return lambda queries, *of: model._compute_in_batch_neg_loss(queries, passages(*of))[1]


def swift(kind: Any, names: Sequence[str] = ()) -> Loss:
    vars(sys.modules[kind.__module__])["strtobool"] = lambda text: text == "True"  # of transformers

    def call(queries: Tensor, *of: Tensor) -> Tensor:
        groups = torch.cat([queries[:, None], passages(*of).unflatten(0, (len(queries), 3))], 1)
        labels = torch.tensor([1, 0, 0]).repeat(len(queries))
        with patch.dict(os.environ, {f"INFONCE_{name}": "True" for name in names}):
            value: Tensor = kind(None, None)({"last_hidden_state": groups.flatten(0, 1)}, labels)
        return value

    return call


def nemo(kind: Any, **settings: Any) -> Loss:
    loss = kind(temperature=0.5, cross_device_negatives=False, **settings)
    return lambda *rows: loss(**dict(zip(("queries", "documents", "hard_negatives"), rows, strict=False)))


def pylate(kind: Any) -> Loss:
    def call(*tokens: Tensor) -> Tensor:
        ones = torch.ones(tokens[0].shape[:2], dtype=torch.long)
        named = [{"token_embeddings": x, "input_ids": ones, "attention_mask": ones.clone()} for x in tokens]
        value: Tensor = kind(model=Reading())(named)
        return value

    return call


def in_one_batch(loss: Loss) -> Loss:
    return lambda queries, positives, negatives: loss(queries, positives, negatives.flatten(0, 1))


QWEN3 = cz.MNRL(
    temperature=0.1, normalize=False, directions=("query_to_doc", "query_to_query", "doc_to_doc"),
    false_negative_margin=0.1, mask_doc_to_doc=False,
)  # fmt: skip
FLAG_EMBEDDING = "FlagEmbedding.finetune.embedder.encoder_only.base.modeling.BiEncoderOnlyEmbedderModel"
SWIFT, NEMO = "swift.loss.embedding.InfonceLoss", "nemo_automodel.components.loss.infonce.InfoNCELoss"
COLBERT = "colpali_engine.loss.late_interaction_losses.ColbertLoss"
GROUPS, PAIRS, TOKENS = ((7, 8), (7, 8), (7, 2, 8)), ((7, 8), (7, 8)), ((7, 3, 8), (7, 3, 8))
REPLACEMENTS: list[tuple[str, tuple[Any, ...], Callable[[Any], Loss], Loss]] = [
    ("tevatron.loss.SimpleContrastiveLoss", GROUPS, tevatron, in_one_batch(cz.MNRL(temperature=1.0, normalize=False))),
    (FLAG_EMBEDDING, GROUPS, flag_embedding, in_one_batch(cz.MNRL(temperature=0.5, normalize=False))),
    (SWIFT, GROUPS, swift, in_one_batch(cz.MNRL(temperature=0.1, normalize=False))),
    (SWIFT, GROUPS, partial(swift, names=("INCLUDE_QQ", "INCLUDE_DD", "MASK_FAKE_NEGATIVE")), in_one_batch(QWEN3)),
    (NEMO, GROUPS, nemo, cz.InfoNCE(temperature=0.5)),
    (NEMO, PAIRS, partial(nemo, direction="symmetric"), cz.InfoNCE(temperature=0.5, symmetric=True)),
    ("pylate.losses.contrastive.Contrastive", TOKENS, pylate, cz.MaxSim(temperature=1.0)),
    (COLBERT, TOKENS, lambda kind: kind(temperature=0.5, normalize_scores=True),
     cz.MaxSim(temperature=0.5, token_reduction="mean", normalize=False)),
    ("colpali_engine.loss.bi_encoder_losses.BiEncoderLoss", PAIRS, lambda kind: kind(temperature=0.5),
     cz.InfoNCE(temperature=0.5, normalize=False)),
]  # fmt: skip
"""Losses of trainers of embedding models, the shapes of their arguments, and what replaces them, as on the page "Coming from
another library"."""


@pytest.mark.filterwarnings("ignore")  # their own
@pytest.mark.parametrize(("path", "shapes", "make", "ours"), REPLACEMENTS)
def test_what_replaces_a_trainers_loss_is_their_own_code(path: str, shapes, make, ours) -> None:
    theirs = make(class_of(path))
    for seed in range(3):
        drawn = (numbers(*shape, seed=10 * seed + i) for i, shape in enumerate(shapes))
        unit = [F.normalize(x, dim=-1).requires_grad_() for x in drawn]
        assert_same(ours, theirs, *unit)
        with pytest.raises(AssertionError):
            assert_same(ours, lambda *x: theirs(x[0].roll(1, 0), *x[1:]), *unit)  # other pairs


def test_a_package_that_is_absent_is_a_skip_that_names_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(packages, "FOLDER", packages.ROOT / ".venv" / "no peers")
    says = r"lightly==.* is not in .venv/no peers; `make test-all` installs it"
    with pytest.raises(pytest.skip.Exception, match=says):
        of_package("lightly")


def test_the_stand_in_of_a_model_has_no_parameters() -> None:
    models = [x for peer in table() for x in peer.settings.values() if isinstance(x, nn.Module)]
    assert models
    assert not any([*model.parameters()] for model in models)


OF_OPEN_CLIP = [peer for peer in table() if peer.package == "open-clip-torch" and peer.name in open_clip.__all__]


def original(name: str, **settings: Any) -> Any:
    need("open-clip-torch")
    return getattr(packages.loaded("open_clip.loss"), name)(**settings)


def in_its_place(loss: Any, **options: Any) -> Any:
    return getattr(open_clip, type(loss).__name__)(**options)


@pytest.mark.parametrize("wrap", [in_its_place, cz.DistributedLoss])
def test_a_training_of_open_clip_is_that_of_one_process(wrap: Wrap, worlds: Worlds) -> None:
    need("open-clip-torch")
    for peer, compared in measure(worlds, OF_OPEN_CLIP, runs, wrap):
        assert [why for x in compared.values() if (why := peer.wrong(x))] == [], str(peer)


def test_a_loss_of_open_clip_forgets_the_graph_of_the_model_and_has_no_parameters_of_it() -> None:
    loss = open_clip.SigLipLoss()
    z, scale, bias = numbers(4, 4, seed=0), nn.Parameter(torch.tensor(2.0)), nn.Parameter(torch.tensor(-3.0))
    loss(z, z, scale, bias).backward()
    assert not [*loss.parameters()]
    close(copy.deepcopy(loss)(z, z, scale, bias).detach(), original("SigLipLoss")(z, z, scale, bias).detach())
    with pytest.raises(ValueError, match="temperature must be positive"):
        loss(z, z, torch.tensor(-1.0), bias)
    assert loss.contrastive.temperature == 1.0


def test_a_scale_of_bfloat16_is_inverted_in_float32() -> None:
    z, scale = numbers(4, 4, seed=0), torch.tensor(93.0, dtype=torch.bfloat16)
    close(open_clip.ClipLoss()(z, z, scale), original("ClipLoss")(z, z, scale.double()), tolerance=1e-6)


def test_preferring_native_losses_names_the_adapter() -> None:
    with pytest.raises(ValueError, match=re.escape("contrastive_zoo.adapters.open_clip.ClipLoss()")):
        cz.DistributedLoss(original("ClipLoss"), prefer_native=True)
