"""Bad input is one clear sentence, the same on every rank, and the next step finds every rank ready."""

import random
import re
import warnings
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import Tensor

import contrastive_zoo as cz
from contrastive_zoo.loss_base.loss import Loss
from contrastive_zoo.testing.worlds import Worlds
from tests.helpers import close, common_error, drawn, later, numbers

Wrap = Callable[..., Callable[..., Any]]


def z(
    n: int = 4, d: int = 3, *, learnt: bool = True, dtype: torch.dtype = torch.float32, of_rank: int | None = None
) -> Tensor:
    """Embeddings as an encoder makes them, on each rank others."""
    if of_rank is None:
        of_rank = dist.get_rank() if dist.is_initialized() else 0
    return numbers(n, d, seed=7 + of_rank).to(dtype).requires_grad_(learnt)


def y(n: int = 4) -> Tensor:
    return torch.arange(n) % 2


def spoilt(value: float, rows: tuple[int, ...] = (2,)) -> Tensor:
    x = z().detach()
    x[list(rows), 1] = value
    return x.requires_grad_()


def third_party(embeddings: Tensor, labels: Tensor) -> Tensor:
    """A loss from elsewhere."""
    return embeddings[labels == 0].square().sum()


def lenient(embeddings: Tensor, labels: Tensor | None = None, indices_tuple: Any = None) -> Tensor:
    """One that can do without labels."""
    return embeddings.square().sum()


def in_plain_formulas(is_bad: bool, wrap: Wrap) -> None:
    with cz.engine.plain_formulas() if is_bad else nullcontext():
        wrap(cz.InfoNCE())(z(), z())


class MyRows(cz.RowLoss):
    def rows(self, similarity: Tensor, positive: Tensor, negative: Tensor) -> tuple[Tensor, Tensor]:
        return (similarity * negative).sum(1), negative.any(1)


@dataclass(frozen=True)
class Mistake:
    """A call that is bad where ``is_bad``, which is the last rank alone (or every rank).

    Args:
        call: ``call(is_bad, wrap)``, with ``wrap`` DistributedLoss, or nothing on one process.
        words: what the sentence must say, parts separated by …: what came, what was expected, the fix.
        alone: whether one process makes it too.
        on_all_ranks: whether every rank makes the mistake.
    """

    call: Callable[[bool, Wrap], Any]
    words: str
    alone: bool = True
    on_all_ranks: bool = False


def between(call: Callable[[bool, Wrap], Any], words: str) -> Mistake:
    """One that takes two ranks to make."""
    return Mistake(call, words, alone=False)


def own(name: str, call: Callable[[bool, Wrap], Any], words: str, on_all_ranks: bool = False) -> dict[str, Mistake]:
    """A rank's own fault: of the last rank alone, and of all."""
    of_all = {f"{name}, everywhere": Mistake(call, words, on_all_ranks=True)}
    return of_all if on_all_ranks else of_all | {name: Mistake(call, words)}


MISTAKES: dict[str, Mistake] = {
    # ---- rows
    **own(
        "views of different length",
        lambda is_bad, wrap: wrap(cz.NTXent())(z(4), z(4 - is_bad)),
        "NTXent: … views must pair row by row … view 0 float32 [4, 3] … view 1 float32 [3, 3] … same samples",
    ),
    **own(
        "a single view",
        lambda is_bad, wrap: wrap(cz.NTXent())(*[z()] * (2 - is_bad)),
        "two or more views … got 1 … loss(view1, view2)",
    ),
    **own(
        "keys without a query",
        lambda is_bad, wrap: wrap(cz.InfoNCE())(z(4), z(4 + is_bad)),
        "InfoNCE: … row i of queries belongs to row i of keys … keys float32 [5, 3] … negatives",
    ),
    "keys forgotten": between(lambda is_bad, wrap: wrap(cz.InfoNCE())(*[z()] * (2 - is_bad)), "InfoNCE: … 'keys'"),
    "a misspelt argument": between(
        lambda is_bad, wrap: wrap(cz.SupCon())(z(), **{"lables" if is_bad else "labels": y()}), "SupCon: … 'lables'"
    ),
    **own(
        "flat embeddings",
        lambda is_bad, wrap: wrap(cz.SupCon())(z().flatten() if is_bad else z(), y(12 if is_bad else 4)),
        "floating-point rows [n, d], got float32 [12]",
    ),
    **own(
        "negatives of another width",
        lambda is_bad, wrap: wrap(cz.InfoNCE())(z(), z(), z(5, 3 + is_bad)),
        "negatives are shared [m, d] or per query [n, m, d] … got float32 [5, 4] … queries float32 [4, 3]",
    ),
    **own(
        "negatives of another number",
        lambda is_bad, wrap: wrap(cz.InfoNCE())(z(), z(), z(4 + is_bad, 6).view(-1, 2, 3)),
        "per query [n, m, d] … got float32 [5, 2, 3]",
    ),
    **own(
        "None for a view",
        lambda is_bad, wrap: wrap(cz.NTXent())(z(), None if is_bad else z()),
        "NTXent: … view 1 … NoneType",
    ),
    **own(
        "a list of labels",
        lambda is_bad, wrap: wrap(cz.SupCon())(z(), y().tolist() if is_bad else y()),
        "SupCon: … labels … list",
    ),
    "widths": between(
        lambda is_bad, wrap: wrap(cz.NTXent())(z(4, 3 + 2 * is_bad), z(4, 3 + 2 * is_bad)),
        "NTXent: ranks disagree on the width of view 0 … rank 0 brought d=3 … brought d=5 … same encoder head",
    ),
    "widths of a third-party loss": between(
        lambda is_bad, wrap: wrap(third_party)(z(4, 3 + 2 * is_bad), y()),
        "third_party: ranks disagree on the width of embeddings … d=3 … d=5",
    ),
    "dtypes": between(
        lambda is_bad, wrap: wrap(cz.SupCon())(z(dtype=torch.bfloat16 if is_bad else torch.float32), y()),
        "SupCon: ranks disagree on the dtype of embeddings … float32 … bfloat16 … same precision",
    ),
    "numbers of views": between(
        lambda is_bad, wrap: wrap(cz.NTXent())(*[z()] * (2 + is_bad)),
        "ranks disagree on what they bring … view 2 … on every rank or on none",
    ),
    "negatives on one rank": between(
        lambda is_bad, wrap: wrap(cz.InfoNCE())(z(), z(), *[z()] * is_bad),
        "ranks disagree on what they bring … brought negatives, rank 0 brought none",
    ),
    "rows without a gradient": between(
        lambda is_bad, wrap: wrap(cz.NTXent())(z(learnt=not is_bad), z(learnt=not is_bad)),
        "disagree on whether view 0 carry a gradient … rank 0 brought rows with gradient … without gradient … empty batch",
    ),
    # ---- labels
    **own(
        "no labels",
        lambda is_bad, wrap: wrap(cz.SupCon())(z(), *[y()] * (not is_bad)),
        "labels are missing … call loss",
    ),
    "no labels for a third-party loss": between(
        lambda is_bad, wrap: wrap(third_party)(z(), *[y()] * (not is_bad)),
        "third_party: … missing a required argument … labels",
    ),
    "labels that a third-party loss can do without": between(
        lambda is_bad, wrap: wrap(lenient)(z(), *[y()] * (not is_bad)),
        "ranks disagree on what they bring … rank 0 brought labels … on every rank or on none",
    ),
    "None for labels": between(
        lambda is_bad, wrap: wrap(lenient)(z(), None if is_bad else y()), "disagree on … labels"
    ),
    "labels for None": between(
        lambda is_bad, wrap: wrap(lenient)(z(), y() if is_bad else None), "disagree on … labels"
    ),
    **own(
        "labels of another length",
        lambda is_bad, wrap: wrap(cz.SupCon())(z(), y(4 + is_bad)),
        "one per row, got 5 for 4 rows … own labels",
    ),
    "labels of another length for a third-party loss": between(
        lambda is_bad, wrap: wrap(third_party)(z(), y(4 + is_bad)), "labels are one per row, got 5 for 4 rows"
    ),
    **own(
        "float labels",
        lambda is_bad, wrap: wrap(cz.SupCon())(z(), y().float() if is_bad else y()),
        "labels are one integer per row, got float32 [4] … labels.long()",
    ),
    **own(
        "one-hot labels",
        lambda is_bad, wrap: wrap(MyRows())(z(), torch.eye(4).long() if is_bad else y()),
        "labels are one integer per row, got int64 [4, 4] … labels.argmax(1)",
    ),
    # ---- settings
    **{
        name: mistake
        for t in (0.0, -0.1, float("nan"), float("inf"))
        for name, mistake in own(
            f"temperature {t}",
            lambda is_bad, wrap, t=t: wrap(later(cz.NTXent(), temperature=t if is_bad else 0.1))(z(), z()),
            f"temperature must be positive and finite … got {t} … temperature=1/s",
        ).items()
    },
    **own(
        "a negative learnt temperature",
        lambda is_bad, wrap: wrap(later(cz.SupCon(), temperature=torch.tensor(-1.0 if is_bad else 1.0)))(z(), y()),
        "temperature must be positive and finite, got -1.0",
    ),
    **own(
        "an unknown reduction",
        lambda is_bad, wrap: wrap(later(cz.InfoNCE(), reduction="average" if is_bad else "mean"))(z(), z()),
        "reduction is one of 'mean', 'sum', 'none', got 'average'",
    ),
    "temperatures": between(
        lambda is_bad, wrap: wrap(cz.NTXent(temperature=0.2 if is_bad else 0.1))(z(), z()),
        "ranks disagree on temperature … rank 0 has 0.1 … has 0.2 … same on every rank",
    ),
    "classes of losses": between(
        lambda is_bad, wrap: wrap(cz.Circle() if is_bad else cz.Triplet())(z(), y()),
        "ranks disagree on the loss: rank 0 has Triplet … has Circle",
    ),
    "a nested setting": between(
        lambda is_bad, wrap: wrap(cz.WeightedSum([cz.SupCon(), cz.Triplet(margin=0.9 if is_bad else 0.1)]))(z(), y()),
        "ranks disagree on losses.1.margin: rank 0 has 0.1 … has 0.9",
    ),
    "plain formulas": between(in_plain_formulas, "ranks disagree on plain_formulas(): rank 0 has False … has True"),
    **{
        name: between(
            lambda is_bad, wrap, name=name, values=values: wrap(cz.InfoNCE(**{name: values[is_bad]}))(z(), z()),
            f"ranks disagree on {name}: rank 0 has {values[0]} … has {values[1]}",
        )
        for name, values in {"reduction": ("mean", "none"), "symmetric": (False, True)}.items()
    },
    **{
        name: between(
            lambda is_bad, wrap, name=name, values=values: wrap(cz.SupCon(), **{name: values[is_bad]})(z(), y()),
            f"ranks disagree on {name}: rank 0 has {values[0]} … has {values[1]}",
        )
        for name, values in {
            "ring": (False, True),
            "static_shapes": (False, True),
            "grad_reduction": ("mean", "sum"),
            "mode": ("replicated", "sharded"),
        }.items()
    },
    "numbers for a third-party loss": between(
        lambda is_bad, wrap: wrap(lambda embeddings, margin: embeddings.sum() * margin)(z(), 0.5 + is_bad),
        "ranks disagree on margin … 0.5 … 1.5",
    ),
    # ---- values
    **{
        name: mistake
        for value in (float("nan"), float("inf"), -float("inf"))
        for name, mistake in own(
            f"{value} in a view",
            lambda is_bad, wrap, value=value: wrap(cz.NTXent())(z(), spoilt(value) if is_bad else z()),
            "view 1 hold NaN or infinite values in 1 of 4 rows (row 2) … check_finite=False",
        ).items()
    },
    "NaN for a third-party loss": between(
        lambda is_bad, wrap: wrap(third_party)(spoilt(torch.nan) if is_bad else z(), y()),
        "third_party: … embeddings hold NaN or infinite values in 1 of 4 rows (row 2)",
    ),
    # ---- no rows at all
    **own(
        "no rows", lambda is_bad, wrap: wrap(cz.NTXent())(z(0), z(0)), "the global batch is empty", on_all_ranks=True
    ),
    "no rows for a third-party loss": Mistake(
        lambda is_bad, wrap: wrap(third_party)(z(0), y(0)),
        "third_party: the global batch is empty … skip the step",
        alone=False,
    ),
    # ---- mining
    "indices mined locally": between(
        lambda is_bad, wrap: wrap(lenient)(z(), y(), indices_tuple=(torch.tensor([0]),) * 3 if is_bad else None),
        "indices_tuple was mined on this rank's rows … DistributedLoss(loss, miner=miner)",
    ),
}


def good() -> float:
    return cz.DistributedLoss(cz.NTXent())(z(), z()).item()


@pytest.mark.parametrize(("name", "world_size"), drawn(MISTAKES, [2, 3], one_in=2))
def test_every_rank_says_the_same_and_goes_on(name: str, world_size: int, worlds: Worlds) -> None:
    mistake = MISTAKES[name]

    def bad() -> None:
        last = dist.get_rank() == dist.get_world_size() - 1
        mistake.call(mistake.on_all_ranks or last, cz.DistributedLoss)

    text, after = common_error(worlds, world_size, bad, good)
    for words in mistake.words.split(" … "):
        assert words in text
    assert "|" not in text, "the format in which ranks compare notes is nobody's business"
    of_one_rank = mistake.alone and not mistake.on_all_ranks
    assert (f"rank {world_size - 1}: " in text) == of_one_rank or not mistake.alone
    assert len(set(after)) == 1


@pytest.mark.parametrize("name", [name for name, mistake in MISTAKES.items() if mistake.on_all_ranks])
def test_one_process_says_it_too(name: str) -> None:
    mistake = MISTAKES[name]
    for wrap in (lambda loss: loss, cz.DistributedLoss):
        with pytest.raises(ValueError, match=r"\w+: .*\w") as raised:
            mistake.call(True, wrap)
        for words in mistake.words.split(" … "):
            assert words in str(raised.value)
        assert "rank 0: " not in str(raised.value)


def test_all_failing_ranks_are_named(worlds: Worlds) -> None:
    def bad() -> None:
        cz.DistributedLoss(cz.SupCon())(z(), y(4 + dist.get_rank()))

    text, _ = common_error(worlds, 3, bad, good)
    assert "rank 1: labels are one per row, got 5" in text
    assert "rank 2: labels are one per row, got 6" in text
    assert "rank 0" not in text


# ------------------------------------------------------------------------------------------------- refused when built

CONSTRUCTORS: dict[str, tuple[Callable[[], Any], type[Exception], tuple[str, ...]]] = {
    "unknown setting": (
        lambda: cz.NTXent(temprature=0.1),
        TypeError,
        ("NTXent has no setting 'temprature'", "temperature, normalize, reduction, check_finite"),
    ),
    "unknown grad_reduction": (
        lambda: cz.DistributedLoss(cz.NTXent(), grad_reduction="avg"),
        ValueError,
        ("'mean' or 'sum'", "got 'avg'", "DDP"),
    ),
    "a miner with an own loss": (
        lambda: cz.DistributedLoss(cz.SupCon(), miner=lambda embeddings, labels: None),
        ValueError,
        ("SupCon weighs all pairs itself", "Leave the miner out"),
    ),
    "a loss that cannot be called": (lambda: cz.DistributedLoss(0.1), ValueError, ("can be called", "got float")),
    "temperature 0": (lambda: cz.LearnableTemperature(0.0), ValueError, ("positive", "got 0.0")),
    "NaN": (lambda: cz.LearnableTemperature(float("nan")), ValueError, ("positive", "got nan")),
    "too cold": (lambda: cz.LearnableTemperature(0.001), ValueError, ("1 / max_scale", "0.001", "max_scale=100")),
}


@pytest.mark.parametrize("name", CONSTRUCTORS)
def test_some_things_are_refused_when_built(name: str) -> None:
    build, kind, words = CONSTRUCTORS[name]
    with pytest.raises(kind) as raised:
        build()
    for word in words:
        assert word in str(raised.value)


# ------------------------------------------------------------------------------------------ what is not a mistake


@pytest.mark.parametrize(
    "make",
    [
        lambda: cz.DistributedLoss(cz.SupCon(check_finite=False)),
        lambda: cz.DistributedLoss(cz.SupCon(), check_finite=False),
        lambda: cz.DistributedLoss(third_party, check_finite=False),
        lambda: cz.SupCon(check_finite=False),
    ],
    ids=["loss", "wrapper", "third_party", "bare"],
)
def test_check_finite_can_be_turned_off(make: Callable[[], Any], worlds: Worlds) -> None:
    assert all(np.isnan(worlds.run(2, lambda: make()(spoilt(torch.nan, (0, 1, 2, 3)), y()).item())))


def test_one_process_takes_indices_that_were_mined_by_hand() -> None:
    assert cz.DistributedLoss(lenient)(z(), y(), indices_tuple=()).item() == pytest.approx(z().square().sum().item())


def test_a_rank_without_rows_is_welcome(worlds: Worlds) -> None:
    found = worlds.run(2, lambda n: cz.DistributedLoss(cz.NTXent())(z(n), z(n)).item(), each=[(4,), (0,)])
    assert found == pytest.approx([cz.NTXent()(z(), z()).item()] * 2)


def test_a_bare_loss_among_several_processes_warns_once_and_is_local(worlds: Worlds) -> None:
    def job() -> tuple[list[tuple[str, str]], list[Tensor]]:
        Loss._warned_about_local_negatives = False
        rows = z(4 + dist.get_rank())
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            cz.DistributedLoss(cz.NTXent())(rows, rows)
            assert not caught
            found = [cz.NTXent()(rows, rows), cz.NTXent()(rows, rows), cz.SupCon()(rows, y(len(rows)))]
        assert {x.category for x in caught} == {UserWarning}
        return [(str(x.message), x.filename) for x in caught], found

    for rank, (texts, found) in enumerate(worlds.run(2, job)):
        rows = z(4 + rank, of_rank=rank)
        expected = [cz.NTXent()(rows, rows)] * 2 + [cz.SupCon()(rows, y(len(rows)))]
        for value, alone in zip(found, expected, strict=True):
            close(value, alone.detach(), 1e-6)
        ((text, where),) = texts
        assert "this process's own rows only, though 2 processes run" in text
        assert "DistributedLoss(NTXent(...))" in text
        assert where == __file__, "the warning points at the user's line"


def test_a_loss_may_insist_on_what_its_miner_finds(worlds: Worlds) -> None:
    def job() -> float:
        def loss(embeddings: Tensor, labels: Tensor, indices_tuple: Tensor) -> Tensor:
            return embeddings[indices_tuple].sum()

        return cz.DistributedLoss(loss, miner=lambda embeddings, labels: labels)(z(), y()).item()

    on_one_process = torch.cat([z(), z()])[torch.cat([y(), y()])].sum().item()
    assert worlds.run(2, job) == pytest.approx([on_one_process] * 2)


# ------------------------------------------------------------------------------------------------------ random losses


def draws() -> list[float]:
    """From every stream there is; an odd number of Gaussians, of which generators keep one in hand."""
    return [torch.rand(()).item(), np.random.rand(), np.random.randn(), random.random(), random.gauss()]


def seed_all(seed: int) -> None:
    torch.manual_seed(seed)
    np.random.seed(seed)
    random.seed(seed)


def one_process_draws(seed: int, times: int) -> list[list[float]]:
    """Return what a process draws; its streams go on as they were."""
    before = random.getstate(), np.random.get_state(), torch.get_rng_state()
    seed_all(seed)
    result = [draws() for _ in range(times)]
    random.setstate(before[0])
    np.random.set_state(before[1])
    torch.set_rng_state(before[2])
    return result


def in_loss(embeddings: Tensor, labels: Tensor) -> tuple[Tensor, list[float]]:
    return embeddings.sum(), draws()


def after_miner(embeddings: Tensor, labels: Tensor, indices_tuple: Any = None) -> tuple[Tensor, list[float]]:
    return embeddings.sum(), indices_tuple


@pytest.mark.parametrize("where", ["loss", "miner"])
@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_chance_is_rank_0s_everywhere_and_the_other_ranks_keep_their_own(where, world_size, worlds: Worlds) -> None:
    def job() -> list[list[float]]:
        seed_all(100 + dist.get_rank())
        warm = draws()
        miner = (lambda embeddings, labels: draws()) if where == "miner" else None
        loss_fn = cz.DistributedLoss(after_miner if miner else in_loss, miner=miner)
        return [warm, loss_fn(z(), y())[1], loss_fn(z(), y())[1], draws()]

    warm, first, second, next_on_rank_0 = one_process_draws(100, 4)
    others = [one_process_draws(100 + rank, 2) for rank in range(1, world_size)]
    found = worlds.run(world_size, job)
    assert found[0] == [warm, first, second, next_on_rank_0]
    assert found[1:] == [[own_warm, first, second, own_next] for own_warm, own_next in others]


def test_the_other_ranks_keep_their_own_stream_when_the_loss_raises(worlds: Worlds) -> None:
    def job() -> list[float]:
        def broken(embeddings: Tensor, labels: Tensor) -> Tensor:
            draws()
            raise ZeroDivisionError

        seed_all(100 + dist.get_rank())
        with pytest.raises(ZeroDivisionError):
            cz.DistributedLoss(broken)(z(), y())
        return draws()

    assert worlds.run(2, job)[1] == one_process_draws(101, 1)[0]


@pytest.mark.parametrize(
    ("call", "sentence"),
    [
        (lambda: cz.MILNCE()(torch.tensor(1.0), torch.ones(4, 2, 3)), "MILNCE: videos are floating-point rows"),
        (lambda: cz.LeJEPA(3)(torch.tensor(1.0), torch.tensor(1.0)), "LeJEPA: "),
        (lambda: cz.Margin(num_classes=3)(torch.ones(4, 3), 1j), "Margin: view 1 must be a tensor, got complex."),
        (lambda: cz.Margin(num_classes=3)(torch.ones(4, 3), torch.ones(4, 3)), "Margin: β of a class needs labels"),
        (lambda: cz.Margin(num_classes=3)(torch.ones(4, 3), torch.tensor(1)), "Margin: labels are one integer per row"),
        (lambda: cz.SigLIP(logit_bias=torch.empty(1, device="meta")), "SigLIP: logit_bias must hold values"),
        (lambda: cz.Triplet(mining=np.zeros(0)), "Triplet: mining is one of"),  # type: ignore[arg-type]  # why: wrong on purpose
    ],
)
def test_what_is_no_row_label_or_setting_is_named(call, sentence: str) -> None:
    with pytest.raises(ValueError, match=re.escape(sentence)):
        call()
