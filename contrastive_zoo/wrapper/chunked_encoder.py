"""An encoder and its chunks: run once without a graph, and once more with one when gradients arrive."""

import itertools
import json
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.parallel import DistributedDataParallel
from torch.utils._pytree import TreeSpec, tree_flatten, tree_leaves, tree_unflatten, treespec_dumps, treespec_loads

from contrastive_zoo.ranks.adjoints import broadcasted
from contrastive_zoo.ranks.compat import backward_pass
from contrastive_zoo.ranks.compiling import Function
from contrastive_zoo.ranks.devices import DIFFERENTIABLE
from contrastive_zoo.ranks.handshake import refuse_empty
from contrastive_zoo.ranks.row_checks import described
from contrastive_zoo.ranks.session import refuse
from contrastive_zoo.ranks.world import Shards, World


def set_random_states(states: Sequence[Tensor], devices: Iterable[torch.device]) -> None:
    torch.set_rng_state(states[0])
    for state, device in zip(states[1:], devices, strict=True):
        torch.get_device_module(device).set_rng_state(state, device)


@contextmanager
def buffers_before(module: nn.Module) -> Iterator[dict[str, Tensor]]:
    """Context manager: yields a dict that gets the former values of the buffers that the body changes."""
    before: dict[str, Tensor] = {}
    changed: dict[str, Tensor] = {}

    def record(*_: Any) -> None:  # a hook, since DDP copies rank 0's buffers when its forward begins
        if not before:
            before.update((name, x.clone()) for name, x in module.named_buffers())

    handle = module.register_forward_pre_hook(record)
    try:
        yield changed
    finally:
        handle.remove()
    after = dict(module.named_buffers())
    changed.update((name, x) for name, x in before.items() if name in after and not torch.equal(x, after[name]))


@torch.no_grad()
def set_buffers(module: nn.Module, values: Mapping[str, Tensor]) -> None:
    buffers = dict(module.named_buffers())
    for name, x in values.items():
        buffers[name].copy_(x)


class Chunk(NamedTuple):
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]

    @classmethod
    def of(cls, arguments: Any) -> "Chunk":
        """Return a tensor, a tuple of arguments or a mapping of keywords as a chunk."""
        if isinstance(arguments, Mapping):
            return cls((), dict(arguments))
        return cls(tuple(arguments) if isinstance(arguments, (tuple, list)) else (arguments,), {})


def has_samples(x: Any) -> bool:
    """Return whether x is a dense tensor whose dimension 0 counts samples."""
    return isinstance(x, Tensor) and x.layout is torch.strided and not x.is_nested and x.ndim > 0


def is_empty(chunk: Chunk) -> bool:
    counts = [len(x) for x in tree_leaves(tuple(chunk)) if has_samples(x)]
    return bool(counts) and not any(counts)


def leaves(outputs: Sequence[Tensor]) -> list[Tensor]:
    """Return the tensors at which a graph ends: with FSDP the gathered parameters, which the module does not keep."""
    nodes: dict[Any, None] = dict.fromkeys(x.grad_fn for x in outputs)
    remaining = list(nodes)
    while remaining:
        following = [node for node, _ in remaining.pop().next_functions if node is not None and node not in nodes]
        nodes.update(dict.fromkeys(following))
        remaining += following
    return [node.variable for node in nodes if node.name() == "torch::autograd::AccumulateGrad"]


class ChunkedEncoder:
    """An encoder, its chunks, and the state that the second pass restores."""

    tree: TreeSpec  # the structure of the encoder's output
    sizes: list[list[int]]  # of each chunk, the number of embeddings of each output tensor
    repetitions = 0  # of the last chunk, without effect, where other ranks have more chunks
    is_borrowed = False  # whether its chunk is a row of another rank, whose output is cut

    def __init__(self, model: nn.Module, chunks: list[Chunk], last_reduction: list[int] | None = None) -> None:
        # with ZeRO 3, the backward pass in which gradients were reduced last
        self.model, self.last_reduction = model, last_reduction or [-1]
        self.chunks = [x for x in chunks if not is_empty(x)]
        self.example = next(iter(self.chunks or chunks), None)  # of a chunk, maybe an empty one
        self.devices = sorted({x.device for x in model.parameters() if x.device.type != "cpu"}, key=str)
        kinds = ("cpu", *{device.type for device in self.devices})
        self.autocast = [(x, torch.get_autocast_dtype(x), torch.is_autocast_enabled(x)) for x in kinds]
        self.module = model.module if isinstance(model, DistributedDataParallel) else model
        self.buffers: Mapping[str, Tensor] = {}  # before the first pass, those that it changes
        self.random_states: list[list[Tensor]] = []  # before each chunk of the first pass

    def _random_numbers_kept(self) -> AbstractContextManager[None]:
        return torch.random.fork_rng(self.devices, device_type=self.devices[0].type if self.devices else "cuda")

    @contextmanager
    def _autocast_of_construction(self) -> Iterator[None]:
        """Context manager: without autocast's cache, which would pass on weights that were cast without a graph."""
        with ExitStack() as stack:
            for kind in self.autocast:
                stack.enter_context(torch.autocast(*kind, cache_enabled=False))
            yield

    def _outputs(self, chunk: Chunk) -> list[Any]:
        outputs, self.tree = tree_flatten(self.model(*chunk.args, **chunk.kwargs))
        return [x[:0] if self.is_borrowed and has_samples(x) else x for x in outputs]

    def encode(self) -> list[list[Any]]:
        """Run the first pass: return the leaves of the output of each chunk, without a graph."""
        result = []
        with torch.no_grad(), self._autocast_of_construction(), buffers_before(self.module) as self.buffers:
            for chunk in self.chunks:
                of_devices = (torch.get_device_module(device).get_rng_state(device) for device in self.devices)
                self.random_states.append([torch.get_rng_state(), *of_devices])
                result.append(self._outputs(chunk))
            with self._random_numbers_kept(), buffers_before(self.module) as before:
                for _ in range(self.repetitions):
                    self._outputs(self.chunks[-1])
            set_buffers(self.module, before)
        return result

    @property
    def parameters(self) -> list[Tensor]:
        """The parameters whose gradients the node returns: none if hooks of DDP, FSDP or ZeRO 3 collect them."""
        hooked = self._is_sharded or self._partitioned or any(hasattr(x, "no_sync") for x in self.model.modules())
        return [] if hooked else [x for x in self.model.parameters() if x.requires_grad]

    @property
    def _is_sharded(self) -> bool:
        """Whether FSDP2 reduces the gradients of each backward pass that arrives at a parameter."""
        return any(hasattr(x, "set_requires_gradient_sync") for x in self.model.modules())

    @property
    def _partitioned(self) -> list[Any]:
        """The trainable parameters that stage 3 of ZeRO gathers for each module, and whose gradients it reduces."""
        return [x for x in self.model.parameters() if x.requires_grad and hasattr(x, "ds_id")]

    @contextmanager
    def _held(self) -> Iterator[None]:
        """Context manager: gradients add up on this rank; ZeRO 3 reads a mark of each parameter."""
        parameters = self._partitioned
        with getattr(self.model, "no_sync", nullcontext)():
            for x in parameters:
                x.ds_grad_is_ready = False
            try:
                yield
            finally:
                for x in parameters:
                    x.ds_grad_is_ready = True

    @contextmanager
    def _reduced(self) -> Iterator[None]:
        """Context manager: hooks reduce gradients; those of ZeRO 3 only once, of parameters that the body uses."""
        parameters, arrived = self._partitioned, set[Tensor]()
        if parameters and self.last_reduction == [backward_pass()]:
            raise ValueError(
                "GradCache: ZeRO stage 3 reduces an encoder's gradients once in a backward pass, got two calls of it. "
                "Encode all samples by one call, such as encode(torch.cat([view1, view2])).chunk(2)."
            )
        handles = [x.register_post_accumulate_grad_hook(arrived.add) for x in parameters]
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()
        self.last_reduction[0] = backward_pass()
        for x in parameters:
            # DeepSpeed itself completes the gradients of its leaf modules
            if x.grad is not None and x not in arrived and not hasattr(x, "ds_z3_leaf_module"):
                raise ValueError(
                    "GradCache: with ZeRO stage 3 each chunk uses the same parameters, got one of shape "
                    f"{list(x.ds_shape)} that the last chunk does not use. Use stage 1 or 2, or FSDP2."
                )

    def encode_again(self, output_gradients: list[Tensor], totals: dict[Tensor, Tensor], *, sync: bool) -> None:
        """Run the second pass, which adds gradients to ``totals``; with ``sync`` hooks reduce them during the last chunk."""
        self.has_graph = False
        sizes = zip(*self.sizes, strict=True)
        by_output = (x.split(list(of)) for x, of in zip(output_gradients, sizes, strict=True))
        chunks = list(zip(self.chunks, self.random_states, zip(*by_output, strict=True), strict=True))
        repeated = self.chunks[-1], self.random_states[-1], tuple(map(torch.zeros_like, chunks[-1][2]))
        present = dict(self.module.named_buffers())
        after = {name: present[name].clone() for name in self.buffers}
        set_buffers(self.module, self.buffers)
        with self._random_numbers_kept():
            try:
                for _ in range(self.repetitions):
                    self._run_again(*repeated, totals, False)
                    set_buffers(self.module, self.buffers)
                for index, chunk in enumerate(chunks):
                    self._run_again(*chunk, totals, sync and index == len(chunks) - 1)
            finally:
                set_buffers(self.module, after)
        if not self.has_graph and self.model.training and any(x.requires_grad for x in self.model.parameters()):
            raise ValueError(
                f"{self.caller}: the encoder's output has no gradient, so that it would not be trained. Remove detach() and "
                "no_grad() from its forward, or call encoder.requires_grad_(False) if it is not to be trained."
            )

    def _run_again(
        self,
        chunk: Chunk,
        states: list[Tensor],
        gradients: Sequence[Tensor],
        totals: dict[Tensor, Tensor],
        is_last: bool,
    ) -> None:
        with self._reduced() if is_last else self._held():
            with torch.enable_grad(), self._autocast_of_construction():
                set_random_states(states, self.devices)
                outputs = self._outputs(chunk)
            pairs = [(x, gradient) for x, gradient in zip(outputs, gradients, strict=True) if x.requires_grad]
            ends, of_ends = [x for x, _ in pairs], [gradient for _, gradient in pairs]
            self.has_graph |= bool(ends)
            parameters = self.parameters
            if not parameters and (is_last or not self._is_sharded):
                if ends or totals:
                    torch.autograd.backward([*ends, *totals], [*of_ends, *totals.values()])
                totals.clear()
            elif ends:
                parameters = parameters or leaves(ends)
                result = torch.autograd.grad(ends, parameters, of_ends, allow_unused=True)
                for x, gradient in zip(parameters, result, strict=True):
                    if gradient is not None:
                        totals[x] = totals[x] + gradient if x in totals else gradient

    def agree_on_passes(self, caller: str, world: World, shards: Shards) -> None:
        """Repeat the last chunk, or run a borrowed row, where other ranks have more: a forward pass may send messages."""
        self.caller, self.world = caller, world
        if min(shards.sizes) == 0:
            chunk = self._borrowed(shards)
            if not self.chunks:
                self.chunks, self.is_borrowed = [chunk], True
        self.repetitions = max(1, *shards.sizes) - len(self.chunks)

    def _borrowed(self, shards: Shards) -> Chunk:
        """Return the first row of a rank that has rows, zeros if none has: a mask without tokens has NaN for a gradient."""
        # BatchNorm refuses a single row, and takes none
        rows = 0 if any(isinstance(x, _BatchNorm) for x in self.model.modules()) else 1
        leaves, tree = tree_flatten(tuple(self.example or ()))
        dtypes = [str(x.dtype)[6:] if has_samples(x) else None for x in leaves]
        kind = [dtypes, None if None in dtypes else treespec_dumps(tree)]
        shapes = [[rows, *x.shape[1:]] if has_samples(x) else None for x in leaves]
        texts = self.world.exchange_text(json.dumps([kind, shapes]) if self.example else "")
        brought = {rank: json.loads(text) for rank, text in enumerate(texts) if text}
        if not brought:
            refuse_empty(self.caller, shards)
        source = max(brought, key=lambda rank: shards.sizes[rank] > 0)
        (dtypes, structure), shapes = brought[source]
        if any(of != brought[source][0] for of, _ in brought.values()) or (structure is None and "" in texts):
            raise ValueError(
                f"{self.caller}: a rank without samples has other arguments than the other ranks, or none. Pass an empty "
                "chunk there, such as x[:0], and the same further arguments."
            )
        if self.example is None:
            device = next((x.device for x in self.model.parameters()), None)
            leaves, tree = [torch.empty(0, device=device)] * len(dtypes), treespec_loads(structure)
        for index, (dtype, shape) in enumerate(zip(dtypes, shapes, strict=True)):
            if dtype is not None:
                row = leaves[index][:rows]
                if source != self.world.rank or row.shape[0] < rows:
                    row = torch.zeros(shape, dtype=getattr(torch, dtype), device=row.device)
                leaves[index] = broadcasted(row, source, self.world)
        return Chunk(*tree_unflatten(leaves, tree))


def encode_all(encoders: Sequence[ChunkedEncoder]) -> list[Any]:
    """Return each encoder's output for all its chunks; the outputs' backward pass runs the encoders again."""
    is_trainable = any(x.requires_grad for encoder in encoders for x in encoder.model.parameters())
    if torch.is_grad_enabled() and is_trainable:
        parameters = dict.fromkeys(x for encoder in encoders for x in encoder.parameters)  # towers may share some
        outputs = iter(_Encode.apply(encoders, torch.zeros((), requires_grad=True), *parameters))
    else:
        outputs = iter(_first_passes(encoders))
    return [tree_unflatten(list(itertools.islice(outputs, x.tree.num_leaves)), x.tree) for x in encoders]


def _first_passes(encoders: Sequence[ChunkedEncoder]) -> list[Tensor]:
    """Return the embeddings of all encoders, without a graph; ranks hear of other outputs in their next handshake."""
    passes = [encoder.encode() for encoder in encoders]
    for encoder, chunks in zip(encoders, passes, strict=True):
        outputs = list(itertools.chain.from_iterable(chunks))
        if not outputs or not all(map(has_samples, outputs)):
            got = next((described(x) for x in outputs if not has_samples(x)), "no output")
            problem = f"the encoder returns embeddings, dense tensors [n, …], got {got}. Return them from its forward."
            refuse(encoder.caller, problem, world=encoder.world)
        encoder.sizes = [[len(x) for x in of_chunk] for of_chunk in chunks]
    return [torch.cat(parts) for chunks in passes for parts in zip(*chunks, strict=True)]


class _Encode(Function):
    """Both passes of all encoders; ``anchor`` makes outputs need a gradient where hooks collect the parameters'."""

    @staticmethod
    def forward(
        ctx: Any, encoders: Sequence[ChunkedEncoder], anchor: Tensor, *parameters: Tensor
    ) -> tuple[Tensor, ...]:
        ctx.encoders, ctx.parameters = encoders, parameters
        outputs = _first_passes(encoders)
        ctx.mark_non_differentiable(*(x for x in outputs if x.dtype not in DIFFERENTIABLE))
        return tuple(outputs)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        arriving = iter(gradients)
        totals: defaultdict[nn.Module, dict[Tensor, Tensor]] = defaultdict(dict)
        for index, encoder in enumerate(ctx.encoders):
            is_last_use = all(encoder.model is not other.model for other in ctx.encoders[index + 1 :])
            of_outputs = list(itertools.islice(arriving, encoder.tree.num_leaves))
            encoder.encode_again(of_outputs, totals[encoder.model], sync=is_last_use)
        parts = ([of_model[x] for of_model in totals.values() if x in of_model] for x in ctx.parameters)
        return None, None, *(sum(of_x[1:], of_x[0]) if of_x else None for of_x in parts)
