"""Roles of a third-party loss's arguments: samples in dimension 0, in another one, or one tensor that all ranks share."""

import itertools
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from contrastive_zoo.loss_base.loss import Loss
from contrastive_zoo.loss_base.loss_modules import loss_name, without_ddp
from contrastive_zoo.ranks.row_checks import is_integer


@dataclass(frozen=True)
class Roles:
    """The arguments that have a role, by name or path; a name stands for all that a tuple, list or dict of it holds."""

    shared: tuple[str, ...] = ()  # those that are equal on every rank, which each rank computes with its own of
    # the dimension that counts samples; 0 states that an argument holds samples although it is equal on every rank
    batch_dim: Mapping[str, int] = field(default_factory=dict)
    # by path, dimensions whose sizes may differ between ranks; gathered rows are padded to the largest
    pad_dims: Mapping[str, tuple[int, ...]] = field(default_factory=dict)

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
        for option in ("pad_dims", "shared", "batch_dim"):
            for name in getattr(self, option):
                if name not in leaves and (option == "pad_dims" or not any(_covers(name, path) for path in leaves)):
                    names = ", ".join(leaves)
                    return f"{option} names {name}, which is no argument of this call. Its arguments are {names}."
        dims = [("pad_dims", path, of_path) for path, of_path in self.pad_dims.items()]
        dims += [("batch_dim", path, (dim,)) for path in leaves if (dim := self.dim(path)) is not None]
        for option, path, of_path in dims:
            x = leaves[path]
            if x is not None and not (isinstance(x, Tensor) and max(of_path) < x.ndim):
                stated = of_path if len(of_path) > 1 else of_path[0]
                shape = list(x.shape) if isinstance(x, Tensor) else type(x).__name__
                return f"{option}[{path!r}] is {stated}, which is no dimension of {shape}."
        return None


NO_ROLES = Roles()


def roles_of(
    loss: Any,
    shared: Collection[str] | None,
    batch_dim: Mapping[str, int] | None,
    pad_dims: Mapping[str, int | Sequence[int]] | None,
) -> Roles:
    """Return the options as roles; refuse what they cannot be, and any of them for a loss that takes none."""
    names = () if shared is None else shared
    dims = {} if batch_dim is None else batch_dim
    widths = pad_dims.items() if isinstance(pad_dims, Mapping) else ()
    padded = {name: (x,) if isinstance(x, int) else tuple(x) for name, x in widths}
    is_wrong = pad_dims is not None and not isinstance(pad_dims, Mapping)
    if is_wrong or not all(x and all(is_integer(i, at_least=1) for i in x) for x in padded.values()):
        raise ValueError(
            "DistributedLoss: pad_dims are the padded dimensions, 1 or more, by the name of the argument, such as "
            f"{{'tokens': 1, 'mask': 1}}, got {pad_dims!r}. Dimension 0 counts samples and needs no padding."
        )
    if isinstance(names, str) or not (isinstance(names, Collection) and all(isinstance(x, str) for x in names)):
        raise ValueError(
            "DistributedLoss: shared is the set of the arguments that are equal on every rank, such as {'prototypes'}, got "
            f"{shared!r}."
        )
    if not isinstance(dims, Mapping) or not all(
        isinstance(k, str) and is_integer(x, at_least=0) for k, x in dims.items()
    ):
        raise ValueError(
            "DistributedLoss: batch_dim is the dimension that counts samples, 0 or more, by the name of the argument, such "
            f"as {{'views': 1}}, got {batch_dim!r}."
        )
    by_option = {"shared": sorted(names), "batch_dim": dims, "pad_dims": padded}
    stated = [(option, name) for option, of_option in by_option.items() for name in of_option]
    for (option, first), (other, second) in itertools.combinations(stated, 2):
        if option != other and (_covers(first, second) or _covers(second, first)):
            raise ValueError(
                f"DistributedLoss: {second} stands in {option} and in {other}. An argument has one of shared, batch_dim "
                "and pad_dims."
            )
    bare = without_ddp(loss)
    for options, what, reason, fix in (
        (padded, "pad_dims is", "takes sizes that differ between ranks where it can", "Leave pad_dims out."),
        (names or dims, "shared and batch_dim are", "knows its arguments", "Leave them out."),
    ):
        if options and isinstance(bare, Loss):
            raise ValueError(
                f"DistributedLoss: {what} for a third-party loss that every rank computes; {loss_name(bare)} {reason}. {fix}"
            )
    return Roles(tuple(sorted(names)), dict(dims), padded)


def _covers(name: str, path: str) -> bool:
    return path == name or path.startswith(f"{name}[")


Counts = Mapping[str, Sequence[int]]  # the number of samples on each rank, by argument


def has_own_count(path: str, counts: Counts) -> bool:
    """Return whether no other argument has k rows for each of this one's, or the reverse, as views in one tensor have."""
    others = [sizes for other, sizes in counts.items() if other != path]
    ordered = [sorted((tuple(counts[path]), tuple(sizes)), key=sum) for sizes in others]
    return bool(others) and not any(
        most == tuple(sum(most) // max(sum(least), 1) * x for x in least) for least, most in ordered
    )


def stacked_views(shapes: Mapping[str, Sequence[int]], counts: Counts, paths: Collection[str]) -> str | None:
    """Name the first of ``paths`` that stacks views, [V, N, D] with V < N on all ranks, beside N labels; or None."""
    for path, shape in shapes.items():
        others = {other: sizes for other, sizes in counts.items() if other != path}
        if path not in paths or len(shape) < 3 or len({*counts[path]}) > 1 or shape[0] >= shape[1]:
            continue
        of_samples = (sizes for other, sizes in others.items() if len(shapes[other]) == 1)
        if counts[path] not in others.values() and any({*sizes} == {shape[1]} for sizes in of_samples):
            return path
    return None
