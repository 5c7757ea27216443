"""Which rows repeat another row's id, without a list of all ids on any rank."""

import torch
from jaxtyping import Bool, Int
from torch import Tensor

from contrastive_zoo.evaluation.rounds import exchanged
from contrastive_zoo.world import World


def first_of_each(ids: Int[Tensor, " n"], world: World) -> Bool[Tensor, " n"]:
    """Return which rows are the first with their id, in the order of all ranks' rows.

    Samplers that pad repeat samples, so that every rank has equally many; these count once. Rank ``id mod W`` compares the
    rows with this id.

    Examples:
        >>> first_of_each(torch.tensor([7, 8, 7]), World())
        tensor([ True,  True, False])
    """
    ids = ids.cpu()
    home = ids.remainder(world.size)
    order = home.argsort(stable=True)
    send = torch.bincount(home, minlength=world.size).tolist()
    receive = [sizes[world.rank] for sizes in world.exchange(send)]
    asked = exchanged(ids[order], send, receive, world)
    by_id, rows = asked.sort(stable=True)  # received in rank order, so the first of equal ids is the first row
    repeated = torch.zeros(len(asked), dtype=torch.bool)
    repeated[rows[1:]] = by_id[1:] == by_id[:-1]
    told = exchanged(repeated, receive, send, world)
    first = torch.empty(len(ids), dtype=torch.bool)
    first[order] = ~told
    return first
