"""Monitor: its figures, what holds for all of them with the mistakes that are caught, and what ranks agree on; pictures."""

import io
import math

import pytest
import torch
import torch.distributed as dist
from matplotlib.figure import Figure
from torch import nn

import contrastive_zoo as cz
from contrastive_zoo.metrics import figures, plots
from contrastive_zoo.metrics.figures import sketch
from contrastive_zoo.ranks.transport import reduced_everywhere
from contrastive_zoo.ranks.world import ONE_PROCESS, Shards
from tests.helpers import EXACT, Largest, numbers

N, D = 13, 5
X, Y = numbers(N, D, seed=0), numbers(N, D, seed=1)
PAIRED = X, X + 0.7 * Y
INDEX = torch.arange(N)
NARROW = numbers(N, 40, seed=2), numbers(N, 40, seed=3)  # N < d
LABELLED = X, torch.tensor([0, 1, 0, 2, 1, 2, 0, 2**60, 2**60 + 1, 3, 3, 0, 1])
REPEATED = X[INDEX // 2], LABELLED[1]  # ties


def third_party(embeddings, labels):
    return (embeddings @ embeddings.T)[labels[:, None] == labels].square().mean()


def of_pairs(queries, keys):
    return (queries - keys).square().mean()


CASES = {
    "views": (cz.NTXent, PAIRED, (4, 9)),
    "two encoders": (cz.Clip, PAIRED, (0, 7, 6)),
    "fewer rows than dimensions": (cz.InfoNCE, NARROW, (12, 1)),
    "labels": (cz.SupCon, LABELLED, (6, 0, 7)),
    "ties": (cz.Triplet, REPEATED, (5, 8)),
    "ids": (cz.MultiPositive, (*PAIRED, LABELLED[1]), (6, 0, 7)),
    "embeddings of zeros": (cz.NTXent, (X.tril(-3), X.tril(-2)), (4, 9)),
    "a third-party loss": (third_party, LABELLED, (13, 0)),
    "a third-party loss of pairs": (of_pairs, PAIRED, (1, 12)),
}


ENCODERS = {cz.Clip: ("images", "texts")} | dict.fromkeys((cz.InfoNCE, cz.MultiPositive, of_pairs), ("queries", "keys"))
"""The names of the arguments of losses of two encoders."""


def watched(attach, make, rows, shards, worlds):
    """Return each rank's figures, and its value, next random numbers and gradients, of a loss under a monitor or none."""

    def on_rank(*rows):
        torch.manual_seed(0)
        torch.set_default_dtype(rows[0].dtype)
        loss_fn = cz.DistributedLoss(make() if isinstance(make, type) else make)
        monitor = attach and attach(loss_fn)
        leaves = [x.clone().requires_grad_(x.is_floating_point()) for x in rows]
        with torch.device("meta"):  # the user's default device
            value = loss_fn(*leaves)
        random = torch.rand(3)
        value.backward()
        gradients = [x.grad for x in leaves if x.grad is not None]
        return monitor and monitor.latest, [value.detach(), random, *gradients]

    each = list(zip(*(x.split(list(shards)) for x in rows), strict=True))
    return worlds.run(len(shards), on_rank, each=each)


def differs(found, expected, resolution):
    """Return whether some figure differs: counts and quantiles by a bit, or quantiles by more than the resolution."""
    for name, x in expected.items():
        is_exact = "_q" in name or name.startswith(("top1", "anchors", "likely"))
        bound = resolution + 1e-12 if resolution and "_q" in name else 0.0 if is_exact else EXACT * max(1.0, abs(x))
        value = found.get(name, math.nan)
        if not (abs(value - x) <= bound or (math.isnan(x) and math.isnan(value))):
            return True
    return False


def broken(attach, make, rows, shards, worlds):
    """Return what does not hold of a monitor, on some rank: the split, plain formulas, or a loss that is left alone."""
    ((alone, _),) = watched(attach, make, rows, [sum(shards)], worlds)
    formulas, bare = direct_figures(ENCODERS.get(make, ()), *rows), watched(None, make, rows, shards, worlds)
    result = set()
    for (of_rank, found), (_, expected) in zip(watched(attach, make, rows, shards, worlds), bare, strict=True):
        result |= {"split"} if of_rank.keys() != alone.keys() or differs(of_rank, alone, 0.0) else set()
        result |= {"formulas"} if differs(of_rank, formulas, 2**-11) else set()
        result |= set() if all(map(torch.equal, found, expected)) else {"loss"}
    return result


def direct_figures(encoders, first, second, ids=INDEX):
    a = nn.functional.normalize(first.double(), dim=1)
    itself = torch.eye(len(a), dtype=torch.bool)
    if second.is_floating_point():
        b, positive = nn.functional.normalize(second.double(), dim=1), ids[:, None] == ids
        negative = ~positive
    else:
        b, alike = a, second[:, None] == second
        positive, negative = alike & ~itself, ~alike
    s, found = a @ b.T, {}
    for kind, mask in (("positive", positive), ("negative", negative)):
        found[f"{kind}_similarity"] = s[mask].mean().item()
        for q in (0.05, 0.5, 0.95):
            kth = s[mask].sort().values[math.ceil(round(q * int(mask.sum()), 9)) - 1 : None] if mask.any() else s[mask]
            found[f"{kind}_similarity_q{100 * q:g}"] = kth[0].item() if len(kth) else math.nan
    directions = ("top1_forward", s, positive, negative), ("top1_backward", s.T, positive.T, negative.T)
    for name, scores, is_positive, is_negative in directions:
        best, worst = (scores.masked_fill(~mask, -math.inf).amax(1) for mask in (is_positive, is_negative))
        found[name] = (best > worst)[is_positive.any(1)].double().mean().item()
    found["anchors_without_positive"] = (~positive.any(1)).double().mean().item()
    found["alignment"] = (a[:, None] - b[None]).square().sum(-1)[positive].mean().item()
    if b is a or not encoders:  # one encoder, of two views or of labelled rows
        return found | of_encoder("", [a] if b is a else [a, b])
    return found | of_encoder(f"{encoders[0]}/", [a]) | of_encoder(f"{encoders[1]}/", [b])


def of_encoder(prefix, views):
    """Return the figures of unit embeddings; only pairs within a view count for the uniformity."""
    z = torch.cat(views)
    p = torch.linalg.svdvals(z) ** 2 / z.square().sum()
    potentials = [torch.pdist(view).square().mul(-2).exp() for view in views]
    variance = z.var(0, correction=0)
    found = {"uniformity": torch.cat(potentials).mean().log(), "effective_rank": torch.special.entr(p).sum().exp()}
    found |= {"variance_min": variance.min(), "variance_mean": variance.mean(), "variance_max": variance.max()}
    return {f"{prefix}{name}": x.item() for name, x in found.items()}


class LocalBatch(cz.Monitor):
    def observe(self, loss, rows, shards, world):
        super().observe(loss, rows, [Shards((len(x),)) for x in rows.values()], ONE_PROCESS)


class MeanOfRanks(LocalBatch):
    def observe(self, loss, rows, shards, world):
        super().observe(loss, rows, shards, world)
        means = reduced_everywhere(torch.tensor([*super().latest.values()], device="cpu"), "mean", world)
        self.mean = dict(zip(super().latest, means, strict=True))

    @property
    def latest(self):
        return {name: float(x) for name, x in getattr(self, "mean", super().latest).items()}


class DrawsRandomNumbers(cz.Monitor):
    """Draws the signs of its sketches from torch's global generator."""

    def observe(self, loss, rows, shards, world):
        super().observe(loss, rows, shards, world)
        torch.randint(0, 2, (64,), device="cpu")


MISTAKES = {LocalBatch: "split", MeanOfRanks: "formulas", DrawsRandomNumbers: "loss"}


def test_figures_are_those_of_one_process_and_of_formulas_and_the_loss_is_left_alone(worlds):
    for name, (make, rows, shards) in CASES.items():
        assert broken(cz.Monitor, make, rows, shards, worlds) == set(), name
    for mistake, what in MISTAKES.items():
        assert what in broken(mistake, cz.NTXent, PAIRED, (4, 9), worlds)


def test_blocks_and_rounds_change_no_bit(monkeypatch):
    cases = (cz.SupCon(), *LABELLED), (cz.Clip(), *PAIRED)
    whole = [measured(*case) for case in cases]
    monkeypatch.setattr(figures, "CANDIDATES", 4)
    monkeypatch.setattr(figures, "_BLOCK", 6)
    for case, expected in zip(cases, whole, strict=True):
        assert measured(*case) == pytest.approx(expected, rel=1e-12, abs=0)


def test_the_path_of_large_batches_is_monitored_alike(worlds):
    rows = numbers(700, 16, seed=4), numbers(700, 16, seed=5)
    for make in (cz.NTXent, cz.SigLIP):
        one, two = (watched(cz.Monitor, make, rows, s, worlds) for s in ((700,), (300, 400)))
        for name, value in one[0][0].items():
            assert all(math.isclose(x[name], value, rel_tol=1e-9, abs_tol=1e-12) for x, _ in two), name


def test_no_tensor_grows_with_the_square_of_the_batch(monkeypatch):
    monkeypatch.setattr(figures, "CANDIDATES", 128)
    monkeypatch.setattr(figures, "_BLOCK", 2**13)
    n, d = 600, 8
    with Largest() as largest:
        assert measured(of_pairs, numbers(n, d, seed=0), numbers(n, d, seed=1))
    assert largest.elements <= max(2**13, 2 * n * d)


def measured(loss, *rows, **settings):
    loss_fn = cz.DistributedLoss(loss)
    monitor = cz.Monitor(loss_fn, **settings)
    loss_fn(*rows)
    return monitor.latest


def test_ties_are_misses_and_copies_are_likely_false_negatives():
    same = torch.ones(4, 3)
    assert measured(cz.NTXent(), same, same)["top1_forward"] == 0.0
    copies = torch.eye(4)[[0, 0, 1, 2]]
    found = measured(cz.NTXent(), copies, copies)
    assert (found["top1_forward"], found["top1_backward"]) == (0.5, 0.5)
    assert measured(cz.NTXent(), X[:, :1].abs(), Y[:, :1].abs())["top1_forward"] == 0.0
    assert found["likely_false_negatives"] == 2 / 12
    assert measured(cz.SupCon(), torch.eye(3), torch.tensor([0, 0, 1]))["anchors_without_positive"] == 1 / 3


def test_views_of_all_forms():
    views = [numbers(6, 4, seed=seed) for seed in range(3)]
    of_views = measured(cz.SupCon(), torch.stack(views, 1), torch.arange(6) // 2)
    rows, labels = torch.cat(views), (torch.arange(6) // 2).repeat(3)
    assert of_views == measured(cz.SupCon(), rows, labels)
    three = measured(cz.NTXent(), *views)
    pairs_of_two = [measured(cz.NTXent(), views[i], views[j]) for i, j in ((0, 1), (0, 2), (1, 2))]
    for name in ("positive_similarity", "top1_forward", "top1_backward", "alignment"):
        assert math.isclose(three[name], sum(x[name] for x in pairs_of_two) / 3, rel_tol=1e-12)
    assert "positive_similarity" in measured(cz.MNRL(), *views)
    no_pairs = measured(lambda queries, documents: (queries @ documents.T).mean(), views[0], views[1][:5])
    assert "positive_similarity" not in no_pairs
    ids = torch.stack([INDEX, INDEX + 1], 1)  # several of a query
    several = (cz.OnlineContrastive(), INDEX % 2), (cz.CoSENT(), INDEX), (nn.CosineEmbeddingLoss(), INDEX)
    for loss, *more in (*several, (cz.MultiPositive(), ids, INDEX)):  # what belongs together is annotated
        found = measured(loss, *PAIRED, *more)
        assert "positive_similarity" not in found
        assert any(name.endswith("uniformity") for name in found)


def test_half_precision_and_values_that_are_not_finite():
    found = measured(cz.NTXent(), X.bfloat16(), X.bfloat16())
    assert found["top1_forward"] == 1.0
    broken = X.clone()
    broken[0] = math.nan
    assert math.isnan(measured(cz.NTXent(check_finite=False), broken, X)["effective_rank"])


def test_temperature_and_drift(worlds):
    for temperature in (0.25, cz.LearnableTemperature(0.25), nn.Parameter(torch.tensor(0.25))):
        assert measured(cz.Clip(temperature=temperature), *PAIRED)["temperature"] == 0.25
    assert "temperature" not in measured(third_party, *LABELLED)
    scaled = nn.CosineEmbeddingLoss()
    scaled.temperature = nn.Linear(1, 1)  # one that takes the logits
    assert "temperature" not in measured(scaled, *PAIRED, torch.ones(N))

    def job(same):
        torch.manual_seed(0)
        encoder = nn.Linear(D, 200)
        start, step = sketch(encoder).norm(), 1e-3 * torch.randn_like(encoder.weight)
        if dist.get_rank() == 1 and not same:
            encoder.weight.data += step
        rows = (numbers(3, D, seed=seed + dist.get_rank()) for seed in (0, 9))
        return measured(cz.Clip(), *rows, encoder=encoder), step.norm() / start

    for found, _ in worlds.run(2, job, True):
        assert found["encoder_drift"] == 0.0
    (first, expected), (second, _) = worlds.run(2, job, False)
    assert first == second
    assert 0.4 < first["encoder_drift"] / expected < 1.6


def test_every_kth_call_in_training_mode_is_measured():
    loss_fn = cz.DistributedLoss(cz.NTXent())
    monitor = cz.Monitor(loss_fn, every=2)
    assert (monitor.latest, monitor.take(), str(monitor)) == ({}, {}, repr(monitor))
    with pytest.raises(ValueError, match="no call has been measured"):
        monitor.plot()
    taken = []
    for step in range(5):
        loss_fn.eval()(X, X)
        loss_fn.train()(X, Y)
        if monitor.take():
            taken.append(step)
    assert taken == [0, 2, 4]
    assert monitor.measurement.call == 4
    monitor.remove()
    loss_fn(X, X)
    assert (monitor.measurement.call, monitor.take()) == (4, {})
    cz.Monitor(loss_fn)


ROWS = torch.randn(30, 4, generator=torch.Generator().manual_seed(0))
CLASSES = torch.arange(30) % 3


def counts(rows, labels):
    with torch.device("meta"):
        axis = plots.similarity_histogram(rows, labels=labels, bins=20).axes[0]
    totals = [int(text.get_text().rpartition(" ")[2]) for text in axis.get_legend().get_texts()]
    densities = [x.get_data().values for x in axis.patches[::2]]
    negative, positive = ([round(x * n / 10) for x in of] for of, n in zip(densities, totals, strict=True))
    return positive, negative


def test_the_histogram_counts_every_pair_once(worlds):
    positive, negative = counts(ROWS, CLASSES)
    assert (sum(positive), sum(negative)) == (30 * 9, 30 * 20)
    cosines = nn.functional.cosine_similarity(ROWS[:, None].double(), ROWS[None].double(), dim=2)
    same = (CLASSES[:, None] == CLASSES) & ~torch.eye(30, dtype=torch.bool)
    assert torch.histc(cosines[same].float(), 20, -1, 1).tolist() == positive
    for split in ((10, 20), (0, 29, 1)):
        each = list(zip(ROWS.split(split), CLASSES.split(split), strict=True))
        assert worlds.run(len(split), counts, each=each) == [(positive, negative)] * len(split)


def test_every_picture_is_a_figure():
    loss_fn = cz.DistributedLoss(cz.Clip())
    monitor = cz.Monitor(loss_fn)
    loss_fn(*PAIRED)
    of_monitor = monitor.plot()
    assert [text.get_text() for text in of_monitor.axes[1].get_legend().get_texts()] == ["images", "texts"]
    histogram = plots.similarity_histogram(ROWS, ROWS[:5], labels=CLASSES, gallery_labels=CLASSES[:5])
    for figure in (of_monitor, histogram, plots.embedding_map(ROWS, CLASSES), plots.embedding_map(ROWS)):
        assert isinstance(figure, Figure)
        figure.savefig(file := io.BytesIO())
        assert len(file.getvalue()) > 2000
