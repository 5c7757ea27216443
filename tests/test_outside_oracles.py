"""Losses and metrics beside other programs: optax in JAX, open-metric-learning, scikit-learn, and a published table.

Gradients of optax's losses are those of JAX's automatic differentiation.
"""

import sys
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from sklearn.neighbors import KNeighborsClassifier, NearestNeighbors, NeighborhoodComponentsAnalysis
from torch import Tensor

import contrastive_zoo as cz
from contrastive_zoo.testing.worlds import Worlds
from tests.helpers import assert_same, close, need, numbers, split
from tools.peer_losses import packages

pytestmark = pytest.mark.peers

Theirs = Callable[..., Any]  # of JAX's libraries, the arguments of a call, and then the loss's own parameters

N = 8
A, B = (numbers(N, 5, seed=seed) for seed in range(2))
LABELS = torch.tensor([0, 1, 0, 2, 1, 2, 0, 1])
SHARDS = {1: (8,), 2: (5, 3), 3: (3, 0, 5)}
DIFFERENT = 1e-3
"""Least difference of a value, and of a gradient, from those of other arguments."""


def cosines(jax: Any, a: Any, b: Any) -> Any:
    return jax.optax.cosine_similarity(a[:, None], b[None])


def to_own(jax: Any, logits: Any) -> Any:
    return jax.optax.softmax_cross_entropy_with_integer_labels(logits, jax.np.arange(len(logits))).mean()


def clip(jax: Any, a: Any, b: Any, log_scale: Any) -> Any:
    logits = cosines(jax, a, b) * jax.np.exp(log_scale)
    return (to_own(jax, logits) + to_own(jax, logits.T)) / 2


def smoothed(jax: Any, a: Any, b: Any) -> Any:
    targets = jax.optax.smooth_labels(jax.np.eye(N), 0.2)
    return jax.optax.softmax_cross_entropy(cosines(jax, a, b) / 0.5, targets).mean()


def multi_positive(jax: Any, queries: Any, keys: Any, ids: Any) -> Any:
    logits, same = cosines(jax, queries, keys) / 0.5, ids[:, None] == ids
    return jax.optax.softmax_cross_entropy(logits, same / same.sum(1, keepdims=True)).mean()


def triplets(jax: Any, z: Any, labels: Any) -> Any:
    same = labels[:, None] == labels
    anchor, positive, negative = np.nonzero((same & ~np.eye(N, dtype=bool))[:, :, None] & ~same[:, None])
    return jax.optax.losses.triplet_margin_loss(z[anchor], z[positive], z[negative], margin=0.3, eps=0.0).mean()


OPTAX: dict[str, tuple[Callable[[], Any], tuple[Tensor, ...], Theirs]] = {
    "NTXent": (lambda: cz.NTXent(temperature=0.5), (A, B),
               lambda jax, a, b: jax.optax.losses.ntxent(
                   jax.np.concatenate([a, b]), jax.np.tile(jax.np.arange(N), 2), 0.5)),
    "SINCERE, pairs": (lambda: cz.SINCERE(temperature=0.5, average="pairs"), (A, LABELS),
                       lambda jax, z, labels: jax.optax.losses.ntxent(z, labels, 0.5)),
    "InfoNCE, smoothed": (lambda: cz.InfoNCE(temperature=0.5, label_smoothing=0.2), (A, B), smoothed),
    "Clip": (cz.Clip, (A, B), clip),
    "MultiPositive": (lambda: cz.MultiPositive(temperature=0.5), (A, B, LABELS), multi_positive),
    "Triplet": (lambda: cz.Triplet(margin=0.3, normalize=False, average="all"), (A, LABELS), triplets),
    "NegativeCosine": (cz.NegativeCosine, (A, B),
                       lambda jax, a, b: jax.optax.cosine_distance(a, jax.lax.stop_gradient(b)).mean() - 1),
}  # fmt: skip


def computed(theirs: Theirs, *arguments: Tensor) -> tuple[Tensor, list[Tensor]]:
    """Return a value and the gradients of all real arguments, computed by JAX in float64."""
    if str(packages.FOLDER) not in sys.path:
        sys.path.append(str(packages.FOLDER))
    import jax
    import optax

    jax.config.update("jax_enable_x64", True)
    libraries = SimpleNamespace(np=jax.numpy, lax=jax.lax, optax=optax)
    real = [i for i, x in enumerate(arguments) if x.is_floating_point()]
    of = jax.value_and_grad(lambda *x: theirs(libraries, *x), argnums=real)
    value, gradients = of(*(x.numpy() for x in arguments))
    return torch.tensor(np.array(value)), [torch.tensor(np.array(x)) for x in gradients]


@pytest.fixture(scope="module")
def jax_process() -> Iterator[Worlds]:
    """A process of its own: JAX starts threads, and the tests' process forks."""
    need("optax", "jax", "jaxlib", "ml-dtypes", "opt-einsum", "absl-py")
    with Worlds(timeout=300.0) as worlds:
        yield worlds


def prepared(make: Callable[[], Any]) -> Any:
    """Return the loss in float64 with parameters that are not those of the start."""
    loss = make().double()
    for i, parameter in enumerate(loss.parameters()):
        parameter.data = 0.5 * numbers(*parameter.shape, seed=9 + i)
    return loss


def on_rank(make: Callable[[], Any], world_size: int, *rows: Tensor) -> tuple[Tensor, list[Tensor], list[Tensor]]:
    """Return the value, and the gradients of the rank's rows and of the loss's parameters after DDP's mean."""
    loss, real = prepared(make), [x.requires_grad_() for x in rows if x.is_floating_point()]
    value = cz.DistributedLoss(loss)(*rows)
    found = torch.autograd.grad(value, [*real, *loss.parameters()], allow_unused=True, materialize_grads=True)
    return value, [x / world_size for x in found[: len(real)]], list(found[len(real) :])


@pytest.mark.parametrize("name", OPTAX)
def test_optax_and_jax_agree_on_any_number_of_ranks(name: str, worlds: Worlds, jax_process: Worlds) -> None:
    make, rows, theirs = OPTAX[name]
    parameters = [x.detach() for x in prepared(make).parameters()]
    ((value, gradients),) = jax_process.run(1, computed, theirs, *rows, *parameters)
    for world_size, shards in SHARDS.items():
        each = list(zip(*(split(x, shards) for x in rows), strict=True))
        found = worlds.run(world_size, on_rank, make, world_size, each=each)
        of_rows = [torch.cat(x) for x in zip(*(x for _, x, _ in found), strict=True)]
        for rank_value, _, of_parameters in found:
            close(rank_value, value)
            for x, expected in zip([*of_rows, *of_parameters], gradients, strict=True):
                close(x, expected)
    ((other, others),) = jax_process.run(1, computed, theirs, rows[0].roll(1, 0), *rows[1:], *parameters)
    assert (other - value).abs() > DIFFERENT
    assert max((x - y).abs().max() for x, y in zip(others, gradients, strict=True)) > DIFFERENT


@pytest.mark.parametrize(
    ("ours", "miner", "name", "margin"),
    [
        (cz.Triplet(margin=0.3, average="all", normalize=False), "inbatch_all_tri", "AllTripletsMiner", 0.3),
        (cz.Triplet(margin=0.0, soft=True, normalize=False), "inbatch_all_tri", "AllTripletsMiner", None),
        (cz.Triplet(margin=0.3, average="all", mining="hard", normalize=False), "inbatch_hard_tri",
         "HardTripletsMiner", 0.3),
    ],
)  # fmt: skip
def test_triplets_are_those_of_open_metric_learning(ours: Any, miner: str, name: str, margin: float | None) -> None:
    need("open-metric-learning")
    kind = packages.loaded("oml.losses.triplet").TripletLossWithMiner
    theirs = kind(margin, getattr(packages.loaded(f"oml.miners.{miner}"), name)())
    for seed in range(3):
        z = numbers(N, 5, seed=seed).requires_grad_()
        assert_same(ours, theirs, z, LABELS)
        with pytest.raises(AssertionError):
            assert_same(ours, lambda z, labels: theirs(z, labels.roll(1)), z, LABELS)


NAMES = ["hit_rate@1", "hit_rate@5", "precision@1", "precision@5", "map"]
QUERIES, GALLERY = (F.normalize(numbers(n, 8, seed=n), dim=1) for n in (40, 60))
RELEVANT = torch.arange(40)[:, None] % 10 == torch.arange(60) % 10
SEARCHED: dict[str, Any] = {"labels": torch.arange(40) % 10, "gallery_labels": torch.arange(60) % 10}


def test_metrics_are_those_of_open_metric_learning() -> None:
    need("open-metric-learning")
    theirs = packages.loaded("oml.functional.metrics").calc_retrieval_metrics
    nearest, relevant = torch.cdist(QUERIES, GALLERY).argsort(1), [x.nonzero().flatten() for x in RELEVANT]
    expected = theirs(nearest, relevant, None, (1, 5), (1, 5), (60,), reduce=False, verbose=False)
    found = cz.metrics.evaluate(QUERIES, GALLERY, **SEARCHED, metrics=NAMES, reduction="none")
    for name, x in found.items():
        kind, _, k = name.replace("hit_rate", "cmc").partition("@")
        close(x.float(), expected[kind][int(k or 60)], tolerance=1e-6)  # theirs are sums of float32


def test_neighbours_are_those_of_scikit_learn() -> None:
    found = cz.metrics.top_k(QUERIES, GALLERY, k=5)
    distances, places = NearestNeighbors(n_neighbors=5, metric="cosine").fit(GALLERY).kneighbors(QUERIES)
    assert found.indices.tolist() == places.tolist()
    close(found.scores, 1 - torch.from_numpy(distances))

    labels, of_items = (x.numpy() for x in SEARCHED.values())
    shares = KNeighborsClassifier(5, metric="cosine").fit(GALLERY, of_items).predict_proba(QUERIES)
    own, others = shares[np.arange(40), labels], np.where(labels[:, None] == np.arange(10), 0, shares).max(1)
    right = cz.metrics.evaluate(QUERIES, GALLERY, **SEARCHED, metrics=["knn_accuracy@5"])
    assert right == pytest.approx({"knn_accuracy@5": (own > others).mean()}, abs=1e-12)


def test_nca_is_that_of_scikit_learn() -> None:
    """Theirs is the expected number of right neighbours, with its gradient for the linear encoder."""
    rows, encoder = numbers(N, 6, seed=0), numbers(3, 6, seed=1).requires_grad_()
    theirs = NeighborhoodComponentsAnalysis()
    theirs.n_iter_ = 1  # fit sets it; 0 prints a header
    same = (LABELS[:, None] == LABELS).numpy()
    value, gradient = theirs._loss_grad_lbfgs(encoder.detach().numpy().ravel(), rows.numpy(), same)
    losses = cz.NCA(normalize=False, reduction="none")(rows @ encoder.T, LABELS)
    found = (-losses).exp().sum()
    close(found.detach(), torch.tensor(value))
    close(torch.autograd.grad(found, encoder)[0].flatten(), torch.from_numpy(gradient))


UCR = {"ACSF1": 0.46, "ArrowHead": 0.2, "GunPoint": 0.0867, "ItalyPowerDemand": 0.0447, "OSULeaf": 0.4793}
"""Errors of the nearest neighbour by Euclidean distance: the column "ED (w=0)" of the archive's summary, Dau et al. 2019,
https://arxiv.org/abs/1810.07758, for the univariate data sets of equal lengths that aeon's wheel contains."""


def series(name: str, part: str) -> tuple[Tensor, list[str]]:
    text = (packages.FOLDER / "aeon" / "datasets" / "data" / name / f"{name}_{part}.ts").read_text()
    lines = [x.split(":") for x in text.splitlines() if x and x[0] not in "#@"]
    return torch.tensor([[float(x) for x in row.split(",")] for row, _ in lines]).double(), [x for _, x in lines]


@pytest.mark.parametrize("name", UCR)
def test_the_nearest_neighbour_is_as_often_wrong_as_published(name: str) -> None:
    need("aeon")
    (queries, labels), (gallery, of_items) = series(name, "TEST"), series(name, "TRAIN")
    number = {label: i for i, label in enumerate(sorted(set(of_items)))}
    named = {"labels": labels, "gallery_labels": of_items}
    arguments: dict[str, Any] = {x: torch.tensor([number[label] for label in of]) for x, of in named.items()}
    # series have mean 0 and variance 1, so the largest cosine is the least distance
    found = cz.metrics.evaluate(queries, gallery, **arguments, metrics=["knn_accuracy@1"])
    assert round(1 - found["knn_accuracy@1"], 4) == UCR[name]
