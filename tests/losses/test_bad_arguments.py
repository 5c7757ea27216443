"""Arguments and settings of a loss that do not fit: one sentence that says what came, what was expected and the fix."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import contrastive_zoo as cz
from contrastive_zoo.loss_base.class_loss import ClassLoss

EYE, Y, TOKENS = torch.eye(3), torch.arange(3), torch.eye(3)[:, None].repeat(1, 2, 1)
QWEN = ("query_to_doc", "doc_to_doc")


def spoilt(loss: ClassLoss, weights: Tensor) -> ClassLoss:
    loss.weights = nn.Parameter(weights)
    return loss


BAD: list[tuple[Callable[[], Any], str]] = [
    # ---- pairs
    (lambda: cz.SigLIP()(EYE, EYE[:2]), "SigLIP: image i belongs to text i, got images"),
    (lambda: cz.SupSigmoid()(EYE, None), "SupSigmoid: labels are missing"),
    (lambda: cz.Clip(temperature=cz.LearnableTemperature(0.001)), "at least 1 / max_scale"),
    (lambda: cz.Clip(symmetric=False), "Clip has no setting 'symmetric'"),
    (lambda: cz.DCL(denominators="both"), "DCL: denominators is 'joint' or 'per_view', got 'both'"),
    (lambda: cz.MILNCE()(EYE, EYE), "MILNCE: texts are k >= 1 candidates per video"),
    (lambda: cz.ClipDistillation()(EYE, EYE, EYE, EYE[:2]), "row i is one sample everywhere, got teacher_images"),
    (lambda: cz.MultiPositive(duplicates="drop"), "one of 'positive', 'ignore', 'negative', got 'drop'"),
    (lambda: cz.MultiPositive()(EYE, EYE[:2], Y), "MultiPositive: key_ids are missing"),
    (lambda: cz.MultiPositive()(EYE, EYE[:, :2], Y), "MultiPositive: queries and keys are of one width"),
    (lambda: cz.MultiPositive()(EYE, EYE, Y.double()), "MultiPositive: ids are integers, one or k per query"),
    (lambda: cz.MultiPositive(symmetric=True)(EYE, EYE, Y, Y), "are for paired rows: leave key_ids and weights out"),
    (lambda: cz.MultiPositive()(EYE, EYE, Y, Y, -torch.ones(3)), "weights are non-negative, one per id"),
    (lambda: cz.InfoNCE(in_batch_negatives=False)(EYE, EYE), "InfoNCE: in_batch_negatives=False .* pass negatives"),
    (lambda: cz.InfoNCE(in_batch_negatives=False, symmetric=True)(EYE, EYE, EYE), "and not symmetric"),
    (lambda: cz.MegaBatchMargin()(EYE, EYE[:2]), "views must pair row by row"),
    (lambda: cz.CoSENT()(EYE, EYE, torch.ones(2)), "scores are one number per pair, got float32"),
    (lambda: cz.CoSENT()(EYE, EYE[:2], torch.ones(3)), "row i is one pair"),
    (lambda: cz.OnlineContrastive()(EYE, EYE, Y), "labels are 1 for a positive pair and 0"),
    # ---- mined negatives, candidates of a query
    (lambda: cz.GIST()(EYE, EYE, EYE, EYE, EYE), "GIST: negatives and guide_negatives come together"),
    (lambda: cz.GIST()(EYE, EYE, EYE, EYE, EYE, EYE[:2]), "GIST: negatives are rows like anchors"),
    (lambda: cz.GIST()(EYE, EYE, EYE, EYE, query_ids=Y[:2]), "GIST: query_ids are one per row, got 2 for 3 rows"),
    (lambda: cz.GIST()(EYE, EYE, EYE, EYE, negative_ids=Y), "GIST: negative_ids are compared with document_ids"),
    (lambda: cz.GIST()(EYE, EYE, EYE[:2], EYE[:2]), "GIST: row i is one pair everywhere, got guide_anchors"),
    (lambda: cz.MNRL()(EYE, EYE[:2]), "MNRL: row i of queries belongs to row i of documents"),
    (lambda: cz.MNRL()(EYE, EYE, EYE[:, :2]), r"MNRL: negatives are \[m, d\], got float32 \[3, 2\]"),
    (lambda: cz.MNRL()(EYE, EYE, EYE, Y + 1), r"MNRL: owners are rows of this rank's 3 queries, or -1, got 1 … 3"),
    (lambda: cz.MNRL()(EYE, EYE, EYE, Y[:2]), "MNRL: owners are one per row"),
    (lambda: cz.MNRL()(EYE, EYE, None, Y), "MNRL: owners say whose the negatives are, but there are no negatives"),
    (lambda: cz.MNRL()(EYE, EYE, document_ids=Y[:2]), "MNRL: document_ids are one per row, got 2 for 3 rows"),
    (lambda: cz.MNRL()(EYE, EYE, query_ids=Y.double()), "MNRL: query_ids are one integer per row"),
    (lambda: cz.MNRL()(EYE, EYE, EYE, None, None, Y), "MNRL: negative_ids are compared with document_ids"),
    (lambda: cz.MNRL(false_negative_margin=torch.ones(1, requires_grad=True)), "a constant"),
    (lambda: cz.MNRL(directions=("doc_to_query",)), "MNRL: directions are 'query_to_doc' and any of"),
    (lambda: cz.MNRL(directions=QWEN, partition_mode="per_direction"), "doc_to_doc never hold the positive"),
    (lambda: cz.MarginMSE()(EYE, EYE, EYE, EYE[:, :1]), r"negatives are k >= 1 rows per query, \[n, k, d\]"),
    (lambda: cz.MarginMSE()(EYE, EYE, EYE[:, None], EYE[:, :2]), "margins are one number per negative"),
    (lambda: cz.ScoreDistillation()(EYE, EYE[:, None], EYE[:, :1]), "candidates are k >= 2 rows per query"),
    (lambda: cz.ScoreDistillation()(EYE, TOKENS, torch.ones(3)), "scores are one number per candidate"),
    # ---- labelled embeddings
    (lambda: cz.SupCon()(EYE, Y, torch.ones(3, 3)), "labels or by a mask, got both"),
    (lambda: cz.SupCon()(EYE, mask=torch.ones(3, 2)), "a column for each of the 3 samples of all ranks, got float32"),
    (lambda: cz.SupCon()(EYE, mask=torch.ones(2, 3)), "the mask has a row for each local sample"),
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
    (lambda: cz.ArcFace(3, 4, magin=0.5), "no setting 'magin'"),
    (lambda: cz.SoftTriple(3, 4, shard_over=cz.World()), "SoftTriple has no setting 'shard_over'"),
    (lambda: cz.ProxyAnchor(3, 4, sub_centers=2), "ProxyAnchor has no setting 'sub_centers'"),
    # ---- views
    (lambda: cz.VICReg()(EYE, EYE[:2]), "views must pair row by row"),
    (lambda: cz.SwAV(3, 4)(EYE, EYE), r"prototypes are \[clusters, d\] with d=3 as views"),
    (lambda: cz.SwAV(4, 3)(EYE), "two or more views"),
    (lambda: cz.SwAV(4, 3, code_views=3)(EYE, EYE), "1 <= code_views <= 2, got 3"),
    (lambda: cz.SwAV(torch.tensor(39, dtype=torch.uint8), 3), "SwAV: there are prototypes"),
    (lambda: cz.DINO(4)(EYE, EYE), r"the centre is as wide as outputs.*Construct DINO\(out_dim"),
    (lambda: cz.DINO(3)(EYE[:, None], EYE[:, None]), "student sees two or more views .* got 1 from"),
    (lambda: cz.DINO(3)(EYE, EYE[:2]), r"student and teacher are \[n, views, k\], or \[n, k\], got"),
    # ---- tokens
    (lambda: cz.MaxSim()(EYE, TOKENS), r"queries are floating-point tokens \[n, L, d\], got float32"),
    (lambda: cz.MaxSim()(TOKENS, TOKENS[..., :2]), "documents are of the queries' width and dtype, got"),
    (lambda: cz.MaxSim()(TOKENS, TOKENS, negatives=TOKENS.half()), "negatives are of the queries' width"),
    (lambda: cz.MaxSim()(TOKENS[:2], TOKENS), "Pass further documents as negatives"),
    (lambda: cz.MaxSim()(TOKENS, TOKENS, torch.ones(3, 3).bool()), "query_mask holds a bool or an"),
    (lambda: cz.MaxSim()(TOKENS, TOKENS, torch.ones(3, 2)), "query_mask holds a bool or an integer"),
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


@pytest.mark.parametrize(("call", "said"), BAD, ids=[said for _, said in BAD])
def test_bad_arguments_are_refused_with_the_fix(call: Callable[[], Any], said: str) -> None:
    with pytest.raises((ValueError, TypeError), match=said):
        call()
