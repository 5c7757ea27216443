"""The gallery: common implementations of a distributed contrastive loss, right ones and wrong ones, as recipes.

Every invariant names a wrong recipe that it catches. All recipes compute InfoNCE in both directions with a learnable scale
(views), or a supervised contrastive loss (labels); on one process all of them return the same value.
"""

# Each module registers its recipes when it is imported; the order is that of the page.
from contrastive_zoo.testing.gallery import gather, local_anchors, samples, reductions, backward, training_steps  # noqa: F401, I001 - as above
from contrastive_zoo.testing.gallery.recipe import (
    GALLERY,
    TRAINING_STEPS,
    DenseInfoNCE,
    Recipe,
    make,
    recipe,
    symmetric_cross_entropy,
)
from contrastive_zoo.testing.gallery.steps import DistributedByHand


__all__ = [
    "GALLERY",
    "TRAINING_STEPS",
    "DenseInfoNCE",
    "DistributedByHand",
    "Recipe",
    "make",
    "recipe",
    "symmetric_cross_entropy",
]
