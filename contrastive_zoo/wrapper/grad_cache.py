"""Large batches in small memory: one autograd node runs the encoder twice, chunk by chunk, without a graph and with one."""

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils._pytree import tree_flatten, tree_leaves, tree_map, tree_unflatten

from contrastive_zoo.ranks.compiling import uncompiled
from contrastive_zoo.ranks.devices import is_fsdp
from contrastive_zoo.ranks.row_checks import described, is_integer, tensor_problem
from contrastive_zoo.ranks.session import agree
from contrastive_zoo.ranks.suggestions import suggests_names
from contrastive_zoo.ranks.world import Processes, ProcessGroupAttribute, World
from contrastive_zoo.wrapper.chunked_encoder import ChunkedEncoder, has_samples
from contrastive_zoo.wrapper.token_chunks import mask_parts, mask_problem


class GradCache(nn.Module):
    """An encoder that holds the activations of ``chunk_size`` samples at a time; call it like the encoder itself.

    The encoder runs chunk by chunk without a graph. In the backward pass it runs again, with the same dropout masks; buffers
    are updated once. DDP may be inside or around it:

        encode = GradCache(DistributedDataParallel(encoder), chunk_size=64)
        loss_fn(encode(images), labels).backward()

    With ``chunk_tokens`` the encoder takes a keyword ``attention_mask``, [n, tokens], padded on one side, and all tensors
    [n, tokens, …] of a chunk are cut to its longest sample (:func:`contrastive_zoo.data.token_chunks`).

    Encode two views by one call, ``encode(torch.cat([view1, view2])).chunk(2)``: then gradients are reduced once. A rank
    without samples encodes one row of another rank and cuts the output, because many encoders take no empty batch. Without
    DDP or FSDP2, call :func:`contrastive_zoo.average_gradients` after ``backward()``.

    Args:
        model: the encoder, with or without DDP around it.
        chunk_size: samples in a chunk.
        chunk_tokens: instead, the most padded tokens of a chunk: its samples times its longest sample.
        process_group: the ranks; None is the group of a DDP model, or the default group.

    Raises:
        ValueError: not one of ``chunk_size`` and ``chunk_tokens``, above 0. At the call, on every rank: tensors of different
            numbers of samples, inputs that need a gradient, a missing mask, a sample longer than ``chunk_tokens``, outputs
            other than dense tensors [n, …], ZeRO 3, DDP's static_graph. In the backward pass: an output without a gradient.

    Examples:
        >>> encode = GradCache(nn.Linear(2, 3), chunk_size=4)
        >>> z = encode(torch.ones(10, 2))        # 4 + 4 + 2 samples
        >>> z.square().sum().backward()          # and again, with a graph
        >>> z.shape, encode.model.weight.grad is not None
        (torch.Size([10, 3]), True)

    Source: Gao et al. 2021, §3, https://arxiv.org/abs/2101.06983
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
                "GradCache needs a torch.nn.Module and either chunk_size= (samples per chunk) or chunk_tokens=, got "
                f"{type(model).__name__}, chunk_size={described(chunk_size)} and chunk_tokens={described(chunk_tokens)}. "
                "Write GradCache(model, chunk_size=64), with the most samples that fit."
            )
        self.model, self.process_group = model, process_group
        self.chunk_size, self.chunk_tokens = chunk_size, chunk_tokens

    @uncompiled
    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Return the encoder's output; tensors are split along dimension 0, anything else goes to every chunk."""
        leaves, tree = tree_flatten((args, kwargs))
        counts = {len(x) for x in leaves if has_samples(x)}
        problem = None if len(counts) == 1 else f"tensors have one number of rows, got {sorted(counts) or 'no tensor'}."
        whole = next((x for x in leaves if isinstance(x, Tensor) and x.ndim and not has_samples(x)), None)
        problem = (None if whole is None else tensor_problem("each input", whole)) or problem
        if any(isinstance(x, Tensor) and x.requires_grad for x in leaves):
            fix = "Put trainable preprocessing into the model, or detach the inputs."
            problem = problem or f"inputs carry a gradient, which stops here. {fix}"
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

        chunks = [tree_unflatten([part(x, *of_chunk) for x in leaves], tree) for of_chunk in parts]
        output = self._encoded(ChunkedEncoder(self.model, chunks), problem or _trainer_problem(self.model))
        if self.chunk_tokens is None:
            return output
        if bad := [x for x in tree_leaves(output) if len(x) != max(counts)]:
            raise ValueError(
                f"GradCache: with chunk_tokens an encoder returns one row for each of {max(counts)} samples, got "
                f"{described(bad[0])}. Pass chunk_size."
            )
        order = torch.cat([rows for rows, _ in parts]).argsort()
        return tree_map(lambda x: x[order], output)

    def _encoded(self, encoder: ChunkedEncoder, problem: str | None) -> Any:
        """Return the encoder's output, after all ranks have agreed that it can run."""
        process_group = self.process_group
        if process_group is None and isinstance(self.model, DistributedDataParallel):
            process_group = self.model.process_group
        # without a backward pass and FSDP ranks send no messages, and one rank may encode alone
        together = torch.is_grad_enabled() or encoder.is_sharded
        world = World.of(process_group if together else World(), "GradCache")
        counts = {"chunks": torch.zeros(len(encoder.chunks))}
        encoder.agree_on_passes(world, *agree("GradCache", counts, world=world, problem=problem).shards)
        return encoder.encode()

    def extra_repr(self) -> str:
        return f"chunk_size={self.chunk_size}" if self.chunk_tokens is None else f"chunk_tokens={self.chunk_tokens}"


def _trainer_problem(model: nn.Module) -> str | None:
    if hasattr(model, "backward") and hasattr(model, "step"):
        return f"{type(model).__name__} owns the backward pass. Put GradCache inside, around the encoder alone."
    if any(hasattr(x, "ds_id") for x in model.parameters()):
        return "ZeRO stage 3 reduces the gradients of each chunk by itself. Use stage 1 or 2, or FSDP2."
    if isinstance(model, DistributedDataParallel) and model.static_graph:  # torch fails in its first no_sync()
        return (
            "DDP with static_graph=True takes no second chunk. Leave static_graph out, or put DDP around: "
            "DistributedDataParallel(GradCache(encoder, chunk_size), static_graph=True)."
        )
    sharded: list[Any] = [x for x in model.modules() if is_fsdp(x)]
    # the first one is outermost; it is a root unless a module around GradCache is sharded, too
    if sharded and sharded[0]._get_fsdp_state()._is_root is False:
        return (
            "a module around GradCache is sharded, and FSDP would reduce the gradients of the first chunk alone. Call "
            "fully_shard on the encoder and its blocks, not on a module that holds GradCache."
        )
    return None
