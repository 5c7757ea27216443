"""Write your own loss in five lines: the losses of anchors from their similarities to all candidates."""

import inspect
from typing import Any, TypedDict

from jaxtyping import Bool, Float
from torch import Tensor

from contrastive_zoo.compiling import traced_as
from contrastive_zoo.devices import beside_rows
from contrastive_zoo.engine.pairwise import dot_products
from contrastive_zoo.engine.reduction import Reduction
from contrastive_zoo.engine.row_statistics import Rows
from contrastive_zoo.engine.rowwise import AnchorBlock, sum_over_anchors
from contrastive_zoo.loss_base.checks import flag_problem, labelled_problem, shared_problem
from contrastive_zoo.loss_base.graph_operator import GraphModule
from contrastive_zoo.loss_base.loss import Loss
from contrastive_zoo.loss_base.preparation import begin_labelled, begin_views, concat_views, sample_indices
from contrastive_zoo.session import refuse
from contrastive_zoo.world import World


class RowSettings(TypedDict, total=False):
    """The settings of every row loss; a subclass passes them on by ``**row_settings: Unpack[RowSettings]``."""

    normalize: bool
    reduction: Reduction
    check_finite: bool


class RowLoss(Loss):
    """A loss that is a sum over anchors. Define :meth:`rows`; the loss is then distributed, with memory linear in N.

    Call it with labelled embeddings, ``loss(embeddings, labels)``, or with views, ``loss(view1, view2, …)``, whose rows
    at the same index are positives of each other.

    Args:
        normalize: normalise embeddings to unit length first, so that similarities are cosines, not dot products.
        reduction: ``"mean"`` over all ranks' valid anchors, ``"sum"``, or ``"none"`` for the local anchors, 0 if not valid.
        check_finite: whether NaN and infinite embeddings are refused.

    Raises:
        ValueError: an unknown reduction; at the call: labels that are missing, not integers or not one per row, views
            of different shape, NaN or infinite embeddings, widths or dtypes that differ between ranks, or no rows.

    Examples:
        >>> import torch
        >>> class Triplet(RowLoss):
        ...     '''Batch-hard: the farthest positive against the nearest negative.'''
        ...     def rows(self, similarity, positive, negative):
        ...         hard_positive = similarity.masked_fill(~positive, 2).amin(1)
        ...         hard_negative = similarity.masked_fill(~negative, -2).amax(1)
        ...         return (hard_negative - hard_positive + 0.5).relu(), positive.any(1) & negative.any(1)
        >>> z = torch.tensor([[1.0, 0.0], [1.0, 0.0], [0.6, 0.8]])
        >>> Triplet()(z, torch.tensor([0, 0, 1]))   # 0.6 − 1 + 0.5; row 2 has no positive
        tensor(0.1000)
    """

    ring_refusal = "its rows() needs whole rows: it yields no statistics that merge"

    def __init__(self, *, normalize: bool = True, reduction: Reduction = "mean", check_finite: bool = True) -> None:
        super().__init__(check_finite=check_finite)
        self.normalize, self.reduction = normalize, reduction
        if problem := RowLoss.settings_problem(self):  # the settings of a subclass are not set yet
            raise ValueError(f"{type(self).__name__}: {problem}")

    def settings_problem(self) -> str | None:
        """Return what is wrong with the current settings, or None; a subclass with further settings extends it."""
        return flag_problem(normalize=self.normalize) or shared_problem(reduction=self.reduction)

    def similarity(self, anchors: Float[Tensor, "c d"], candidates: Float[Tensor, "N d"]) -> Float[Tensor, "c N"]:
        """Return the dot products of anchors and candidates. A loss on distances overrides this with its distance."""
        return dot_products(anchors, candidates)

    def rows(
        self, similarity: Float[Tensor, "c N"], positive: Bool[Tensor, "c N"], negative: Bool[Tensor, "c N"]
    ) -> tuple[Float[Tensor, " c"], Bool[Tensor, " c"]] | Rows:
        """Return the losses of c anchors, and whether each anchor counts.

        Write plain torch, row by row: row i of the results may depend only on row i of the arguments and on parameters.
        A candidate that is neither positive nor negative is the anchor itself. With ``yield`` of statistics
        (:mod:`contrastive_zoo.engine.row_statistics`) the loss can also be computed from candidates in parts, which
        ``DistributedLoss(loss, ring=True)`` needs.

        Args:
            similarity: similarities of the anchors to the candidates of all ranks.
            positive: whether the candidate is another row with the anchor's id.
            negative: whether the candidate has another id.

        Raises:
            NotImplementedError: a subclass does not define this method.
        """
        raise NotImplementedError(f"{type(self).__name__} must define rows(similarity, positive, negative).")

    def lists_positives(self) -> bool:
        """Return whether :meth:`rows` takes ``most_positives``: it computes one positive of each anchor after the other."""
        return False

    def can_ring(self) -> bool:
        """Return whether :meth:`rows`, or :meth:`on_block`, yields statistics that merge."""
        kind = type(self)
        return inspect.isgeneratorfunction(kind.rows if kind.on_block is RowLoss.on_block else kind.on_block)

    def on_block(self, block: AnchorBlock) -> tuple[Float[Tensor, " c"], Bool[Tensor, " c"]] | Rows:
        """Return the same from a whole block. Override this if the loss needs labels or the embeddings themselves."""
        similarity = self.similarity(block.anchors, block.candidates)
        # last, because an accelerator computes similarities while the host waits for the number
        settings = {"most_positives": block.most_positives} if self.lists_positives() else {}
        return self.rows(similarity, block.positive, block.negative, **settings)

    @traced_as(GraphModule.traced_forward)
    def forward(self, *rows: Tensor, world: World | None = None, **named_rows: Tensor) -> Float[Tensor, "..."]:
        """Return the reduced loss.

        Args:
            rows: embeddings [n, d] and labels [n], or two or more views [n, d].
            world: the ranks that share the batch; None is this rank alone. ``DistributedLoss`` passes its own.
            named_rows: embeddings and labels by name.
        """
        world = self.local() if world is None else world
        rows += tuple(named_rows.pop(name) for name in ("embeddings", "labels") if name in named_rows)
        if named_rows:
            unknown = f"compares embeddings with labels, or views; got {', '.join(named_rows)} as well. Leave them out."
            refuse(type(self).__name__, unknown, world=world)
        self.refuse_other_than_tensors(rows, {}, world)
        rows, _ = beside_rows(rows, {})
        settings: Any = {"normalize": self.normalize, "reduction": self.reduction, "world": world}
        settings["problem"] = self.settings_problem()
        if len(rows) > 1 and all(x.is_floating_point() and x.ndim == 2 for x in rows):
            views, shards = begin_views(type(self).__name__, rows, **settings)
            z, ids, shards = (
                concat_views(views, world),
                sample_indices(shards, views[0], views=len(views)),
                shards.times(len(views)),
            )
        else:
            embeddings, labels, *_ = *rows, None, None
            settings["problem"] = labelled_problem(*rows) or settings["problem"]
            z, ids, shards = begin_labelled(type(self).__name__, embeddings, labels, **settings)
        return sum_over_anchors(self, z, ids, reduction=self.reduction, shards=shards, world=world)

    def extra_repr(self) -> str:
        unchecked = "" if self.check_finite else ", check_finite=False"
        return f"normalize={self.normalize}, reduction={self.reduction!r}{unchecked}"
