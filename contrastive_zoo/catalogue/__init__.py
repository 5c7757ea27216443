"""The catalogue of losses: what ``contrastive-zoo list`` and the page of the zoo show."""

from contrastive_zoo.catalogue.entries import CATALOGUE
from contrastive_zoo.catalogue.entry import Entry

__all__ = ["CATALOGUE", "Entry"]
