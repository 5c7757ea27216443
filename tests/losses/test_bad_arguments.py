"""Arguments and settings that do not fit, sizes beyond memory and numbers beyond float32: what came, and the fix."""

import warnings
from collections.abc import Callable
from itertools import permutations
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import contrastive_zoo as cz
from contrastive_zoo.loss_base.settings import is_number
from contrastive_zoo.loss_base.shapes import call_form
from contrastive_zoo.metrics import plots
from tests.helpers import assert_says, close, later, numbers
from tests.own_losses import OF_CATALOGUE

EYE, Y, TOKENS = torch.eye(3), torch.arange(3), torch.eye(3)[:, None].repeat(1, 2, 1)
Z, LABELS = torch.eye(4, 3), torch.arange(4) % 2
META, HUGE = torch.device("meta"), 2**62
TO_DOC = ("query_to_doc", "doc_to_doc")
INSTANCE = "pass an instance, SupCon(...), not the class SupCon."


def nested(x: Tensor) -> Tensor:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch advises the other layout
        return torch.nested.nested_tensor([*x])


def spoilt(x: Tensor) -> Tensor:
    """Return NaN in sample 2; integers as floats."""
    is_bad = (torch.arange(len(x)) == 2).view(-1, *[1] * (x.ndim - 1))
    return torch.where(is_bad, torch.nan, x.double())


SPOILT: dict[str, tuple[Callable[[Tensor], Any], str]] = {
    "a list": (Tensor.tolist, "{name} must be a tensor, got list"),
    "None": (lambda x: None, "{name} (must be a tensor, got NoneType|are missing)"),
    "one number": (lambda x: x.flatten()[0], r"{name} .*got \w+ \[\]"),
    "one sample less": (lambda x: x[:-1], r"row i of |one per row, got \d for \d|do not pair|add up to"),
    "a dimension more": (lambda x: x[None], r"got \w+ \[1, |row i of |got \d for 1 rows"),
    "another width": (lambda x: x[..., :-1], r"with the \w of|one per row|row i of |as wide|\[n, |add up to"),
    "complex numbers": (lambda x: x.to(torch.complex64), "{name} .*got complex64 "),
    "NaN, or floats for integers": (spoilt, "{name}(: NaN or infinite values in .* row| .*got (some of )?float64 )"),
    "no values": (lambda x: x.to(META), "{name} must hold values"),
    "sparse": (Tensor.to_sparse, r"{name} must be a dense tensor.*Pass {name}\.to_dense"),
    "nested": (nested, "{name} must be a dense tensor, got nested"),
}
"""Mistakes in one argument, and what is said of it by its name."""

Z64, SETS, IDS, MASK = numbers(3, 2, seed=0), numbers(3, 2, 2, seed=0), torch.arange(3), torch.ones(3, 2).bool()
OF_MASKS = "query_mask document_mask negative_mask"
OF_IDS = "owners document_ids negative_ids query_ids dataset_ids"


def full(loss: nn.Module, *of: tuple[str, Tensor]) -> tuple[nn.Module, dict[str, Tensor]]:
    named = {name: x for names, x in of for name in names.split()}
    return loss, {name: named[name] for name in call_form(type(loss)).signature.parameters}


FULL: dict[str, tuple[nn.Module, dict[str, Tensor]]] = {
    "GIST": full(cz.GIST(), ("anchors positives guide_anchors guide_positives negatives guide_negatives", Z64)),
    "MNRL": full(cz.MNRL(), ("queries documents negatives", Z64), (OF_IDS, IDS)),
    "MultiPositive": full(cz.MultiPositive(), ("queries keys", Z64), ("ids key_ids", IDS), ("weights", torch.ones(3))),
    "MaxSim": full(cz.MaxSim(), ("queries documents negatives", SETS), (OF_MASKS, MASK)),
}
"""Calls with all arguments."""

CALLS = FULL | {
    name: (of.make().double(), {key: x.detach() for key, x in of.arguments().items()})
    for name, of in OF_CATALOGUE.items()
    if "option" not in name
}


def may_be_right(mistake: str, loss: nn.Module, arguments: dict[str, Tensor], name: str) -> bool:
    """Whether the argument is optional, stands alone, or no other has its kind of numbers."""
    x, others = arguments[name], [y for key, y in arguments.items() if key != name]
    alone = x.is_floating_point() and (x.ndim == 1 or not any(y.is_floating_point() and y.ndim > 1 for y in others))
    return {
        "None": name in call_form(type(loss)).optional and name != "labels",
        "one sample less": not others or (name == "negatives" and x.ndim == 2),
        "another width": alone or isinstance(loss, cz.HMLC | cz.PaCo),  # any number of levels, of classes
    }.get(mistake, False)


@pytest.mark.parametrize("name", CALLS)
def test_each_argument_is_checked_beside_the_others(name: str) -> None:
    """By the annotations of ``inputs``; without their check a loss goes on, or stops in the words of torch."""
    loss, arguments = CALLS[name]
    names = [*call_form(type(loss)).signature.parameters, *arguments]
    for index, (argument, x) in enumerate(arguments.items()):
        for mistake, (spoil, said) in SPOILT.items():
            if not may_be_right(mistake, loss, arguments, argument):
                words = said.format(name=rf"({argument}|{names[index]}|view {index})")
                with pytest.raises(ValueError, match=rf"^{type(loss).__name__}: .*({words})"):
                    loss(*{**arguments, argument: spoil(x)}.values())


@pytest.mark.path("engines")
def test_without_the_check_of_shapes_the_words_are_those_of_torch() -> None:
    with patch("contrastive_zoo.loss_base.shapes.shapes_problem", return_value=None), pytest.raises(RuntimeError):
        cz.Clip()(EYE, EYE[:2])


def hard_negatives(**settings: Any) -> Any:
    return cz.data.mine_hard_negatives(**{"queries": Z, "corpus": Z.clone(), "positives": torch.arange(4), **settings})


def judged(queries: Any = Y, **settings: Any) -> Any:
    return cz.metrics.evaluate(Z, **{"ids": torch.arange(4), "judgements": (queries, Y, Y), **settings})


def third_party(embeddings: Tensor, weights: Tensor) -> Tensor:
    return (embeddings.sum(1) * weights).sum()


def ranking() -> nn.Module:
    """A loss of sentence-transformers holds its encoder."""
    loss = nn.Module()
    loss.model = type("BaseModel", (nn.Module,), {"__module__": "sentence_transformers.base"})()
    return loss


def no_miner(embeddings: Tensor, labels: Tensor) -> None:
    pass


OF_ALL: list[Any] = [
    cz.Triplet(mining="hard"), cz.SmoothAP(), cz.DCL(), cz.SupCon(variant="in"), cz.MNRL(false_negative_margin=0.1),
    cz.VICReg(), cz.ArcFace(3, 2), cz.CrossBatchMemory(cz.InfoNCE(), 4, 2), torch.dist,
]  # fmt: skip
"""Losses that compare with all candidates at once."""
SUM = cz.WeightedSum([cz.NTXent(), cz.VICReg()])
OF_WEIGHTS: dict[str, Any] = {"shared": {"weights"}, "batch_dim": {"weights": 1}}

BAD: list[tuple[Callable[[], object], str]] = [
    (lambda: cz.MultiPositive()(EYE, EYE[:2], Y), "MultiPositive: key_ids are missing"),
    (lambda: cz.MultiPositive(symmetric=True)(EYE, EYE, Y, Y), "are for paired rows: leave key_ids and weights out"),
    (lambda: cz.MultiPositive()(EYE, EYE, Y, Y, -torch.ones(3)), "weights are non-negative, one per id"),
    (lambda: cz.SigLIP()(EYE, EYE, None, Y), "SigLIP: text_ids are compared with ids"),
    (lambda: cz.InfoNCE(in_batch_negatives=False)(EYE, EYE), "loss(queries, keys, negatives)"),
    (lambda: cz.InfoNCE(in_batch_negatives=False, symmetric=True)(EYE, EYE, EYE), "leave symmetric=False"),
    (lambda: cz.OnlineContrastive()(EYE, EYE, Y), "labels are 1 for a positive pair and 0"),
    (lambda: cz.GIST()(EYE, EYE, EYE, EYE, EYE), "GIST: negatives and guide_negatives belong together"),
    (lambda: cz.MNRL()(EYE, EYE, EYE, Y + 1), "MNRL: owners are rows of this rank's 3 queries, or -1, got 1 … 3"),
    (lambda: cz.MNRL()(EYE, EYE, None, Y), "MNRL: owners came without negatives"),
    (lambda: cz.MNRL(in_batch_negatives=False)(EYE, EYE, EYE), "without owners … owners=torch.arange(len(queries))"),
    (lambda: cz.MNRL()(EYE, EYE, EYE, dataset_ids=Y), "MNRL: negatives came without owners"),
    (lambda: cz.MNRL()(EYE, EYE, EYE, None, None, Y), "MNRL: negative_ids are compared with document_ids"),
    (lambda: cz.MNRL(in_batch_negatives=False, directions=TO_DOC), "leave directions=('query_to_doc',)"),
    (lambda: cz.MNRL(false_negative_margin=torch.ones(1, requires_grad=True)), "a constant"),
    (lambda: cz.MNRL(directions=("doc_to_query",)), "MNRL: directions are 'query_to_doc' and any of"),
    (lambda: cz.MNRL(directions=TO_DOC, partition_mode="per_direction"), "doc_to_doc never hold the positive"),
    (lambda: cz.ScoreDistillation()(EYE, EYE[:, None], EYE[:, :1]), "candidates are [n, k, d] with k >= 2"),
    (lambda: cz.MultiPositive()(EYE, EYE, Y, Y, EYE), "weights are non-negative, one per id, got float32 [3, 3]"),
    (lambda: cz.NTXent()(view1=EYE, view2=EYE), "Pass views by position: loss(view1, view2)."),
    (lambda: cz.NTXent(0.1, False), "too many positional arguments … It has: temperature"),
    (lambda: cz.SupCon()(EYE, Y, None, Y), "SupCon: too many positional arguments"),
    (lambda: cz.SupCon()(EYE, Y, torch.ones(3, 3)), "labels or by a mask, got both"),
    (lambda: cz.SupCon()(EYE, EYE), "got float32 [3, 3]. Use labels.long()"),
    (lambda: cz.SupCon()(EYE, Y[:, None]), "got int64 [3, 1]. Use labels.flatten()"),
    (lambda: cz.TiCo(4)(EYE, EYE), "the covariance is as wide … Construct TiCo(embedding_size=3)"),
    (lambda: cz.LeJEPA(4)(EYE, EYE), "got float32 [4, 1024] … Construct LeJEPA(embedding_size=3)"),
    (lambda: cz.LeJEPA(3, global_views=3)(EYE, EYE), "global_views … got 3 of 2 views"),
    (lambda: cz.Margin(beta=torch.nan), "Margin: beta must be finite, got nan"),
    (lambda: cz.SupCon()(EYE, mask=torch.ones(3, 2)), "a column for each of the 3 samples of all ranks, got float32"),
    (lambda: cz.SupCon(variant="in")(EYE, EYE.long()), "variant='in' takes one label of each sample"),
    (lambda: cz.FastAP(normalize=False), "unit rows"),
    (
        lambda: cz.NormalizedSoftmax(2, 3, shard_over=cz.World())(EYE, Y),
        "labels are classes 0 … 1, got 0 … 2. Number them",
    ),
    (lambda: cz.NormalizedSoftmax(5, 3, shard_over=cz.World(0, 2))(EYE, Y), "hold the weights of 3 classes of 5"),
    (lambda: later(cz.ProxyAnchor(3, 3), weights=nn.Parameter(TOKENS))(EYE, Y), "weights are [classes, d] and as wide"),
    (lambda: later(cz.CosFace(3, 3), sample_rate=0.5)(EYE, Y), "sample_rate is 1 in a loss that was"),
    (lambda: cz.CosFace(3, 4, shard_over=2), "shard_over is a World, such as World.of"),
    (lambda: cz.MaxSim(top_k=3, token_reduction="mean"), "MaxSim: top_k has a mean of its own"),
    (lambda: cz.SwAV(3, 4)(EYE, EYE), "prototypes are [clusters, d] with d=3 as views"),
    (lambda: later(cz.SwAV(5, 3), prototypes=nn.Parameter(LABELS, False))(Z, Z), "prototypes are [clusters, d]"),
    (lambda: cz.SwAV(4, 3, code_views=3)(EYE, EYE), "1 <= code_views <= 2, got 3"),
    (lambda: cz.DINO(4)(EYE, EYE), "the centre is as wide as outputs … Construct DINO(out_dim"),
    (lambda: cz.DINO(3)(EYE[:, None], EYE[:, None]), "student sees two or more views … got 1 from"),
    (lambda: cz.IBOT(3)(EYE, EYE, Y + 1), "are the numbers of masked patches … add up to 3 … a sum of 6, least 1"),
    (lambda: cz.IBOT(3)(EYE, EYE, Y[:0]), "got a sum of 0, least 0"),
    (lambda: cz.IBOT(3)(EYE, EYE, torch.tensor([4, -1])), "got a sum of 3, least -1"),
    (lambda: cz.MaxSim()(TOKENS, TOKENS, negatives=TOKENS.half()), "negatives must have the dtype of queries"),
    (lambda: cz.MaxSim()(TOKENS, TOKENS[:, :0]), "documents have one valid token or more each"),
    (lambda: cz.MaxSim()(TOKENS[:0], TOKENS[:0]), "the global batch is empty"),
    (lambda: cz.Matryoshka(cz.SupCon(), (1, 2), weights=[1.0]), "one weight for each of 2 terms"),
    (lambda: cz.Matryoshka(cz.SupCon(), (1, 2), weights=[1.0, torch.nan]), "weights must be finite"),
    (lambda: cz.Matryoshka(cz.ProxyNCA(3, 3), [2])(EYE, Y), "ProxyNCA, of a prefix of 2: … embedding_size=2"),
    (
        lambda: cz.WeightedSum([cz.InfoNCE(reduction="none"), cz.NTXent(reduction="none"), cz.VICReg()])(EYE, EYE),
        "WeightedSum: losses of a sum … got InfoNCE [3], NTXent [6], VICReg []. Use reduction='mean' in each",
    ),
    (lambda: cz.WeightedSum([]), "one weight for each of 0 terms"),
    (lambda: cz.WeightedSum([cz.SupCon(), nn.MSELoss()]), "this library's, got MSELoss"),
    (lambda: cz.WeightedSum([cz.NTXent(), cz.SupCon]), INSTANCE),
    (lambda: cz.Margin(num_classes=3)(Z, torch.ones(4, 3)), "Margin: β of a class needs labels"),
    (lambda: cz.Margin(num_classes=3)(Z, torch.tensor(1)), "Margin: labels are one integer per row"),
    (lambda: cz.Circle()(Z, targets=LABELS), "Circle: compares embeddings with labels, or views; got targets as well"),
    (lambda: later(cz.WeightedSum([cz.SupCon()]), weights=(np.inf,))(Z, LABELS), "WeightedSum: weights must be finite"),
    (lambda: later(cz.SogCLR(4), num_samples=3)(Z, Z, LABELS), "Construct another loss"),
    (lambda: later(cz.SogCLR(4), bimodal=True)(Z, Z, LABELS), "Construct another loss"),
    *(
        (lambda x=x: cz.SogCLR(9, temperature=0.3, temperature_range=x), "temperature_range is a tuple of two numbers")
        for x in ((0.2,), (0.0, 0.5), (0.4, 0.5), (0.5, 0.2), "ab", 0.3, EYE[0, :2])
    ),
    (lambda: later(cz.SogCLR(4), temperature_range=(0.1, 1))(Z, Z, LABELS), "no temperatures. Construct another"),
    *(
        (lambda x=x: cz.HMLC(level_weights=x), "level_weights are a list")
        for x in ([np.nan], [-1], "a", [], EYE[0], 1.0)
    ),
    (lambda: cz.MagFace(3, 2, low_norm=3, high_norm=2), "low_norm < high_norm, got 3 and 2"),
    (lambda: cz.LearnableTemperature(0.001), "1 / max_scale … 0.001 … max_scale=100"),
    (lambda: cz.LearnableTemperature(0.1, max_scale=np.nan), "max_scale=nan"),
    *((lambda x=x: cz.LearnableTemperature(x), "initial temperature") for x in (np.inf, 10**5000, 0.0, np.nan)),
    (lambda: cz.SIGReg(3, num_slices=HUGE)(Z), "SIGReg: num_slices must be a float, or an integer up to 2**53"),
    (lambda: cz.data.GlobalBatchSampler(HUGE, batch_size=2), "num_samples is below 2**60"),
    (lambda: hard_negatives(absolute_margin=True), "scores and margins are numbers"),
    (lambda: hard_negatives(corpus=EYE[:0]), "the corpus is empty"),
    (lambda: cz.metrics.evaluate(Z), "labels are missing: call evaluate(embeddings, labels=labels)"),
    (lambda: judged(ids=None), "judgements name rows by id: pass ids"),
    (lambda: judged(labels=LABELS), "labels or judgements say which items are relevant, got both"),
    (lambda: judged(metrics=["knn_accuracy@1"]), "knn_accuracy needs labels, got judgements"),
    (lambda: judged(Y.float()), "judgements name integer ids, got float32 [3] and int64 [3]"),
    (lambda: judged([0]), "must be a tensor, got list"),
    (lambda: hard_negatives(queries=np.array(["a", "b"])), "queries must be a tensor"),
    (lambda: cz.collectives.replicated([1.0]), "replicated: x must be a tensor, got list"),
    (lambda: cz.DistributedLoss(third_party, shared="weights"), "shared is the set of the arguments … got 'weights'"),
    (lambda: cz.DistributedLoss(third_party, shared={1}), "such as {'prototypes'}, got {1}"),
    (lambda: cz.DistributedLoss(third_party, batch_dim={"weights": -1}), "batch_dim is … got {'weights': -1}"),
    (lambda: cz.DistributedLoss(third_party, batch_dim=["weights"]), "got ['weights']"),
    (lambda: cz.DistributedLoss(third_party, **OF_WEIGHTS), "weights stands in shared and in batch_dim"),
    (lambda: cz.DistributedLoss(cz.SupCon(), shared={"labels"}), "are for a third-party loss … SupCon knows its"),
    (lambda: cz.DistributedLoss(cz.NTXent(), grad_reduction="avg"), "'mean' or 'sum' … got 'avg' … DDP"),
    (lambda: cz.DistributedLoss(third_party, check_finite=1), "check_finite is True or False, got 1"),
    (lambda: cz.DistributedLoss(cz.SupCon(), miner=no_miner), "SupCon weighs all pairs itself … Leave the miner out"),
    (lambda: cz.DistributedLoss(third_party, miner=no_miner), "third_party(embeddings: … takes no indices_tuple"),
    (lambda: cz.DistributedLoss(0.1), "must be callable … got float"),
    (lambda: cz.DistributedLoss(cz.DistributedLoss(third_party)), "loss is a DistributedLoss, which gathers"),
    (lambda: cz.DistributedLoss(ranking()), "Module holds the encoder … DistributedSentenceLoss"),
    (lambda: cz.data.DistributedMiner(cz.data.DistributedMiner(no_miner)), "is a DistributedMiner, which gathers"),
    (lambda: cz.data.DistributedMiner(3), "DistributedMiner: … must be callable … got int"),
    (lambda: cz.MemoryQueue(3, 3, dtype=torch.int64), "floating"),
    (lambda: cz.CrossBatchMemory(cz.NTXent(), 8, 3), "NTXent cannot compare a batch with a memory"),
    (lambda: cz.CrossBatchMemory(cz.SupCon(), 8, 3, miner=print), "takes no miner"),
    (lambda: cz.CrossBatchMemory(cz.SupCon, 8, 3), INSTANCE),
    (lambda: cz.CrossBatchMemory(cz.MaxSim(), 8, 3), "MaxSim cannot compare … InfoNCE"),
    (lambda: cz.CrossBatchMemory(cz.MNRL(in_batch_negatives=False), 8, 3), "MNRL cannot … in_batch_negatives=False"),
    (lambda: cz.MomentumEncoder(nn.Linear(1, 1), buffers="none"), "buffers"),
    (lambda: cz.MomentumEncoder(nn.Linear(1, 1)).update(torch.relu), "update takes the encoder that was copied, got"),
    *((lambda x=x: cz.World.of(x), "process_group: a process group, a 1-d") for x in (1, "dp", object)),
    *((lambda x=x: cz.DistributedLoss(x, ring=True), "cannot be computed with ring=True, because") for x in OF_ALL),
    (lambda: cz.DistributedLoss(SUM, ring=True), "WeightedSum cannot … because VICReg"),
    *((lambda x=x: cz.DistributedLoss(cz.Clip(), ring=x), "ring is True or False, got") for x in (2, "all", EYE, None)),
    *(
        (lambda at=at: cz.World(*at), f"a rank is an integer in 0 … size − 1, got rank={at[0]}, size={at[1]}")
        for at in ((5, 2), (2, 2), (-1, 2), (0, 0), (0.0, 1), (True, 2))
    ),
    (lambda: cz.MemoryQueue(3, 3).enqueue(Z * torch.nan), "leave these rows out: rows[rows.isfinite"),
    (lambda: cz.NTXent(temperature=torch.tensor(0.1).to_sparse()), "temperature must be a dense tensor, got sparse"),
    (lambda: cz.Monitor(cz.NTXent()), "expects a DistributedLoss, got NTXent"),
    (lambda: cz.Monitor(cz.DistributedLoss(cz.NTXent()), every=0), "at least 1, got 0"),
    (lambda: [cz.Monitor(x) for x in [cz.DistributedLoss(cz.NTXent())] * 2], "has a monitor already"),
    (lambda: plots.embedding_map(Z, LABELS[:3]), "3 for 4 rows"),
    (lambda: plots.embedding_map(Z[:, :1]), "two or more features are drawn on a plane, got float32 [4, 1]"),
    (lambda: plots.embedding_map(Z * torch.nan), "NaN … leave these rows out"),
    *((lambda x=x: plots.similarity_histogram(Z, labels=LABELS, bins=x), "bins is an integer") for x in (0, 1.5, "10")),
    (lambda: cz.explain(cz.NTXent(), Z, Z, device=torch.device("mps")), "device is 'cpu' or 'cuda', got 'mps'"),
    (lambda: cz.explain(cz.NTXent(), Z, Z[:3]), "NTXent: … view 1"),
    (lambda: cz.explain(cz.NTXent(), Z, Z, world_size=0), "world_size is the number of ranks, 1 or more, got 0"),
    (lambda: cz.engine.memory_budget(-1).__enter__(), "0 or more, got -1"),
    (lambda: cz.engine.use_implementation("cuda").__enter__(), "'auto', 'torch' or 'triton', got 'cuda'"),
    (lambda: cz.GradCache(nn.Linear(3, 2), 0), "chunk_size=0"),
    (lambda: cz.GradCache(lambda x: x, 2), "torch.nn.Module … got function"),
    (lambda: cz.GradCache(nn.Linear(3, 2)), "chunk_size=None and chunk_tokens=None"),
    (lambda: cz.GradCache(nn.Linear(3, 2), 2, chunk_tokens=8), "chunk_size=2 and chunk_tokens=8"),
]


@pytest.mark.parametrize(("call", "words"), BAD, ids=[words for _, words in BAD])
def test_bad_arguments_are_refused_with_the_fix(call: Callable[[], object], words: str) -> None:
    with pytest.raises((ValueError, TypeError)) as raised:
        call()
    assert_says(str(raised.value), words)


@pytest.mark.parametrize(
    ("make", "call"),
    [
        (lambda: cz.Margin(), lambda loss: loss(Z, LABELS)),
        (lambda: cz.SigLIP(), lambda loss: loss(Z, Z)),
        (lambda: cz.ArcFace(2, 3), lambda loss: loss(Z, LABELS)),
        (lambda: cz.MemoryQueue(8, 3), lambda queue: queue.enqueue(Z)),
        (lambda: cz.CrossBatchMemory(cz.SupCon(), size=8, embedding_size=3), lambda loss: loss(Z, LABELS)),
    ],
)
def test_a_loss_without_values_is_refused_until_it_has_some(make: Callable[[], nn.Module], call: Any) -> None:
    with META:
        empty = make()
    with pytest.raises(ValueError, match="is on the meta device and has no value"):
        call(empty)
    empty.to_empty(device="cpu").load_state_dict(make().state_dict())
    assert call(empty).isfinite().all()


@pytest.mark.parametrize("dtype", [torch.float16, torch.float64, torch.int32])
def test_a_setting_in_a_tensor_has_any_dtype(dtype: torch.dtype) -> None:
    """A momentum, and a temperature in a tensor of one number, which leaves rows their dtype."""
    one = torch.ones(1, dtype=dtype)
    losses = [cz.DINO(3, centre_momentum=x, teacher_temperature=x) for x in (one, 1.0)]
    close(*(loss(Z, Z) for loss in losses))
    close(losses[0].centre, losses[1].centre)


@pytest.mark.parametrize("loss", [cz.DINO(3).eval(), cz.DINO(3, centering="sinkhorn")], ids=str)
def test_a_teacher_has_any_dtype(loss: cz.DINO) -> None:
    for student, teacher in permutations([Z.bfloat16(), Z, Z.double()], 2):
        assert torch.equal(loss(student, teacher), loss(student, teacher.to(student.dtype)))


def test_weights_of_single_ids_are_one_a_query() -> None:
    loss, ids, keys = cz.MultiPositive(), torch.tensor([0, 1, 0, 1]), torch.arange(4)
    halves = loss(Z, Z, ids, key_ids=keys, weights=torch.full((4,), 0.5))
    close(halves, loss(Z, Z, ids[:, None], key_ids=keys, weights=torch.full((4, 1), 0.5)))


def test_rows_of_width_0_have_scores() -> None:
    empty = torch.empty(4, 0)
    assert cz.metrics.top_k(empty, k=1).scores.tolist() == [[0.0]] * 4
    assert cz.OrthogonalRegularization()(empty).isfinite()


def test_what_a_number_is() -> None:
    """The least and the largest element decide; the ends of float32 are numbers, and 1e-300 if nothing is divided by it."""
    finfo = torch.finfo(torch.float32)
    assert is_number(torch.tensor([0.0, 1.0, 2.0]), low=0, high=2, several=True)
    assert is_number(torch.empty(0), several=True)
    assert all(map(is_number, (finfo.max, -finfo.max, 1e-300)))
    assert is_number(finfo.tiny, above=0)
    assert not is_number(torch.tensor([0.0, -1.0, 2.0]), low=0, several=True)
    assert not is_number(torch.tensor([0.0, torch.nan, 2.0]), several=True)
    assert not is_number(finfo.tiny / 2, above=0)
