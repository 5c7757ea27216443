"""Big batches through small memory: rows are computed chunk by chunk and forgotten, and computed again when a gradient
for them arrives.

A contrastive loss needs all rows at once, but the encoder does not: given ∂L/∂z, the gradient of its parameters is a sum
over rows. So the encoder runs twice, and holds the activations of one chunk at a time:

    first pass      z_c = f(x_c)  for every chunk c, without a graph
    the loss        L(z; φ), its backward pass as far as  g = ∂L/∂z
    second pass     z_c = f(x_c)  once more, with a graph;  ∂L/∂θ += ⟨g_c, ∂z_c/∂θ⟩

That is one node of the graph, whose forward is the first pass and whose backward is the second. Everything around it
(factors on the loss, a GradScaler, parameters of the loss, whatever else is differentiated) is ordinary autograd.
"""

import itertools
import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from typing import Any, NamedTuple, Protocol

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn.parallel import DistributedDataParallel
from torch.utils._pytree import (
    TreeSpec,
    tree_flatten,
    tree_leaves,
    tree_unflatten,
    treespec_dumps,
    treespec_loads,
)

from contrastive_zoo.compiling import Function
from contrastive_zoo.handshake import refuse_empty
from contrastive_zoo.session import meet
from contrastive_zoo.world import Processes, World


class Scaler(Protocol):
    """What scales a loss before its backward pass: ``torch.amp.GradScaler``."""

    def scale(self, outputs: Tensor) -> Tensor:
        """The loss times the present scale."""


def cached_step(
    model: nn.Module | Sequence[nn.Module],
    chunks: Iterable[Any],
    loss_fn: Callable[..., Tensor],
    *targets: Any,
    scaler: Scaler | None = None,
    process_group: Processes = None,
) -> Float[Tensor, ""]:
    """Forward and backward pass of ``loss_fn(model(all chunks), *targets)``, with one chunk's activations at a time.

    The gradients are those of ``loss_fn(torch.cat([model(x) for x in chunks]), *targets).backward()``: dropout draws the
    same in both passes, autocast is the same, buffers move once. Under DDP gradients travel once, with the last chunk;
    without it call :func:`contrastive_zoo.average_gradients` afterwards. Ranks may bring different numbers of chunks; a
    rank without any runs the model on an empty one, made after another rank's, so that DDP finds it in its place. (FSDP
    sends parameters in each forward pass: there every rank brings as many chunks.)

    Args:
        model: an encoder of rows, or several, one a tower. A module may return several tensors.
        chunks: what the encoder is called with: a tensor, a tuple of arguments or a mapping of keywords, again and
            again. With several encoders, one such sequence for each. No gradient flows into them.
        loss_fn: takes the rows of all chunks, one tensor a tower (or output), then ``targets``. Between ranks it is a
            ``DistributedLoss``.
        targets: labels and the like, of all chunks.
        scaler: scales the loss first; then step with ``scaler.step(optimizer)`` as usual.
        process_group: whose ranks; None is that of a DDP model, or the default group at the time of the call.

    Returns:
        The loss, detached and unscaled.

    Raises:
        ValueError: on every rank alike: no chunk on any rank, or none on one and no tensors on the others to make one
            after; chunks that carry a gradient; models that are not modules, or not as many as sequences of chunks.

    Example:
        >>> import contrastive_zoo as cz
        >>> model, x = nn.Linear(2, 2, bias=False), torch.eye(2)
        >>> _ = nn.init.eye_(model.weight)
        >>> cached_step(model, x.split(1), lambda z: z.square().sum())
        tensor(2.)
        >>> model.weight.grad
        tensor([[2., 0.],
                [0., 2.]])

    Source: Gao et al. 2021, §3, https://arxiv.org/abs/2101.06983
    """
    models: Sequence[Any] = model if isinstance(model, (tuple, list)) else (model,)
    problem, towers = None, []
    if isinstance(model, (tuple, list)):
        several = [list(x) for x in chunks]
        if len(several) != len(models):
            problem = f"each model has its sequence of chunks, got {len(models)} models and {len(several)} sequences."
    else:
        several = [list(chunks)]
    if found := [type(x).__name__ for x in models if not isinstance(x, nn.Module)]:
        problem = f"a model is a torch.nn.Module, got {found[0]}. Wrap a method in a module that calls it."
    if problem is None:
        towers = [_Tower(x, [_call(chunk) for chunk in its]) for x, its in zip(models, several, strict=True)]
    outputs = _cached("cached_step", towers, problem, process_group)
    loss = loss_fn(*itertools.chain.from_iterable(tree_leaves(output) for output in outputs), *targets)
    (loss if scaler is None else scaler.scale(loss)).backward()
    return loss.detach()


class GradCache(nn.Module):
    """An encoder that holds the activations of ``chunk_size`` rows at a time; called like the encoder itself.

    Its output is the encoder's. When the backward pass reaches it, the encoder runs again chunk by chunk, as
    :func:`cached_step` describes. Use it where a trainer calls ``backward``:

        encode = GradCache(DistributedDataParallel(encoder), chunk_size=64)
        loss = loss_fn(encode(images), labels)
        loss.backward()

    DDP may also be around it, as where a trainer puts DDP around everything.

    Two views through one encoder are one call, ``encode(torch.cat([view1, view2])).chunk(2)``: then gradients travel
    once. Under ``torch.no_grad()`` it is the encoder, chunk by chunk, and ranks do not wait for each other.

    Args:
        model: the encoder, with DDP around it or not.
        chunk_size: rows at a time.
        process_group: whose ranks agree that the input is good; None is that of a DDP model, or the default group at the
            time of the call.

    Raises:
        ValueError: a chunk size below 1. At the call, on every rank alike: tensors that differ in their numbers of rows,
            no tensor at all, or inputs that carry a gradient.

    Example:
        >>> encode = GradCache(nn.Linear(2, 3), chunk_size=4)
        >>> z = encode(torch.ones(10, 2))        # 4 + 4 + 2 rows
        >>> z.square().sum().backward()          # and again, with a graph
        >>> z.shape, encode.model.weight.grad is not None
        (torch.Size([10, 3]), True)

    Source: Gao et al. 2021, §3, https://arxiv.org/abs/2101.06983
    """

    def __init__(self, model: nn.Module, chunk_size: int, *, process_group: Processes = None) -> None:
        super().__init__()
        if chunk_size < 1 or not isinstance(model, nn.Module):
            raise ValueError(
                f"GradCache: a torch.nn.Module and at least one row a chunk, got {type(model).__name__} and "
                f"chunk_size={chunk_size}."
            )
        self.model = model
        self.chunk_size = chunk_size
        self.process_group = process_group

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """What the encoder makes of these rows.

        Args:
            args: as the encoder takes them; tensors are split along dimension 0, anything else goes to every chunk.
            kwargs: likewise.
        """
        leaves, tree = tree_flatten((args, kwargs))
        counts = {len(x) for x in leaves if _is_rows(x)}
        problem = None
        if len(counts) != 1:
            problem = f"tensors have one number of rows, got {sorted(counts) or 'no tensor'}."
        calls = []
        for start in range(0, max(counts, default=0) or 1, self.chunk_size):
            rows = slice(start, start + self.chunk_size)
            calls.append(_Call(*tree_unflatten([x[rows] if _is_rows(x) else x for x in leaves], tree)))
        (output,) = _cached("GradCache", [_Tower(self.model, calls)], problem, self.process_group)
        return output

    def extra_repr(self) -> str:
        return f"chunk_size={self.chunk_size}"


class _Call(NamedTuple):
    """One chunk, as the model takes it."""

    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]


def _call(chunk: Any) -> _Call:
    if isinstance(chunk, Mapping):
        return _Call((), dict(chunk))
    return _Call(tuple(chunk) if isinstance(chunk, (tuple, list)) else (chunk,), {})


def _is_rows(x: Any) -> bool:
    return isinstance(x, Tensor) and x.ndim > 0


def _cached(caller: str, towers: list["_Tower"], problem: str | None, process_group: Processes) -> list[Any]:
    """What each tower makes of all its chunks, to be made again when gradients arrive."""
    if any(isinstance(x, Tensor) and x.requires_grad for tower in towers for x in tree_leaves(list(tower.calls))):
        problem = problem or (
            "chunks carry a gradient, which stops here. Put whatever computes them into the model, or detach them."
        )
    if process_group is None:
        models = [tower.model for tower in towers if isinstance(tower.model, DistributedDataParallel)]
        process_group = models[0].process_group if models else None
    # without a backward pass nobody waits for anybody, and a rank may encode alone
    world = World.of(process_group if torch.is_grad_enabled() else World())
    counts = {f"chunks of tower {i}": torch.zeros(len(tower.calls)) for i, tower in enumerate(towers)}
    for tower, shards in zip(towers, meet(caller, counts, world=world, problem=problem), strict=True):
        refuse_empty(caller, shards)
        if min(shards.sizes) == 0:
            tower.fill(caller, world)
    if not torch.is_grad_enabled() or not any(tower.learns for tower in towers):
        return [tree_unflatten(*tower.encode()) for tower in towers]
    learnt = {id(x): x for tower in towers for x in tower.parameters}
    flat = _Encode.apply(towers, torch.zeros((), requires_grad=True), *learnt.values())
    ends = list(itertools.accumulate((len(tower.outputs) for tower in towers), initial=0))
    parts = (list(flat[start:stop]) for start, stop in itertools.pairwise(ends))
    return [tree_unflatten(part, tower.outputs.tree) for part, tower in zip(parts, towers, strict=True)]


class _Encode(Function):
    """Rows of all towers. ``anchor`` makes them need a gradient even where all parameters get theirs on the side."""

    @staticmethod
    def forward(ctx: Any, towers: list["_Tower"], anchor: Tensor, *parameters: Tensor) -> tuple[Tensor, ...]:
        ctx.towers, ctx.order = towers, [id(x) for x in parameters]
        rows = [x for tower in towers for x in tower.encode()[0]]
        ctx.mark_non_differentiable(*(x for x in rows if not x.is_floating_point()))
        return tuple(rows)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        arriving = iter(gradients)
        found: dict[int, Tensor] = {}
        for index, tower in enumerate(ctx.towers):
            last = all(tower.model is not other.model for other in ctx.towers[index + 1 :])
            tower.encode_again(list(itertools.islice(arriving, len(tower.outputs))), found, travel=last)
        return None, None, *(found.get(name) for name in ctx.order)


class _Outputs(NamedTuple):
    """How a tower's output is made of tensors, and how many rows each chunk has in each of them."""

    tree: TreeSpec
    sizes: list[list[int]]

    def __len__(self) -> int:
        return self.tree.num_leaves


class _Tower:
    """A model, its chunks, and what is needed to run it on them once more exactly as before."""

    outputs: _Outputs

    def __init__(self, model: nn.Module, calls: list[_Call]) -> None:
        self.model, self.calls = model, calls
        self.inner = model.module if isinstance(model, DistributedDataParallel) else model
        self.devices = sorted({x.device for x in model.parameters() if x.device.type != "cpu"}, key=str)
        self.random: list[list[Tensor]] = []
        self.buffers: dict[str, Tensor] = {}
        self.autocast = [
            (kind, torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind))
            for kind in ("cpu", *{device.type for device in self.devices})
        ]

    def encode(self) -> tuple[list[Tensor], TreeSpec]:
        """The first pass: rows of all chunks without a graph."""
        found = []
        with torch.no_grad(), self._same_autocast(), self._which_buffers_move():
            for call in self.calls:
                self.random.append(_random_states(self.devices))
                leaves, tree = tree_flatten(self.model(*call.args, **call.kwargs))
                found.append(leaves)
        self.outputs = _Outputs(tree, [[len(x) for x in leaves] for leaves in found])
        return [torch.cat(parts) for parts in zip(*found, strict=True)], tree

    @property
    def learns(self) -> bool:
        """Whether there is anything to run a second time for."""
        return any(x.requires_grad for x in self.model.parameters())

    @property
    def parameters(self) -> list[Tensor]:
        """Those whose gradients are handed on; none if the model's own hooks collect them, as DDP's and FSDP's do."""
        hooked = any(hasattr(x, "no_sync") or hasattr(x, "set_requires_gradient_sync") for x in self.model.modules())
        return [] if hooked else [x for x in self.model.parameters() if x.requires_grad]

    def encode_again(self, gradients: list[Tensor], found: dict[int, Tensor], *, travel: bool) -> None:
        """The second pass: every chunk with a graph, and its rows' gradients through it.

        Args:
            gradients: of the rows of all chunks, by output.
            found: where gradients of :attr:`parameters` are added up, by identity.
            travel: whether gradients that hooks collect travel with the last chunk.
        """
        sizes = zip(*self.outputs.sizes, strict=True)
        by_chunk = list(zip(*(g.split(list(of)) for g, of in zip(gradients, sizes, strict=True)), strict=True))
        with self._state_of_then():
            for index, (call, states, pulls) in enumerate(zip(self.calls, self.random, by_chunk, strict=True)):
                stays = not (travel and index == len(self.calls) - 1)
                with getattr(self.model, "no_sync", nullcontext)() if stays else nullcontext():
                    with torch.enable_grad(), self._same_autocast():
                        _set_random_states(states, self.devices)
                        rows = tree_leaves(self.model(*call.args, **call.kwargs))
                    self._pull([(x, pull) for x, pull in zip(rows, pulls, strict=True) if x.requires_grad], found)

    def _pull(self, rows: list[tuple[Tensor, Tensor]], found: dict[int, Tensor]) -> None:
        """One chunk's rows and their gradients, through its graph."""
        ends, pulls = [x for x, _ in rows], [pull for _, pull in rows]
        parameters = self.parameters
        if not parameters and ends:
            torch.autograd.backward(ends, pulls)
        elif ends:
            parts = torch.autograd.grad(ends, parameters, pulls, allow_unused=True)
            for x, part in zip(parameters, parts, strict=True):
                if part is not None:
                    found[id(x)] = found[id(x)] + part if id(x) in found else part

    def fill(self, caller: str, world: World) -> None:
        """Make an empty chunk after another rank's, where there is none.

        Raises:
            ValueError: the others' chunks are not made of tensors alone.
        """
        kinds = [text for text in world.exchange_text(_kind(self.calls[0]) if self.calls else "-") if text != "-"]
        if not kinds[0]:
            raise ValueError(
                f"{caller}: a rank has no chunk, and the others' are not made of tensors alone, so that none can be made "
                "after them. Bring an empty one there, such as x[:0]."
            )
        if not self.calls:
            tree, shapes = json.loads(kinds[0])
            device = next((x.device for x in self.model.parameters()), None)
            empty = [torch.empty(0, *shape, dtype=getattr(torch, dtype), device=device) for dtype, shape in shapes]
            self.calls.append(_Call(*tree_unflatten(empty, treespec_loads(tree))))

    @contextmanager
    def _same_autocast(self) -> Iterator[None]:
        """As it was when the tower was made. No cache: it would lend weights cast without a graph to whoever is next."""
        with ExitStack() as stack:
            for kind, enabled, dtype in self.autocast:
                stack.enter_context(torch.autocast(kind, dtype=dtype, enabled=enabled, cache_enabled=False))
            yield

    @contextmanager
    def _which_buffers_move(self) -> Iterator[None]:
        """Notes how the buffers were that the first pass changes: BatchNorm's statistics, a spectral norm's vectors."""
        before: dict[str, Tensor] = {}

        def note(*_: Any) -> None:  # from within the forward pass, after DDP has copied rank 0's buffers
            if not before:
                before.update((name, x.clone()) for name, x in self.inner.named_buffers())

        handle = self.inner.register_forward_pre_hook(note)
        try:
            yield
        finally:
            handle.remove()
        now = dict(self.inner.named_buffers())
        self.buffers = {k: x for k, x in before.items() if k in now and not torch.equal(x, now[k])}

    @contextmanager
    def _state_of_then(self) -> Iterator[None]:
        """Buffers as they were before the first pass; afterwards, buffers and random numbers as they are now."""
        buffers = dict(self.inner.named_buffers())
        now = {name: buffers[name].clone() for name in self.buffers}
        states = _random_states(self.devices)
        with torch.no_grad():
            for name, x in self.buffers.items():
                buffers[name].copy_(x)
        try:
            yield
        finally:
            _set_random_states(states, self.devices)
            with torch.no_grad():
                for name, x in now.items():
                    buffers[name].copy_(x)


def _kind(call: _Call) -> str:
    """Of what tensors a chunk is made, as text; nothing if of anything else."""
    leaves, tree = tree_flatten(tuple(call))
    if not all(_is_rows(x) for x in leaves):
        return ""
    return json.dumps([treespec_dumps(tree), [(str(x.dtype)[6:], x.shape[1:]) for x in leaves]])


def _random_states(devices: Iterable[torch.device]) -> list[Tensor]:
    return [torch.get_rng_state(), *(torch.get_device_module(device).get_rng_state(device) for device in devices)]


def _set_random_states(states: Sequence[Tensor], devices: Iterable[torch.device]) -> None:
    cpu, *others = states
    torch.set_rng_state(cpu)
    for state, device in zip(others, devices, strict=True):
        torch.get_device_module(device).set_rng_state(state, device)
