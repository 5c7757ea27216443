"""The gallery: common implementations of a distributed contrastive loss, right ones and wrong ones, as recipes.

Every invariant names a wrong recipe that it catches. All recipes compute InfoNCE in both directions with a learnable scale
(views), or a supervised contrastive loss (labels); on one process all of them return the same value.
"""

# Each module registers its recipes when it is imported; the order is that of the page.
from tools.gallery import gather, peers, steps  # noqa: F401 - as above
from tools.gallery.recipe import GALLERY, make, recipe

__all__ = ["GALLERY", "make", "recipe"]
