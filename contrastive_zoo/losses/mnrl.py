"""Softmax over pairs of texts and mined negatives, as sentence embeddings are trained: MNRL and GIST."""

import math
from collections.abc import Collection, Mapping, Sequence
from typing import Annotated, Any, Literal, get_args

import torch
from jaxtyping import Float, Int
from torch import Tensor

from contrastive_zoo.engine.batch import Batch
from contrastive_zoo.engine.cost import Blocks, Entry, Pairs
from contrastive_zoo.engine.masked import masked_log_sum_exp, tie_width
from contrastive_zoo.engine.pairs import Direction, TowerPairs
from contrastive_zoo.engine.plan import Needs
from contrastive_zoo.engine.rowwise import AnchorBlock, BlockLoss, PairBlock, comparable, reduce_pairs, split_pairs
from contrastive_zoo.engine.softmax_arithmetic import cross_entropy, log_sum_exp
from contrastive_zoo.loss_base.loss import NO_RING, CallInputs, Inputs, Loss
from contrastive_zoo.loss_base.settings import Bounds, Reduction, Temperature
from contrastive_zoo.loss_base.shapes import together_problem
from contrastive_zoo.ranks.row_checks import range_rule

PartitionMode = Literal["joint", "per_direction"]
Hardness = Literal["in_batch_negatives", "hard_negatives", "all_negatives"]
Strategy = Literal["absolute", "relative"]
Margin = Annotated[float, Bounds(constant=True)]  # of a mask, which has no derivative
_DIRECTIONS = get_args(Direction)
_HOLD_THE_POSITIVE = {"query_to_doc", "doc_to_query"}


class MNRL(Loss, engine="softmax", has_kernel=True):
    r"""Compute the multiple negatives ranking loss of sentence-transformers.

    With q, d the unit embeddings of queries and documents of all ranks, D all documents and hard negatives,

        query_to_doc    Z_i = Σ_{x∈D} exp(q_i·x / t + h_ix)        query_to_query  Z_i = Σ_{j≠i} exp(q_i·q_j / t)
        doc_to_query    Z_i = Σ_j exp(d_i·q_j / t)                 doc_to_doc      Z_i = Σ_{x∈D, not i's} exp(d_i·x / t)

        loss = mean_i [ log Σ_directions Z_i  −  q_i·d_i / t ]            partition_mode "joint"
        loss = mean_i [ mean_directions log Z_i  −  q_i·d_i / t ]         "per_direction"

    h_ix = hardness_strength · q_i·x, held constant, or 0. False negatives are left out of every Z_i: those with the ids of
    pair i, and terms s(·,·) > q_i·d_i + margin, times |q_i·d_i| if relative, up to rounding.

    Called as ``loss(queries, documents, negatives, owners, document_ids, negative_ids, query_ids, dataset_ids)``:

    - queries, documents: [n, d].
    - negatives: [m, d], for every query.
    - owners: [m], the query that a negative was mined for; −1: every query.
    - document_ids, negative_ids, query_ids: [n], [m], [n] integers; equal ids are one document or query.
    - dataset_ids: [n] integers; pairs and owned negatives are compared within a data set; −1: a pair alone.

    Args:
        temperature: t > 0.
        directions: of the above; ``"query_to_doc"``.
        partition_mode: as above.
        hardness_mode: which candidates have h: ``"in_batch_negatives"``, ``"hard_negatives"`` (a query's own),
            ``"all_negatives"`` or None.
        hardness_strength: non-negative.
        false_negative_margin: the margin; None: only ids.
        margin_strategy: ``"absolute"`` or ``"relative"``.
        mask_doc_to_doc: whether the margin masks doc_to_doc.
        in_batch_negatives: False: compare with negatives only, own or −1's.
        normalize: normalise embeddings first.
        reduction: ``"mean"``, ``"sum"`` or ``"none"``.
        check_finite: refuse NaN and infinite embeddings.

    Examples:
        >>> eye = torch.eye(2)   # mean of log(e + 1 + e⁻¹) and log(e + 2), − 1
        >>> MNRL(temperature=1.0)(eye, eye, -eye[:1], torch.tensor([0]))
        tensor(0.4795)

    Source: Henderson et al. 2017, §4.4, https://arxiv.org/abs/1705.00652; directions: https://arxiv.org/abs/2308.03281;
    hardness: https://arxiv.org/abs/2503.04812; false negatives: https://arxiv.org/abs/2506.05176
    """

    temperature: Temperature = 0.05
    directions: tuple[Direction, ...] = ("query_to_doc",)
    partition_mode: PartitionMode = "joint"
    hardness_mode: Hardness | None = None
    hardness_strength: Annotated[float, Bounds("hardness_strength is non-negative", low=0, constant=True)] = 0.0
    false_negative_margin: Margin | None = None
    margin_strategy: Strategy = "absolute"
    mask_doc_to_doc: bool = True
    in_batch_negatives: bool = True
    normalize: bool = True
    reduction: Reduction = "mean"

    row_indices = ("owners",)

    def settings_problem(self) -> str | None:
        directions = self.directions
        known = isinstance(directions, Sequence) and all(x in _DIRECTIONS for x in directions)
        if not known or "query_to_doc" not in directions:
            return f"directions are 'query_to_doc' and any of {', '.join(_DIRECTIONS[1:])}, got {directions}."
        if problem := super().settings_problem():
            return problem
        if self.partition_mode == "per_direction" and not set(directions) <= _HOLD_THE_POSITIVE:
            return "query_to_query and doc_to_doc never hold the positive: with them use partition_mode='joint'."
        return _OWN_NEGATIVES if not self.in_batch_negatives and len(directions) > 1 else None

    def ring_problem(self) -> str | None:
        masks = self.false_negative_margin is not None or not self.in_batch_negatives
        by_rows = self.hardness_mode is not None or masks
        return f"a ring {_UNSUPPORTED}" if by_rows else super().ring_problem()

    def inputs(
        self,
        queries: Float[Tensor, "n d"],
        documents: Float[Tensor, "n d"],
        negatives: Float[Tensor, "m d"] | None = None,
        owners: Int[Tensor, " m"] | None = None,
        document_ids: Int[Tensor, " n"] | None = None,
        negative_ids: Int[Tensor, " m"] | None = None,
        query_ids: Int[Tensor, " n"] | None = None,
        dataset_ids: Int[Tensor, " n"] | None = None,
    ) -> Inputs:
        rows = {"queries": queries, "documents": documents, "negatives": negatives, "owners": owners}
        rows |= {"document_ids": document_ids, "negative_ids": negative_ids, "query_ids": query_ids}
        rows |= {"dataset_ids": dataset_ids}
        rule = f"owners are rows of this rank's {len(queries)} queries, or -1"
        values = [] if owners is None else [range_rule(owners, -1, len(queries) - 1, rule)]
        compared = {"directions": tuple(self.directions)}  # which may also be a list
        alone = negative_ids is not None and document_ids is None
        problem = "negative_ids are compared with document_ids: pass both." if alone else None
        is_grouped = dataset_ids is not None or not self.in_batch_negatives
        if negatives is None and not self.in_batch_negatives:
            problem = _OWN_NEGATIVES
        elif negatives is not None and owners is None and is_grouped:
            problem = _NO_OWNERS
        return Inputs.of(rows, problem, values=values, compared=compared, local=owners is not None)

    def needs(self, inputs: Inputs) -> Needs:
        candidates = tuple(name for name in ("documents", "negatives") if name in inputs.rows)
        needs = super().needs(inputs)._replace(anchors=("queries",), candidates=candidates)
        if self._sums_suffice(inputs.rows):
            return needs._replace(no_kernel=_UNSUPPORTED) if "doc_to_doc" in self.directions else needs
        return needs._replace(engine="rows", no_ring=NO_RING["rows"], no_kernel=_UNSUPPORTED)

    def _sums_suffice(self, rows: Mapping[str, Tensor]) -> bool:
        """Return whether each Z_i is a plain sum over all candidates."""
        has_ids = not {"document_ids", "query_ids", "dataset_ids"}.isdisjoint(rows)
        is_masked = self.false_negative_margin is not None or has_ids or not self.in_batch_negatives
        of_documents = "doc_to_doc" in self.directions and "negatives" in rows
        return self.hardness_mode is None and not is_masked and not of_documents

    def entries(self, stated: CallInputs) -> list[Entry]:
        rows, directions = stated.inputs.rows, self.directions
        if not self._sums_suffice(rows):
            grouped = [] if self.in_batch_negatives and "dataset_ids" not in rows else [2 * 8]
            return [_blocks_of_pairs(stated, "queries", 1.5 * len(directions), grouped)]
        scale, entries = self.scale_of(stated)
        how: Any = {"scale": scale, "unit_norm": self.normalize}
        entries.append(Pairs(["queries"], ["documents"], columnwise="doc_to_query" in directions, **how))
        if "negatives" in rows:
            entries.append(Pairs(["queries"], ["negatives"], columnwise=False, **how))
        towers = {"query_to_query": "queries", "doc_to_doc": "documents"}
        return [*entries, *(Pairs([x], (), **how) for key, x in towers.items() if key in directions), *self.reduced()]

    def compute(self, batch: Batch) -> Tensor:
        pairs, directions = TowerPairs(batch, batch.settings.temperature, self.normalize), tuple(self.directions)
        if self._sums_suffice(batch.rows):
            others, positive = pairs.sums_by_direction(directions)
            losses = _losses(others, positive, self.partition_mode)
            return batch.reduce(losses.to(pairs.rows[0].dtype), reduction=self.reduction)

        compared = {*directions} if self.mask_doc_to_doc else {*directions} - {"doc_to_doc"}
        margin = batch.settings.false_negative_margin, self.margin_strategy
        loss = BlockLoss.of(_pair_losses, batch.settings, directions=directions, compared=compared, margin=margin)
        queries, documents = batch.rows["queries"], batch.rows["documents"]
        arguments = (queries, documents, batch.rows.get("negatives", queries[:0]))
        return reduce_pairs(
            batch, loss, [batch.prepared(x, normalize=self.normalize) for x in arguments],
            ids=_ids_of_pairs(batch), owners=batch.rows.get("owners"), groups=self._groups(batch), reduction=self.reduction,
        )  # fmt: skip

    def _groups(self, batch: Batch) -> Tensor | None:
        """Return the group of each pair, which is compared with those of its group: its data set, or itself alone."""
        index, ids = batch.indices(), batch.rows.get("dataset_ids")
        if not self.in_batch_negatives:
            return index
        return None if ids is None else torch.where(ids < 0, -1 - index, ids.long())


_OWN_NEGATIVES = (
    "with in_batch_negatives=False a query is compared only with its own negatives. Pass negatives=… and owners=…, and "
    "leave directions=('query_to_doc',)."
)
_NO_OWNERS = (
    "negatives came without owners, which say whose they are. Pass owners=torch.arange(len(queries)) if negative i was "
    "mined for query i, or -1 for a negative of every query."
)
_UNSUPPORTED = "computes MNRL with in-batch negatives, without hardness_mode, ids, false_negative_margin and doc_to_doc"


def _blocks_of_pairs(stated: CallInputs, anchors: str, matmuls: float, further: list[int]) -> Blocks:
    """Return what :func:`reduce_pairs` sends: candidates of twice the width, which of them are single, further data, ids."""
    rows = stated.inputs.rows
    return Blocks(
        [anchors], [anchors, *(x for x in ("negatives",) if x in rows)], width=2 * rows[anchors].shape[1],
        companions=[1, *further, *(2 * 8 for name in _IDS if name in rows)], parameters=stated.learnt("temperature"),
        reduction=stated.settings.reduction, matmuls=matmuls,
    )  # fmt: skip


_IDS = {"document_ids": "negative_ids", "query_ids": ""}  # of pairs, and of the negatives that they are compared with


def _ids_of_pairs(batch: Batch) -> list[tuple[Tensor, Tensor | None]]:
    return [(batch.rows[x], batch.rows.get(y)) for x, y in _IDS.items() if x in batch.rows]


def _threshold(pairs: PairBlock, margin: float | Tensor, strategy: Strategy) -> Tensor:
    """Return the largest similarity that an anchor's negatives may have, [c, 1]: that of its pair plus the margin."""
    first, second = pairs.first.detach(), pairs.second.detach()
    similarity = (first * second).sum(1, keepdim=True)
    squares = torch.maximum(first.square().sum(1, keepdim=True), second.square().sum(1, keepdim=True))
    tie = tie_width(first) * squares.clamp(min=1)
    return similarity + margin * (similarity.abs() if strategy == "relative" else 1) + tie


def _losses(others: dict[Direction, Tensor], positive: Tensor, partition_mode: str) -> Tensor:
    """Return −log of the positive's share, given the log-sum-exps of the other candidates of each direction."""
    if partition_mode == "per_direction":
        return torch.stack([cross_entropy(positive, x) for x in others.values()]).mean(0)
    # Z contains the positive once for each of these k directions: log(k + Σ exp(s − p)) = log k + log(1 + Σ … / k)
    shift = math.log(len(_HOLD_THE_POSITIVE & others.keys()))
    return shift + cross_entropy(positive, log_sum_exp(torch.stack([*others.values()]), 0) - shift)


def _pair_losses(
    block: AnchorBlock,
    temperature: Tensor,
    directions: Sequence[Direction],
    margin: tuple[float | Tensor | None, Strategy],  # in a tuple: it has no derivative
    compared: Collection[str],  # the directions that the margin masks, by similarities of the guide if there is one
    partition_mode: PartitionMode = "joint",
    hardness_mode: Hardness | None = None,
    hardness_strength: float = 0.0,
    has_guide: bool = False,  # then negatives are candidates of queries alone
) -> tuple[Tensor, Tensor]:
    x, is_own = split_pairs(block.anchors, block.candidates, block.companions[0][1]), block.positive
    distinct = comparable(block, 2 if has_guide else 1)
    guide = split_pairs(*block.companions[1], block.companions[0][1]) if has_guide else x
    threshold = None if margin[0] is None else _threshold(guide, margin[0], margin[1])
    others: dict[Direction, Tensor] = {}
    for direction in directions:
        similarity = x.similarity(direction)
        logits, allowed = similarity / temperature, distinct & ~is_own
        if direction == "query_to_doc":
            allowed = distinct & ~(is_own & x.is_pair)  # also negatives that were mined for the query
            if hardness_mode is not None:
                masks = {"in_batch_negatives": ~is_own, "hard_negatives": is_own & ~x.is_pair}
                hard = masks.get(hardness_mode, ~(is_own & x.is_pair))
                logits = logits + (hardness_strength * similarity.detach()).where(hard, 0)
        elif direction != "doc_to_doc" or has_guide:
            allowed = allowed & x.is_pair
        if threshold is not None and direction in compared:
            of_guide = similarity if guide is x else guide.similarity(direction)
            allowed = allowed & (of_guide.detach() <= threshold)
        others[direction] = masked_log_sum_exp(logits, allowed)
    positive = (x.first * x.second).sum(1) / temperature
    return _losses(others, positive, partition_mode), torch.ones_like(block.ids, dtype=torch.bool)


class GIST(Loss, engine="rows"):
    r"""Compute InfoNCE over the candidates that a guide model does not find closer to the anchor than its positive.

    With a, p, x the unit embeddings of anchors, positives and negatives of all ranks, g(·,·) the guide's cosine and

        τ_i = g(a_i, p_i) − margin,   or, relative,   g(a_i, p_i) − margin · |g(a_i, p_i)|

    anchor i's logits are a_i·p_j / t; with ``contrast_anchors`` also a_i·a_j / t, j ≠ i; with ``contrast_positives``
    p_i·p_j / t, j ≠ i; and a_i·x / t. Pairs with g(·,·) > τ_i, up to 64 units of rounding, are masked, except a_i·p_i:

        loss = mean_i [ logsumexp of i's logits  −  a_i·p_i / t ]

    Equal to sentence-transformers' GISTEmbedLoss on one process, which masks a_i·a_i and p_i·p_i only if τ_i < 1, and on
    several ranks compares anchors with those of the same rank.

    Called as ``loss(anchors, positives, guide_anchors, guide_positives, negatives, guide_negatives)``:

    - anchors, positives: [n, d].
    - guide_anchors, guide_positives: [n, e], the guide's embeddings of the same samples; without gradient.
    - negatives: [m, d], candidates of every anchor of every rank; m may differ between ranks.
    - guide_negatives: [m, e].

    Args:
        temperature: t > 0; a tensor or module is learnable.
        margin_strategy: ``"absolute"`` or ``"relative"``.
        margin: the margin in τ; a larger margin masks more pairs.
        contrast_anchors: whether anchors are candidates of each other.
        contrast_positives: whether positives are candidates of each other.
        reduction: ``"mean"`` over all ranks' losses, ``"sum"``, or ``"none"`` for those of this rank.
        check_finite: refuse NaN and infinite embeddings.

    Examples:
        >>> eye, equal = torch.eye(2), torch.tensor([[1.0, 0.0], [1.0, 0.0]])
        >>> GIST(temperature=1.0)(eye, eye, eye, eye)   # log(e + 3) − 1
        tensor(0.7437)
        >>> GIST(temperature=1.0, margin=0.1)(eye, eye, equal, equal)   # all other pairs are masked
        tensor(0.)

    Source: Solatorio 2024, §3, https://arxiv.org/abs/2402.16829
    """

    temperature: Temperature = 0.01
    margin_strategy: Strategy = "absolute"
    margin: Margin = 0.0
    contrast_anchors: bool = True
    contrast_positives: bool = True
    reduction: Reduction = "mean"

    def inputs(
        self,
        anchors: Float[Tensor, "n d"],
        positives: Float[Tensor, "n d"],
        guide_anchors: Float[Tensor, "n e"],
        guide_positives: Float[Tensor, "n e"],
        negatives: Float[Tensor, "m d"] | None = None,
        guide_negatives: Float[Tensor, "m e"] | None = None,
    ) -> Inputs:
        rows = {"anchors": anchors, "positives": positives, "negatives": negatives}
        rows |= {"guide_anchors": guide_anchors, "guide_positives": guide_positives, "guide_negatives": guide_negatives}
        return Inputs.of(rows, together_problem(negatives=negatives, guide_negatives=guide_negatives))

    def entries(self, stated: CallInputs) -> list[Entry]:
        width, of_guide = (stated.inputs.rows[name].shape[1] for name in ("anchors", "guide_anchors"))
        matmuls = (1 + self.contrast_anchors + self.contrast_positives) * (3 + of_guide / max(1, width)) / 2
        return [_blocks_of_pairs(stated, "anchors", matmuls, [2 * of_guide * stated.wide])]

    def compute(self, batch: Batch) -> Tensor:
        arguments = dict(batch.rows)
        arguments.setdefault("negatives", arguments["anchors"][:0])
        arguments.setdefault("guide_negatives", arguments["guide_anchors"][:0])
        names = ("anchors", "positives", "negatives")
        rows = [batch.prepared(arguments[name], normalize=True) for name in names]
        guides = [batch.prepared(arguments[f"guide_{name}"].detach(), normalize=True) for name in names]
        directions: list[Direction] = ["query_to_doc"]
        directions += ["query_to_query"] if self.contrast_anchors else []
        directions += ["doc_to_doc"] if self.contrast_positives else []
        loss = BlockLoss(
            _pair_losses, temperature=batch.settings.temperature, directions=directions, compared=directions,
            margin=(-batch.settings.margin, self.margin_strategy), has_guide=True,
        )  # fmt: skip
        return reduce_pairs(batch, loss, rows, [guides], reduction=self.reduction)
