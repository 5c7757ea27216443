"""Explain a call: which path its step takes, and what that costs, without computing it."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from contrastive_zoo.engine.cost import Cost, cost_of
from contrastive_zoo.engine.implementation import DTYPES, LARGEST_WIDTH, NO_KERNELS, Kernels
from contrastive_zoo.engine.plan import Plan, Situation, choose
from contrastive_zoo.loss_base.loss import CallInputs, rows_of
from contrastive_zoo.loss_base.loss_modules import loss_name, without_ddp
from contrastive_zoo.ranks.compat import without_values
from contrastive_zoo.ranks.handshake import PAYLOAD_LIMIT
from contrastive_zoo.ranks.world import Shards, World
from contrastive_zoo.wrapper.distributed import DistributedLoss
from contrastive_zoo.wrapper.step import FROM_ELSEWHERE


@dataclass(frozen=True)
class Explanation:
    """The plan of a call and its cost for one rank; ``print`` shows both, with what would change them."""

    name: str  # of the loss
    plan: Plan  # who computes what, how embeddings get there, by which arithmetic, and why
    situation: Situation  # the sizes and options that the plan was chosen by
    cost: Cost  # the messages, bytes, multiplications and memory of one rank
    device: str
    dtype: str
    changes: Mapping[str, str]  # what a user may do, and what the cost would be then

    @property
    def messages(self) -> int:
        """Return the number of messages, forward and backward."""
        return self.cost.messages

    @property
    def bytes_sent(self) -> int:
        return self.cost.bytes_sent

    @property
    def matmul_flop(self) -> int:
        """Return the operations of matrix products, a multiplication and an addition being two."""
        return self.cost.matmul_flop

    @property
    def peak_bytes(self) -> int:
        """Return the memory that the loss holds at its peak, beside the embeddings."""
        return self.cost.peak_bytes

    def __str__(self) -> str:
        return "\n".join(self._lines())

    def _lines(self) -> Iterator[str]:
        plan, cost, ranks = self.plan, self.cost, self.situation.world_size
        tensors = [x for x in self.situation.rows.values() if x.embeddings]
        each = f"{tensors[0].shards.size:,} samples of {tensors[0].width:,} features" if tensors else "no embeddings"
        several = f", {len(tensors)} tensors of embeddings" if len(tensors) > 1 else ""
        yield f"{self.name}, {ranks:,} rank{'s' * (ranks > 1)} × {each}{several}, {self.dtype}, {self.device}"
        work, movement, arithmetic = plan.because
        yield f"  work        {plan.work}: {work}"
        yield f"  embeddings  {plan.movement}: {movement}"
        for index, of in enumerate(plan.members or [plan]):
            name, why = (f"loss {index}: ", of.because[2]) if plan.members else ("", arithmetic)
            yield f"  arithmetic  {name}{of.arithmetic}: {why}"
        backward = f", {cost.backward_messages} of them in the backward pass" if cost.backward_messages else ""
        yield f"  messages    {cost.messages:,}{backward}; a rank sends {with_unit(cost.bytes_sent, 'B')}"
        yield f"  matmuls     {with_unit(cost.matmul_flop, 'FLOP')} a rank"
        yield f"  memory      {with_unit(cost.peak_bytes, 'B')} beside the embeddings"
        for what, then in self.changes.items():
            yield f"  {what:<26} {then}"


def with_unit(count: float, unit: str) -> str:
    """Return a count with few digits.

    Examples:
        >>> with_unit(805_306_368, "B"), with_unit(304, "B")
        ('805 MB', '304 B')
    """
    for prefix, size in (("P", 1e15), ("T", 1e12), ("G", 1e9), ("M", 1e6), ("k", 1e3)):
        if count >= size:
            return f"{count / size:.3g} {prefix}{unit}"
    return f"{count:.0f} {unit}"


def explain(
    loss_fn: Callable[..., Any],
    *tensors: Any,
    world_size: int | None = None,
    device: str | torch.device | None = None,
    dtype: torch.dtype | None = None,
    **named: Any,
) -> Explanation:
    """Return the plan of a call and what it costs, without computing it or sending anything.

    Called as ``print(cz.explain(loss_fn, view1, view2))``, with what the loss is called with. Tensors on the meta device
    have no values and take no memory, so a laptop explains 64 GPUs: ``torch.empty(4096, 768, device="meta")``.

    Args:
        loss_fn: a ``DistributedLoss``, a loss of this library or from elsewhere. With several ranks a bare loss is explained
            as ``DistributedLoss(loss_fn)``.
        tensors: the arguments of one rank; every rank is taken to bring as many.
        world_size: number of ranks; None is that of the process group, 1 without one.
        device: ``"cpu"`` or ``"cuda"``; None is that of the tensors, the CPU for meta tensors.
        dtype: of the embeddings; None is theirs.
        named: arguments that are passed by name.

    Raises:
        ValueError: what the loss refuses in these arguments, or a world size below 1.

    Examples:
        >>> import contrastive_zoo as cz
        >>> x = torch.empty(4096, 768, device="meta")
        >>> plan = cz.explain(cz.DistributedLoss(cz.NTXent()), x, x, world_size=64, device="cuda", dtype=torch.bfloat16)
        >>> plan.plan.work, plan.plan.movement, plan.plan.arithmetic, plan.messages
        ('own anchors', 'gather', 'kernel', 7)
    """
    wrapper = loss_fn if isinstance(loss_fn, DistributedLoss) else DistributedLoss(loss_fn)
    size = World.of(wrapper.process_group).size if world_size is None else world_size
    if size < 1:
        raise ValueError(f"explain: world_size is the number of ranks, 1 or more, got {world_size}.")
    arguments = [x for x in (*tensors, *named.values()) if isinstance(x, Tensor)]
    place = torch.device(device or next((x.device for x in arguments if not x.is_meta), "cpu"))
    args, keywords = without_values((tensors, named), dtype)
    call, _ = wrapper._call(without_ddp(wrapper.loss), args, keywords)
    name, problem = (
        (call.name, call.problem) if isinstance(call, CallInputs) else (loss_name(call.loss), call.inputs.problem)
    )
    if problem is not None:
        raise ValueError(f"{name}: {problem}")
    needs = call.needs if isinstance(call, CallInputs) else FROM_ELSEWHERE
    rows = {key: rows_of(x, Shards((len(x),) * size)) for key, x in call.inputs.rows.items()}
    situation = Situation(size, rows, place.type == "cpu", ring=bool(wrapper.ring), kernels=_kernels(call, place))
    situation = situation._replace(payload=0 < situation.payload_bytes <= PAYLOAD_LIMIT)
    bare: Any = without_ddp(wrapper.loss)
    entries = bare.entries(call.inputs) if isinstance(call, CallInputs) else []

    def explained(situation: Situation) -> tuple[Plan, Cost]:
        plan = choose(name, needs, situation)
        return plan, cost_of(plan, situation, entries)

    plan, cost = explained(situation)
    shown_dtype = next((x.dtype for x in call.inputs.rows.values() if x.is_floating_point()), torch.float32)
    shown = {"cpu": "CPU", "cuda": "CUDA"}.get(place.type, place.type)
    result = Explanation(name, plan, situation, cost, shown, str(shown_dtype).removeprefix("torch."), {})
    return replace(result, changes=dict(_changes(result, explained)))


def _kernels(call: Any, place: torch.device) -> Kernels:
    """Return whether kernels would compute these embeddings on a device of this type, which need not be there."""
    rows = next((x for x in call.inputs.rows.values() if x.is_floating_point() and x.ndim > 1), None)
    if place.type != "cuda" or rows is None or not isinstance(call, CallInputs):
        return NO_KERNELS
    return Kernels(rows.dtype in DTYPES and 1 <= rows.shape[-1] <= LARGEST_WIDTH)


def _changes(now: Explanation, explained: Callable[[Situation], tuple[Plan, Cost]]) -> Iterator[tuple[str, str]]:
    gathers, rings = now.plan.movement == "gather" and now.plan.work == "own anchors", now.plan.movement == "ring"
    if gathers or rings:
        plan, cost = explained(now.situation._replace(ring=gathers))
        if rings or plan.movement == "ring":
            held, sent = with_unit(cost.peak_bytes, "B"), with_unit(cost.bytes_sent, "B")
            yield f"ring={gathers}", f"{held} held, {sent} sent, {cost.messages:,} messages"
