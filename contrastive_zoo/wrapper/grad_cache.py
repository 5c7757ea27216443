"""Large batches in small memory: one autograd node runs the encoder twice, chunk by chunk, without a graph and with one."""

import itertools
from collections.abc import Callable, Iterable, Sequence
from importlib import metadata
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils._pytree import tree_flatten, tree_leaves, tree_map, tree_unflatten

from contrastive_zoo.ranks.row_checks import described, is_integer, tensor_problem
from contrastive_zoo.ranks.session import agree_on_shards
from contrastive_zoo.ranks.suggestions import suggests_names
from contrastive_zoo.ranks.world import Processes, ProcessGroupAttribute, World
from contrastive_zoo.wrapper.chunked_encoder import Chunk, ChunkedEncoder, encode_all, has_samples
from contrastive_zoo.wrapper.token_chunks import mask_parts, mask_problem


def cached_step(
    model: nn.Module | Sequence[nn.Module],
    chunks: Iterable[Any],
    loss_fn: Callable[..., Tensor],
    *targets: Any,
    scaler: torch.amp.GradScaler | None = None,
    process_group: Processes = None,
) -> Float[Tensor, ""]:
    """Run forward and backward of ``loss_fn(model(all chunks), *targets)``, with the activations of one chunk at a time.

    The gradients are those of ``loss_fn(torch.cat([model(x) for x in chunks]), *targets).backward()``: both passes draw
    the same dropout masks, and buffers are updated once. DDP and FSDP2 reduce gradients once; without them, call
    :func:`contrastive_zoo.average_gradients` afterwards. Ranks may hold different numbers of chunks. One without
    chunks encodes a row of another rank, as :class:`GradCache` does.

    Args:
        model: an encoder, or a sequence of encoders, one for each tower. A module may return several tensors.
        chunks: the encoder's arguments, chunk by chunk: a tensor, a tuple of arguments or a mapping of keywords. With
            several encoders, one such sequence for each. Inputs receive no gradient.
        loss_fn: takes the embeddings of all chunks, one tensor for each tower (or output), then ``targets``. With
            several ranks it is a ``DistributedLoss``.
        targets: labels and other arguments of the loss, of all chunks.
        scaler: scales the loss before the backward pass; then step with ``scaler.step(optimizer)`` as usual.
        process_group: the ranks; None is the group of a DDP model, or the default group at the time of the call.

    Returns:
        The loss, detached and unscaled.

    Raises:
        ValueError: on every rank alike: no chunk; no chunk on one rank and chunks of other things than tensors on others;
            chunks that need a gradient; bad models, chunks or outputs. On its rank: ``loss_fn`` returns several numbers.
        TypeError: ``loss_fn`` returns no tensor.

    Examples:
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
    several = isinstance(model, (tuple, list))
    models: Sequence[Any] = model if isinstance(model, (tuple, list)) else (model,)
    sequences: Any = [chunks] if not several else list(chunks) if _is_sequence(chunks) else chunks
    problem, encoders = _step_problem(models, sequences, loss_fn, several), []
    if problem is None:
        encoders = [ChunkedEncoder(x, list(map(Chunk.of, its))) for x, its in zip(models, sequences, strict=True)]
    inputs = [x for encoder in encoders for x in tree_leaves(list(encoder.chunks))]
    outputs = _encoded("cached_step", models, encoders, problem or _inputs_problem(inputs), process_group)
    loss = loss_fn(*itertools.chain.from_iterable(tree_leaves(output) for output in outputs), *targets)
    if not isinstance(loss, Tensor):
        raise TypeError(f"cached_step: loss_fn returns one number as a tensor, got {described(loss)}.")
    if loss.numel() != 1:
        raise ValueError(f"cached_step: loss_fn returns one number as a tensor, got {described(loss)}. Reduce it.")
    (loss if scaler is None else scaler.scale(loss)).backward()
    return loss.detach()


def _is_sequence(x: object) -> bool:
    """Return whether x holds inputs; arrays without dimensions have an iterator that fails."""
    return isinstance(x, Iterable) and getattr(x, "ndim", 1) > 0


def _step_problem(models: Sequence[Any], sequences: Any, loss_fn: object, several: bool) -> str | None:
    if not isinstance(sequences, list) or not all(map(_is_sequence, sequences)):
        what = " for each model" if several and isinstance(sequences, list) else ""
        return f"chunks are a sequence of inputs{what}, got {described(sequences if several else sequences[0])}."
    if not callable(loss_fn):
        return f"loss_fn is a function of embeddings, got {described(loss_fn)}."
    if not models:
        return "there is at least one model, got none."
    if result := [type(x).__name__ for x in models if not isinstance(x, nn.Module)]:
        return f"a model is a torch.nn.Module, got {result[0]}. Wrap a method in a module that calls it."
    if len(sequences) != len(models):
        return f"each model has its sequence of chunks, got {len(models)} models and {len(sequences)} sequences."
    return None


class GradCache(nn.Module):
    """An encoder that holds the activations of ``chunk_size`` samples at a time; call it like the encoder itself.

    In the backward pass the encoder runs again chunk by chunk, as in :func:`cached_step`. DDP may be inside or around it:

        encode = GradCache(DistributedDataParallel(encoder), chunk_size=64)
        loss_fn(encode(images), labels).backward()

    With ``chunk_tokens`` the encoder takes a keyword ``attention_mask``, [n, tokens], padded on one side, and all tensors
    [n, tokens, …] of a chunk are cut to its longest sample (:func:`contrastive_zoo.data.token_chunks`).

    Encode two views by one call, ``encode(torch.cat([view1, view2])).chunk(2)``: then gradients are reduced once. A rank
    without samples encodes one row of another rank and cuts the output, because many encoders take no empty batch.

    Args:
        model: the encoder, with or without DDP around it.
        chunk_size: samples in a chunk.
        chunk_tokens: instead, the most padded tokens of a chunk: its samples times its longest sample.
        process_group: the ranks; None is the group of a DDP model, or the default group.

    Raises:
        ValueError: not one of ``chunk_size`` and ``chunk_tokens``, above 0. At the call, on every rank: tensors of different
            numbers of samples, inputs that need a gradient, a missing mask, a sample longer than ``chunk_tokens``, outputs
            other than dense tensors [n, …]. In the backward pass: an output without a gradient. With ZeRO 3: a second call
            of the encoder, or a last chunk that leaves out a parameter.

    Examples:
        >>> encode = GradCache(nn.Linear(2, 3), chunk_size=4)
        >>> z = encode(torch.ones(10, 2))        # 4 + 4 + 2 samples
        >>> z.square().sum().backward()          # and again, with a graph
        >>> z.shape, encode.model.weight.grad is not None
        (torch.Size([10, 3]), True)
    """

    process_group = ProcessGroupAttribute()

    @suggests_names("Pass the encoder and chunk_size=, the samples in a chunk.")
    def __init__(
        self,
        model: nn.Module,
        chunk_size: int | None = None,
        *,
        chunk_tokens: int | None = None,
        process_group: Processes = None,
    ) -> None:
        super().__init__()
        sizes = [x for x in (chunk_size, chunk_tokens) if x is not None]
        if len(sizes) != 1 or not is_integer(sizes[0], at_least=1) or not isinstance(model, nn.Module):
            raise ValueError(
                "GradCache needs a torch.nn.Module, and chunk_size= (samples in a chunk) or chunk_tokens=, at least 1, got "
                f"{type(model).__name__}, chunk_size={described(chunk_size)} and chunk_tokens={described(chunk_tokens)}. "
                "Pass the most samples that fit: GradCache(model, chunk_size=64)."
            )
        self.model, self.process_group = model, process_group
        self.chunk_size, self.chunk_tokens = chunk_size, chunk_tokens
        self._last_reduction = [-1]

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Return the encoder's output; tensors are split along dimension 0, anything else goes to every chunk."""
        leaves, tree = tree_flatten((args, kwargs))
        counts = {len(x) for x in leaves if has_samples(x)}
        problem = None if len(counts) == 1 else f"tensors have one number of rows, got {sorted(counts) or 'no tensor'}."
        whole = next((x for x in leaves if isinstance(x, Tensor) and x.ndim and not has_samples(x)), None)
        problem = (None if whole is None else tensor_problem("each input", whole)) or problem or _inputs_problem(leaves)
        mask: Any = kwargs.get("attention_mask")
        parts: list[tuple[Any, slice]] = []  # samples of each chunk, and the columns of tensors of tokens
        if self.chunk_tokens is not None:
            problem = problem or mask_problem(mask, self.chunk_tokens)
            parts = [] if problem else [*mask_parts(mask, self.chunk_tokens)]
        elif problem is None and self.chunk_size is not None:
            starts = range(0, max(counts) or 1, self.chunk_size)
            parts = [(slice(start, start + self.chunk_size), slice(None)) for start in starts]

        def part(x: Any, rows: Any, columns: slice) -> Any:
            if not has_samples(x):
                return x
            return x[rows, columns] if columns != slice(None) and x.shape[1:2] == mask.shape[1:2] else x[rows]

        chunks = [Chunk(*tree_unflatten([part(x, *of_chunk) for x in leaves], tree)) for of_chunk in parts]
        encoder = ChunkedEncoder(self.model, chunks, self._last_reduction)
        (output,) = _encoded("GradCache", [self.model], [encoder], problem, self.process_group)
        if self.chunk_tokens is None:
            return output
        if bad := [x for x in tree_leaves(output) if len(x) != max(counts)]:
            raise ValueError(
                f"GradCache: with chunk_tokens an encoder returns one row for each of {max(counts)} samples, got "
                f"{described(bad[0])}. Pass chunk_size."
            )
        order = torch.cat([rows for rows, _ in parts]).argsort()
        return tree_map(lambda x: x[order], output)

    def extra_repr(self) -> str:
        return f"chunk_size={self.chunk_size}" if self.chunk_tokens is None else f"chunk_tokens={self.chunk_tokens}"


def _trainer_problem(model: nn.Module) -> str | None:
    if hasattr(model, "backward") and hasattr(model, "step"):
        return f"{type(model).__name__} owns the backward pass. Put GradCache inside, around the encoder alone."
    if any(hasattr(x, "ds_id") for x in model.parameters()):
        installed = metadata.version("deepspeed")
        if tuple(map(int, installed.split(".")[:2])) < (0, 17):
            return f"ZeRO stage 3 reduces gradients of all chunks at once since DeepSpeed 0.17, got {installed}. Upgrade it."
    sharded: list[Any] = [x for x in model.modules() if hasattr(x, "_get_fsdp_state")]
    # the first one is outermost; it is a root unless a module around GradCache is sharded, too
    if sharded and sharded[0]._get_fsdp_state()._is_root is False:
        return (
            "a module around GradCache is sharded, and FSDP would reduce the gradients of the first chunk alone. Call "
            "fully_shard on the encoder and its blocks, not on a module that holds GradCache."
        )
    return None


def _inputs_problem(inputs: Sequence[Any]) -> str | None:
    problem = (
        "chunks carry a gradient, which stops here. Put trainable preprocessing into the model, or detach the inputs."
    )
    return problem if any(isinstance(x, Tensor) and x.requires_grad for x in inputs) else None


def _encoded(
    caller: str, models: Sequence[Any], encoders: list[ChunkedEncoder], problem: str | None, process_group: Processes
) -> list[Any]:
    """Return the encoders' outputs, after all ranks have agreed that each of them can run."""
    problem = problem or next(filter(None, (_trainer_problem(encoder.model) for encoder in encoders)), None)
    if process_group is None:
        process_group = next((x.process_group for x in models if isinstance(x, DistributedDataParallel)), None)
    # without a backward pass ranks send no messages, and one rank may encode alone
    world = World.of(process_group if torch.is_grad_enabled() else World(), caller)
    counts = {f"chunks of tower {i}": torch.zeros(len(encoder.chunks)) for i, encoder in enumerate(encoders)}
    for encoder, shards in zip(encoders, agree_on_shards(caller, counts, world=world, problem=problem), strict=True):
        encoder.agree_on_passes(caller, world, shards)
    return encode_all(encoders)
