"""What mining reads: a user's functions, a guide's scores, rows by their global index; and its progress bar."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TypeAlias, TypeVar

import torch
from torch import Tensor

from contrastive_zoo.ranks.row_checks import described
from contrastive_zoo.ranks.session import agree_on_shards
from contrastive_zoo.ranks.transport import exchange_rows
from contrastive_zoo.ranks.world import Shards, World

Guide: TypeAlias = Callable[[Tensor, Tensor], Tensor]
"""A function of query indices [p] and corpus indices [p] that returns scores [p]."""


def guided(
    guide: Guide, query: Tensor, positives: Tensor, candidates: Tensor, allowed: Tensor, margin: float
) -> Tensor:
    """Return which candidates the guide takes for negatives."""

    def scores(which: Tensor, corpus: Tensor, otherwise: float) -> Tensor:
        pairs = which.nonzero(as_tuple=True)
        result = torch.as_tensor(guide(query[pairs[0]], corpus[pairs])).double().cpu()
        if result.shape != pairs[0].shape or result.isnan().any():
            raise ValueError(f"it returns one number per pair, {len(pairs[0])}, got {described(result)}.")
        return torch.full(which.shape, otherwise, dtype=torch.float64).index_put(pairs, result)

    if not len(query):
        return allowed
    worst = scores(positives >= 0, positives, torch.inf)
    lowest = worst.amin(1, keepdim=True) if positives.shape[1] else torch.full((len(query), 1), torch.inf)
    return scores(allowed, candidates, torch.inf) <= lowest - margin


def progress_problem() -> str | None:
    """Return what to do where tqdm is not installed, in words; None if it is."""
    try:
        import tqdm.auto  # noqa: F401 - whether it can be imported
    except ImportError:
        return "progress=True needs tqdm, which is not installed: pip install contrastive_zoo[mining]."
    return None


@contextmanager
def bar(total: int, *, wanted: bool, shown: bool) -> Iterator[Callable[[int], object]]:
    """Yield a function that is called with the number of queries that are done."""
    if not wanted:
        yield lambda number: None
        return
    from tqdm.auto import tqdm

    with tqdm(total=total, desc="Mining hard negatives", unit=" queries", disable=not shown) as shown_bar:
        yield shown_bar.update


R = TypeVar("R")


def called_on_every_rank(caller: str, name: str, function: Callable[[], R], *, world: World) -> R:
    """Return this rank's result of a user's function; every rank calls it, and any rank's error is all ranks' error.

    Raises:
        ValueError: on every rank alike, the function raised on some rank; there it is ``__cause__``.
    """
    cause: Exception | None = None
    problem = None
    try:
        result = function()
    except Exception as error:
        cause, problem = error, f"{name} raised {type(error).__name__}: {str(error).rstrip('.')}."
    try:
        agree_on_shards(caller, {}, world=world, problem=problem)
    except ValueError as error:
        raise error from cause
    return result


def fetched(rows: Tensor, shards: Shards, wanted: Tensor, world: World) -> Tensor:
    """Return the rows with these global indices, whichever rank holds them; every rank calls it, with any number of them.

    Each rank requests every row once, and the owners answer. Memory is that of the result.

    ``wanted`` are int64 indices of any shape.

    Returns:
        [*shape of wanted, *shape of a row], on the CPU.
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
