"""An encoder and its chunks: run once without a graph, and once more with one when gradients arrive."""

import itertools
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.parallel import DistributedDataParallel
from torch.utils._pytree import TreeSpec, tree_flatten, tree_leaves, tree_unflatten

from contrastive_zoo.ranks.adjoints import broadcasted
from contrastive_zoo.ranks.compiling import Function
from contrastive_zoo.ranks.devices import DIFFERENTIABLE, is_fsdp
from contrastive_zoo.ranks.row_checks import described
from contrastive_zoo.ranks.session import refuse
from contrastive_zoo.ranks.world import Shards, World
from contrastive_zoo.wrapper.graphs import graph_nodes, leaf_of


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


Chunk = tuple[tuple[Any, ...], Mapping[str, Any]]  # the arguments of one call


def has_samples(x: Any) -> bool:
    """Return whether x is a dense tensor whose dimension 0 counts samples."""
    return isinstance(x, Tensor) and x.layout is torch.strided and not x.is_nested and x.ndim > 0


class ChunkedEncoder:
    """An encoder, its chunks, and the state that the second pass restores."""

    tree: TreeSpec  # the structure of the encoder's output
    sizes: list[list[int]]  # of each chunk, the number of embeddings of each output tensor
    repetitions = 0  # of the last chunk, without effect, where other ranks have more chunks
    is_borrowed = False  # whether its chunk is a row of another rank, whose output is cut

    def __init__(self, model: nn.Module, chunks: list[Chunk]) -> None:
        self.model = model
        self.chunks = [chunk for chunk in chunks if any(len(x) for x in tree_leaves(chunk) if has_samples(x))]
        self.example = (self.chunks or chunks)[:1]  # of a chunk, maybe an empty one
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
        args, kwargs = chunk
        outputs, self.tree = tree_flatten(self.model(*args, **kwargs))
        return [x[:0] if self.is_borrowed and has_samples(x) else x for x in outputs]

    def _first_pass(self) -> list[list[Any]]:
        """Return the leaves of the output of each chunk, without a graph."""
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
        """The parameters whose gradients the node returns: none if hooks of DDP or FSDP collect them."""
        hooked = self.is_sharded or any(hasattr(x, "no_sync") for x in self.model.modules())
        return [] if hooked else [x for x in self.model.parameters() if x.requires_grad]

    @property
    def is_sharded(self) -> bool:
        """Whether FSDP2 gathers parameters in each forward pass, and reduces gradients where they arrive."""
        return any(map(is_fsdp, self.model.modules()))

    def encode_again(self, output_gradients: Sequence[Tensor]) -> dict[Tensor, Tensor]:
        """Run the second pass; return the gradients of parameters that no hooks reduce during the last chunk."""
        self.has_graph, totals = False, dict[Tensor, Tensor]()
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
                    self._run_again(*chunk, totals, index == len(chunks) - 1)
            finally:
                set_buffers(self.module, after)
        if not self.has_graph and self.model.training and any(x.requires_grad for x in self.model.parameters()):
            raise ValueError(
                "GradCache: the encoder's output has no gradient, so that it would not be trained. Remove detach() and "
                "no_grad() from its forward, or call encoder.requires_grad_(False) if it is not to be trained."
            )
        return totals

    def _run_again(
        self,
        chunk: Chunk,
        states: list[Tensor],
        gradients: Sequence[Tensor],
        totals: dict[Tensor, Tensor],
        is_last: bool,
    ) -> None:
        with nullcontext() if is_last else getattr(self.model, "no_sync", nullcontext)():
            with torch.enable_grad(), self._autocast_of_construction():
                set_random_states(states, self.devices)
                outputs = self._outputs(chunk)
            pairs = [(x, gradient) for x, gradient in zip(outputs, gradients, strict=True) if x.requires_grad]
            ends, of_ends = [x for x, _ in pairs], [gradient for _, gradient in pairs]
            self.has_graph |= bool(ends)
            parameters = self.parameters
            if not parameters and (is_last or not self.is_sharded):
                if ends or totals:
                    torch.autograd.backward([*ends, *totals], [*of_ends, *totals.values()])
                totals.clear()
            elif ends:
                # with FSDP the gathered parameters, which the module does not keep
                parameters = parameters or [x for node in graph_nodes(ends) if (x := leaf_of(node)) is not None]
                result = torch.autograd.grad(ends, parameters, of_ends, allow_unused=True)
                for x, gradient in zip(parameters, result, strict=True):
                    if gradient is not None:
                        totals[x] = totals[x] + gradient if x in totals else gradient

    def agree_on_passes(self, world: World, shards: Shards) -> None:
        """Repeat the last chunk, or run a borrowed row, where other ranks have more: a forward pass may send messages."""
        self.world = world
        if min(shards.sizes) == 0:
            chunk = self._borrowed(shards)
            if not self.chunks:
                self.chunks, self.is_borrowed = [chunk], True
        self.repetitions = max(1, *shards.sizes) - len(self.chunks)

    def _borrowed(self, shards: Shards) -> Chunk:
        """Return the first row of a rank that has rows, zeros if none has: a mask without tokens has NaN for a gradient."""
        # BatchNorm refuses a single row, and takes none
        rows = 0 if any(isinstance(x, _BatchNorm) for x in self.model.modules()) else 1
        leaves, tree = tree_flatten(self.example)
        dtypes = [str(x.dtype)[6:] if has_samples(x) else None for x in leaves]
        shapes = [[rows, *x.shape[1:]] if has_samples(x) else None for x in leaves]
        texts = self.world.exchange_text(json.dumps([[str(tree), dtypes], shapes]))
        kinds, shapes_of = zip(*map(json.loads, texts), strict=True)
        if any(of_rank != kinds[0] for of_rank in kinds):
            raise ValueError(
                "GradCache: a rank without samples has other arguments than the other ranks. Pass an empty tensor "
                "there, such as x[:0], and the same further arguments."
            )
        source = max(range(self.world.size), key=lambda rank: shards.sizes[rank] > 0)
        for index, (dtype, shape) in enumerate(zip(dtypes, shapes_of[source], strict=True)):
            if dtype is not None:
                row = leaves[index][:rows]
                if source != self.world.rank or row.shape[0] < rows:
                    row = torch.zeros(shape, dtype=getattr(torch, dtype), device=row.device)
                leaves[index] = broadcasted(row, source, self.world)
        (chunk,) = tree_unflatten(leaves, tree)
        return chunk

    def _embeddings(self) -> list[Tensor]:
        """Return the embeddings of all chunks, without a graph; ranks hear of other outputs in their next handshake."""
        chunks = self._first_pass()
        outputs = list(itertools.chain.from_iterable(chunks))
        if not outputs or not all(map(has_samples, outputs)):
            got = next((described(x) for x in outputs if not has_samples(x)), "no output")
            problem = f"the encoder returns embeddings, dense tensors [n, …], got {got}. Return them from its forward."
            refuse("GradCache", problem, world=self.world)
        self.sizes = [[len(x) for x in of_chunk] for of_chunk in chunks]
        return [torch.cat(parts) for parts in zip(*chunks, strict=True)]

    def encode(self) -> Any:
        """Return the output for all chunks, whose backward pass runs the encoder again."""
        if torch.is_grad_enabled() and any(x.requires_grad for x in self.model.parameters()):
            outputs = _Encode.apply(self, torch.zeros((), requires_grad=True), *self.parameters)
        else:
            outputs = self._embeddings()
        return tree_unflatten(list(outputs), self.tree)


class _Encode(Function):
    """Both passes of an encoder; ``anchor`` makes outputs need a gradient where hooks collect the parameters'."""

    @staticmethod
    def forward(ctx: Any, encoder: ChunkedEncoder, anchor: Tensor, *parameters: Tensor) -> tuple[Tensor, ...]:
        ctx.encoder, ctx.parameters = encoder, parameters
        outputs = encoder._embeddings()
        ctx.mark_non_differentiable(*(x for x in outputs if x.dtype not in DIFFERENTIABLE))
        return tuple(outputs)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        return None, None, *map(ctx.encoder.encode_again(gradients).get, ctx.parameters)
