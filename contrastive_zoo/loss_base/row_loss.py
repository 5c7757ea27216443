"""Write your own loss in five lines: the losses of anchors from their similarities to all candidates."""

from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from typing import Any, Literal

import torch
from jaxtyping import Bool, Float
from torch import Tensor, nn

from contrastive_zoo.engine.batch import Batch
from contrastive_zoo.engine.cost import Entry
from contrastive_zoo.engine.pairwise import Metric, dissimilarities, dot_products
from contrastive_zoo.engine.rowwise import AnchorBlock, BlockLoss, blocks_of, reduce_rows
from contrastive_zoo.loss_base.families import LabelledLoss
from contrastive_zoo.loss_base.loss import CallInputs, Inputs
from contrastive_zoo.loss_base.loss_modules import is_third_party
from contrastive_zoo.loss_base.settings import Reduction
from contrastive_zoo.loss_base.shapes import ROWS, call_form, shapes_problem

CountedTerms = Literal["nonzero", "all"]  # the terms that a mean counts: those with a loss, or all


class AnchorLoss(LabelledLoss, engine="rows"):
    """A loss of labelled embeddings that is a sum over anchors; they may also be compared with a memory's embeddings."""

    reduction: Reduction = "mean"

    def block_loss(self, batch: Batch) -> BlockLoss:
        """Return the loss of a block of anchors, with the settings of this step."""
        raise NotImplementedError(f"{type(self).__name__} must define block_loss(batch).")

    @property
    def normalizes(self) -> bool:
        """Whether embeddings are normalised to unit length first; a loss without this setting always does."""
        return bool(self.__dict__.get("normalize", True))

    @property
    def may_draw(self) -> bool:
        """Whether it runs code from elsewhere, which may draw random numbers or change a buffer."""
        return any(is_third_party(type(x)) for x in self.modules())  # type: ignore[arg-type]  # mypy takes a class for its instance

    def entries(self, stated: CallInputs) -> list[Entry]:
        if stated.needs.engine != "rows":
            return super().entries(stated)
        names = [name for name in stated.inputs.rows if name != "labels"]
        loss = self.block_loss(Batch({}, {}, stated.settings))
        ids = "labels" if "labels" in stated.inputs.rows else ""
        return [blocks_of(loss, names, ids=ids, reduction=self.reduction, watched=self.may_draw)]

    def compute(self, batch: Batch) -> Tensor:
        views = [name for name in batch.rows if name != "labels"]
        z, has_labels = batch.candidates(*views, normalize=self.normalizes), "labels" in batch.rows
        ids = batch.rows["labels"].long() if has_labels else batch.indices(times=len(views))
        return reduce_rows(
            batch, self.block_loss(batch), z, ids, times=len(views), reduction=self.reduction, may_draw=self.may_draw
        )


class RowLoss(AnchorLoss):
    """A loss that is a sum over anchors. Define :meth:`rows`; the loss is then distributed, with memory linear in N.

    Call it with labelled embeddings, ``loss(embeddings, labels)``; with two views, ``loss(view1, view2)``, whose
    embeddings at the same index are positives of each other; or with any number of them in one tensor [n, views, d].
    Annotated class attributes are its settings, as of any
    :class:`Loss`; in :meth:`rows` a learnable one is the tensor that it is in this step.

    Examples:
        >>> import torch
        >>> class Triplet(RowLoss):
        ...     '''Batch-hard: the farthest positive against the nearest negative.'''
        ...     margin: float = 0.5
        ...     def rows(self, similarity, positive, negative):
        ...         hard_positive = similarity.masked_fill(~positive, 2).amin(1)
        ...         hard_negative = similarity.masked_fill(~negative, -2).amax(1)
        ...         return (hard_negative - hard_positive + self.margin).relu(), positive.any(1) & negative.any(1)
        >>> z = torch.tensor([[1.0, 0.0], [1.0, 0.0], [0.6, 0.8]])
        >>> Triplet()(z, torch.tensor([0, 0, 1]))   # 0.6 − 1 + 0.5; row 2 has no positive
        tensor(0.1000)
    """

    normalize: bool = True
    reduction: Reduction = "mean"

    terms = 1  # the number of means that the loss adds: rows() returns [c, terms] if there are several

    def similarity(self, anchors: Float[Tensor, "c d"], candidates: Float[Tensor, "N d"]) -> Float[Tensor, "c N"]:
        """Return the dot products of anchors and candidates. A loss on distances overrides this with its distance."""
        return dot_products(anchors, candidates)

    def rows(
        self, similarity: Float[Tensor, "c N"], positive: Bool[Tensor, "c N"], negative: Bool[Tensor, "c N"]
    ) -> tuple[Float[Tensor, " c"], Bool[Tensor, " c"]]:
        """Return the losses of c anchors, and whether each anchor counts.

        Write plain torch, row by row: row i of the results may depend only on row i of the arguments and on parameters.
        A candidate that is neither positive nor negative is the anchor itself.

        Args:
            similarity: similarities of the anchors to the candidates of all ranks.
            positive: whether the candidate is another embedding with the anchor's id.
            negative: whether the candidate has another id.

        Raises:
            NotImplementedError: a subclass does not define this method.
        """
        raise NotImplementedError(f"{type(self).__name__} must define rows(similarity, positive, negative).")

    def on_block(self, block: AnchorBlock) -> tuple[Float[Tensor, " c"], Bool[Tensor, " c"]]:
        """Return the same from a whole block. Override this if the loss needs labels or the embeddings themselves."""
        similarity = block.with_equal_columns(self.similarity(block.anchors, block.candidates))
        return self.rows(similarity, block.positive, block.negative)

    def block_loss(self, batch: Batch) -> BlockLoss:
        """Return this loss of a block, in which attributes are the settings of this step."""
        now = vars(batch.settings)
        # names with a dot: those of no argument
        values: dict[str, Any] = {f"settings.{name}": x for name, x in now.items() if isinstance(x, Tensor)}
        named = ((name, x) for name, x in self.named_parameters() if name.partition(".")[0] not in now)
        parameters: dict[str, Any] = {f"module.{name}": x for name, x in named if x.requires_grad}

        def on_block(block: AnchorBlock, **learnable: Tensor) -> tuple[Tensor, Tensor]:
            if not parameters:
                return self.on_block(block)
            replaced = {name: learnable[name] for name in parameters}
            return torch.func.functional_call(_OnBlock(self), replaced, (block,))

        def in_force(learnable: Mapping[str, Tensor]) -> AbstractContextManager[None]:
            learnt = {name.removeprefix("settings."): x for name, x in learnable.items() if name in values}
            return _attributes(self, now | learnt)

        of_block: dict[str, Any] = {"terms": self.terms, "matrices": self.matrices, "module": self}
        return BlockLoss(on_block, in_force=in_force, **of_block, **values, **parameters)

    def inputs(self, *args: Tensor, **named: Tensor) -> Inputs:  # type: ignore[override]  # views, too
        if len(args) == 1 and not named and args[0].ndim == 3:  # several views of each sample
            args = args[0].unbind(1)
        elif len(args) > 2 and not named and all(x.is_floating_point() for x in args):
            return Inputs({}, _UNLABELLED.format(count=len(args)))
        if len(args) > 1 and not named and all(x.is_floating_point() and x.ndim == 2 for x in args):
            views = {f"view {index}": x for index, x in enumerate(args)}
            return Inputs(views, shapes_problem(views, dict.fromkeys(views, ROWS)))
        arguments = dict(zip(("embeddings", "labels"), args, strict=False)) | named
        if len(args) > 2 or arguments.keys() - {"embeddings", "labels"} or len(arguments) < len(args) + len(named):
            others = ", ".join(sorted(arguments.keys() - {"embeddings", "labels"})) or "more tensors"
            return Inputs({}, f"compares embeddings with labels, or views; got {others} as well. Leave them out.")
        if "embeddings" not in arguments:
            return Inputs({}, "embeddings are missing: call loss(embeddings, labels).")
        stated = super().inputs(arguments["embeddings"], arguments.get("labels"))
        return replace(stated, problem=shapes_problem(arguments, call_form(LabelledLoss).shapes) or stated.problem)


_UNLABELLED = (
    "got {count} tensors without labels: as views of the same samples they would all attract each other, negatives, too. "
    "For an anchor, a positive and a negative call MNRL()(anchor, positive, negative), or torch.nn.TripletMarginLoss in "
    "DistributedLoss; for views pass one tensor [n, views, d]: loss(torch.stack([view1, view2, view3], dim=1))."
)


@contextmanager
def _attributes(loss: RowLoss, values: dict[str, Any]) -> Iterator[None]:
    """Context manager: these are the loss's attributes, which may hide parameters and modules; what the body sets stays."""
    attributes = vars(loss)
    before = {name: attributes[name] for name in values if name in attributes}
    attributes.update(values)
    try:
        yield
    finally:
        unchanged = {name for name, x in values.items() if attributes.get(name) is x}
        attributes.update({name: x for name, x in before.items() if name in unchanged})
        for name in unchanged - before.keys():
            del attributes[name]


class _OnBlock(nn.Module):
    """Call ``on_block`` as a forward: functional_call replaces parameters only while it calls a module's forward."""

    def __init__(self, module: RowLoss) -> None:
        super().__init__()
        self.module = module

    def forward(self, block: AnchorBlock) -> tuple[Tensor, Tensor]:
        return self.module.on_block(block)


class DissimilarityLoss(RowLoss):
    """A row loss whose user chooses the metric."""

    metric: Metric = "distance"

    @property
    def sign(self) -> int:
        """The factor of margins: −1 for similarities, whose dissimilarity is their negative."""
        return -1 if self.metric == "similarity" else 1

    def similarity(self, anchors: Tensor, candidates: Tensor) -> Tensor:
        return dissimilarities(anchors, candidates, self.metric)
