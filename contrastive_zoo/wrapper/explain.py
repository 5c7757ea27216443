"""Explain a call: which path its step takes, and what that costs, without computing it."""

from bisect import bisect_left
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map

from contrastive_zoo.engine.batch import is_embedding
from contrastive_zoo.engine.cost import Entry, UserCode, cost_of
from contrastive_zoo.engine.implementation import LARGEST_WIDTH, Kernels, problem_of
from contrastive_zoo.engine.ledger import EMBEDDINGS, Cost
from contrastive_zoo.engine.plan import Needs, Plan, Rows, Situation, choose
from contrastive_zoo.engine.tiling import memory_budget
from contrastive_zoo.loss_base.loss import CallInputs, Loss
from contrastive_zoo.loss_base.loss_modules import LossModules, loss_name, without_ddp
from contrastive_zoo.ranks.handshake import PAYLOAD_LIMIT
from contrastive_zoo.ranks.world import Shards, World
from contrastive_zoo.wrapper.distributed import DistributedLoss
from contrastive_zoo.wrapper.step import FROM_ELSEWHERE


@dataclass(frozen=True)
class Explanation(Cost):
    """The plan of a call and its cost for one rank; ``print`` shows both, with what would change them."""

    name: str  # of the loss
    plan: Plan  # who computes what, how embeddings get there, by which arithmetic, and why
    situation: Situation  # the sizes and options that the plan was chosen by
    device: str
    dtype: str
    changes: Mapping[str, str] = field(default_factory=dict)  # what a user may do, and what the cost would be then

    def __str__(self) -> str:
        plan, ranks = self.plan, self.situation.world_size
        arrive = sum(x.bytes for x in self.sent if x.name in EMBEDDINGS)
        size = f"; {with_unit(arrive, 'B')} arrive at each rank" if arrive else ""
        backward = f", {self.backward_messages:,} of them in the backward pass" if self.backward_messages else ""
        width = max(map(len, self.changes))
        lines = [
            f"{self.name}, {ranks:,} rank{'s' * (ranks > 1)} × {self._samples()}, {self.dtype}, {self.device}",
            f"  work        {plan.work}: {plan.because[0]}",
            f"  embeddings  {plan.movement}: {plan.because[1]}{size}",
            *(f"  arithmetic  {name}{of.arithmetic}: {of.because[2]}" for name, of in _arithmetics(plan)),
            f"  messages    {self.messages:,}{backward}; a rank sends {with_unit(self.bytes_sent, 'B')}",
            f"  matmuls     {with_unit(self.matmul_flop, 'FLOP')} a rank, forward and backward",
            f"  memory      {with_unit(self.peak_bytes, 'B')} beside the embeddings, their gradients included",
            *(f"  assumed     {what}" for what in self.assumed),
            "What would change it:",
            *(f"  {what:<{width}}  {then}" for what, then in self.changes.items()),
        ]
        return "\n".join(lines)

    def _samples(self) -> str:
        """Return the number of samples of a rank, their features, and how many tensors of embeddings there are."""
        tensors = {name: x for name, x in self.situation.rows.items() if x.embeddings}
        if not tensors:
            return "no embeddings"
        (name, first), *others = tensors.items()
        kind = "tokens" if name.startswith("tokens of ") else "samples"
        each = f"{first.shards.size:,} {kind} of {first.width:,} features"
        several = "views" if name.startswith("view ") else "tensors of embeddings"
        return f"{each}, {len(tensors)} {several}" if others else each


def _arithmetics(plan: Plan, name: str = "") -> Iterator[tuple[str, Plan]]:
    """Yield the plans of the members of a sum, or the plan itself, and which they are."""
    if not plan.members:
        yield name, plan
    for index, of in enumerate(plan.members):
        yield from _arithmetics(of, f"{name}loss {index}: ")


def with_unit(count: float, unit: str) -> str:
    """Return a count with few digits, such as 805 MB."""
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
        ValueError: what the loss refuses in these arguments, or a world size, device or dtype that is none.

    Examples:
        >>> import contrastive_zoo as cz
        >>> x = torch.empty(4096, 768, device="meta")
        >>> plan = cz.explain(cz.DistributedLoss(cz.NTXent()), x, x, world_size=64, device="cuda", dtype=torch.bfloat16)
        >>> plan.plan.work, plan.plan.movement, plan.plan.arithmetic, plan.messages
        ('own anchors', 'gather', 'kernel', 7)
    """
    if world_size is not None and not (isinstance(world_size, int) and world_size >= 1):
        raise ValueError(f"explain: world_size is the number of ranks, 1 or more, got {world_size!r}.")
    if device is not None and str(device).split(":")[0] not in ("cpu", "cuda"):
        raise ValueError(f"explain: device is 'cpu' or 'cuda', got {str(device)!r}.")
    if dtype is not None and not (isinstance(dtype, torch.dtype) and dtype.is_floating_point):
        raise ValueError(f"explain: dtype is that of embeddings, such as torch.bfloat16, got {dtype!r}.")
    wrapper = loss_fn if isinstance(loss_fn, DistributedLoss) else DistributedLoss(loss_fn)
    bare, size = without_ddp(wrapper.loss), World.of(wrapper.process_group).size if world_size is None else world_size
    arguments = [x for x in (*tensors, *named.values()) if isinstance(x, Tensor)]
    place = torch.device(device or next((x.device for x in arguments if not x.is_meta), "cpu"))
    args, keywords = _without_memory((tensors, named), bare, dtype)
    call = wrapper._call(bare, args, keywords)
    name, problem, needs = loss_name(bare), call.inputs.problem, FROM_ELSEWHERE
    learns: dict[str, bool] = {}  # which embeddings get a gradient
    if is_own := isinstance(call, CallInputs):
        name, problem, needs = call.name, call.problem, call.needs
        embeddings = {key: x for key, x in call.inputs.rows.items() if is_embedding(x) and key not in call.whole}
        learns = {key: x.requires_grad for key, x in embeddings.items()}
    if problem is not None:
        raise ValueError(f"{name}: {problem}")
    entries: list[Entry] = [*bare.entries(call)] if is_own else []
    if not is_own or LossModules(bare).runs_third_party_code:
        entries.append(UserCode(isinstance(bare, Loss) and any(True for _ in bare.buffers())))
    rows = {key: Rows.of(Shards((len(x),) * size), x.shape[1:], x.dtype) for key, x in call.inputs.rows.items()}
    first = next((x for x in call.inputs.rows.values() if is_embedding(x)), None)
    kernels = Kernels(place.type == "cuda" and is_own and first is not None and problem_of(first) is None)
    situation = Situation(size, rows, place.type == "cpu", ring=bool(wrapper.ring), kernels=kernels)
    may_follow = situation.on_cpu and needs.split is None
    situation = situation._replace(payload=may_follow and 0 < situation.payload_bytes <= PAYLOAD_LIMIT)
    labels = [x for x in arguments if not (x.is_meta or x.is_floating_point()) and x.ndim == 1]
    classes = len(labels[0].unique()) if labels else None
    shown = {"cpu": "CPU", "cuda": "CUDA"}.get(place.type, place.type)
    held = "float32" if first is None else str(first.dtype).removeprefix("torch.")

    def explained(situation: Situation) -> Explanation:
        plan = choose(name, needs, situation)
        cost = cost_of(plan, situation, entries, classes=classes)
        return Explanation(**vars(cost), name=name, plan=plan, situation=situation, device=shown, dtype=held)

    now = explained(situation)
    if len({*learns.values()}) > 1:
        frozen = " and ".join(key for key in learns if not learns[key])
        unneeded = f"gradients of {frozen}, which need none: a step may send less"
        now = replace(now, assumed=[*now.assumed, unneeded])
    return replace(now, changes=dict(_changes(now, explained, needs)))


def _without_memory(arguments: Any, loss: Any, dtype: torch.dtype | None) -> Any:
    """Return nested arguments with zeros that take no memory in place of meta tensors, and of those of another dtype."""
    held = [*loss.parameters(), *loss.buffers()] if isinstance(loss, nn.Module) else []
    home = next((x.device for x in held), torch.device("cpu"))

    def zeros(x: Any) -> Any:
        if not isinstance(x, Tensor) or not (x.is_meta or (dtype not in (None, x.dtype) and x.is_floating_point())):
            return x
        wanted = dtype if dtype is not None and x.is_floating_point() else x.dtype
        zero = torch.zeros((), dtype=wanted, device=home if x.is_meta else x.device)
        return zero.requires_grad_(x.is_floating_point() and (x.is_meta or x.requires_grad)).expand(x.shape)

    return tree_map(zeros, arguments)


def _changes(
    now: Explanation, explained: Callable[[Situation], Explanation], needs: Needs
) -> Iterator[tuple[str, str]]:
    """Yield what a user may do, and what a step would cost then."""
    situation = now.situation
    if now.plan.work == "own anchors" and now.plan.movement in ("gather", "ring") and needs.no_ring is None:
        ring = now.plan.movement == "gather"
        then = explained(situation._replace(ring=ring))
        sent, held = with_unit(then.bytes_sent, "B"), with_unit(then.peak_bytes, "B")
        yield f"ring={ring}", f"{then.messages:,} messages, {sent} sent, {held} held"

    def with_budget(size: int) -> Explanation:
        with memory_budget(size):
            return explained(situation)

    least = with_budget(2**62).matmul_flop  # of a budget for all logits
    if now.matmul_flop > least:
        powers = range(20, 62)
        power = powers[bisect_left(powers, True, key=lambda power: with_budget(2**power).matmul_flop == least)]
        yield f"memory_budget(2**{power})", _computed(with_budget(2**power))
    elif (then := with_budget(0)).peak_bytes < now.peak_bytes:
        yield "memory_budget(0)", _computed(then)
    if now.device == "CUDA" and now.plan.arithmetic in ("tiles", "plain", "one operator") and needs.no_kernel is None:
        if situation.kernels.apply:
            then = explained(situation._replace(kernels=situation.kernels._replace(always=True)))
            yield "use_implementation('triton')", _computed(then)
        else:
            widths = f"at most {LARGEST_WIDTH:,} features"
            yield "other embeddings", f"Triton kernels take float32, bfloat16 and float16 with {widths}"
    yield "GradCache", "less memory of the encoder; that of the loss stays"


def _computed(then: Cost) -> str:
    return f"{with_unit(then.matmul_flop, 'FLOP')} of matmuls, {with_unit(then.peak_bytes, 'B')} held"
