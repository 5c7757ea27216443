"""DistributedLoss makes any loss a function of the global batch."""

import inspect
from collections.abc import Callable, Collection, Mapping
from typing import Any, Generic, Literal

import torch
from torch import nn
from torch.utils._pytree import tree_map
from typing_extensions import TypeVar

from contrastive_zoo.loss_base.loss import CallInputs, Loss
from contrastive_zoo.loss_base.loss_modules import is_plain, loss_name, without_ddp
from contrastive_zoo.ranks import devices
from contrastive_zoo.ranks.adjoints import scale_gradient
from contrastive_zoo.ranks.compiling import uncompiled
from contrastive_zoo.ranks.messages import report
from contrastive_zoo.ranks.row_checks import first_non_finite, flag_problem, word_problem
from contrastive_zoo.ranks.session import Findings, Session, refuse
from contrastive_zoo.ranks.suggestions import suggests_names
from contrastive_zoo.ranks.world import Processes, ProcessGroupAttribute, Shards, World
from contrastive_zoo.wrapper.call_history import CallHistory, looking_later
from contrastive_zoo.wrapper.loss_call import LossCall, native_and_replaced, refuse_bad_callable, signature
from contrastive_zoo.wrapper.roles import NO_ROLES, Roles, roles_of
from contrastive_zoo.wrapper.step import OwnStep, ThirdPartyStep

R = TypeVar("R", default=Any)  # what the loss returns
GradReduction = Literal["mean", "sum"]


_MODELS = tuple(f"torch.nn.modules.{x}" for x in ("linear", "conv", "transformer"))
_MODELS += ("transformers.models.", "torchvision.models.", "timm.models.")
"""Modules whose classes are no losses."""


class Wrapper(nn.Module):
    """A wrapper of a loss or a miner, whose attributes are read and set through it where it has none of that name."""

    _wrapped = "loss"  # the attribute that holds it
    _also_read: Collection[str] = ()  # its private attributes that are read, too

    def extra_repr(self) -> str:
        """Every option that is not its default; modules stand below."""
        parts = []
        for name, parameter in inspect.signature(type(self)).parameters.items():
            value = getattr(self, name)
            if value is not parameter.default and value != parameter.default and name not in self._modules:
                parts.append(f"{name}={shown(value)}")
        return ", ".join(parts)

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            if (bare := self._has(name)) is None:
                raise
            return getattr(bare, name)

    def __setattr__(self, name: str, value: Any) -> None:
        # a schedule that sets loss_fn.temperature means the loss's; without this it would change nothing
        is_present = name in vars(self) or name in vars(self).get("_modules", ()) or hasattr(type(self), name)
        bare = None if is_present else self._has(name)
        if bare is None:
            super().__setattr__(name, value)
        else:
            setattr(bare, name, value)

    def _has(self, name: str) -> Any:
        """The bare loss or miner if this is one of its attributes."""
        held = vars(self).get("_modules", {}) | vars(self)
        bare = without_ddp(held.get(self._wrapped))
        is_private = name.startswith("_") and name not in self._also_read
        return None if is_private or not hasattr(bare, name) else bare


class DistributedLoss(Wrapper, Generic[R]):
    """Compute any loss on the embeddings of all ranks, with the value and gradients of one process.

    Called as ``loss`` is, with this rank's samples. Shards may be uneven or empty. Let L be the loss of all samples:

    - every rank returns L;
    - after the trainer's all-reduce the encoder's gradient is ∂L/∂θ;
    - the gradient of the loss's parameters is ∂L/∂φ, before any all-reduce.

    A loss of this library splits its anchors over the ranks. Every rank computes any other loss on the gathered samples.
    ``loss_fn.temperature`` is that of ``loss``.

    Args:
        loss: any module or function of tensors, one for each view, whose dimension 0 counts samples.
        miner: ``miner(embeddings, labels)``; its result becomes ``indices_tuple``.
        prefer_native: replace a third-party loss by this library's, if it has the same formula; optimize this module's
            ``parameters()``, because class weights may be copied.
        process_group: a process group or 1-d DeviceMesh; None is the default group.
        grad_reduction: ``"mean"`` if the trainer averages gradients, as DDP and FSDP do; ``"sum"`` if it adds them.
        check_finite: refuse NaN and infinite embeddings; on an accelerator one call later.
        check_equal: compare parameters, buffers and results between ranks, without a further message.
        check_distinct: refuse two ranks with the same embeddings.
        ring: pass candidates from rank to rank instead of gathering them.
        shared: a third-party loss's arguments that are one tensor for all ranks: ``{"prototypes"}``.
        batch_dim: the dimension that counts samples: ``{"views": 1}``.

    Raises:
        ValueError: an option that the loss cannot have. At the call, on every rank: ranks that differ in the loss, its
            options, arguments, widths or dtypes; arguments whose role is unclear; embeddings that are not finite, equal
            on two ranks, or on no rank at all.
        CommunicationError: another rank has raised, died, or is late.

    Examples:
        >>> import torch, contrastive_zoo as cz
        >>> cz.DistributedLoss(cz.NTXent(temperature=1.0))(torch.eye(2), torch.eye(2))
        tensor(0.5514)
    """

    process_group = ProcessGroupAttribute()
    __call__: Callable[..., R]

    @suggests_names("Pass the loss by position and a miner as miner=…; add up losses by WeightedSum([loss1, loss2]).")
    def __init__(
        self,
        loss: Callable[..., R],
        *,
        miner: Callable[..., Any] | None = None,
        prefer_native: bool = False,
        process_group: Processes = None,
        grad_reduction: GradReduction = "mean",
        check_finite: bool = True,
        check_equal: bool = True,
        check_distinct: bool = True,
        ring: bool = False,
        shared: Collection[str] | None = None,
        batch_dim: Mapping[str, int] | None = None,
    ) -> None:
        super().__init__()
        problem = word_problem("grad_reduction", grad_reduction, GradReduction)
        if problem is not None:
            problem = f"{problem} DDP, FSDP, Lightning, Accelerate and Hugging Face average: 'mean'."
        checks = {"check_finite": check_finite, "check_equal": check_equal, "check_distinct": check_distinct}
        if problem := problem or flag_problem(prefer_native=prefer_native, ring=ring, **checks):
            raise ValueError(f"DistributedLoss: {problem}")
        refuse_bad_callable("DistributedLoss", "loss", loss)
        if miner is not None:
            refuse_bad_callable("DistributedLoss", "miner", miner)
        self._replaced: inspect.Signature | None = None  # of the third-party loss that this library's loss replaces
        if prefer_native:
            loss, miner, self._replaced = native_and_replaced(loss, miner)
        self.ring = ring
        refuse_bad_loss(loss, miner, ring)
        self.miner = miner
        self.prefer_native = prefer_native
        self.process_group = process_group
        self.grad_reduction = grad_reduction
        self.check_finite = check_finite
        self.check_equal = check_equal
        self.check_distinct = check_distinct
        roles = roles_of(loss, shared, batch_dim)
        self.shared = roles.shared or None
        self.batch_dim = roles.batch_dim or None
        self._history = CallHistory()
        self._observer: Any = None
        self.loss = loss

    @uncompiled
    def forward(self, *rows: Any, **named_rows: Any) -> Any:
        """The loss of all ranks' samples, from this rank's, which are passed as the loss takes them."""
        loss: Any = self._modules.get("loss")
        loss = self.loss if loss is None else loss
        bare = loss if isinstance(loss, Loss) else without_ddp(loss)
        session = self._session(bare)
        try:
            call = self._call(bare, rows, named_rows)
        except Exception as error:
            if session.size == 1 and (isinstance(bare, Loss) or not isinstance(error, TypeError)):
                raise
            if session.size == 1:  # the error of the third-party loss itself
                return loss(*rows, **named_rows)
            # only this rank may lack an argument, or fail to read a setting; the others wait in the handshake
            text = f"{error}" if isinstance(error, TypeError) else f"{type(error).__name__}: {error}"
            text += "" if text.endswith(("?", ".")) else "."
            refuse(loss_name(bare), text.removeprefix(f"{loss_name(bare)}: "), world=session)
        except BaseException as error:  # Ctrl-C in a module in place of a setting
            report(error, session)
            raise
        if session.size == 1:
            return self._alone(loss, bare, call, session)
        if isinstance(call, LossCall) and (problem := call.inputs.problem) is not None:
            refuse(loss_name(bare), problem, world=session)  # the statement is made of rows that can be sent
        session = looking_later(session, call.inputs.rows)
        step = self, bare, session
        if isinstance(call, CallInputs):
            compute = bare.compute if loss is bare else loss  # DDP's forward pass prepares the gradient all-reduce
            value = OwnStep(call.name, call, *step, compute).compute()
        else:
            value = ThirdPartyStep(loss_name(bare), call, *step).compute()
        if self.grad_reduction == "sum":
            value = tree_map(lambda x: scale_gradient(x, 1 / session.size), value)
        return value

    def _call(self, bare: Any, rows: tuple[Any, ...], named_rows: dict[str, Any]) -> CallInputs | LossCall:
        """What this rank states of a call."""
        if self._replaced is not None:
            bound = self._replaced.bind(*rows, **named_rows)
            passed = {name: x for name, x in bound.arguments.items() if x is not None}
            if len(passed) > 2:
                words = "embeddings and labels, or two views"
                raise TypeError(f"with prefer_native=True a call takes {words}, got {', '.join(passed)}. Leave it out.")
            rows, named_rows = (*passed.values(),), {}
        if isinstance(bare, Loss):
            if is_plain(bare):
                return bare.stated(rows, named_rows)
            rows, named_rows = devices.to_device_of_embeddings(rows, named_rows)
        # a miner's indices come later, also where the loss requires them
        takes = signature(bare)
        bound = (takes.bind if self.miner is None else takes.bind_partial)(*rows, **named_rows)
        return LossCall(self.loss, self.miner, bound, self._roles())

    def _session(self, bare: Any) -> Session:
        world = World.of(self.process_group)
        # no trainer adds up the gradients of parameters that are split over the ranks
        factor = world.size if self.grad_reduction == "sum" else 1
        check_finite = self.check_finite and getattr(bare, "check_finite", True)
        return Session(
            world.rank, world.size, world.group, check_finite,
            sharded_factor=factor, findings=Findings([] if check_finite else None),
            caller=f"{loss_name(bare)}, call {self._history.calls + 1}",
        )  # fmt: skip

    def _roles(self) -> Roles:
        return Roles(tuple(self.shared or ()), self.batch_dim or {}) if self.shared or self.batch_dim else NO_ROLES

    def observe_with(self, observer: Any) -> None:
        """Tell a :class:`Monitor` of every call in training mode; None: no longer. Do so on every rank.

        Raises:
            ValueError: there is another observer.
        """
        if observer is not None and self._observer is not None:
            raise ValueError("DistributedLoss: this loss has a monitor already. Use it, or call its remove() first.")
        self._observer = observer

    def _alone(self, loss: Any, bare: Any, call: CallInputs | LossCall, session: Session) -> Any:
        """Compute alone; a third-party loss gets its arguments unchanged."""
        observer, rows, problem = self._observer if self.training else None, call.inputs.rows, None
        session = looking_later(session, rows)
        if isinstance(call, LossCall):
            looks = session.check_finite and call.inputs.problem is None
            problem = call.refusal(session) or (first_non_finite(rows) if looks else None)
        problem = problem or self._history.values_problem()
        problem = problem or (None if observer is None else observer.problem(rows))
        if problem is not None:
            refuse(loss_name(bare), problem, world=session)
        if isinstance(call, CallInputs):
            batch = bare.agreed(call, session, waits=False)
            value = bare.compute(batch) if loss is bare else loss(batch)
        else:
            value = call.mine_and_compute(session)
        self._history.look_at_values(loss_name(bare), session.findings, positives=self.check_finite)
        if observer is not None:
            observer.observe(bare, rows, [Shards((len(x),)) for x in rows.values()], session)
        return value


def refuse_bad_loss(loss: Any, miner: Callable[..., Any] | None, ring: bool) -> None:
    """Refuse what is no loss of embeddings, and a miner or a ring that the loss does not support."""
    bare = without_ddp(loss)
    name, is_own = loss_name(bare), isinstance(bare, Loss)
    kinds = [kind for x in (bare.modules() if isinstance(bare, nn.Module) else ()) for kind in type(x).__mro__]
    if any(kind.__module__.startswith("sentence_transformers.") and kind.__name__ == "BaseModel" for kind in kinds):
        raise ValueError(
            f"DistributedLoss: {name} holds the encoder and takes its tokens. Ranks must exchange embeddings, not tokens. "
            "Use contrastive_zoo.adapters.sentence_transformers.DistributedSentenceLoss(loss)."
        )
    holds_loss = any(kind is Loss or "Loss" in kind.__name__ for kind in kinds)
    if type(bare).__module__.startswith(_MODELS) and not holds_loss:
        raise ValueError(
            f"DistributedLoss: {name} is a model. Wrap the loss, such as DistributedLoss(NTXent()), and call it with the "
            "model's embeddings; DistributedDataParallel wraps the model."
        )
    if miner is not None and is_own:
        raise ValueError(
            f"DistributedLoss: {name} weighs all pairs itself and takes no miner's indices. "
            "Leave the miner out, or pass a loss that takes indices_tuple."
        )
    takes = None if miner is None else signature(bare)
    if takes and not any(x.name == "indices_tuple" or x.kind is x.VAR_KEYWORD for x in takes.parameters.values()):
        raise ValueError(
            f"DistributedLoss: {name}{takes} takes no indices_tuple, which is how a miner's indices reach a "
            "loss. Leave the miner out."
        )
    reason = bare.ring_problem() if is_own else "every rank computes it from the embeddings of all ranks"
    if ring and reason is not None:
        raise ValueError(
            f"DistributedLoss: {name} cannot be computed with ring=True, because {reason}. Write DistributedLoss(loss) "
            "without ring."
        )


def shown(option: Any) -> str:
    """An option as ``repr`` prints it: a function by its name, a process group by its ranks."""
    if isinstance(option, torch.distributed.ProcessGroup):
        return f"<ranks {torch.distributed.get_process_group_ranks(option)}>"
    return loss_name(option) if callable(option) else repr(option)
