"""Find the embeddings among the arguments of a loss, and which of their pairs are positive."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from contrastive_zoo.engine.precision import in_float64
from contrastive_zoo.metrics.exact import norms
from contrastive_zoo.ranks.world import Shards


@dataclass(frozen=True)
class Samples:
    """The embeddings of this rank in one call, in float64 and of unit length.

    Args:
        encoders: by name the embeddings of each encoder, one tensor [n, d] for each view.
        shards: how the samples of each encoder are split over the ranks.
        labels: classes [n] of the only encoder's rows; None: the row of another view or encoder with the same index is
            the positive one.
    """

    encoders: Mapping[str, Sequence[Tensor]]
    shards: Mapping[str, Shards]
    labels: Tensor | None = None

    @classmethod
    def of(cls, rows: Mapping[str, Tensor], shards: Sequence[Shards]) -> Samples:
        """Find the embeddings of a call. All ranks find the same, as they have agreed on names, kinds and sizes.

        The first argument holds embeddings: [n, d], or [n, views, d]. Integers after them are labels. Otherwise arguments
        whose names begin with ``view`` are views of the same samples, and a second argument [m, d] is another encoder's.
        Further arguments are not looked at.

        Examples:
            >>> x, one = torch.ones(2, 3), Shards((2,))
            >>> {name: len(of) for name, of in Samples.of({"view1": x, "view2": x}, [one, one]).encoders.items()}
            {'embeddings': 2}
            >>> list(Samples.of({"queries": x, "keys": x}, [one, one]).encoders)
            ['queries', 'keys']
            >>> Samples.of({"embeddings": x, "labels": torch.tensor([0, 7])}, [one, one]).labels
            tensor([0, 7])
        """
        assert samples_problem(rows) is None
        named = [(name, x, of) for (name, x), of in zip(rows.items(), shards, strict=True)]
        name, first, of = named[0]
        views = [first] if first.ndim == 2 else list(first.unbind(1))
        following = named[1] if len(named) > 1 else None
        if following is not None and _are_labels(following[1]) and following[2].sizes == of.sizes:
            stacked = _unit(torch.cat([x.detach() for x in views]))
            labels = following[1].to(stacked.device).repeat(len(views))
            return cls({"embeddings": [stacked]}, {"embeddings": of.times(len(views))}, labels)
        if first.ndim == 2 and name.startswith("view"):
            views += [x for other, x, _ in named[1:] if other.startswith("view") and x.shape[1:] == first.shape[1:]]
        elif following is not None and first.ndim == 2 and _is_other_encoder(following[1], first):
            return cls(
                {name: [_unit(first)], following[0]: [_unit(following[1])]}, {name: of, following[0]: following[2]}
            )
        return cls({"embeddings": [_unit(x) for x in views]}, {"embeddings": of})

    def pairs(self) -> list[tuple[Tensor, Tensor]]:
        """Return what is compared: each two views, or the two encoders; nothing where indices do not pair."""
        if self.labels is not None:
            (only,) = next(iter(self.encoders.values()))
            return [(only, only)]
        if len({of.sizes for of in self.shards.values()}) > 1:
            return []
        views = [x for of_encoder in self.encoders.values() for x in of_encoder]
        return [(a, b) for index, a in enumerate(views) for b in views[index + 1 :]]


def samples_problem(rows: Mapping[str, Tensor]) -> str | None:
    """Return why a monitor finds no embeddings among these arguments, in words; None if it finds some."""
    first = next(iter(rows.values()), None)
    if first is not None and first.is_floating_point() and first.ndim in (2, 3):
        return None
    kinds = ", ".join(f"{name} of {x.ndim} dimensions" for name, x in rows.items()) or "no tensor"
    return (
        f"for its monitor the first argument of the loss holds embeddings, [n, d] or [n, views, d], got {kinds}. Monitor a "
        "loss of embeddings, or call monitor.remove()."
    )


def _are_labels(x: Tensor) -> bool:
    return x.ndim == 1 and not x.is_floating_point() and not x.is_complex()


def _is_other_encoder(x: Tensor, first: Tensor) -> bool:
    return x.is_floating_point() and x.shape[1:] == first.shape[1:]


def _unit(rows: Tensor) -> Tensor:
    """Return rows of unit length in float64, each a function of its row alone; a row of zeros stays as it is."""
    rows = in_float64(rows.detach())
    lengths = norms(rows)
    return rows / lengths.masked_fill(lengths == 0, 1.0)
