"""Arguments and settings of a loss that do not fit: one sentence that says what came, what was expected and the fix."""

from collections.abc import Callable
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor, nn

import contrastive_zoo as cz
from contrastive_zoo.loss_base.class_loss import ClassLoss
from tests.own_losses import OF_CATALOGUE

EYE, Y, TOKENS = torch.eye(3), torch.arange(3), torch.eye(3)[:, None].repeat(1, 2, 1)
QWEN = ("query_to_doc", "doc_to_doc")


def spoilt(loss: ClassLoss, weights: Tensor) -> ClassLoss:
    loss.weights = nn.Parameter(weights)
    return loss


BAD: list[tuple[Callable[[], Any], str]] = [
    # ---- pairs
    (lambda: cz.SupSigmoid()(EYE, None), "SupSigmoid: labels are missing"),
    (lambda: cz.Clip(symmetric=False), "Clip has no setting 'symmetric'.*normalize, reduction, check_fi"),
    (lambda: cz.DCL(denominators="both"), "DCL: denominators is 'joint' or 'per_view', got 'both'"),
    (lambda: cz.MultiPositive(duplicates="drop"), "one of 'positive', 'ignore', 'negative', got 'drop'"),
    (lambda: cz.MultiPositive()(EYE, EYE[:2], Y), "MultiPositive: key_ids are missing"),
    (lambda: cz.MultiPositive()(EYE, EYE[:, :2], Y), r"keys must be floating-point \[m, d\] with the d of queries"),
    (
        lambda: cz.MultiPositive()(EYE, EYE, Y.double()),
        r"ids must be integer \[n\] or integer \[n, k\], got float64 \[3\]",
    ),
    (lambda: cz.MultiPositive(symmetric=True)(EYE, EYE, Y, Y), "are for paired rows: leave key_ids and weights out"),
    (lambda: cz.MultiPositive()(EYE, EYE, Y, Y, -torch.ones(3)), "weights are non-negative, one per id"),
    (lambda: cz.InfoNCE(in_batch_negatives=False)(EYE, EYE), "InfoNCE: in_batch_negatives=False .* pass negatives"),
    (lambda: cz.InfoNCE(in_batch_negatives=False, symmetric=True)(EYE, EYE, EYE), "and not symmetric"),
    (lambda: cz.OnlineContrastive()(EYE, EYE, Y), "labels are 1 for a positive pair and 0"),
    # ---- mined negatives, candidates of a query
    (lambda: cz.GIST()(EYE, EYE, EYE, EYE, EYE), "GIST: negatives came without guide_negatives"),
    (lambda: cz.GIST()(EYE, EYE, EYE, EYE, query_ids=Y[:2]), "GIST: query_ids are one per row, got 2 for 3 rows"),
    (lambda: cz.GIST()(EYE, EYE, EYE, EYE, negative_ids=Y), "GIST: negative_ids came without negatives. Leave"),
    (lambda: cz.MNRL()(EYE, EYE[:2]), "row i of documents belongs .* Pass further documents as negatives"),
    (lambda: cz.MNRL()(EYE, EYE, EYE[:, :2]), r"negatives must be floating-point \[m, d\] with the d of queries"),
    (lambda: cz.MNRL()(EYE, EYE, EYE, Y + 1), r"MNRL: owners are rows of this rank's 3 queries, or -1, got 1 … 3"),
    (lambda: cz.MNRL()(EYE, EYE, EYE, Y[:2]), "MNRL: owners are one per row"),
    (lambda: cz.MNRL()(EYE, EYE, None, Y), "MNRL: owners came without negatives"),
    (lambda: cz.MNRL()(EYE, EYE, document_ids=Y[:2]), "MNRL: document_ids are one per row, got 2 for 3 rows"),
    (lambda: cz.MNRL()(EYE, EYE, query_ids=Y.double()), "MNRL: query_ids are one integer per row"),
    (lambda: cz.MNRL()(EYE, EYE, EYE, None, None, Y), "MNRL: negative_ids are compared with document_ids"),
    (lambda: cz.MNRL(false_negative_margin=torch.ones(1, requires_grad=True)), "a constant"),
    (lambda: cz.MNRL(directions=("doc_to_query",)), "MNRL: directions are 'query_to_doc' and any of"),
    (lambda: cz.MNRL(directions=QWEN, partition_mode="per_direction"), "doc_to_doc never hold the positive"),
    (lambda: cz.MarginMSE()(EYE, EYE, EYE[:, None], EYE[:, :2]), r"margins must be .* with the k of negatives"),
    (lambda: cz.ScoreDistillation()(EYE, EYE[:, None], EYE[:, :1]), r"candidates are \[n, k, d\] with k >= 2"),
    # ---- labelled embeddings
    (lambda: cz.SupCon()(EYE, Y, torch.ones(3, 3)), "labels or by a mask, got both"),
    (lambda: cz.SupCon()(EYE, mask=torch.ones(3, 2)), "a column for each of the 3 samples of all ranks, got float32"),
    (lambda: cz.SupCon()(EYE), "labels are missing"),
    (lambda: cz.FastAP(normalize=False), "unit rows"),
    # ---- classes
    (lambda: cz.NormalizedSoftmax(2, 3)(EYE, Y), r"labels are classes 0 … 1, got 2. Number them"),
    (lambda: cz.NormalizedSoftmax(3, 2)(EYE, Y), r"as wide as embeddings, got float32 \[3, 2\]"),
    (lambda: cz.NormalizedSoftmax(2, 3, shard_over=cz.World())(EYE, Y), r"labels are classes 0 … 1"),
    (lambda: cz.NormalizedSoftmax(5, 3, shard_over=cz.World(0, 2))(EYE, Y), "hold the weights of 3 classes of 5"),
    (lambda: cz.NormalizedSoftmax(3, 3)(EYE, Y - 1), "got -1"),
    (lambda: cz.NormalizedSoftmax(3, 3)(EYE), "labels are missing"),
    (lambda: spoilt(cz.ProxyAnchor(3, 3), TOKENS)(EYE, Y), r"weights are \[classes, d\] and as wide"),
    (lambda: cz.CosFace(3, 4, shard_over=2), "shard_over is a World, such as World.of"),
    (lambda: cz.SoftTriple(3, 4, shard_over=cz.World()), "SoftTriple has no setting 'shard_over'"),
    (lambda: cz.ProxyAnchor(3, 4, sub_centers=2), "ProxyAnchor has no setting 'sub_centers'"),
    # ---- views
    (lambda: cz.SwAV(3, 4)(EYE, EYE), r"prototypes are \[clusters, d\] with d=3 as views"),
    (lambda: cz.SwAV(4, 3)(EYE), "two or more views"),
    (lambda: cz.SwAV(4, 3, code_views=3)(EYE, EYE), "1 <= code_views <= 2, got 3"),
    (lambda: cz.SwAV(torch.tensor(39, dtype=torch.uint8), 3), "SwAV: num_prototypes must be at least 1"),
    (lambda: cz.DINO(4)(EYE, EYE), r"the centre is as wide as outputs.*Construct DINO\(out_dim"),
    (lambda: cz.DINO(3)(EYE[:, None], EYE[:, None]), "student sees two or more views .* got 1 from"),
    # ---- tokens
    (lambda: cz.MaxSim()(EYE, TOKENS), r"queries must be floating-point \[n, a, d\], got float32"),
    (lambda: cz.MaxSim()(TOKENS, TOKENS[..., :2]), r"documents must be .* with the d of queries, got"),
    (lambda: cz.MaxSim()(TOKENS, TOKENS, negatives=TOKENS.half()), "negatives must have the dtype of queries"),
    (lambda: cz.MaxSim()(TOKENS[:2], TOKENS), "Pass further documents as negatives"),
    (lambda: cz.MaxSim()(TOKENS, TOKENS, torch.ones(3, 3).bool()), r"query_mask must be .* with the a of queries"),
    (lambda: cz.MaxSim()(TOKENS, TOKENS, torch.ones(3, 2)), r"query_mask must be bool \[n, a\] or integer"),
    (lambda: cz.MaxSim()(TOKENS, TOKENS, negative_mask=torch.ones(3, 2).bool()), "negative_mask came without"),
    (
        lambda: cz.MaxSim()(TOKENS, TOKENS, None, torch.eye(3, 2).long()),
        "one valid token or more each, got none in row 2",
    ),
    (lambda: cz.MaxSim()(TOKENS, TOKENS[:, :0]), "documents have one valid token or more each"),
    (lambda: cz.MaxSim(token_reduction="max"), "token_reduction is 'sum' or 'mean', got 'max'"),
    (lambda: cz.MaxSimPairwise()(TOKENS / 0, TOKENS), "tokens of queries hold NaN or infinite values in 6"),
    (lambda: cz.MaxSim()(TOKENS[:0], TOKENS[:0]), "the global batch is empty"),
    # ---- losses of losses
    (lambda: cz.Matryoshka(cz.SupCon(), ()), "one or more widths"),
    (lambda: cz.Matryoshka(cz.SupCon(), (0, 3)), "at least 1"),
    (lambda: cz.Matryoshka(cz.SupCon(), (1, 2), weights=[1.0]), "one weight for each of 2 terms"),
    (lambda: cz.Matryoshka(nn.MSELoss(), (1, 2)), "this library's, got MSELoss"),
    (lambda: cz.Matryoshka(cz.SupCon(), (1, 2), weights=[1.0, torch.nan]), "weights must be finite"),
    (lambda: cz.WeightedSum([cz.NTXent()], weights=[torch.inf]), "weights must be finite"),
    (lambda: cz.WeightedSum([]), "one weight for each of 0 terms"),
    (lambda: cz.WeightedSum([cz.SupCon()], weights=[1.0, 2.0]), "one weight for each of 1 terms"),
    (lambda: cz.WeightedSum([cz.SupCon(), nn.MSELoss()]), "this library's, got MSELoss"),
    (lambda: cz.WeightedSum([cz.NTXent(), cz.SupCon]), r"pass an instance, SupCon\(...\), not the class SupCon\."),
    (lambda: cz.Matryoshka(cz.SupCon, (1, 2)), r"pass an instance, SupCon\(...\), not the class SupCon\."),
    (lambda: cz.CrossBatchMemory(cz.SupCon, 8, 4), r"pass an instance, SupCon\(...\), not the class SupCon\."),
    # ---- padding, which third-party losses alone need
    (lambda: cz.DistributedLoss(cz.MaxSim(), pad_dims={"queries": 1}), "pad_dims is for a third-party loss"),
    (lambda: cz.DistributedLoss(nn.MSELoss(), pad_dims={"input": 0}), "pad_dims are the padded dimensions, 1 or more"),
    (lambda: cz.DistributedLoss(nn.MSELoss(), pad_dims=["input"]), r"got \['input'\]"),
]


@pytest.mark.parametrize("name", OF_CATALOGUE)
def test_each_argument_has_as_many_samples_as_the_first(name: str) -> None:
    """By the annotations of ``inputs``; without their check a loss goes on, or stops in the words of torch."""
    loss = OF_CATALOGUE[name].make()
    rows = [x.detach() for x in OF_CATALOGUE[name].arguments().values()]
    for index in range(1, len(rows)):
        if len(rows[index]) == len(rows[0]):
            with pytest.raises(ValueError, match=r"belongs to row i of|are one per row, got 7|do not pair"):
                loss.double()(*rows[:index], rows[index][:-1], *rows[index + 1 :])


def test_without_the_check_of_shapes_the_words_are_those_of_torch() -> None:
    with patch("contrastive_zoo.loss_base.loss.shapes_problem", return_value=None), pytest.raises(RuntimeError):
        cz.Clip()(EYE, EYE[:2])


@pytest.mark.parametrize(("call", "said"), BAD, ids=[said for _, said in BAD])
def test_bad_arguments_are_refused_with_the_fix(call: Callable[[], Any], said: str) -> None:
    with pytest.raises((ValueError, TypeError), match=said):
        call()
