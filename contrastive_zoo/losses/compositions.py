"""Compositions: several losses of the same embeddings, or one loss of prefixes."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from torch import Tensor, nn

from contrastive_zoo.engine.batch import Batch, is_embedding
from contrastive_zoo.engine.cost import Entry
from contrastive_zoo.loss_base.composition import Composition, member_entries, member_value
from contrastive_zoo.loss_base.loss import CallInputs, Inputs, Loss
from contrastive_zoo.loss_base.settings import is_number
from contrastive_zoo.ranks.row_checks import described


class WeightedSum(Composition):
    r"""Add the weighted values of several losses of the same embeddings.

        L = Σ_k w_k · loss_k(embeddings)

    Embeddings are gathered once for all losses. (Tensors that a loss first concatenates, such as the hard negatives of
    :class:`MNRL` and :class:`GIST`, are gathered by that loss.)

    Args:
        losses: losses of this library with the same call form. A temperature, or any other module, may be shared.
        weights: w_k; None is 1 for each, as in pytorch-metric-learning's MultipleLosses.

    Raises:
        ValueError: no losses, a third-party loss or a class in place of its instance, or not one finite weight per loss.
            At the call, on every rank: what any of the losses refuses.

    Examples:
        >>> import contrastive_zoo as cz
        >>> a = torch.eye(2)
        >>> WeightedSum([cz.NTXent(temperature=1.0), cz.InfoNCE(temperature=1.0)], weights=[1.0, 0.5])(a, a)
        tensor(0.7081)

    Source: pytorch-metric-learning's MultipleLosses, https://kevinmusgrave.github.io/pytorch-metric-learning/losses
    """

    def __init__(self, losses: Sequence[Loss], *, weights: Sequence[float] | None = None) -> None:
        if not isinstance(losses, (Sequence, nn.ModuleList)):
            raise ValueError(f"WeightedSum: losses are a list of losses, got {described(losses)}.")
        super().__init__(losses, len(losses), weights)
        self.losses = nn.ModuleList(losses)

    def members(self) -> Sequence[Loss]:
        return [*self.losses]

    def terms(self, batch: Batch) -> list[Tensor]:
        return [member_value(loss, batch.member(index)) for index, loss in enumerate(self.members())]


class Matryoshka(Composition):
    r"""Add the values of ``loss`` on prefixes of the embeddings.

        L = Σ_m c_m · loss(z[:, :m])

    A loss that normalises does so for each prefix. Embeddings are gathered once, gradients are communicated per prefix.

    Args:
        loss: a loss of this library, with any call form; its parameters are shared by all prefixes.
        dims: widths m. Include the whole width to train the whole embedding.
        weights: c_m; None is 1 for each, as in the paper and in sentence-transformers' MatryoshkaLoss.

    Raises:
        ValueError: a third-party loss or a class in place of its instance, dims below 1, other than a finite weight for
            each; at the call narrower embeddings.

    Examples:
        >>> import contrastive_zoo as cz
        >>> Matryoshka(cz.InfoNCE(temperature=1.0), (1, 2))(torch.eye(2), torch.eye(2))   # ½ (0.3133 + log 2) + 0.3133
        tensor(0.8165)

    Source: Kusupati et al. 2022, eq. 1, https://arxiv.org/abs/2205.13147
    """

    shown = ("dims", "weights")

    def __init__(self, loss: Loss, dims: Sequence[int], *, weights: Sequence[float] | None = None) -> None:
        listed = isinstance(dims, Sequence) and not isinstance(dims, (str, bytes))
        if not listed or not dims or not all(is_number(m, low=1, whole=True) for m in dims):
            raise ValueError(f"Matryoshka: dims are one or more widths of at least 1, got {described(dims)}.")
        super().__init__([loss], len(dims), weights)
        self.loss, self.dims = loss, tuple(dims)

    def members(self) -> Sequence[Loss]:
        return [self.loss]

    def stated(
        self, args: Sequence[Any], named: Mapping[str, Any], known: dict[Callable[..., Inputs], Inputs] | None = None
    ) -> CallInputs:
        stated = super().stated(args, named, known)
        if stated.problem is None and (problem := self._prefix_problem(args, named)) is not None:
            return replace(stated, name=type(self).__name__, problem=problem)
        return stated

    def _prefix_problem(self, args: Sequence[Any], named: Mapping[str, Any]) -> str | None:
        """Return why a prefix cannot be cut or compared, such as with class weights of another width, in words, or None."""
        tensors = {**{f"argument {index}": x for index, x in enumerate(args)}, **named}
        wide = {name: x for name, x in tensors.items() if x is not None and is_embedding(x)}
        narrow = [f"{name} {described(x)}" for name, x in wide.items() if x.shape[-1] < max(self.dims)]
        if narrow:
            return f"a prefix of {max(self.dims)} does not fit into {', '.join(narrow)}."
        if isinstance(self.loss, Composition) or not self.loss.is_plain or self.loss.has_static_inputs:
            return None
        for m in self.dims:
            cut = {name: x[..., :m] for name, x in wide.items()}
            of_args = [cut.get(f"argument {index}", x) for index, x in enumerate(args)]
            if problem := self.loss.inputs(*of_args, **{name: cut.get(name, x) for name, x in named.items()}).problem:
                return f"{type(self.loss).__name__}, of a prefix of {m}: {problem}"
        return None

    def entries(self, stated: CallInputs) -> list[Entry]:
        (part,) = stated.inputs.parts
        return [member_entries(0, self.loss, part, stated, width) for width in self.dims]

    def terms(self, batch: Batch) -> list[Tensor]:
        member = batch.member(0)
        return [member_value(self.loss, member.prefix(m)) for m in self.dims]
