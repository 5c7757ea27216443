"""Families of losses by what a call compares: views, images and texts, labelled embeddings, embeddings alone."""

from collections.abc import Sequence
from itertools import count

from jaxtyping import Float, Int
from torch import Tensor

from contrastive_zoo.loss_base.loss import Inputs, Loss
from contrastive_zoo.loss_base.settings import Reduction

NO_LABELS = "labels are missing: call loss(embeddings, labels) with one integer per row."


def of_views(views: Sequence[Tensor]) -> Inputs:
    """Return the inputs of a call with two or more views."""
    too_few = f"two or more views are compared, got {len(views)}. Call loss(view1, view2)."
    return Inputs(dict(zip(map("view {}".format, count()), views, strict=False)), too_few if len(views) < 2 else None)


class ViewLoss(Loss):
    """A loss of two or more views of the same samples: ``loss(view1, view2, …)``, [n, d] each."""

    def inputs(self, *views: Float[Tensor, "n d"]) -> Inputs:
        return of_views(views)


class TwoViewLoss(Loss):
    """A loss of two views of the same samples: ``loss(view1, view2)``, [n, d] each."""

    def inputs(self, view1: Float[Tensor, "n d"], view2: Float[Tensor, "n d"]) -> Inputs:
        return Inputs({"view 0": view1, "view 1": view2})


class ImageTextLoss(Loss):
    """A loss of images and their texts: ``loss(images, texts)``, [n, d] each."""

    compares = ("images",), ("texts",)

    normalize: bool = True
    reduction: Reduction = "mean"

    def inputs(self, images: Float[Tensor, "n d"], texts: Float[Tensor, "n d"]) -> Inputs:
        return Inputs({"images": images, "texts": texts})


class LabelledLoss(Loss):
    """A loss of labelled embeddings: ``loss(embeddings, labels)``, [n, d] and [n] integers."""

    def inputs(self, embeddings: Float[Tensor, "n d"], labels: Int[Tensor, " n"] | None = None) -> Inputs:
        return Inputs({}, NO_LABELS) if labels is None else Inputs({"embeddings": embeddings, "labels": labels})


class EmbeddingLoss(Loss):
    """A loss of embeddings alone: ``loss(embeddings)``, [n, d]."""

    def inputs(self, embeddings: Float[Tensor, "n d"]) -> Inputs:
        return Inputs({"embeddings": embeddings})
