"""DistributedLoss: the one gesture that makes any loss a function of the global batch."""

import inspect
from collections.abc import Callable
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.utils._pytree import keystr, tree_flatten_with_path, tree_map, tree_unflatten

from contrastive_zoo.collectives import all_gather
from contrastive_zoo.losses.base import Loss
from contrastive_zoo.masks import labels_problem
from contrastive_zoo.meeting import meet, refuse, refuse_empty
from contrastive_zoo.randomness import one_stream
from contrastive_zoo.world import Processes, World

GradReduction = Literal["mean", "sum"]


class DistributedLoss(nn.Module):
    """``loss`` on the rows of all ranks: its value, its encoder gradient and its own parameters' gradient.

    For z₁ … z_N the rows of all ranks in rank order and L what one process computes from them, on every rank and for
    every split of the rows (uneven and empty shards too):

    - the returned value is L;
    - after the trainer's reduction the encoder's gradient is ∂L/∂θ;
    - the gradient of the loss's own parameters is ∂L/∂φ, the same on every rank already before any reduction.

    Losses of this library compute only their own anchors' part. Any other callable is computed on the gathered rows, by
    every rank alike. On one process the same line works and changes nothing.

    Args:
        loss: a loss of this library, or any module or function of tensors whose dimension 0 counts rows:
            ``loss(embeddings, labels)``, ``loss(view1, view2)``, or pytorch-metric-learning's
            ``loss(embeddings, labels, indices_tuple=None, ref_emb=None, ref_labels=None)``.
        miner: called as ``miner(embeddings, labels)`` (and with the reference rows, if there are any) on the gathered
            rows; what it returns is passed on as ``indices_tuple``.
        process_group: who holds rows: a process group, a 1-d DeviceMesh, or None for the default group at the time of
            the call.
        grad_reduction: what the trainer does with the ranks' gradients. ``"mean"``: DDP, FSDP, Lightning, Accelerate,
            the Hugging Face Trainer, DeepSpeed, :func:`contrastive_zoo.average_gradients`. ``"sum"``: a sum
            communication hook, a divide factor of 1.
        check_finite: whether rows with NaN or infinite values are refused.

    Raises:
        ValueError: an unknown ``grad_reduction``; a miner with a loss of this library. At the call, on every rank
            alike: ranks that bring different arguments, widths or dtypes, labels that are not one per row, NaN or
            infinite rows, no rows at all, or indices mined on this rank's rows only.

    Example:
        >>> import contrastive_zoo as cz
        >>> loss_fn = cz.DistributedLoss(cz.NTXent(temperature=1.0))
        >>> loss_fn(torch.eye(2), torch.eye(2))
        tensor(0.5514)
        >>> loss_fn = cz.DistributedLoss(lambda z, labels: z[labels == 0].square().sum())
        >>> loss_fn(torch.eye(2), torch.tensor([0, 1]))
        tensor(1.)
    """

    def __init__(
        self,
        loss: Callable[..., Any],
        *,
        miner: Callable[..., Any] | None = None,
        process_group: Processes = None,
        grad_reduction: GradReduction = "mean",
        check_finite: bool = True,
    ) -> None:
        super().__init__()
        if grad_reduction not in ("mean", "sum"):
            raise ValueError(
                f"DistributedLoss: grad_reduction is 'mean' or 'sum', what the trainer does with gradients, got "
                f"{grad_reduction!r}. DDP, FSDP, Lightning, Accelerate and Hugging Face average: 'mean'."
            )
        if not callable(loss):
            raise ValueError(f"DistributedLoss: a loss can be called, got {type(loss).__name__}, which cannot.")
        if miner is not None and isinstance(_bare(loss), Loss):
            raise ValueError(
                f"DistributedLoss: {type(_bare(loss)).__name__} weighs all pairs itself and takes no miner's indices. "
                "Leave the miner out, or pass a loss that takes indices_tuple."
            )
        self.loss = loss
        self.miner = miner
        self.process_group = process_group
        self.grad_reduction = grad_reduction
        self.check_finite = check_finite

    def forward(self, *rows: Any, **named_rows: Any) -> Any:
        """The loss of all ranks' rows, from mine.

        Args:
            rows: as the loss takes them.
            named_rows: as the loss takes them.
        """
        bare = _bare(self.loss)
        world = World.of(self.process_group, check_finite=self.check_finite and getattr(bare, "check_finite", True))
        try:
            signature = _signature(bare)
            # a miner's indices come later, also where the loss insists on them
            bound = (signature.bind_partial if self.miner else signature.bind)(*rows, **named_rows)
        except TypeError as error:  # this rank alone may have forgotten an argument; the others would wait for it
            refuse(_name(bare), f"{error}.", world=world)
        bound.arguments = tree_map(lambda x: _scale_rows(x, world.size), dict(bound.arguments))
        if getattr(bare, "sharded", False) and self.grad_reduction == "sum":
            bare.shard_gradient_scale = world.size  # no trainer adds up what each rank holds for itself
        if isinstance(bare, Loss):
            value = self.loss(*bound.args, **bound.kwargs, world=world)
        else:
            value = self._replicated(bound, world)
        if self.grad_reduction == "sum":
            value = tree_map(lambda x: _scale_gradient(x, 1 / world.size), value)
        return value

    def _replicated(self, bound: inspect.BoundArguments, world: World) -> Any:
        """A loss from elsewhere, computed on all rows by every rank alike: each then holds the complete gradient."""
        bound.arguments, device = _gathered(_name(_bare(self.loss)), bound.arguments, world)
        with one_stream(world, device):
            if self.miner is not None:
                mined = [bound.arguments[name] for name in ("embeddings", "labels")]
                mined += [bound.arguments[name] for name in ("ref_emb", "ref_labels") if name in bound.arguments]
                bound.arguments["indices_tuple"] = self.miner(*mined)
            return self.loss(*bound.args, **bound.kwargs)


def _signature(loss: Any) -> inspect.Signature:
    """Of the loss; of some function of anything where Python does not know it, as for built-in ones."""
    if isinstance(loss, Loss) and hasattr(loss, "function"):
        parameters = inspect.signature(type(loss).function).parameters.values()
        return inspect.Signature([x for x in parameters if x.kind is not x.KEYWORD_ONLY])
    try:
        return inspect.signature(loss.forward if isinstance(loss, nn.Module) else loss)
    except ValueError:
        return inspect.signature(lambda *rows, **named_rows: None)


def _gathered(name: str, arguments: dict[str, Any], world: World) -> tuple[dict[str, Any], torch.device | None]:
    """The same arguments with every tensor of rows replaced by all ranks' rows, and where these lie."""
    leaves, tree = tree_flatten_with_path(arguments)
    named = {_path(path): leaf for path, leaf in leaves}
    rows = {path: leaf for path, leaf in named.items() if isinstance(leaf, Tensor) and leaf.ndim > 0}
    plain = {path: leaf for path, leaf in named.items() if isinstance(leaf, (int, float, str, type(None)))}
    shards = meet(name, rows, world=world, problem=_problem(arguments, world), settings=plain)
    if rows:
        refuse_empty(name, shards[0])
    for (path, leaf), where in zip(rows.items(), shards, strict=True):
        named[path] = all_gather(leaf, gradient="complete", shards=where, process_group=world)
    device = next((leaf.device for leaf in rows.values()), None)
    return tree_unflatten(list(named.values()), tree), device


def _problem(arguments: dict[str, Any], world: World) -> str | None:
    """What is wrong with a foreign loss's arguments, in words; None if nothing is."""
    if world.size > 1 and arguments.get("indices_tuple") is not None:
        return (
            "indices_tuple was mined on this rank's rows, but the loss sees all ranks' rows, where these indices mean "
            "other samples. Pass the miner instead: DistributedLoss(loss, miner=miner)."
        )
    rows, labels = arguments.get("embeddings"), arguments.get("labels")
    if isinstance(rows, Tensor) and isinstance(labels, Tensor) and labels.ndim == 1 and len(labels) != len(rows):
        return labels_problem("labels", labels.long(), len(rows))
    return None


def _bare(loss: Any) -> Any:
    """The loss itself where DDP is wrapped around it."""
    return loss.module if isinstance(loss, nn.parallel.DistributedDataParallel) else loss


def _name(loss: Any) -> str:
    return getattr(loss, "__name__", type(loss).__name__)


def _path(path: Any) -> str:
    """``['embeddings']`` as ``embeddings``, ``['views'][0]`` as ``views[0]``."""
    return keystr(path)[2:].replace("']", "", 1)


class _ScaleGradient(torch.autograd.Function):
    """y = x;  dx = factor · dy."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, factor: float) -> Tensor:
        ctx.factor = factor
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, None]:
        return dy * ctx.factor, None


def _scale_gradient(x: Any, factor: float) -> Any:
    """x itself, whose gradient comes out ``factor`` times as large; anything without a gradient as it is."""
    return _ScaleGradient.apply(x, factor) if isinstance(x, Tensor) and x.requires_grad and factor != 1 else x


def _scale_rows(x: Any, factor: float) -> Any:
    """The same for rows; a single number is a parameter, of which every rank has the complete gradient already."""
    return _scale_gradient(x, factor) if isinstance(x, Tensor) and x.ndim > 0 else x
