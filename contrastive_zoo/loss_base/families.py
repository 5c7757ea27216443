"""Families of losses by what a call compares: views, two towers, labelled embeddings, embeddings alone."""

from jaxtyping import Float, Int
from torch import Tensor

from contrastive_zoo.loss_base.loss import Inputs, Loss
from contrastive_zoo.ranks.row_checks import described, labelled_problem, rows_problem, towers_problem, views_problem


class ViewLoss(Loss):
    """A loss of two or more views of the same samples: ``loss(view1, view2, …)``.

    - views: [n, d] each; index i is the same sample in every view. n may differ between ranks.
    """

    def inputs(self, *views: Float[Tensor, "n d"]) -> Inputs:
        return Inputs({f"view {index}": x for index, x in enumerate(views)}, views_problem(views))


class TwoViewLoss(Loss):
    """A loss of two views of the same samples: ``loss(view1, view2)``.

    - view1: [n, d]; n may differ between ranks.
    - view2: [n, d]; index i is the same sample in both.
    """

    def inputs(self, view1: Float[Tensor, "n d"], view2: Float[Tensor, "n d"]) -> Inputs:
        return Inputs({"view 0": view1, "view 1": view2}, views_problem((view1, view2)))


class TowerLoss(Loss):
    """A loss of queries and their keys, and of further negatives: ``loss(queries, keys, negatives)``.

    - queries: [n, d]; n may differ between ranks.
    - keys: [n, d]; key i belongs to query i.
    - negatives: [m, d] for all queries, m may differ between ranks; or [n, m, d] for one query each.
    """

    def inputs(
        self,
        queries: Float[Tensor, "n d"],
        keys: Float[Tensor, "n d"],
        negatives: Float[Tensor, "m d"] | Float[Tensor, "n m d"] | None = None,
    ) -> Inputs:
        rule, fix = "row i of queries belongs to row i of keys", "Pass keys without a partner as negatives."
        problem = _negatives_problem(queries, negatives) or towers_problem(rule, fix, queries=queries, keys=keys)
        return Inputs.of({"queries": queries, "keys": keys, "negatives": negatives}, problem)


class ImageTextLoss(Loss):
    """A loss of images and their texts: ``loss(images, texts)``.

    - images: [n, d]; n may differ between ranks.
    - texts: [n, d]; text i belongs to image i.
    """

    def inputs(self, images: Float[Tensor, "n d"], texts: Float[Tensor, "n d"]) -> Inputs:
        rows = {"images": images, "texts": texts}
        return Inputs(rows, towers_problem("image i belongs to text i", "Pass as many of both.", **rows))


class LabelledLoss(Loss):
    """A loss of labelled embeddings: ``loss(embeddings, labels)``.

    - embeddings: [n, d]; n may differ between ranks.
    - labels: [n] integers, one per embedding.
    """

    def inputs(self, embeddings: Float[Tensor, "n d"], labels: Int[Tensor, " n"] | None = None) -> Inputs:
        problem = labelled_problem(embeddings, labels)
        return Inputs({} if labels is None else {"embeddings": embeddings, "labels": labels}, problem)


class EmbeddingLoss(Loss):
    """A loss of embeddings alone: ``loss(embeddings)``.

    - embeddings: [n, d]; n may differ between ranks.
    """

    def inputs(self, embeddings: Float[Tensor, "n d"]) -> Inputs:
        return Inputs({"embeddings": embeddings}, rows_problem("embeddings", embeddings))


def _negatives_problem(queries: Tensor, negatives: Tensor | None) -> str | None:
    if negatives is None:
        return None
    if problem := rows_problem("queries", queries):
        return problem
    fits = negatives.ndim == 2 or (negatives.ndim == 3 and len(negatives) == len(queries))
    if fits and negatives.shape[-1] == queries.shape[-1] and negatives.dtype == queries.dtype:
        return None
    return (
        f"negatives are shared [m, d] or per query [n, m, d], got "
        f"{described(negatives)} for queries {described(queries)}."
    )
