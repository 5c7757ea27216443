"""One call of a third-party loss: how its arguments bind, what is wrong with them, and this library's loss in its place."""

import inspect
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any

from torch import Tensor, nn

from contrastive_zoo.loss_base.loss import Loss
from contrastive_zoo.loss_base.loss_modules import loss_name, without_ddp
from contrastive_zoo.losses.references import references_problem
from contrastive_zoo.ranks.devices import split_problem
from contrastive_zoo.ranks.one_process import in_one_process
from contrastive_zoo.ranks.row_checks import described, is_integer
from contrastive_zoo.ranks.suggestions import needed
from contrastive_zoo.ranks.world import World
from contrastive_zoo.wrapper.arguments import Arguments, GlobalIndices
from contrastive_zoo.wrapper.roles import NO_ROLES, Roles

# arguments that tell which rows belong together; without them a loss pairs each row with its other view
_NAME_PARTNERS = ("labels", "indices_tuple", "ref_labels")


@dataclass
class LossCall:
    loss: Any
    miner: Any
    bound: inspect.BoundArguments
    roles: Roles = NO_ROLES

    @cached_property
    def inputs(self) -> Arguments:
        return Arguments.of(self.bound.arguments, self.roles)

    @property
    def variadic(self) -> list[str]:
        """The name of ``*arguments``, if the loss takes any number of them."""
        return [x.name for x in self.bound.signature.parameters.values() if x.kind is x.VAR_POSITIONAL]

    @property
    def named(self) -> dict[str, Any]:
        """The arguments by name; those of ``*arguments`` by place, those of ``**arguments`` by their own names."""
        result: dict[str, Any] = {}
        for name, x in self.bound.arguments.items():
            kind = self.bound.signature.parameters[name].kind
            places = {f"{name}[{index}]": y for index, y in enumerate(x)} if name in self.variadic else {name: x}
            result |= x if kind is inspect.Parameter.VAR_KEYWORD else places
        return result

    def mine_and_compute(self, world: World) -> Any:
        """What the loss returns, given the miner's indices if there is a miner; both see one process."""
        bound, mined = self.bound, dict[str, Any]()
        if self.miner is not None:
            bound.arguments.pop("indices_tuple", None)  # None, as trainers pass it
            named = self.named
            references = [x for name in ("ref_emb", "ref_labels") if (x := named.pop(name, None)) is not None]
            mine = partial(self.miner, *[*named.values()][:2], *references)
            mined["indices_tuple"] = in_one_process(mine, loss_name(self.miner), world)
        compute, bare = partial(self.loss, *bound.args, **bound.kwargs | mined), without_ddp(self.loss)
        value = in_one_process(compute, loss_name(bare), world, self.loss)
        if isinstance(bare, nn.Module) and (problem := model_problem(bare, value)) is not None:
            raise ValueError(f"{loss_name(bare)}: {problem}")  # equal on every rank
        return value

    def problem(self, world: World) -> str | None:
        arguments = self.roles.of_rows(self.bound.arguments)
        bare = without_ddp(self.loss)
        if isinstance(bare, Loss) and bare.has_row_indices(self.bound.args, self.bound.kwargs):
            return NOT_WHOLE
        return self.refusal(world) or paired_problem(arguments)

    def refusal(self, world: World) -> str | None:
        """Return why the loss or its miner would be wrong for these arguments, in words; on one process too."""
        bare, named = without_ddp(self.loss), self.named
        if isinstance(bare, nn.Module) and (problem := split_problem(bare)) is not None:
            return problem
        parts = bare.named_modules() if isinstance(bare, nn.Module) else [("", bare)]
        for path, part in parts if world.size > 1 else ():
            # as open_clip's, which would look for the ranks' samples here; FSDP and losses of this library do not
            gathers_nothing = isinstance(part, Loss) or type(part).__module__.startswith("torch.")
            if is_integer(made_for := getattr(part, "world_size", 1), at_least=2) and not gathers_nothing:
                words = f"its {f'{path}.world_size'.lstrip('.')} is 1, since it gets the samples of all ranks at once"
                return f"{words}, got {made_for}. Construct it for one process."
        if named.get("ref_emb") is not None and (problem := references_problem(bare)):
            return f"it is wrong for other references than its batch: {problem}"
        indices = named.get("indices_tuple")
        if indices is not None and self.miner is not None:
            return "indices_tuple came along, but this DistributedLoss has a miner of its own. Leave one of them out."
        if world.size > 1 and isinstance(indices, (tuple, list)) and not isinstance(indices, GlobalIndices):
            return (
                "indices_tuple was mined on this rank's rows, but the loss sees all ranks' rows, where these indices mean "
                "other samples. Pass the miner instead, DistributedLoss(loss, miner=miner), or pass the unchanged result of "
                "DistributedMiner(miner)."
            )
        return None


NOT_WHOLE = (
    "a loss in it has a forward of its own, or hooks, and every rank has to compute it from the rows of all ranks, which "
    "reduction='none', sharded weights or indices of local rows do not allow. Override compute(batch) instead."
)


def signature(loss: Any) -> inspect.Signature:
    """The signature of a loss; that of a function of any arguments where Python knows none, as for built-in functions."""
    loss = getattr(loss, "_orig_mod", loss)  # the module that torch.compile wraps in one of any arguments
    try:
        result = inspect.signature(loss.forward if isinstance(loss, nn.Module) else loss)
    except ValueError:
        return inspect.signature(lambda *rows, **named_rows: None)
    named = [x for x in result.parameters.values() if x.name != "world"]
    return result.replace(parameters=named) if isinstance(loss, Loss) else result


def paired_problem(arguments: Mapping[str, Any]) -> str | None:
    """Which of this rank's arguments do not pair row by row, in words; the totals over all ranks may agree all the same."""
    counts = {name: len(x) for name, x in arguments.items() if isinstance(x, Tensor) and x.ndim > 0}
    inputs = {name for name, x in arguments.items() if x is not None}
    pairs = [("ref_labels", "ref_emb", "are one per row of ref_emb")]
    if isinstance(labels := arguments.get("labels"), Tensor) and labels.ndim == 1:
        pairs.append(("labels", "embeddings", "are one per row"))
    if inputs.isdisjoint(_NAME_PARTNERS):
        pairs.append(("ref_emb", "embeddings", "holds another view of each row of embeddings"))
    first_view = next((name for name in arguments if name.startswith("view")), "")
    is_view = f"is another view of each row of {first_view}"
    pairs += [(name, first_view, is_view) for name in inputs if name.startswith("view")]
    pairs += [(name, "embeddings", "is one per row of embeddings") for name in inputs if name.endswith("mask")]
    for name, other, rule in sorted(pairs):
        if name in counts and other in counts and counts[name] != counts[other]:
            return (
                f"{name} {rule}, got {counts[name]} for {counts[other]} rows. Pass this rank's own {name} with its own "
                f"{other}."
            )
    return None


def native_and_replaced(loss: Any, miner: Any) -> tuple[Any, Any, inspect.Signature | None]:
    """Return this library's loss, no miner, and the signature of the loss that it replaces; or loss and miner, and None."""
    kind = type(without_ddp(loss))
    if issubclass(kind, Loss):
        return loss, miner, None
    if kind.__module__.startswith("open_clip."):
        raise ValueError(
            "DistributedLoss: prefer_native=True replaces no loss of open_clip, which takes its scale at the call. Use "
            "contrastive_zoo.adapters.open_clip.ClipLoss() or SigLipLoss(), or leave out prefer_native."
        )
    # imported here: pytorch-metric-learning is an optional dependency
    with needed("prefer_native=True", "contrastive_zoo[pml]"):
        import pytorch_metric_learning
    if not pytorch_metric_learning.__version__.startswith("2."):  # names and formulas of later ones may differ
        return loss, miner, None
    from contrastive_zoo.wrapper.pml.translation import to_native

    try:
        return to_native(loss, miner), None, signature(loss)
    except ValueError:  # no loss of this library is the same function
        return loss, miner, None


_GATHERING = {
    "contrastive_zoo": ("DistributedLoss", "DistributedMiner"),
    "pytorch_metric_learning": ("DistributedLossWrapper", "DistributedMinerWrapper"),
}
"""Classes that gather the embeddings of all ranks, by their package."""


def refuse_bad_callable(caller: str, role: str, x: Any) -> None:
    """Refuse what cannot be called or is a class, and a loss or miner that gathers or holds one that does."""
    if isinstance(x, type):
        raise ValueError(
            f"{caller}: a {role} is an instance, got the class {x.__name__}. Pass an instance, {x.__name__}(...)."
        )
    if not callable(x):
        raise ValueError(f"{caller}: a {role} must be callable, got {type(x).__name__}. Pass a module or a function.")
    for path, part in x.named_modules() if isinstance(x, nn.Module) else [("", x)]:
        for kind in type(part).__mro__:
            if kind.__name__ in _GATHERING.get(kind.__module__.partition(".")[0], ()):
                where, bare = f"{role}.{path}".rstrip("."), "miner" if "Miner" in kind.__name__ else "loss"
                raise ValueError(
                    f"{caller}: {where} is a {kind.__name__}, which gathers all ranks' rows. {caller} gathers them, too: "
                    f"each row would count once for every rank, and the value would be wrong. Pass the bare {bare} there."
                )


def model_problem(loss: nn.Module, value: Any) -> str | None:
    """Return that a module with parameters has returned embeddings, as an encoder does, in words, or None."""
    # a square matrix has the losses of pairs
    is_matrix = isinstance(value, Tensor) and value.ndim > 1 and value.shape[0] != value.shape[1]
    if not is_matrix or next(loss.parameters(), None) is None or isinstance(loss, Loss):
        return None
    return (
        f"a loss returns one number, got {described(value)}, as from a model. Wrap the loss and call it with the model's "
        "embeddings: DistributedLoss(NTXent())(model(view1), model(view2))."
    )
