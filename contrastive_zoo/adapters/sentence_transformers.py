"""Losses of sentence-transformers on the sentences of all ranks, with unchanged calls and trainers.

Such a loss holds its encoder and calls it on tokens. During the call the encoder returns all ranks' embeddings of a column;
every rank then computes the same loss. Of a loss with a gradient cache, ``calculate_loss`` takes all ranks' embeddings.
"""

from collections.abc import Callable, Iterable, Mapping
from contextlib import ExitStack
from functools import partial
from typing import Any, cast
from unittest.mock import patch

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils._pytree import tree_map

from contrastive_zoo.loss_base.loss_modules import LossModules
from contrastive_zoo.ranks.adjoints import scale_gradient
from contrastive_zoo.ranks.collectives import all_gather, broadcast
from contrastive_zoo.ranks.handshake import refuse_empty
from contrastive_zoo.ranks.messages import reported
from contrastive_zoo.ranks.randomness import one_stream
from contrastive_zoo.ranks.row_checks import described, word_problem
from contrastive_zoo.ranks.session import Session, agree, refuse
from contrastive_zoo.ranks.suggestions import needed
from contrastive_zoo.ranks.world import Processes, ProcessGroupAttribute, Shards, World
from contrastive_zoo.wrapper.call_history import CallHistory, join_problem
from contrastive_zoo.wrapper.distributed import GradReduction, Wrapper

with needed("contrastive_zoo.adapters.sentence_transformers", "sentence-transformers[train]>=6"):
    from sentence_transformers import MultiVectorEncoder, SentenceTransformer, SparseEncoder
    from sentence_transformers.base.losses.gradcache import uses_gradient_cache
    from sentence_transformers.base.losses.merged_forward import column_merging_disabled
    from sentence_transformers.sentence_transformer.losses import AdaptiveLayerLoss, DenoisingAutoEncoderLoss
    from sentence_transformers.util import cat_padded_token_embeddings

ENCODERS = (SentenceTransformer, SparseEncoder, MultiVectorEncoder)
# what losses read of an encoder's output; those after the first are a SparseAutoEncoder's
_OF_SPARSE = ("sentence_embedding_backbone", *(f"decoded_embedding_{x}" for x in ("k", "4k", "aux", "k_pre_bias")))
_OF_SAMPLES = ("sentence_embedding", *_OF_SPARSE)
_OF_TOKENS = "token_embeddings", "attention_mask"  # of a MultiVectorEncoder's output
_OF_A_RANK = {"mini_batch_size", "show_progress_bar"}  # what may differ between ranks


class DistributedSentenceLoss(Wrapper):
    """Compute a loss of sentence-transformers on the sentences of all ranks.

    Every rank returns the value L of ``loss(sentence_features, labels)`` on one process with all ranks' sentences. After
    DDP's gradient all-reduce the encoder's gradient is ∂L/∂θ. The gradient of the loss's own parameters is ∂L/∂φ on every
    rank, before any reduction; the first call copies them, and buffers, from rank 0.

    The wrapper has the loss's attributes, so a trainer works unchanged. Of losses that contain others (MatryoshkaLoss)
    wrap the outermost one. Each rank draws its own dropout masks in the encoder.

    Args:
        loss: any loss around a ``SentenceTransformer``, ``SparseEncoder`` or ``MultiVectorEncoder``, with a gradient cache
            (``Cached…``) or without.
        process_group: a process group, a 1-d DeviceMesh, or None for the default group at the time of the call.
        grad_reduction: what the trainer does with gradients; ``SentenceTransformerTrainer`` averages them, ``"mean"``.
        check_finite: whether embeddings with NaN or infinite values are refused.

    Raises:
        ValueError: an unknown ``grad_reduction``; a loss without such an encoder, one that gathers, trains two encoders or
            a decoder, or embeds chunks otherwise than by a gradient cache of its own. At the call with several ranks, the
            same on every rank: another loss, other settings, columns, widths or dtypes on some rank, or other parameters
            after the first call; columns or labels that are not one per sample, NaN or infinite embeddings, an empty
            global batch, an active ``join()``; ``AdaptiveLayerLoss`` around a compiled encoder.

    Examples:
        >>> import torch
        >>> from sentence_transformers.sentence_transformer.losses import CosineSimilarityLoss
        >>> class Identity(nn.Module):                 # an encoder of numbers instead of words
        ...     def forward(self, features):
        ...         return {"sentence_embedding": features["x"]}
        >>> loss_fn = DistributedSentenceLoss(CosineSimilarityLoss(SentenceTransformer(modules=[Identity()], device="cpu")))
        >>> loss_fn([{"x": torch.eye(2)}, {"x": torch.ones(2, 2)}], torch.ones(2))      # (1 − 1/√2)²
        tensor(0.0858)
    """

    process_group = ProcessGroupAttribute()

    def __init__(
        self,
        loss: nn.Module,
        *,
        process_group: Processes = None,
        grad_reduction: GradReduction = "mean",
        check_finite: bool = True,
    ) -> None:
        super().__init__()
        if problem := word_problem("grad_reduction", grad_reduction, GradReduction):
            raise ValueError(f"DistributedSentenceLoss: {problem} SentenceTransformerTrainer averages: 'mean'.")
        encoders = _encoders(loss)
        if problem := _problem(loss, encoders):
            raise ValueError(f"DistributedSentenceLoss: {type(loss).__name__} {problem}")
        # first, so that the encoder's parameters have the same names as in the bare loss
        self.model: nn.Module = encoders.get("model", next(iter(encoders.values())))
        self.process_group, self.grad_reduction, self.check_finite = process_group, grad_reduction, check_finite
        self.loss = loss
        self._guides = [x for x in encoders.values() if x is not self.model]
        self._cached = next((x for x in loss.modules() if _is_cached(x)), None)
        self._holders = [(x, name) for x in loss.modules() for name, y in x.named_children() if y is self.model]
        self._history = CallHistory()

    def forward(self, sentence_features: Iterable[dict[str, Any]], labels: Tensor | None = None) -> Any:
        """Return the loss of all ranks' sentences, given the local inputs of each column, and labels if it takes any."""
        world = World.of(self.process_group, type(self.loss).__name__)
        session = Session.of(world, check_finite=self.check_finite)
        for module, attribute in self._holders:  # a trainer replaces ``model`` by DDP, and no other attribute
            setattr(module, attribute, self.model)
        if session.size == 1:
            return self.loss(sentence_features, labels)
        with reported(session):
            value = self._of_all_ranks(list(sentence_features), labels, session)
        if self.grad_reduction == "sum":
            value = tree_map(lambda x: scale_gradient(x, 1 / session.size), value)
        return value

    def _of_all_ranks(self, columns: list[dict[str, Any]], labels: Tensor | None, world: World) -> Any:
        name, encoder, history = type(self.loss).__name__, _core(self.model), self._history
        modules = LossModules(self.loss, apart={x for of in (self.model, *self._guides) for x in of.modules()})
        held = {key: x for key, x in modules.settings().items() if key.rpartition(".")[2] not in _OF_A_RANK}
        named = {"labels": labels} if isinstance(labels, Tensor) else {}
        is_of_layers = any(isinstance(x, AdaptiveLayerLoss) for x in self.loss.modules())
        words = "AdaptiveLayerLoss looks inside the encoder, where compiled code gathers nothing. Do not compile it."
        problem = words if is_of_layers and not isinstance(encoder, SentenceTransformer) else None
        settings = {**held, "grad_reduction": self.grad_reduction, "number of columns": len(columns)}
        history.enter(world.state)
        state = modules.shared_state() if history.wrapper else {}  # the first call copies it
        agreed = agree(
            name, named, world=world, problem=problem or join_problem(), settings=settings, wrapper=history.wrapper,
            made=history.made, level=history.fingerprint(state, {}).level if state else None, state=state,
        )  # fmt: skip
        history.calls, history.wrapper = history.calls + 1, agreed.wrapper
        world.state.wrappers[agreed.wrapper] = history
        rows = agreed.shards[0] if agreed.shards else None
        if isinstance(labels, Tensor) and rows is not None:
            refuse_empty(name, rows)
            labels = all_gather(labels, gradient="complete", shards=rows, process_group=world)
        if agreed.wrapper == agreed.number:  # the first call: ranks with different seeds drew different ones
            for x in modules.shared_state().values():
                x.data.copy_(broadcast(x.detach(), process_group=world))

        device = next((x.device for x in self.model.parameters()), None)
        if self._cached is not None:
            return self._of_all_caches(columns, labels, rows, world, device)
        with ExitStack() as shared_stream, ExitStack() as patches:

            def gathered_encode(encode: Callable[..., Mapping[str, Any]], *args: Any, **kwargs: Any) -> dict[str, Any]:
                nonlocal rows
                shared_stream.close()  # encoders draw from each rank's own generator, losses from rank 0's
                output = encode(*args, **kwargs)
                names = _OF_TOKENS if isinstance(encoder, MultiVectorEncoder) else _OF_SAMPLES
                features = output if isinstance(output, Mapping) else {}
                local = {key: features[key] for key in names if isinstance(features.get(key), Tensor)}
                if not local:
                    got = ", ".join(features) or described(output)
                    words = f"each encoder and guide returns a dict with one of {', '.join(names)}, got {got}."
                    refuse(name, words, world=world)
                of_all, rows = _gathered(name, local, rows, world)
                shared_stream.enter_context(one_stream(world, device))
                return {**output, **of_all}

            for model in (encoder, *self._guides):
                patches.enter_context(patch.object(model, "forward", partial(gathered_encode, model.forward)))
            # a merged call would return the columns of one rank after the other, not all ranks' embeddings of a column
            patches.enter_context(column_merging_disabled())
            shared_stream.enter_context(one_stream(world, device))
            return self.loss(columns, labels)

    def _of_all_caches(
        self, columns: list[dict[str, Any]], labels: Tensor | None, rows: Shards | None, world: World, device: Any
    ) -> Any:
        """Return a loss with a gradient cache, whose cache holds the complete gradient of this rank's embeddings."""
        name, cached = type(self.loss).__name__, cast(Any, self._cached)

        def embed_nothing(column: dict[str, Any], *, with_grad: bool) -> Any:
            return cached.embed_minibatch(column, 0, 0, with_grad=with_grad, copy_random_state=False)

        def gathered_calculate(
            calculate: Callable[..., Tensor], chunks: list[list[Tensor]], beside: Any = None, **kwargs: Any
        ) -> Tensor:
            nonlocal rows
            has_partners = isinstance(beside, list)  # a mask of tokens or a guide's embeddings, and no labels
            all_rows: list[list[Tensor]] = []
            for index, (column, parts) in enumerate(zip(columns, chunks, strict=True)):
                partners = beside[index] if has_partners else []
                if not parts:
                    z, *others = embed_nothing(column, with_grad=False)
                    parts, partners = [z.detach().requires_grad_()], others[:1] if has_partners else []
                local = _of_chunks(parts, partners)
                of_all, rows = _gathered(name, local, rows, world)
                all_rows.append([*of_all.values()])
            embeddings = [x[0].detach().requires_grad_() for x in all_rows]
            beside = [[x[1]] for x in all_rows] if has_partners else beside
            with one_stream(world, device):
                value = calculate([[z] for z in embeddings], beside, **kwargs)
            used = [(x[0], z.grad) for x, z in zip(all_rows, embeddings, strict=True) if z.grad is not None]
            torch.autograd.backward([x for x, _ in used], [gradient for _, gradient in used])
            return value

        with patch.object(cached, "calculate_loss", partial(gathered_calculate, cached.calculate_loss)):
            value = self.loss(columns, labels)
        if rows is not None and rows.size == 0 and torch.is_grad_enabled():
            # DDP waits for a backward pass of every rank
            nothing = 0 * embed_nothing(columns[0], with_grad=True)[0].sum()
            value = tree_map(lambda x: x + nothing.to(x.dtype), value)
        return value


def _encoders(loss: nn.Module) -> dict[str, nn.Module]:
    """Return the sentence encoders of a loss and of the losses inside it, by attribute name."""
    result: dict[str, nn.Module] = {}
    for name, child in loss.named_children():
        is_encoder = isinstance(child, ENCODERS)
        result = result | {name: child} if is_encoder else _encoders(child) | result
    return result


def _problem(loss: nn.Module, encoders: Mapping[str, nn.Module]) -> str | None:
    parts = list(loss.modules())
    if not encoders:
        return (
            "holds no SentenceTransformer, SparseEncoder or MultiVectorEncoder. Wrap a loss of embeddings in "
            "contrastive_zoo.DistributedLoss; a loss of a CrossEncoder needs no wrapper, because it compares no embeddings."
        )
    if any(isinstance(x, DenoisingAutoEncoderLoss) for x in parts):
        return "reads tokens with a decoder and compares no rows: leave it as it is, and wrap its decoder in DDP."
    if (cached := [type(x).__name__ for x in parts if _is_cached(x)]) and not uses_gradient_cache(loss):
        return (
            f"has no gradient cache, and contains {cached[0]}, which has: embeddings of mini-batches are then those of one "
            f"rank. Pass a loss without a cache: MultipleNegativesRankingLoss for CachedMultipleNegativesRankingLoss."
        )
    of_tokens = [x for x in parts if isinstance(getattr(x, "model", None), MultiVectorEncoder)]
    if not cached and any(x.mini_batch_size for x in of_tokens):
        return (
            "embeds a column in chunks, after which all ranks' documents would be in another order than the queries. Pass "
            "mini_batch_size=None, or the loss with a gradient cache."
        )
    if any(getattr(x, "gather_across_devices", False) for x in parts):
        return "gathers by itself, and would gather all ranks' rows again. Pass gather_across_devices=False."
    if "model" not in encoders and len({id(x) for x in encoders.values()}) > 1:
        return (
            f"trains {len(encoders)} encoders ({', '.join(encoders)}), but a trainer averages the gradients of one only. "
            "Embed with both under DDP, and pass a function of the embeddings to contrastive_zoo.DistributedLoss."
        )
    return None


def _core(model: nn.Module) -> nn.Module:
    """Return the encoder inside of DDP or FSDP; a compiled module is returned as it is."""
    while not isinstance(model, SentenceTransformer) and not hasattr(model, "_orig_mod") and hasattr(model, "module"):
        model = cast(nn.Module, model.module)
    return model


def _is_cached(loss: nn.Module) -> bool:
    """Return whether it is a loss that embeds mini-batches twice, and no MatryoshkaLoss around one."""
    return uses_gradient_cache(loss) and hasattr(loss, "calculate_loss")


def _of_chunks(chunks: list[Tensor], partners: list[Tensor]) -> dict[str, Tensor]:
    if partners and chunks[0].ndim == 3:
        return dict(zip(_OF_TOKENS, cat_padded_token_embeddings(chunks, partners), strict=True))
    columns = {"sentence_embedding": chunks, "guide": partners}
    return {name: torch.cat(x) for name, x in columns.items() if x}


def _gathered(
    name: str, local: dict[str, Tensor], rows: Shards | None, world: World
) -> tuple[dict[str, Tensor], Shards]:
    """Return all ranks' embeddings of one column, and the shard sizes, equal to those of the labels or first column."""
    z, problem = next(iter(local.values())), None
    if rows is not None and len(z) != rows.size:
        expected = f"where the labels or the first column have {rows.size}"
        problem = (
            f"a column has {len(z)} rows {expected}. Pass one sentence of every column, and one label, for each row."
        )
    if z.ndim == 3:
        # the sum has NaN where any token has; an empty tensor of as many rows tells the number of tokens
        stated = {"token_embeddings": z.sum(1), "tokens": z.new_empty(z.shape[1], 0)}
        shards, tokens = agree(name, stated, world=world, problem=problem).shards
        missing = max(tokens.sizes) - z.shape[1]
        local = {key: F.pad(x, [0] * 2 * (x.ndim - 2) + [0, missing]) for key, x in local.items()}
    else:
        (shards,) = agree(name, {"sentence_embedding": z}, world=world, problem=problem).shards
    refuse_empty(name, shards)
    gather = partial(all_gather, gradient="complete", shards=shards, process_group=world)
    scaled = {key: scale_gradient(x, world.size) if x.is_floating_point() else x for key, x in local.items()}
    return {key: gather(x) for key, x in scaled.items()}, shards
