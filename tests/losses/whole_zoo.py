"""All tables of losses under test together."""

from tests.losses import zoo_compositions, zoo_margins, zoo_pairs, zoo_softmax, zoo_statistics, zoo_tokens, zoo_weights
from tests.zoo import ZOO

FAMILIES = (zoo_softmax, zoo_margins, zoo_pairs, zoo_weights, zoo_statistics, zoo_compositions, zoo_tokens)
WHOLE_ZOO = ZOO + [entry for family in FAMILIES for entry in family.ENTRIES]
EVERY = [*WHOLE_ZOO, *zoo_softmax.ORDERED]
"""Also the losses that care which of a class's embeddings come first."""
