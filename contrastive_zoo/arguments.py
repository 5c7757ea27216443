"""The arguments of one call: which of them are rows, how they are compared between ranks, and how they are gathered."""

import hashlib
import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, is_dataclass
from functools import cached_property
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils._pytree import TreeSpec, keystr, tree_flatten_with_path, tree_unflatten

from contrastive_zoo.collectives import gather_together, packed
from contrastive_zoo.handshake import Agreed
from contrastive_zoo.row_checks import in_one_line, row_kind
from contrastive_zoo.world import Shards, World


class GlobalIndices(tuple[Tensor, ...]):
    """What a miner found among all ranks' rows, the same on every rank: made by ``DistributedMiner``.

    Examples:
        >>> anchors, positives, negatives = GlobalIndices([torch.tensor([0]), torch.tensor([1]), torch.tensor([2])])
    """

    __slots__ = ()


@dataclass(frozen=True)
class Arguments:
    """The leaves of a call's arguments by their path. A tensor with a dimension holds rows, one a sample.

    Examples:
        >>> arguments = Arguments.of({"views": (torch.ones(2, 3), torch.ones(2, 3)), "margin": 0.5})
        >>> list(arguments.rows), arguments.sizes
        (['views[0]', 'views[1]'], [2, 2])
    """

    leaves: dict[str, Any]
    tree: TreeSpec | None = None
    """How the leaves are nested; None if no argument is a tuple, list or dict."""

    @classmethod
    def of(cls, arguments: Mapping[str, Any]) -> "Arguments":
        """The leaves of ``arguments``: tuples, lists and dicts are looked into."""
        if all(isinstance(x, (Tensor, int, float, str, type(None))) for x in arguments.values()):
            return cls(dict(arguments))
        found, tree = tree_flatten_with_path(dict(arguments))
        return cls({_path(path): leaf for path, leaf in found}, tree)

    @cached_property
    def rows(self) -> dict[str, Tensor]:
        """Tensors whose dimension 0 counts samples."""
        return {path: leaf for path, leaf in self.leaves.items() if isinstance(leaf, Tensor) and leaf.ndim > 0}

    @cached_property
    def sizes(self) -> list[int]:
        """Samples of each of :attr:`rows`."""
        return [len(x) for x in self.rows.values()]

    @property
    def compared(self) -> dict[str, str]:
        """What must be the same on every rank: kinds of rows, values of plain arguments, and which are present."""
        settings = {path: leaf for path, leaf in self.leaves.items() if isinstance(leaf, (int, float, str, type(None)))}
        indices = {path for path, leaf in self.leaves.items() if isinstance(leaf, GlobalIndices)}
        return {
            **{path: row_kind(x) for path, x in self.rows.items()},
            **{path: in_one_line(value) for path, value in settings.items()},
            **dict.fromkeys(indices, "global indices"),
            # a loss that declares a default for an argument would hide that the argument is missing on one rank
            "the passed arguments": ", ".join(self.rows),
        }

    @property
    def problem(self) -> str | None:
        """Why these cannot be gathered, in words; None if they can."""
        for path, leaf in self.leaves.items():
            if isinstance(leaf, np.ndarray) or is_dataclass(leaf):
                return (
                    f"{path} must be a tensor, or a tuple, list or dict of tensors, to be gathered, got a "
                    f"{type(leaf).__name__}. Pass tensors, such as torch.as_tensor({path})."
                )
        return None

    @property
    def width(self) -> int:
        """Numbers in the widest floating-point row."""
        return max((x.shape[1:].numel() for x in self.rows.values() if x.is_floating_point()), default=0)

    def total(self, shards: Sequence[Shards]) -> int:
        """Floating-point rows of all arguments on all ranks, given the split of each argument."""
        return sum(of.total for x, of in zip(self.rows.values(), shards, strict=False) if x.is_floating_point())

    @property
    def fingerprint(self) -> int:
        """A digest of the floating-point rows, other than 0; 0 if they cannot be told from a coincidence.

        One row, and rows that are all the same, as of a collapsed encoder, may well be equal on all ranks.
        """
        floating = [x.detach() for x in self.rows.values() if x.is_floating_point()]
        if not any(len(x) > 1 and x.numel() and not torch.equal(x[:1].expand_as(x), x) for x in floating):
            return 0
        digest = hashlib.blake2b(digest_size=7)
        for x in floating:
            digest.update(x.cpu().flatten().view(torch.uint8).numpy().tobytes())
        return 1 + int.from_bytes(digest.digest(), "big")

    def payload(self, world: World) -> list[Tensor] | None:
        """The rows as bytes that may follow a handshake's header; None if two backends send header and rows."""
        return None if self.on_accelerator or world.on_accelerators else packed(list(self.rows.values()))

    @cached_property
    def on_accelerator(self) -> bool:
        """Whether any rows lie elsewhere than on the CPU."""
        return any(x.device.type != "cpu" for x in self.rows.values())

    @property
    def device(self) -> torch.device | None:
        """Where the first rows lie; None if there are none."""
        return next((x.device for x in self.rows.values()), None)

    @property
    def same(self) -> int:
        """Which pairs of rows are one tensor, as bits, and one more; 0 where there are no rows, so that nobody can tell."""
        if not any(self.sizes):
            return 0
        pairs = itertools.combinations(list(self.rows.values())[:_COMPARED], 2)
        return 1 + sum((x is y) << index for index, (x, y) in enumerate(pairs))

    def gathered(self, agreed: Agreed, world: World) -> dict[str, Any]:
        """The arguments with the rows of all ranks in rank order, whose gradients come out W times as large.

        A tensor that was passed as two arguments is one tensor afterwards, as a loss may ask about.
        """
        here = [_movable(x, world) for x in self.rows.values()]
        found = gather_together(here, agreed.shards, world, agreed.payload, factor=world.size)
        found = [x.to(own.device) for x, own in zip(found, self.rows.values(), strict=True)]
        for index, (i, j) in enumerate(itertools.combinations(range(min(len(found), _COMPARED)), 2)):
            if max(agreed.same - 1, 0) >> index & 1:
                found[j] = found[i]
        leaves = self.leaves | dict(zip(self.rows, found, strict=True))
        return leaves if self.tree is None else tree_unflatten(list(leaves.values()), self.tree)


_COMPARED = 11
"""Arguments that may be one tensor: their pairs are as many bits as an int64 has for them."""


def _movable(rows: Tensor, world: World) -> Tensor:
    """Where messages are; labels may have been left on the CPU."""
    return rows if world.device.type == "cpu" else rows.to(world.device)


def _path(path: Any) -> str:
    """``['embeddings']`` as ``embeddings``, ``['views'][0]`` as ``views[0]``."""
    return keystr(path)[2:].replace("']", "", 1)
