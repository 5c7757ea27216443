"""Mistakes of a first hour say what to do, on one process and on two; obeying the sentence works."""

import os
import re
import sys
from collections.abc import Callable, Iterator
from functools import partial
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import contrastive_zoo as cz
from contrastive_zoo.ranks import suggestions
from contrastive_zoo.ranks.world import warn_of_launcher
from contrastive_zoo.testing.worlds import Worlds
from tests.helpers import assert_says, close, common_error, error_message, numbers, rank, warned
from tests.interpreter import python
from tests.test_one_process import Gather, with_dist_nn, with_functional_collectives

Call = Callable[[], Any]


def z(n: int = 8, d: int = 5, seed: int = 0) -> Tensor:
    return numbers(n, d, seed=10 * rank() + seed).requires_grad_()


def y(n: int = 8) -> Tensor:
    return torch.arange(n) % 4


class Output(dict[str, Any]):
    """Embeddings as Hugging Face's models return them."""

    def __getattr__(self, name: str) -> Any:
        if name in self:
            return self[name]
        raise AttributeError(name)


def output() -> Output:
    tokens = z(24).view(8, 3, 5)
    return Output(last_hidden_state=tokens, pooler_output=tokens.mean(1))


class Encoder(nn.LayerNorm):
    """A user's model, the same on every rank."""


warned_here = partial(warned, file=__file__)
D, cached = cz.DistributedLoss, partial(cz.GradCache, nn.Linear(2, 2))
BATCH_SAMPLER = "DataLoader(dataset, batch_sampler=sampler)"

CALLS: dict[str, tuple[Call, Call]] = {
    "Triplet: got 3 tensors without labels … MNRL()(anchor, positive, negative) … torch.nn.TripletMarginLoss": (
        lambda: D(cz.Triplet())(z(), z(), z()),
        lambda: [D(x)(z(), z(), z()) for x in (cz.MNRL(), nn.TripletMarginLoss())],
    ),
    "embeddings must be a tensor, got ndarray … torch.from_numpy(embeddings)": (
        lambda: D(cz.SupCon())(z().detach().numpy(), y()),
        lambda: D(cz.SupCon())(torch.from_numpy(z().detach().numpy()), y()),
    ),
    "labels must be integers, one per row, got a list of str. Number the classes, the same on every rank.": (
        lambda: D(cz.SupCon())(z(), ["cat", "dog"] * 4),
        lambda: D(cz.SupCon())(z(), y()),
    ),
    "view 0 must be a tensor, got a list of 2 … loss(*x)": (
        lambda: D(cz.NTXent())([z(), z()]),
        lambda: D(cz.NTXent())(*[z(), z()]),
    ),
    "embeddings must be a tensor, got Output of last_hidden_state, pooler_output. Pass embeddings.pooler_output.": (
        lambda: D(cz.SupCon())(output(), y()),
        lambda: D(cz.SupCon())(output().pooler_output, y()),
    ),
    "got SimpleNamespace of tokens … embeddings.tokens.mean(1)": (
        lambda: D(cz.SupCon())(SimpleNamespace(tokens=output().last_hidden_state), y()),
        lambda: D(cz.SupCon())(output().last_hidden_state.mean(1), y()),
    ),
    "embeddings must be floating-point [n, d], got float64 [5] … embeddings.unsqueeze(0)": (
        lambda: D(cz.Triplet())(z(1).squeeze(), y(1)),
        lambda: D(cz.Triplet())(z(1).squeeze().unsqueeze(0), y(1)),
    ),
    f"labels [n, C] are 1 for each label of a sample and else 0, got 0 … 3. … {BATCH_SAMPLER}": (
        lambda: D(cz.SupCon())(z()[None], y()[None]),
        lambda: D(cz.SupCon())(z(), y()),
    ),
    "the call has no argument 'features'. Did you mean embeddings?": (
        lambda: D(cz.SupCon())(features=z(), labels=y()),
        lambda: D(cz.SupCon())(embeddings=z(), labels=y()),
    ),
    "Encoder: a loss returns one number, got float64 [ … as from a model … model(view1)": (
        lambda: D(Encoder(5, dtype=torch.float64))(z()),
        lambda: D(cz.NTXent())(*map(Encoder(5, dtype=torch.float64), (z(), z()))),
    ),
    "RetrievalMetrics: compute() came before any update(). Call update(embeddings, labels=labels)": (
        lambda: cz.metrics.RetrievalMetrics("hit_rate@1").compute(),
        lambda: computed("hit_rate@1", z()),
    ),
    "k is between 1 and the … rows to search in, got 100. Lower k … Trainer(num_sanity_val_steps=0)": (
        lambda: computed("hit_rate@100", z()),
        lambda: computed("hit_rate@2", z()),
    ),
}
"""Words of an error, a call on every rank, and one that obeys. All ranks raise the same ValueError; the next step works."""


def computed(name: str, rows: Tensor) -> Tensor | dict[str, Tensor]:
    metric = cz.metrics.RetrievalMetrics(name)
    metric.update(rows, labels=y())
    return metric.compute()


CONSTRUCTED: dict[str, tuple[Call, Call]] = {
    "Did you mean process_group?": (lambda: D(cz.SupCon(), group=None), lambda: D(cz.SupCon(), process_group=None)),
    "Did you mean loss?": (lambda: D(criterion=cz.SupCon()), lambda: D(loss=cz.SupCon())),
    "Did you mean chunk_size?": (lambda: cached(mini_batch_size=2), lambda: cached(chunk_size=2)),
    "Did you mean temperature?": (lambda: cz.SupCon(temp=0.1), lambda: cz.SupCon(temperature=0.1)),
    "a miner as miner=…": (lambda: D(lenient, mine), lambda: D(lenient, miner=mine)),
    "WeightedSum([loss1, loss2])": (lambda: D(cz.DCL(), cz.Clip()), lambda: D(cz.WeightedSum([cz.DCL(), cz.Clip()]))),
    "Linear is a model. Wrap the loss": (lambda: D(nn.Linear(2, 2)), lambda: D(cz.NTXent())),
    "rank, world_size are open_clip's options. Leave them out, ClipLoss()": (
        lambda: cz.adapters.open_clip.ClipLoss(rank=0, world_size=2),
        lambda: cz.adapters.open_clip.ClipLoss(),
    ),
}


def lenient(embeddings: Tensor, labels: Tensor, indices_tuple: Any = None) -> Tensor:
    return embeddings.sum()


def mine(embeddings: Tensor, labels: Tensor) -> tuple[Tensor, ...]:
    return (labels,) * 3


@pytest.mark.parametrize("says", CALLS | CONSTRUCTED)
def test_the_error_says_what_to_do_and_obeying_works(says: str, worlds: Worlds) -> None:
    call, obeyed = (CALLS | CONSTRUCTED)[says]
    assert_says(error_message(call, (TypeError, ValueError)), says)
    obeyed()
    if says in CALLS:
        of_ranks, _ = common_error(worlds, 2, call, lambda: obeyed() is None)
        assert_says(of_ranks, says)


NAMES = {
    "NTXentLoss": "NTXent", "InfoNCELoss": "InfoNCE", "ClipLoss": "Clip", "SupConLoss": "SupCon", "SigLipLoss": "SigLIP",
    "TripletMarginLoss": "Triplet", "DistributedLossWrapper": "DistributedLoss", "TripletLoss": "Triplet",
    "MPerClassSampler": "data.MPerClassBatchSampler", "MultipleNegativesRankingLoss": "MNRL",
    "data.MPerClassSampler": "MPerClassBatchSampler", "losses.NTXentLoss": "NTXent", "metrics.recall_at_k": "evaluate",
    "adapters.openclip": "open_clip", "data.TripletMarginMiner": "",
}  # fmt: skip
"""Names of other libraries, and the name that the error suggests; none for one that is like no other."""


@pytest.mark.parametrize("name", NAMES)
def test_a_name_from_elsewhere_leads_to_ours(name: str) -> None:
    *rooms, attribute = name.split(".")
    module: Any = getattr(cz, rooms[0]) if rooms else cz
    text = error_message(lambda: getattr(module, attribute), AttributeError)
    assert_says(text, f"has no attribute {attribute!r}")
    meant = NAMES[name]
    assert (f"Did you mean {meant}?" in text) if meant else ("Did you mean" not in text)  # type: ignore[operator]  # raised
    imports = f"from {'.'.join(['contrastive_zoo', *rooms])} import {attribute}"
    assert_says(error_message(lambda: exec(imports), ImportError), f"Did you mean {meant}?" if meant else attribute)
    for part in meant.split(".") if meant else ():
        module = getattr(module, part)


@pytest.fixture(autouse=True)
def nothing_asked() -> Iterator[None]:
    with patch.object(suggestions, "ASKED", set()):
        yield


def similarities(transposed: bool = True) -> tuple[Tensor, ...]:
    a, b = z() * 2, z(seed=1)
    return (a @ b.T, (a @ b.T).T) if transposed else (a @ a.T, y())


def without_positives() -> tuple[Tensor, Tensor]:
    return z(), torch.arange(8) + 8 * rank()


NO_POSITIVE = "no two samples had the same label … MPerClassBatchSampler(labels, m=2"
OWN_NUMBERS = "each id of this rank's first batch was also another rank's … ids + rank * samples_per_rank"
SIMILARITIES = "look like a matrix of similarities … Pass the embeddings, [n, d]."

WARNED: dict[str, tuple[str, Callable[[], nn.Module], list[Callable[[], tuple[Tensor, ...]]]]] = {
    "S and its transpose": (SIMILARITIES, cz.Clip, [similarities] * 2),
    "z zᵀ": (SIMILARITIES, cz.SupCon, [lambda: similarities(False)] * 2),
    "one sample a class": (NO_POSITIVE, cz.SupCon, [without_positives] * 6),
    "ids of each rank": (OWN_NUMBERS, partial(cz.SogCLR, 16), [lambda: (z(), z(seed=1), torch.arange(8))] * 3),
    "one id twice": ("", partial(cz.SogCLR, 16), [lambda: (z(), z(seed=1), torch.arange(8) + 7 * rank())] * 3),
    "square embeddings": ("", cz.Clip, [lambda: (z(8, 8) * 2, z(8, 8, seed=1) * 2)]),
    "a collapsed encoder": ("", cz.Clip, [lambda: (z(8, 8) * 0 + 1, z(8, 8) * 0 + 1)]),
    "two of three without positives": ("", cz.SupCon, [without_positives] * 2 + [lambda: (z(), y())] * 4),
    "two views": ("", cz.Triplet, [lambda: (z(), z(seed=1))] * 6),
    "positives on another rank": ("", cz.SupCon, [lambda: (z(), torch.arange(8))] * 6),
}
"""Words of the warning, a loss, and what it is called with, step by step."""


@pytest.mark.parametrize("name", WARNED)
def test_what_trains_wrongly_warns_once_on_every_rank_and_right_use_does_not(name: str, worlds: Worlds) -> None:
    says, loss, steps = WARNED[name]

    def job() -> list[str]:
        loss_fn = D(loss())
        return warned_here(*(lambda rows=rows: loss_fn(*rows()) for rows in steps))

    found = worlds.run(2, job)
    assert found[0] == found[1]
    for texts in found if name in ("positives on another rank", "ids of each rank") else [*found, job()]:
        assert len(texts) == bool(says), texts
        assert_says(" ".join(texts), says)


class HoldsALoss(nn.Module):
    def __init__(self, loss: nn.Module) -> None:
        super().__init__()
        self.loss = loss

    def forward(self, view1: Tensor, view2: Tensor) -> Tensor:
        return self.loss(view1, view2)


def test_a_bare_loss_among_several_processes_warns_once_and_is_local(worlds: Worlds) -> None:
    def job() -> list[str]:
        rows, whole = z(4 + rank()), torch.cat([numbers(4, 5, seed=0), numbers(5, 5, seed=10)])
        alone, holder = partial(D, process_group=cz.World()), HoldsALoss(cz.NTXent())
        before, expected = [{*vars(x)} for x in holder.modules()], alone(cz.NTXent())(whole, whole)
        for wrapped in (holder.loss, holder, lambda view1, view2: holder(view1, view2)):
            assert warned_here(lambda wrapped=wrapped: close(D(wrapped)(rows, rows), expected)) == []
        assert before == [{*vars(x)} for x in holder.modules()]
        calls = [(cz.NTXent(), rows), (cz.NTXent(), rows), (cz.SupCon(), y(len(rows)))]
        return warned_here(*(lambda loss=loss, x=x: close(loss(rows, x), alone(loss)(rows, x)) for loss, x in calls))

    for (text,) in worlds.run(2, job):
        assert_says(text, "this process's own rows only, though 2 processes run … DistributedLoss(NTXent(...))")


GATHERS: list[tuple[Callable[[Tensor], Tensor], int]] = [
    (with_dist_nn, 0),
    (with_functional_collectives, 0),
    (lambda x: cz.collectives.all_gather(x), 0),
    (Gather.apply, 0),
    (lambda x: Gather.apply(x.detach()), 1),
    (lambda x: x.gather(0, torch.zeros_like(x, dtype=torch.int64)), 1),  # torch's own
]
"""How embeddings are gathered, and how many warnings follow."""


@pytest.mark.filterwarnings("ignore::FutureWarning")
@pytest.mark.parametrize(("gather", "count"), GATHERS)
def test_gathered_embeddings_cause_no_warning(gather: Callable[[Tensor], Tensor], count: int, worlds: Worlds) -> None:
    def job() -> int:
        views = gather(z().tanh()).chunk(2)
        return len(warned_here(lambda: cz.NTXent()(*views)))

    assert worlds.run(2, job) == [count] * 2


@pytest.mark.parametrize("size", ["", "1", "4"])
def test_a_launcher_without_a_process_group_warns_once(size: str) -> None:
    warn_of_launcher.cache_clear()  # a process has one launcher
    with patch.dict(os.environ, {"WORLD_SIZE": size}):
        texts = warned_here(lambda: cz.NTXent()(z(), z()), lambda: D(cz.NTXent())(z(), z()))
        assert len(texts) == (size == "4")
        assert_says("".join(texts), "WORLD_SIZE is 4 … torch.distributed.init_process_group()" if texts else "")
        assert warned_here(lambda: D(cz.NTXent(), process_group=cz.World())(z(), z())) == []


EXTRAS = {
    "contrastive_zoo.metrics.plots": ("matplotlib", "contrastive_zoo[plot]"),
    "contrastive_zoo.adapters.huggingface": ("transformers", "transformers[torch]"),
    "contrastive_zoo.adapters.sentence_transformers": ("sentence_transformers", "sentence-transformers[train]"),
    "contrastive_zoo.testing.check": ("hypothesis", "contrastive_zoo[testing]"),
}


@pytest.mark.parametrize("module", EXTRAS)
def test_a_missing_package_is_one_sentence(module: str) -> None:
    package, install = EXTRAS[module]
    room = module.rpartition(".")[0]
    again = f"[sys.modules.pop(x) for x in list(sys.modules) if x.startswith({room!r})]"
    done = python("-c", f"import sys; {again}; sys.modules[{package!r}] = None; import {module}")
    *_, text = done.stderr.splitlines()
    assert_says(text, f"ImportError: {module.removesuffix('.check')} needs {package} … : pip install '{install}")


@pytest.mark.parametrize(
    ("module", "call", "install"),
    [
        ("faiss", lambda: cz.metrics.top_k(z(), z(), k=1), "contrastive_zoo[faiss]"),
        ("pytorch_metric_learning", lambda: D(lenient, prefer_native=True), "contrastive_zoo[pml]"),
    ],
)
def test_a_missing_package_of_an_option_is_one_sentence(module: str, call: Call, install: str) -> None:
    gone = {name: None for name in [module, *sys.modules] if name.split(".")[0] == module}
    with patch.dict(sys.modules, gone):
        sys.modules.pop("contrastive_zoo.wrapper.pml.translation", None)  # it imports the package again
        assert_says(error_message(call, (ImportError, ValueError)), f"{module} … pip install '{install}'")


ROWS, OTHERS = numbers(6, 3, seed=0), numbers(6, 3, seed=1)
SHORT = ROWS.to(torch.float8_e4m3fn)
LABELS = torch.tensor([0, 1, 0, 2, 1, 0])
EXPRESSION = re.compile(r"(?:Use|Pass|such as) (\w+(?:\[[^\]]*\])?(?:\.\w+(?:\([^()]*\))?)*(?:\([^()]*\))?)")


of_labels, of_embeddings = partial(cz.NPairs(), ROWS), partial(cz.SupCon(), labels=LABELS)

TENSORS: dict[str, tuple[Callable[[Any], Any], Any, Any]] = {
    "a column of labels": (of_labels, LABELS[:, None], LABELS),
    "one-hot labels": (of_labels, F.one_hot(LABELS), LABELS),
    "a column of labels as floats": (of_labels, LABELS.double()[:, None], LABELS),
    "one label": (partial(cz.ArcFace(3, 3).double(), ROWS[:1]), torch.tensor(1), torch.tensor([1])),
    "sparse embeddings": (of_embeddings, ROWS.to_sparse(), ROWS),
    "nested embeddings": (of_embeddings, torch.nested.nested_tensor([*ROWS], layout=torch.jagged), ROWS),
    "short floats": (of_embeddings, SHORT, SHORT.bfloat16()),
    "a learnable constant": (lambda x: cz.HCL(tau_plus=x)(ROWS, OTHERS), torch.tensor(0.5, requires_grad=True), 0.5),
}
"""A call of a tensor, a wrong one, and the one that is meant."""


def obeyed(text: str, x: Any) -> Any:
    """Return what the error's expression makes of the argument, whatever name it has there."""
    (expression, *_) = [found for found in EXPRESSION.findall(text) if re.search(r"[.(\[]", found)]
    name = re.match(r"\w+", expression).group()  # type: ignore[union-attr]  # it begins with one
    return eval(expression.replace(name, "x", 1) if name != "torch" else expression, {"x": x, "torch": torch})


@pytest.mark.parametrize("name", TENSORS)
def test_an_expression_is_right(name: str) -> None:
    call, bad, right = TENSORS[name]
    text = error_message(lambda: call(bad))
    assert text is not None
    close(call(obeyed(text, bad)).double(), call(right).double())
