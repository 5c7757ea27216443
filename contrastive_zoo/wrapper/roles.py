"""Roles of a third-party loss's arguments: samples in dimension 0, in another one, or one tensor that all ranks share."""

import itertools
import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from contrastive_zoo.loss_base.loss import Loss
from contrastive_zoo.loss_base.loss_modules import loss_name, without_ddp
from contrastive_zoo.ranks.devices import DIFFERENTIABLE
from contrastive_zoo.ranks.fingerprint import DISTINCT
from contrastive_zoo.ranks.row_checks import is_integer


@dataclass(frozen=True)
class Roles:
    """The arguments that have a role, by name or path; a name stands for all that a tuple, list or dict of it holds."""

    shared: tuple[str, ...] = ()  # those that are equal on every rank, which each rank computes with its own of
    batch_dim: Mapping[str, int] = field(default_factory=dict)  # the dimension that counts samples

    def __str__(self) -> str:
        # sorted: ranks compare it, and a set or a dict may stand in another order on each
        return f"shared={{{', '.join(map(repr, self.shared))}}}, batch_dim={dict(sorted(self.batch_dim.items()))}"

    def is_shared(self, path: str) -> bool:
        return any(_covers(name, path) for name in self.shared)

    def dim(self, path: str) -> int | None:
        """The stated dimension; None without a statement."""
        return next((dim for name, dim in self.batch_dim.items() if _covers(name, path)), None)

    def with_rows_first(self, path: str, x: Any) -> Any:
        """A tensor with its rows in dimension 0; anything else, and a tensor without that dimension, unchanged."""
        dim = self.dim(path) if self.batch_dim else None
        return x.movedim(dim, 0) if dim and isinstance(x, Tensor) and dim < x.ndim else x

    def with_rows_back(self, path: str, rows: Tensor) -> Tensor:
        """What :meth:`with_rows_first` moved, where it was and contiguous, as a loss may view it in another shape."""
        dim = self.dim(path) if self.batch_dim else None
        return rows.movedim(0, dim).contiguous() if dim else rows

    def of_rows(self, arguments: Mapping[str, Any]) -> dict[str, Any]:
        """The arguments that are not shared, with their rows in dimension 0."""
        return {name: self.with_rows_first(name, x) for name, x in arguments.items() if not self.is_shared(name)}

    def problem(self, leaves: Mapping[str, Any]) -> str | None:
        for option in ("shared", "batch_dim"):
            for name in getattr(self, option):
                if not any(_covers(name, path) for path in leaves):
                    names = ", ".join(leaves)
                    return f"{option} names {name}, which is no argument of this call. Its arguments are {names}."
        for path, x in leaves.items():
            dim = self.dim(path)
            if dim is not None and x is not None and not (isinstance(x, Tensor) and dim < x.ndim):
                shape = list(x.shape) if isinstance(x, Tensor) else type(x).__name__
                return f"batch_dim[{path!r}] is {dim}, which is no dimension of {shape}."
        return None


NO_ROLES = Roles()


def roles_of(loss: Any, shared: Collection[str] | None, batch_dim: Mapping[str, int] | None) -> Roles:
    """Return the options as roles; refuse what they cannot be, and any of them for a loss that takes none."""
    names = () if shared is None else shared
    dims = {} if batch_dim is None else batch_dim
    if isinstance(names, str) or not (isinstance(names, Collection) and all(isinstance(x, str) for x in names)):
        raise ValueError(
            "DistributedLoss: shared is the set of the arguments that are equal on every rank, such as {'prototypes'}, got "
            f"{shared!r}."
        )
    are_dims = isinstance(dims, Mapping) and all(is_integer(x, at_least=0) for x in dims.values())
    if not are_dims or not all(isinstance(name, str) for name in dims):
        raise ValueError(
            "DistributedLoss: batch_dim is the dimension that counts samples, 0 or more, by the name of the argument, such "
            f"as {{'views': 1}}, got {batch_dim!r}."
        )
    if twice := [first for first in dims for second in names if _covers(first, second) or _covers(second, first)]:
        raise ValueError(f"DistributedLoss: {twice[0]} stands in shared and in batch_dim. An argument has one of them.")
    bare = without_ddp(loss)
    if (names or dims) and isinstance(bare, Loss):
        raise ValueError(
            "DistributedLoss: shared and batch_dim are for a third-party loss that every rank computes; "
            f"{loss_name(bare)} knows its arguments. Leave them out."
        )
    return Roles(tuple(sorted(names)), dict(dims))


def _covers(name: str, path: str) -> bool:
    return path == name or path.startswith(f"{name}[")


def role_problem(
    rows: Mapping[str, Tensor],
    counts: Mapping[str, tuple[int, ...]],  # the number of samples on each rank, by argument
    equal: Mapping[str, int],  # what the numbers are of those that are equal on every rank
    without_role: Collection[str],
    variadic: Collection[str] = (),  # names of ``*arguments``, whose elements are no list
) -> str | None:
    """Return which tensor without a role cannot hold samples in dimension 0, in the same words on every rank, or None."""
    paths = [path for path in rows if path in without_role]
    for name, members in _lists(paths).items():
        sizes, others = {counts[path] for path in members}, {counts[path] for path in rows if path not in members}
        has_one_each = (len(members),) * len(counts[members[0]]) in others - sizes
        do_pair = all(itertools.starmap(_pair, itertools.combinations(sizes, 2)))
        if name not in variadic and (has_one_each or not do_pair):
            return _ONE_EACH.format(name=name, quoted=repr(name), count=len(members))
    flat = {counts[path] for path, x in rows.items() if x.ndim < 3}
    different = {counts[path] for path in rows if path not in equal}
    embeddings = {counts[path] for path, x in rows.items() if x.dtype in DIFFERENTIABLE}
    for path in paths:
        if rows[path].ndim > 2 and counts[path] not in flat:
            shape = [counts[path][0], *rows[path].shape[1:]]
            return _STACK.format(path=path, quoted=repr(path), shape=shape, count=shape[1])
    for path in paths:
        # one row on each rank is no sample beside several
        has_partner = any(_pair(counts[path], x) and (max(counts[path]) > 1 or max(x) == 1) for x in different)
        if path in equal and different and (equal[path] == DISTINCT or not has_partner):
            return _EQUAL.format(path=path, quoted=repr(path))
    for path in paths:
        has_integers = not (rows[path].dtype in DIFFERENTIABLE or rows[path].dtype is torch.bool)
        if has_integers and embeddings and not any(_pair(counts[path], x) for x in embeddings):
            return _INDICES.format(path=path, quoted=repr(path))
    return None


def views_warning(
    rows: Mapping[str, Tensor], counts: Mapping[str, tuple[int, ...]], without_role: Collection[str]
) -> str | None:
    """Return that trained rows may stand view after view: there are several for each label, or for each row of a teacher.

    The passages of a query, which stand one after the other, are trained with it; rows with a label each need no place.
    """
    trained = [path for path, x in rows.items() if x.requires_grad]
    trained = trained or [path for path, x in rows.items() if x.dtype in DIFFERENTIABLE]
    others = [path for path in rows if path not in trained]
    many = [path for path in trained if path in without_role and counts[path] not in map(counts.get, others)]
    few = [path for path in others if counts[path] not in map(counts.get, trained)]
    for path, other in itertools.product(many, few):
        count = sum(counts[path]) // max(1, sum(counts[other]))
        if count > 1 and _pair(counts[path], counts[other]):
            return _VIEWS.format(path=path, quoted=repr(path), other=other, count=count)
    return None


def row_numbers_problem(rows: Mapping[str, Tensor], without_role: Collection[str]) -> str | None:
    """Return which integers are this rank's row numbers, going by their name or because they permute all rows, or None."""
    for path in rows if without_role else ():
        x = rows[path]
        if path not in without_role or x.dtype in (*DIFFERENTIABLE, torch.bool) or x.ndim > 2 or len(x) < 2:
            continue
        if _LABELS.search(path):  # class_idx too
            continue
        if not any(len(y) == len(x) for y in rows.values() if y.dtype in DIFFERENTIABLE):
            continue
        numbers = torch.arange(len(x), device=x.device)
        may_permute = x.ndim == 1 and len(x) >= _PERMUTED
        permutes = may_permute and torch.equal(x.sort().values, numbers) and not (x == numbers).any()
        if permutes or (_ROW_NUMBERS.search(path) and int(x.min()) >= -1 and int(x.max()) < len(x)):
            return _PARTNERS.format(path=path, quoted=repr(path), count=len(x))
    return None


def _lists(paths: Sequence[str]) -> dict[str, list[str]]:
    """The elements of each list and tuple of several tensors."""
    lists: dict[str, list[str]] = {}
    for path in paths:
        name, _, index = path.rpartition("[")
        if index[:-1].isdigit():
            lists.setdefault(name, []).append(path)
    return {name: of_list for name, of_list in lists.items() if len(of_list) > 1}


def _pair(first: tuple[int, ...], second: tuple[int, ...]) -> bool:
    """Return whether there are k rows of one for each of the other's on every rank, as of passages and queries."""
    least, most = sorted((first, second), key=sum)
    return [*most] == [sum(most) // max(sum(least), 1) * x for x in least]


_ONE_EACH = (
    "{name} is a list of {count} tensors that do not hold the same samples. If each holds one sample, pass one tensor of "
    "all, torch.nn.utils.rnn.pad_sequence({name}, batch_first=True), padded to one length on every rank, with its mask. "
    "batch_dim={{{quoted}: 0}} says that each holds as many as it has rows."
)

_EQUAL = (
    "{path} is equal on every rank, and would count once for each rank, but other arguments are not equal. If it is one "
    "tensor for all ranks, such as prototypes, a queue, class counts or a scale, pass "
    "DistributedLoss(loss, shared={{{quoted}}}), with its labels or weights. If it was gathered before, pass this rank's "
    "own samples. batch_dim={{{quoted}: 0}} says that its samples are equal by chance."
)

_STACK = (
    "{path} {shape} on rank 0 may hold {shape[0]} samples or {count}: no vector or matrix beside it has as many rows. For a "
    "stack of views [V, N, D] pass DistributedLoss(loss, batch_dim={{{quoted}: 1}}). batch_dim={{{quoted}: 0}} says that "
    "dimension 0 counts samples."
)

_VIEWS = (
    "{path} has {count} rows for each row of {other}. The loss gets them rank by rank, which is wrong if they stand view "
    "after view: then pass each view as an argument and join them in the loss, "
    "DistributedLoss(lambda view1, view2: loss(torch.cat([view1, view2]))). If the rows of a sample stand one after the "
    "other, say so: batch_dim={{{quoted}: 0}}."
)

_LABELS = re.compile("label|target|class|^y$")
_PERMUTED = 8  # of 8 labels drawn from 8 classes, one draw in 1,131 is a permutation that moves each
_ROW_NUMBERS = re.compile(r"(^|_)(ind|inds|idx|index|indices|partners?|neighbou?rs?|positives?|negatives?)(_|\b|\d)")

_PARTNERS = (
    "{path} holds numbers below {count}, as row numbers do. They would point into other ranks' rows, where row i of this "
    "rank has another number: find them in the loss, which sees the rows of all ranks, or pass a miner=. "
    "batch_dim={{{quoted}: 0}} says that they are labels or numbers of all ranks' samples."
)

_INDICES = (
    "{path} holds integers, but not one for each embedding. Row numbers, as of pairs or triplets, would point into other "
    "ranks' rows: find them in the loss, which sees the rows of all ranks, or pass a miner=. If it is one tensor for all "
    "ranks, pass DistributedLoss(loss, shared={{{quoted}}}). batch_dim={{{quoted}: 0}} says that it holds samples."
)
