"""Losses of sentence-transformers on the sentences of all ranks, with unchanged calls and trainers.

Such a loss holds its encoder and calls it on tokens. Tokens are not gathered: during the call the encoder returns all
ranks' embeddings of a column, gathered in rank order. Every rank then computes the same loss from them, and so holds the
complete gradient. Other than in DistributedLoss, the loss does not see one process: the encoder in it sends messages of its
own (SyncBatchNorm, FSDP), and a loss that gathers is refused.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any, cast

from sentence_transformers import SentenceTransformer
from sentence_transformers.base.losses.merged_forward import column_merging_disabled
from sentence_transformers.sentence_transformer.losses import AdaptiveLayerLoss, DenoisingAutoEncoderLoss
from torch import Tensor, nn
from torch.utils._pytree import tree_map

from contrastive_zoo.ranks.adjoints import scale_gradient
from contrastive_zoo.ranks.collectives import all_gather, broadcast
from contrastive_zoo.ranks.handshake import refuse_empty
from contrastive_zoo.ranks.messages import reported
from contrastive_zoo.ranks.randomness import one_stream
from contrastive_zoo.ranks.session import Session, agree_on_shards
from contrastive_zoo.ranks.world import Processes, Shards, World
from contrastive_zoo.wrapper.distributed import LossAttributes
from contrastive_zoo.wrapper.options import GradReduction


class DistributedSentenceLoss(LossAttributes):
    """Compute a loss of sentence-transformers on the sentences of all ranks.

    Let L be the value of ``loss(sentence_features, labels)`` on one process that holds all ranks' sentences in rank
    order. For every split of these, every rank returns L. After the gradient all-reduce of DDP the encoder's gradient
    is ∂L/∂θ. The gradient of the loss's own parameters (a classifier, a projection) is ∂L/∂φ on every rank, before any
    reduction. The first call with several ranks copies these parameters and the loss's buffers from rank 0. One process
    computes ``loss`` unchanged.

    The wrapper has the loss's attributes, so a trainer works unchanged: it replaces ``model`` by DDP (whatever name the
    loss gives its encoder) and reads ``get_config_dict()``, ``citation`` and parameters. Of losses that contain others
    (MatryoshkaLoss) wrap the outermost one. Each rank draws its own dropout masks in the encoder.

    Args:
        loss: any loss around a ``SentenceTransformer`` that asks it for ``sentence_embedding``.
        process_group: the ranks: a process group, a 1-d DeviceMesh, or None for the default group at the time of the
            call.
        grad_reduction: how the trainer reduces the ranks' gradients; ``SentenceTransformerTrainer`` averages them,
            ``"mean"``. ``"sum"``: a sum communication hook, a divide factor of 1.
        check_finite: whether embeddings with NaN or infinite values are refused.

    Raises:
        ValueError: an unknown ``grad_reduction``; a loss without a ``SentenceTransformer``, one that recomputes
            embeddings in its backward pass (``Cached…``, mini-batched ``MegaBatchMarginLoss``), one with
            ``gather_across_devices=True``, one that trains two encoders or a decoder. At the call with several ranks, on
            every rank alike: ranks that differ in columns, widths or dtypes, columns or labels that are not one per sample,
            NaN or infinite embeddings, an empty global batch; ``AdaptiveLayerLoss`` around a compiled encoder.

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

    def __init__(
        self,
        loss: nn.Module,
        *,
        process_group: Processes = None,
        grad_reduction: GradReduction = "mean",
        check_finite: bool = True,
    ) -> None:
        super().__init__()
        if grad_reduction not in ("mean", "sum"):
            raise ValueError(
                f"DistributedSentenceLoss: grad_reduction is 'mean' or 'sum', what the trainer does with gradients, got "
                f"{grad_reduction!r}. SentenceTransformerTrainer averages: 'mean'."
            )
        encoders = _encoders(loss)
        if problem := _problem(loss, encoders):
            raise ValueError(f"DistributedSentenceLoss: {type(loss).__name__} {problem}")
        # first, so that the encoder's parameters have the same names as in the bare loss
        self.model: nn.Module = encoders["model"] if "model" in encoders else next(iter(encoders.values()))
        self.process_group = process_group
        self.grad_reduction = grad_reduction
        self.check_finite = check_finite
        self.loss = loss
        self._guides = [x for x in encoders.values() if x is not self.model]
        self._holders = [(x, name) for x in loss.modules() for name, y in x.named_children() if y is self.model]
        self._parameters_are_equal = False

    def forward(self, sentence_features: Iterable[dict[str, Any]], labels: Tensor | None = None) -> Any:
        """Return the loss of all ranks' sentences, given the local ones.

        Args:
            sentence_features: for each column the encoder's inputs for the local samples.
            labels: [n, …], one per sample, if the loss takes any.
        """
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
        """Return the loss on all ranks' embeddings and labels; every rank computes the same."""
        name, encoder = type(self.loss).__name__, _core(self.model)
        named = {"labels": labels} if isinstance(labels, Tensor) else {}
        problem, is_of_layers = None, any(isinstance(x, AdaptiveLayerLoss) for x in self.loss.modules())
        if is_of_layers and not isinstance(encoder, SentenceTransformer):
            problem = (
                "AdaptiveLayerLoss looks inside the encoder, where compiled code gathers nothing. Do not compile it."
            )
        settings = {"grad_reduction": self.grad_reduction, "number of columns": len(columns)}
        result = agree_on_shards(name, named, world=world, problem=problem, settings=settings)
        rows = result[0] if result else None
        if isinstance(labels, Tensor) and rows is not None:
            refuse_empty(name, rows)
            labels = all_gather(labels, gradient="complete", shards=rows, process_group=world)
        self._copy_parameters_from_rank_0(encoder, world)

        device = next((x.device for x in self.model.parameters()), None)
        with ExitStack() as shared_stream, ExitStack() as patches:

            def gathered_encode(encode: Callable[..., Mapping[str, Any]], *args: Any, **kwargs: Any) -> dict[str, Any]:
                nonlocal rows
                shared_stream.close()  # encoders draw from each rank's own generator, losses from rank 0's
                output = encode(*args, **kwargs)
                z, rows = _gathered(name, output["sentence_embedding"], rows, world)
                shared_stream.enter_context(one_stream(world, device))
                return {**output, "sentence_embedding": z}

            for model in (encoder, *self._guides):
                patches.enter_context(_patched_forward(model, gathered_encode))
            # a merged call would return the columns of one rank after the other, not all ranks' embeddings of a column
            patches.enter_context(column_merging_disabled())
            shared_stream.enter_context(one_stream(world, device))
            return self.loss(columns, labels)

    def _copy_parameters_from_rank_0(self, encoder: nn.Module, world: World) -> None:
        """Copy the loss's own parameters and buffers from rank 0, once: ranks with different seeds drew different ones."""
        if self._parameters_are_equal:
            return
        of_encoders = {x for model in (encoder, *self._guides) for x in (*model.parameters(), *model.buffers())}
        for x in (*self.loss.parameters(), *self.loss.buffers()):
            if x not in of_encoders:
                x.data.copy_(broadcast(x.detach(), process_group=world))
        self._parameters_are_equal = True


def _encoders(loss: nn.Module) -> dict[str, nn.Module]:
    """Return the sentence encoders of a loss and of the losses inside it, by attribute name."""
    result: dict[str, nn.Module] = {}
    for name, child in loss.named_children():
        is_encoder = isinstance(child, SentenceTransformer)
        result = result | {name: child} if is_encoder else _encoders(child) | result
    return result


def _problem(loss: nn.Module, encoders: Mapping[str, nn.Module]) -> str | None:
    parts = list(loss.modules())
    if not encoders:
        return (
            "holds no SentenceTransformer. Losses of embeddings go into contrastive_zoo.DistributedLoss; those of "
            "CrossEncoder, SparseEncoder and MultiVectorEncoder are not supported."
        )
    if any(isinstance(x, DenoisingAutoEncoderLoss) for x in parts):
        return "reads tokens with a decoder and compares no rows: leave it as it is, and wrap its decoder in DDP."
    if cached := [type(x).__name__ for x in parts if getattr(x, "uses_gradient_cache", False)]:
        return (
            f"computes embeddings once more in its backward pass ({cached[-1]}), when no rank waits for them. Pass the "
            "loss without a cache: MultipleNegativesRankingLoss for CachedMultipleNegativesRankingLoss, "
            "use_mini_batched_version=False. For a large batch in small memory see contrastive_zoo.cached_step."
        )
    if any(getattr(x, "gather_across_devices", False) for x in parts):
        return "gathers by itself, and would gather all ranks' rows again. Pass gather_across_devices=False."
    if "model" not in encoders and len({id(x) for x in encoders.values()}) > 1:
        return (
            f"trains {len(encoders)} encoders ({', '.join(encoders)}), of which trainers reduce the gradients of one at "
            "most. Embed with both under DDP, and pass a function of the embeddings to contrastive_zoo.DistributedLoss."
        )
    return None


def _core(model: nn.Module) -> nn.Module:
    """Return the encoder inside of DDP or FSDP, whose layers some losses read; a compiled module is returned as it is."""
    while not isinstance(model, SentenceTransformer) and not hasattr(model, "_orig_mod") and hasattr(model, "module"):
        model = cast(nn.Module, model.module)
    return model


def _gathered(name: str, z: Tensor, rows: Shards | None, world: World) -> tuple[Tensor, Shards]:
    """Return all ranks' embeddings of one column, and the shard sizes, equal to those of the labels or first column."""
    problem = None
    if rows is not None and len(z) != rows.size:
        problem = (
            f"a column has {len(z)} rows where the labels or the first column have {rows.size}. Pass one sentence of "
            "every column, and one label, for each row."
        )
    (shards,) = agree_on_shards(name, {"sentence_embedding": z}, world=world, problem=problem)
    refuse_empty(name, shards)
    z = scale_gradient(z, world.size)
    return all_gather(z, gradient="complete", shards=shards, process_group=world), shards


@contextmanager
def _patched_forward(model: nn.Module, patch: Callable[..., Any]) -> Iterator[None]:
    """Run the body with ``model(…)`` replaced by ``patch(forward, …)``."""
    forward, of_instance = model.forward, vars(model).get("forward")
    model.forward = lambda *args, **kwargs: patch(forward, *args, **kwargs)
    try:
        yield
    finally:
        del model.forward
        if of_instance is not None:
            model.forward = of_instance
