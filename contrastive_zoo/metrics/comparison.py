"""How far two encoders differ beyond the choice of queries."""

from typing import NamedTuple

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from contrastive_zoo.ranks.row_checks import described, is_integer, tensor_problem
from contrastive_zoo.ranks.session import Session, agree_on_shards
from contrastive_zoo.ranks.transport import gather_rows
from contrastive_zoo.ranks.world import Processes, World


class Difference(NamedTuple):
    """The difference of two means over queries, and an interval for it.

    Examples:
        >>> Difference(0.02, 0.005, 0.036).low > 0   # the second encoder is better
        True
    """

    mean: float
    """Mean of ``second − first`` over the queries of all ranks."""
    low: float
    high: float
    """What the mean is between in the stated share of the resamples."""


def paired_bootstrap(
    first: Float[Tensor, " n"],
    second: Float[Tensor, " n"],
    *,
    confidence: float = 0.95,
    resamples: int = 10_000,
    seed: int = 0,
    process_group: Processes = None,
) -> Difference:
    """Return how much better the second of two encoders is on the same queries, with a confidence interval.

    The queries of all ranks are drawn with replacement, ``resamples`` times; the interval is between quantiles of the means
    of ``second − first``. It tells what other queries of the same kind would have shown, not what another training would.
    The result is the same bits for every split of the queries.

    Args:
        first: the values of this rank's queries, as of ``evaluate(…, reduction="none")``; NaN does not count.
        second: those of the other encoder, of the same queries in the same order.
        confidence: the share of the resamples whose means are in the interval.
        resamples: how often queries are drawn.
        seed: draws are a function of the seed and the number of queries.
        process_group: who holds queries.

    Raises:
        ValueError: on every rank alike: values outside of 0 … 1 or not of the same queries, no query that counts, or
            settings outside of their bounds or different between ranks.

    Examples:
        >>> first, second = torch.zeros(200), torch.arange(200) % 4 / 4.0
        >>> found = paired_bootstrap(first, second)
        >>> round(found.mean, 3), found.low < 0.375 < found.high
        (0.375, True)

    Source: Efron & Tibshirani 1993, An introduction to the bootstrap, chapter 13; for retrieval: Sakai 2006,
    https://doi.org/10.1145/1148170.1148261
    """
    name = "paired_bootstrap"
    world = Session.of(World.of(process_group, name), check_finite=False)
    problem = _values_problem("first", first) or _values_problem("second", second)
    if problem is None and not torch.equal(first.isnan().cpu(), second.isnan().cpu()):
        got = f"{described(first)} and {described(second)}"
        problem = f"first and second are values of the same queries, NaN where these do not count, got {got}."
    if not is_integer(resamples, at_least=1, at_most=10**6):
        problem = f"resamples is an integer in 1 … 1000000, got {described(resamples)}."
    if not is_integer(seed, at_least=0):
        problem = f"seed is an integer of at least 0, got {described(seed)}."
    if not (isinstance(confidence, float) and 0 < confidence < 1):
        problem = f"confidence is a number between 0 and 1, got {described(confidence)}."
    settings = {"confidence": confidence, "resamples": resamples, "seed": seed}
    shards, _ = agree_on_shards(
        name, {"first": first, "second": second}, world=world, problem=problem, settings=settings
    )
    local = second.detach().cpu().double() - first.detach().cpu().double()
    differences = gather_rows(local, shards, world).numpy()
    differences = differences[~np.isnan(differences)]
    if not len(differences):
        raise ValueError(f"{name}: no query counts, on any rank.")
    generators = (np.random.default_rng([seed, i]) for i in range(world.rank, resamples, world.size))
    drawn = [differences[x.integers(len(differences), size=len(differences))].mean() for x in generators]
    means = torch.tensor(drawn, dtype=torch.float64)
    bounds = (1 - confidence) / 2, (1 + confidence) / 2
    low, high = np.quantile(gather_rows(means, world.shards(means), world).numpy(), bounds).tolist()
    return Difference(float(differences.mean()), low, high)


def _values_problem(name: str, values: Tensor) -> str | None:
    if problem := tensor_problem(name, values):
        return problem
    if values.ndim != 1 or not values.is_floating_point() or bool((values.detach() - 0.5).abs().gt(0.5).any()):
        return f"{name} are one number from 0 to 1 per query, or NaN, got {described(values)}."
    return None
