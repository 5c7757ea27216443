"""Hard negatives that are mined again during the training."""

from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor

from contrastive_zoo.data.mining import Guide, Mining, Selection
from contrastive_zoo.loss_base.state import loading_problem
from contrastive_zoo.ranks.differences import failing_together
from contrastive_zoo.ranks.messages import reported
from contrastive_zoo.ranks.random_keys import random_keys
from contrastive_zoo.ranks.row_checks import array_in_one_line, described, is_integer, tensor_problem
from contrastive_zoo.ranks.session import agree_on_shards, refuse
from contrastive_zoo.ranks.transport import gather_rows
from contrastive_zoo.ranks.world import Processes, World

Encode = Callable[[Int[Tensor, " c"]], Float[Tensor, "c d"]]
"""A function of sample indices that returns their embeddings, in their order."""


class RefreshedNegatives:
    """Hard negatives of every sample, mined every n steps with the current encoder (ANCE).

    Each rank encodes its part of the queries and of the corpus; the search is that of :func:`mine_hard_negatives`. Every
    rank then holds the negatives of all queries, [num_queries, num_negatives], since a sampler may hand it any of them.

    Samples are encoded in the same chunks for every world size. So the negatives are the same bits for any number of
    processes, if the encoder returns the same bits for the same chunk on each of them.

    Args:
        encode_queries: returns the embeddings of the queries with these indices; called without gradient.
        encode_corpus: the same for the corpus.
        positives: [num_queries] or [num_queries, p], indices of each query's positives in the corpus, −1 for none; the same
            on every rank.
        corpus_size: number of items of the corpus.
        every: steps between two minings.
        chunk_size: samples that are encoded at once.
        guide: scores that decide about false negatives, as in :func:`mine_hard_negatives`.
        normalize: whether scores are cosines.
        process_group: who trains.
        settings: ``num_negatives``, ``range_min``, ``range_max``, ``max_score``, ``min_score``, ``absolute_margin``,
            ``relative_margin``, ``guide_margin``, ``sampling`` and ``seed`` of :func:`mine_hard_negatives`. Random
            negatives are drawn anew at each mining.

    Raises:
        ValueError: sizes that are no integers of at least 1, positives that are no int64 [n] or [n, p], or settings that
            select nothing. At :meth:`update`, on every rank alike, what :func:`mine_hard_negatives` raises, an encoder that
            raised on some ranks only or returned anything but one embedding per index, and ranks at different steps.

    Examples:
        >>> rows = torch.tensor([[1.0, 0.0], [0.9, 0.1], [0.0, 1.0], [0.1, 0.9]])
        >>> encode = lambda indices: rows[indices]
        >>> negatives = RefreshedNegatives(
        ...     encode, encode, torch.arange(4), corpus_size=4, every=100, num_negatives=1)
        >>> [negatives.update(step) for step in (0, 1, 99, 100)]
        [True, False, False, True]
        >>> negatives[torch.tensor([0, 3])]
        tensor([[1],
                [2]])

    Source: Xiong et al. 2021 (ANCE), https://arxiv.org/abs/2007.00808
    """

    def __init__(
        self,
        encode_queries: Encode,
        encode_corpus: Encode,
        positives: Int[Tensor, "n p"] | Int[Tensor, " n"],
        *,
        corpus_size: int,
        every: int,
        chunk_size: int = 256,
        guide: Guide | None = None,
        normalize: bool = True,
        process_group: Processes = None,
        **settings: Any,
    ) -> None:
        for name, value in (("corpus_size", corpus_size), ("every", every), ("chunk_size", chunk_size)):
            if not is_integer(value, at_least=1):
                raise ValueError(f"RefreshedNegatives: {name} is an integer of at least 1, got {value!r}.")
        self.selection = Selection(**settings)
        if (problem := _positives_problem(positives) or self.selection.problem) is not None:
            raise ValueError(f"RefreshedNegatives: {problem}")
        self.encode_queries, self.encode_corpus, self.positives = encode_queries, encode_corpus, positives
        self.corpus_size, self.every, self.chunk_size, self.normalize = corpus_size, every, chunk_size, normalize
        self.guide, self.process_group = guide, process_group
        self.mined_at: int | None = None
        """The step of the last mining."""
        self.negatives = torch.full((len(positives), self.selection.num_negatives), -1)
        """[num_queries, num_negatives] indices into the corpus, best first; −1 where there are fewer."""

    def __getitem__(self, queries: Int[Tensor, " c"]) -> Int[Tensor, "c num"]:
        """Return the negatives of these queries; −1 where there are fewer."""
        return self.negatives[queries]

    @torch.no_grad()
    def update(self, step: int) -> bool:
        """Mine if n steps have passed; return whether it did. Every rank calls it at every step.

        Args:
            step: steps trained since the beginning of the training.

        Raises:
            ValueError: on every rank alike, a step that is no integer in 0 … 2**62, or what the class says.
        """
        world = World.of(self.process_group, "RefreshedNegatives")
        if not is_integer(step, at_least=0, at_most=2**62):
            refuse("RefreshedNegatives", f"step is an integer in 0 … 2**62, got {described(step)}.", world=world)
        if self.mined_at is not None and step // self.every == self.mined_at // self.every:
            return False
        agreed = {"step": step, "positives": array_in_one_line(self.positives.cpu().numpy())}
        agree_on_shards("RefreshedNegatives", {"positives": self.positives}, world=world, settings=agreed)
        with reported(world):
            self._mine(step, world)
        return True

    def _mine(self, step: int, world: World) -> None:
        seed = int(random_keys(self.selection.seed, step)) if self.selection.sampling == "random" else 0
        queries, corpus = (
            failing_together(
                f"RefreshedNegatives: {name}", partial(self._encoded, getattr(self, name), size, world), world
            )
            for name, size in (("encode_queries", len(self.positives)), ("encode_corpus", self.corpus_size))
        )
        start, stop = self._part(len(self.positives), world)
        rows = queries, corpus, self.positives[start:stop]
        options: dict[str, Any] = {"guide": self.guide, "normalize": self.normalize, "process_group": world}
        _, mined = Mining(*rows, replace(self.selection, seed=seed), **options).run()
        self.negatives = gather_rows(mined.negatives, world.shards(stop - start), world).clone()
        self.mined_at = step

    def _part(self, size: int, world: World) -> tuple[int, int]:
        """Return the first sample of this rank and the end: whole chunks, so that no chunk depends on W."""
        chunks = -(-size // self.chunk_size)
        first, last = (self.chunk_size * (chunks * rank // world.size) for rank in (world.rank, world.rank + 1))
        return min(first, size), min(last, size)

    def _encoded(self, encode: Encode, size: int, world: World) -> Tensor:
        """Return this rank's embeddings; the dtype and width of a rank without samples are those of the first sample."""
        start, stop = self._part(size, world)
        chunks = [torch.arange(i, min(i + self.chunk_size, stop)) for i in range(start, stop, self.chunk_size)]
        encoded = [_embeddings(encode, chunk) for chunk in chunks or [torch.arange(1)]]
        return torch.cat(encoded) if chunks else encoded[0][:0]

    def state_dict(self) -> dict[str, Any]:
        """Return the negatives and the step at which they were mined: the same on every rank."""
        return {"mined_at": self.mined_at, "negatives": self.negatives.clone()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue with saved negatives until the next mining is due, on any number of ranks.

        Raises:
            ValueError: negatives of another number of queries or negatives, indices outside of the corpus, or a step that
                is no step; the present negatives are kept.
        """
        if not (isinstance(state, Mapping) and {"mined_at", "negatives"} <= state.keys()):
            raise ValueError(f"RefreshedNegatives: a state has mined_at and negatives, got {described(state)}.")
        mined_at, negatives = state["mined_at"], state["negatives"]
        if problem := loading_problem({"negatives": self.negatives}, {"negatives": negatives}):
            raise ValueError(f"RefreshedNegatives: {problem}")
        if negatives.numel() and not -1 <= int(negatives.min()) <= int(negatives.max()) < self.corpus_size:
            raise ValueError(
                f"RefreshedNegatives: saved negatives are -1 … {self.corpus_size - 1}, the rows of the corpus, got "
                f"{int(negatives.min())} … {int(negatives.max())}."
            )
        if not (mined_at is None or is_integer(mined_at, at_least=0)):
            raise ValueError(f"RefreshedNegatives: mined_at is a step or None, got {described(mined_at)}.")
        self.mined_at, self.negatives = mined_at, negatives.clone()


def _embeddings(encode: Encode, chunk: Int[Tensor, " c"]) -> Float[Tensor, "c d"]:
    rows = encode(chunk)
    if not isinstance(rows, Tensor) or rows.ndim != 2 or len(rows) != len(chunk):
        expected = f"one row [d] for each of {len(chunk)} indices"
        raise ValueError(f"RefreshedNegatives: an encoder returns {expected}, got {described(rows)}.")
    return rows.detach().cpu()


def _positives_problem(positives: Tensor) -> str | None:
    if problem := tensor_problem("positives", positives):
        return problem
    if positives.ndim not in (1, 2) or positives.dtype != torch.int64 or not len(positives):
        return f"positives are int64 [n] or [n, p] of at least one query, got {described(positives)}."
    return None
