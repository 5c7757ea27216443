"""Rows of other ranks by their index in the global order."""

import torch
from torch import Tensor

from contrastive_zoo.collectives import exchange_rows
from contrastive_zoo.world import Shards, World


def fetched(rows: Tensor, shards: Shards, wanted: Tensor, world: World) -> Tensor:
    """Return the rows with these global indices, whichever rank holds them; every rank calls it, with any number of them.

    Each rank requests every row once, and the owners answer. Memory is that of the result.

    Args:
        rows: this rank's rows.
        shards: the split of all rows.
        wanted: int64 indices of any shape, each between 0 and the number of all rows − 1.
        world: the ranks.

    Returns:
        [*shape of wanted, *shape of a row], on the CPU.

    Examples:
        >>> fetched(torch.tensor([[5], [6], [7]]), Shards((3,)), torch.tensor([2, 0, 2]), World()).tolist()
        [[7], [5], [7]]
    """
    needed, place = wanted.cpu().unique(return_inverse=True)
    if world.size == 1:
        return rows[needed.to(rows.device)].cpu()[place]
    ends = torch.tensor(shards.sizes).cumsum(0)
    owners = torch.searchsorted(ends, needed, right=True)
    send = torch.bincount(owners, minlength=world.size).tolist()
    receive = [counts[world.rank] for counts in world.exchange(send)]
    requests = exchange_rows(needed.to(world.device), send, receive, world) - shards.start
    answers = rows[requests.to(rows.device)].to(world.device)
    return exchange_rows(answers.contiguous(), receive, send, world).cpu()[place]
