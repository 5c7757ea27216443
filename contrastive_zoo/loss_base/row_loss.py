"""Your own loss in five lines: say what an anchor loses, the rest is done."""

from typing import Any, TypedDict

from jaxtyping import Bool, Float
from torch import Tensor

from contrastive_zoo.compiling import uncompiled
from contrastive_zoo.engine.passes import dot_products
from contrastive_zoo.engine.reduction import Reduction
from contrastive_zoo.engine.rows import Panel, sum_over_anchors
from contrastive_zoo.loss_base.checks import labelled_problem, shared_problem
from contrastive_zoo.loss_base.loss import Loss
from contrastive_zoo.loss_base.preparation import begin_labelled, begin_views, in_a_row, numbered
from contrastive_zoo.session import refuse
from contrastive_zoo.world import World


class RowSettings(TypedDict, total=False):
    """Settings of every row loss, as :class:`RowLoss` documents them: ``**kept: Unpack[RowSettings]`` passes them on."""

    normalize: bool
    reduction: Reduction
    check_finite: bool


class RowLoss(Loss):
    """A loss that is a sum over anchors. Write :meth:`rows`; the loss is then distributed, and linear in memory.

    Call it with labelled rows, ``loss(embeddings, labels)``, or with views, ``loss(view1, view2, …)``, whose rows at
    the same index are positives of each other.

    Args:
        normalize: put rows on the unit sphere first, so that similarities are cosines; otherwise they are dot products.
        reduction: ``"mean"`` over all ranks' valid anchors, ``"sum"``, or ``"none"`` for my anchors, 0 if not valid.
        check_finite: whether rows with NaN or infinite values are refused.

    Raises:
        ValueError: an unknown reduction; at the call: labels that are missing, not integers or not one per row, views
            that do not pair, NaN or infinite rows, ranks that bring different widths or dtypes, or no rows at all.

    Example:
        >>> import torch
        >>> class Triplet(RowLoss):
        ...     '''Batch-hard: the farthest positive must be nearer than the nearest negative.'''
        ...     def rows(self, similarity, positive, negative):
        ...         hard_positive = similarity.masked_fill(~positive, 2).amin(1)
        ...         hard_negative = similarity.masked_fill(~negative, -2).amax(1)
        ...         return (hard_negative - hard_positive + 0.5).relu(), positive.any(1) & negative.any(1)
        >>> z = torch.tensor([[1.0, 0.0], [1.0, 0.0], [0.6, 0.8]])
        >>> Triplet()(z, torch.tensor([0, 0, 1]))   # 0.6 − 1 + 0.5; row 2 has no positive
        tensor(0.1000)
    """

    def __init__(self, *, normalize: bool = True, reduction: Reduction = "mean", check_finite: bool = True) -> None:
        super().__init__(check_finite=check_finite)
        self.normalize, self.reduction = normalize, reduction
        if problem := RowLoss.settings_problem(self):  # a subclass has no settings of its own yet
            raise ValueError(f"{type(self).__name__}: {problem}")

    def settings_problem(self) -> str | None:
        """What is wrong with the settings at this moment, in words; a loss with settings of its own adds them."""
        return shared_problem(reduction=self.reduction)

    def similarity(self, anchors: Float[Tensor, "c d"], columns: Float[Tensor, "N d"]) -> Float[Tensor, "c N"]:
        """How alike anchors and columns are: their dot products. A loss of distances puts its distance here."""
        return dot_products(anchors, columns)

    def rows(
        self, similarity: Float[Tensor, "c N"], positive: Bool[Tensor, "c N"], negative: Bool[Tensor, "c N"]
    ) -> tuple[Float[Tensor, " c"], Bool[Tensor, " c"]]:
        """What each of c anchors loses, and whether it counts.

        Plain torch, row by row: row i of the results may depend on row i of the arguments and on parameters alone. A
        column that is neither positive nor negative is the anchor itself.

        Args:
            similarity: of the anchors to the rows of all ranks.
            positive: other rows with the anchor's id.
            negative: rows with another id.

        Raises:
            NotImplementedError: this is the method to write.
        """
        raise NotImplementedError(f"{type(self).__name__} must define rows(similarity, positive, negative).")

    def on_panel(self, panel: Panel) -> tuple[Float[Tensor, " c"], Bool[Tensor, " c"]]:
        """The same from all that is known of a panel; for a loss that needs labels, or the embeddings themselves."""
        return self.rows(self.similarity(panel.anchors, panel.columns), panel.positive, panel.negative)

    @uncompiled
    def forward(self, *rows: Tensor, world: World | None = None, **named_rows: Tensor) -> Float[Tensor, "..."]:
        """The reduced loss of these rows.

        Args:
            rows: embeddings [n, d] and labels [n], or two or more views [n, d].
            world: who else holds rows; None is nobody. ``DistributedLoss`` passes the process group's.
            named_rows: embeddings and labels by their names.
        """
        world = self.local() if world is None else world
        rows += tuple(named_rows.pop(name) for name in ("embeddings", "labels") if name in named_rows)
        if named_rows:
            unknown = f"compares embeddings with labels, or views; got {', '.join(named_rows)} as well. Leave them out."
            refuse(type(self).__name__, unknown, world=world)
        self.refuse_other_than_tensors(rows, {}, world)
        settings: Any = {"normalize": self.normalize, "reduction": self.reduction, "world": world}
        settings["problem"] = self.settings_problem()
        if len(rows) > 1 and all(x.is_floating_point() and x.ndim == 2 for x in rows):
            views, shards = begin_views(type(self).__name__, rows, **settings)
            z, ids, shards = (
                in_a_row(views, world),
                numbered(shards, views[0], views=len(views)),
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
