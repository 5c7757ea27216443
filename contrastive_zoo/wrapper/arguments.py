"""The arguments of one call: which of them are rows, how they are compared between ranks, and how they are gathered."""

import itertools
from collections.abc import Collection, Iterable, Iterator, Mapping, Set
from dataclasses import dataclass
from enum import Enum
from functools import cached_property, partial
from itertools import starmap
from types import BuiltinFunctionType, FunctionType, MethodType
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils._pytree import TreeSpec, keystr, tree_flatten_with_path, tree_unflatten

from contrastive_zoo.ranks.adjoints import gathered_rows
from contrastive_zoo.ranks.handshake import Agreed
from contrastive_zoo.ranks.row_checks import described, in_one_line, row_kind, tensor_problem
from contrastive_zoo.ranks.world import World
from contrastive_zoo.wrapper.roles import NO_ROLES, Roles


class GlobalIndices(tuple[Tensor, ...]):
    """What a miner found among all ranks' embeddings, the same on every rank: made by ``DistributedMiner``."""

    __slots__ = ()


@dataclass(frozen=True)
class Arguments:
    """A call's arguments by path, such as ``views[0]``; tensors hold samples, unless they have another role."""

    leaves: dict[str, Any]
    tree: TreeSpec | None = None  # how the leaves are nested; None if no argument is a tuple, list or dict
    roles: Roles = NO_ROLES

    @classmethod
    def of(cls, arguments: Mapping[str, Any], roles: Roles = NO_ROLES) -> "Arguments":
        """The leaves of ``arguments``: tuples, lists and dicts are looked into."""
        if all(isinstance(x, (Tensor, int, float, str, type(None))) for x in arguments.values()):
            return cls(dict(arguments), None, roles)
        result, tree = tree_flatten_with_path(dict(arguments))
        # ['embeddings'] as embeddings, ['views'][0] as views[0]
        return cls({keystr(path)[2:].replace("']", "", 1): leaf for path, leaf in result}, tree, roles)

    @cached_property
    def rows(self) -> dict[str, Tensor]:
        """Tensors of samples, which dimension 0 counts here; in one order on every rank, however its dicts were filled."""
        paths = list(self.leaves)
        if self.tree is not None:
            names = list(dict.fromkeys(path.partition("[")[0] for path in paths))
            paths.sort(key=lambda path: (names.index(path.partition("[")[0]), path))
        tensors = {path: x for path in paths if isinstance(x := self.leaves[path], Tensor) and x.ndim > 0}
        return tensors if self.roles is NO_ROLES else self.roles.of_rows(tensors)

    @cached_property
    def shared(self) -> dict[str, Tensor]:
        """Tensors with a dimension that are equal on every rank, which computes with its own."""
        leaves = self.leaves.items() if self.roles.shared else ()
        return {path: x for path, x in leaves if isinstance(x, Tensor) and x.ndim and self.roles.is_shared(path)}

    @property
    def compared(self) -> dict[str, str]:
        """What must be the same on every rank: kinds of rows, values of plain arguments, and which are present."""
        others = {path: leaf for path, leaf in self.leaves.items() if not isinstance(leaf, Tensor)}
        return {
            **{path: row_kind(x) for path, x in self.rows.items()},
            **{f"the shared {path}": _kind(x) for path, x in self.shared.items()},
            **{path: " ".join(map(in_one_line, _contents(leaf))) for path, leaf in others.items()},
            # a loss that declares a default for an argument would hide that the argument is missing on one rank
            "the passed arguments": ", ".join(self.rows),
        }

    @property
    def problem(self) -> str | None:
        if reason := next(filter(None, starmap(tensor_problem, (self.rows | self.shared).items())), None):
            return reason
        for path, leaf in self.leaves.items():
            if not isinstance(leaf, Tensor) and any(isinstance(x, _NO_TEXT) for x in _contents(leaf)):
                make = next(name for kind, name in _MAKES_TENSORS if isinstance(leaf, kind))
                return (
                    f"{path} must be a tensor, or a tuple, list or dict of tensors, to be gathered, got a "
                    f"{type(leaf).__name__}. Pass tensors, such as {make}({path})."
                )
        return None if self.roles is NO_ROLES else self.roles.problem(self.leaves)

    @property
    def same(self) -> int:
        """Which pairs of rows are one tensor, as bits, and one more; 0 where there are no rows, so that nobody can tell."""
        if not any(map(len, self.rows.values())):
            return 0
        result, dim = 1, self.roles.dim
        pairs = itertools.combinations([*self.rows][:_COMPARED], 2)
        for index, (first, second) in enumerate(pairs):
            result += (self.leaves[first] is self.leaves[second] and dim(first) == dim(second)) << index
        return result

    def gathered(self, agreed: Agreed, world: World) -> dict[str, Any]:
        """The arguments with the rows of all ranks."""
        rows = gathered_rows(self.rows, agreed.shards, agreed.payload, world)
        if self.roles.batch_dim:
            rows = {path: self.roles.with_rows_back(path, x) for path, x in rows.items()}
        # a tensor that was passed as two arguments is one tensor afterwards, as a loss may ask about
        for index, (first, second) in enumerate(itertools.combinations([*rows][:_COMPARED], 2)):
            if max(agreed.same - 1, 0) >> index & 1:
                rows[second] = rows[first]
        leaves = self.leaves | rows
        return leaves if self.tree is None else tree_unflatten(list(leaves.values()), self.tree)


_NO_TEXT = (Tensor, np.ndarray, Iterator)  # what an argument of another class must not hold
_VALUES = (type(None), bool, int, float, complex, str, bytes, range, Enum, np.generic, torch.dtype)
_CODE = (type, FunctionType, BuiltinFunctionType, MethodType, nn.Module, GlobalIndices, torch.device)  # equal by class

_DEPTH = 8  # how deep objects are looked into: they may hold themselves


def _contents(x: Any, depth: int = _DEPTH) -> Iterator[Any]:
    """Return the class and the values of an object; tensors, arrays and iterators in it as they are."""
    if isinstance(x, (*_VALUES, *_NO_TEXT)):
        yield x
        return
    yield type(x).__name__
    if isinstance(x, _CODE):
        yield getattr(x, "__qualname__", "")
    elif depth:
        parts = [x.func, x.args, x.keywords] if isinstance(x, partial) else []
        if isinstance(x, (Mapping, Set)):  # in one order on every rank, however they were filled
            parts += sorted(x.items() if isinstance(x, Mapping) else x, key=repr)
        elif isinstance(x, Collection):
            parts += x
        slots = (name for kind in type(x).__mro__ for name in getattr(kind, "__slots__", ()))
        names = sorted({*getattr(x, "__dict__", ()), *slots})
        parts += [(name, getattr(x, name)) for name in names if hasattr(x, name)]
        for part in parts:
            yield from _contents(part, depth - 1)


_MAKES_TENSORS = ((np.ndarray, "torch.as_tensor"), (Mapping, "dict"), (Iterable, "list"), (object, "vars"))

_COMPARED = 11  # arguments that may be one tensor: their pairs are as many bits as an int64 has for them


def _kind(x: Tensor) -> str:
    return f"{described(x)}{' with a gradient' if x.requires_grad and torch.is_grad_enabled() else ''}"
