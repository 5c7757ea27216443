"""The known mistakes: what each does wrong, its fix, and its signature in the evidence of a check or of an audit.

Each mistake has a signature: the factor and the direction of the error in the gradients of the encoder and of the loss's
own parameters; whether ranks return the same value; what happens when the samples of some ranks change. The signatures of a
stage are tried in the order of the table. Evidence that fits none is not recognised, and the diagnosis says what was
measured.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from contrastive_zoo.testing.evidence import Comparison, Evidence, Factor, Stage

Signature = Callable[[Evidence], bool]

NOT_RECOGNISED = "not recognised"
"""Name of the diagnosis of evidence that fits no known mistake."""


@dataclass(frozen=True)
class Mistake:
    """A mistake and its fix.

    Args:
        name: a short name.
        why: what the loss or the training does wrong, in a sentence.
        fix: what to do, in a line.
        signatures: by stage, whether the evidence is that of this mistake.
        of_training: whether the audit of a training can name it.
    """

    name: str
    why: str
    fix: str
    signatures: dict[Stage, Signature] = field(default_factory=dict)
    of_training: bool = False


@dataclass(frozen=True)
class Diagnosis:
    """A mistake and what was measured.

    Args:
        mistake: its name, a key of :data:`MISTAKES`.
        measured: in words, relative to one process; empty if that adds nothing.
    """

    mistake: str
    measured: str = ""

    @property
    def why(self) -> str:
        """What the loss or the training does wrong, in a sentence."""
        return MISTAKES[self.mistake].why

    @property
    def fix(self) -> str:
        """What to do, in a line."""
        return MISTAKES[self.mistake].fix

    def as_dict(self) -> dict[str, str]:
        """Return the diagnosis in plain types, for JSON."""
        return {"mistake": self.mistake, "why": self.why, "measured": self.measured, "fix": self.fix}

    def __str__(self) -> str:
        measured = f"Measured: {self.measured}. " if self.measured else ""
        return f"{self.mistake}: {self.why} {measured}Fix: {self.fix}"


def diagnose(evidence: Evidence) -> Diagnosis:
    """Infer the mistake from the evidence of a check or of an audit.

    Examples:
        >>> from contrastive_zoo.testing.gallery import GALLERY
        >>> from contrastive_zoo.testing.probes import LossEvidence
        >>> from contrastive_zoo.testing.worlds import Worlds
        >>> with Worlds() as worlds:
        ...     diagnose(LossEvidence(GALLERY["own slice"].case, ["same_encoder_gradient"], worlds)).mistake
        'own slice'
    """
    for stage in evidence.stages:
        for mistake in MISTAKES.values():
            fits = mistake.signatures.get(stage)
            if fits is not None and mistake.of_training >= evidence.is_training and fits(evidence):
                return Diagnosis(mistake.name, str(evidence) if evidence.is_training else "")
    return Diagnosis(NOT_RECOGNISED, str(evidence))


def table() -> str:
    """Return the mistakes that an audit names as a table in Markdown, which the documentation shows."""
    rows = [f"| {x.name} | {x.why} | {x.fix} |".replace("|W|", "W") for x in MISTAKES.values() if x.of_training]
    return "\n".join(["| diagnosis | what happens | fix |", "| --- | --- | --- |", *rows])


# --- signatures of more than a line ---------------------------------------------------------------------------------


def _breaks(invariant: str) -> Signature:
    return lambda e: invariant in e.broken


def _is_gathered_first(e: Evidence) -> bool:
    return e.option is not None and e.every(lambda x: x.gathered)


def _is_summed(e: Evidence) -> bool:
    """Return whether a trainer sums gradients of a loss that expects a mean."""
    if not e.is_step:
        return e.trainer == "sum" and e.is_scaled("W", "W")
    reduced = e.is_scaled("W", "W") or e.is_scaled("W", "1")
    return e.has_encoder and reduced and e.passes_on("W")


def _is_averaged(e: Evidence) -> bool:
    """Return whether a trainer averages gradients of a loss that expects a sum."""
    is_known = e.option == "sum" or (e.has_parameters and not e.is_training)
    return is_known and e.is_scaled("1/W", "1/W") and e.passes_on("1")


def _keeps_own_slice(e: Evidence) -> bool:
    is_scaled = e.has_encoder and e.is_scaled("1/W", "1")
    return is_scaled and e.passes_on("1") and not e.calls_in_backward


def _lacks_parameter_reduction(e: Evidence) -> bool:
    """Return whether a step reduces the encoder's gradient but not that of the loss's parameters."""

    def is_local(x: Comparison) -> bool:
        right = x.encoder is None or x.encoder.is_scaled(1.0)
        return right and x.parameters is not None and x.parameters.lack_reduction

    # of a loss for a sum trainer each rank holds 1/W of the gradient
    return e.is_step and (e.every(is_local) or (e.option == "sum" and _has_scaled_parameters(e, "1/W")))


def _has_scaled_parameters(e: Evidence, factor: Factor) -> bool:
    return e.has_parameters and e.is_scaled("1", factor)


def _averages_means(e: Evidence) -> bool:
    """Return whether every rank returns the mean of the ranks' means: half the value if one of two ranks has no samples."""
    assert e.uneven is not None
    x = e.one_sided
    return e.uneven.equal_values and (x is None or x.has_values(0.5) or bool(x.values.isnan().all()))


def _returns_local_means(e: Evidence) -> bool:
    """Return whether the ranks' values, weighted by their numbers of samples, give the value of one process."""
    x = e.uneven
    assert x is not None
    weights = x.values.new_tensor(x.shards) / sum(x.shards)
    return x.near(weights @ x.values, x.expected)


# --- the table ------------------------------------------------------------------------------------------------------

_WRAP_THE_LOSS = "wrap the one-process loss: DistributedLoss(loss)."

_ENTRIES = (
    Mistake(
        "no process group",
        "the script never initialises torch.distributed: every process trains its own model.",
        "call torch.distributed.init_process_group before the training, or use the launcher of the trainer.",
        of_training=True,
    ),
    Mistake(
        "different numbers of steps",
        "a rank ends its training earlier than another one, which waits for it or trains alone.",
        "give all ranks equally many batches; DistributedLoss accepts empty ones (ShardedBatches of examples/digits.py).",
        of_training=True,
    ),
    Mistake(
        "same shard",
        "every rank trains on the same samples: the batch is one shard, repeated W times.",
        "use a sampler that splits the data over ranks, such as torch.utils.data.DistributedSampler.",
        of_training=True,
    ),
    Mistake(
        "not sharded",
        "every rank draws from the whole dataset, so that a sample is seen W times in an epoch.",
        "use a sampler that splits the data over ranks, such as torch.utils.data.DistributedSampler.",
        of_training=True,
    ),
    Mistake(
        "repeated samples",
        "a sampler repeats samples so that all shards have the same size; the loss compares a repeated sample with itself.",
        "drop_last=True, even_batches=False, or a sampler that yields uneven shards: ShardedBatches of examples/digits.py.",
        of_training=True,
    ),
    Mistake(
        "no set_epoch",
        "every epoch has the order of the first one, and so the same batches with the same negatives.",
        "call sampler.set_epoch(epoch) before each epoch.",
        of_training=True,
    ),
    Mistake(
        "not optimized",
        "no optimizer holds the parameters of the loss: they keep their initial values.",
        "Optimizer([*model.parameters(), *loss_fn.parameters()]), or make the loss a member of the model.",
        of_training=True,
    ),
    Mistake(
        "never zeroed",
        "gradients are not cleared between steps and add up: the trainer clears those of the model only.",
        "optimizer.zero_grad() in place of model.zero_grad(); for the Hugging Face Trainer, ContrastiveTrainerMixin of "
        "contrastive_zoo.adapters.huggingface, or the loss as a member of the model.",
        of_training=True,
    ),
    Mistake(
        "accumulation not divided",
        "the loss of each micro-batch is not divided by the number of accumulated micro-batches: gradients are a sum.",
        "divide the loss by their number. For the Hugging Face Trainer use ContrastiveTrainerMixin of "
        "contrastive_zoo.adapters.huggingface.",
        of_training=True,
    ),
    Mistake(
        "times W, accumulation not divided",
        "the loss is multiplied by the number of processes and not divided by the number of accumulated micro-batches.",
        "use ContrastiveTrainerMixin of contrastive_zoo.adapters.huggingface, or divide the loss by both.",
        of_training=True,
    ),
    Mistake(
        "divided by W",
        "the loss is divided by the number of processes before the backward pass, and the trainer averages gradients.",
        "leave the division out.",
        of_training=True,
    ),
    Mistake(
        "hang",
        "a rank does not enter a collective that the others wait in, for example because it has no samples or no valid "
        "pair.",
        "run the same collectives on every rank; a rank without a valid pair contributes a zero that is still "
        "connected to the graph.",
        {"failure": lambda e: e.failure == "hang"},
    ),
    Mistake(
        "raises",
        "the loss works on one process and raises on several.",
        _WRAP_THE_LOSS,
        {"failure": lambda e: e.failure == "raises"},
    ),
    Mistake(
        "uneven shards",
        "the loss works on equal shards and raises on unequal ones.",
        "gather with contrastive_zoo.collectives.all_gather, which accepts any number of samples per rank; or "
        + _WRAP_THE_LOSS,
        {"failure": lambda e: e.failure == "uneven shards"},
    ),
    Mistake(
        "batch statistics",
        "the encoder computes statistics of the local batch (BatchNorm): an embedding depends on the other samples of its "
        "rank.",
        "torch.nn.SyncBatchNorm.convert_sync_batchnorm(model), or a normalisation of single samples.",
        {"value": lambda e: e.depends_on_shard},
        of_training=True,
    ),
    Mistake(
        "gathered first",
        "the embeddings are gathered before the loss, which gathers them again: every sample counts W times.",
        "pass the local embeddings (and local labels) to the loss.",
        {"value": _is_gathered_first, "gradient": _is_gathered_first},
        of_training=True,
    ),
    Mistake(
        "detached",
        "the gathered embeddings carry no gradient: the encoder learns nothing from this loss.",
        "gather with contrastive_zoo.all_gather.",
        {"gradient": lambda e: e.has_encoder and e.is_scaled("0", "1")},
        of_training=True,
    ),
    Mistake(
        "not reduced",
        "the step does not reduce the encoder's gradient over ranks, so that replicas diverge.",
        "wrap the model in DistributedDataParallel, or call contrastive_zoo.average_gradients(model) after backward.",
        {"gradient": lambda e: e.every(lambda x: x.encoder is not None and x.encoder.lack_reduction)},
        of_training=True,
    ),
    Mistake(
        "trainer sums",
        "the loss assumes a trainer that averages gradients and runs under one that sums: all gradients are W times too "
        "large.",
        "DistributedLoss(loss, grad_reduction='sum').",
        {"gradient": _is_summed},
        of_training=True,
    ),
    Mistake(
        "times W",
        "the loss is multiplied by the number of processes W, often to cancel the gradient average of DDP: all gradients, "
        "or those of the loss's own parameters alone, are W times too large.",
        "leave the factor out; where it cancels an average, scale only the gradient of the gathered embeddings, as "
        "DistributedLoss does. The Hugging Face Trainer multiplies with average_tokens_across_devices=True: use "
        "ContrastiveTrainerMixin of contrastive_zoo.adapters.huggingface.",
        {
            "value": lambda e: e.every(lambda x: x.has_values(x.world_size)),
            "gradient": lambda e: e.is_step and e.is_scaled("W", "W") and e.passes_on("W²"),
        },
        of_training=True,
    ),
    Mistake(
        "local negatives",
        "each rank compares only its local samples; those of other ranks are ignored.",
        _WRAP_THE_LOSS,
        {"value": lambda e: e.selection == "local negatives"},
        of_training=True,
    ),
    Mistake(
        "own rank first",
        "each rank puts its local samples first, so results that depend on the order (miners, queues, ties) differ.",
        "keep rank order, as contrastive_zoo.collectives.all_gather does.",
        {"value": lambda e: e.selection == "own rank first"},
    ),
    Mistake(
        "labels not gathered",
        "the embeddings of all ranks are combined with the labels of one rank.",
        "gather labels with the embeddings (contrastive_zoo.collectives.all_gather takes integers), or "
        + _WRAP_THE_LOSS,
        {"value": lambda e: e.selection == "labels not gathered" or e.lacks_labels},
    ),
    Mistake(
        "views split wrongly",
        "several views are gathered in one tensor and split in the wrong places: the blocks of the ranks are "
        "P N P N … and are read as P P … N N ….",
        "gather each view separately.",
        {"value": lambda e: e.selection == "views split wrongly"},
    ),
    Mistake(
        "local loss × W",
        "each rank returns the mean over its local anchors, multiplied by W: the gather already sums gradients over "
        "ranks, so all gradients are W times too large.",
        "do not multiply the loss by W; return global sum / global count on every rank, as DistributedLoss does.",
        {"value": lambda e: e.has_mean("W") and e.is_scaled("W", "W")},
    ),
    Mistake(
        "mean of means",
        "the means of the ranks are averaged: on uneven shards samples of small shards have a larger weight.",
        "divide the global sum by the global count.",
        {"uneven": _averages_means},
    ),
    Mistake(
        "local loss",
        "each rank returns the mean over its local anchors: gradients are right on even shards, the value is that of "
        "one rank, and on uneven shards samples of small shards have a larger weight.",
        "return global sum / global count on every rank, as DistributedLoss does.",
        {
            "value": lambda e: e.has_mean("1") and e.is_scaled("1", "1"),
            "uneven": _returns_local_means,
        },
    ),
    Mistake(
        "trainer averages",
        "the loss assumes a trainer that sums gradients and runs under one that averages: all gradients are W times too "
        "small.",
        "DistributedLoss(loss, grad_reduction='mean').",
        {"gradient": _is_averaged},
        of_training=True,
    ),
    Mistake(
        "own slice",
        "the backward pass of the gather keeps only the local slice, so the gradient average of DDP divides the "
        "encoder's gradient by W; the gradient of the loss's own parameters is right.",
        "gather with contrastive_zoo.collectives.all_gather, whose backward pass sums over ranks; do not multiply "
        "the loss by W, which also scales the value and the gradient of the loss's own parameters.",
        {"gradient": lambda e: _keeps_own_slice(e) and e.calls("gather")},
        of_training=True,
    ),
    Mistake(
        "statistic without gradient",
        "a statistic is all-reduced without gradient: its value is right, but each rank differentiates only its local "
        "term, and the gradient average of DDP divides the encoder's gradient by W.",
        "reduce the statistic with contrastive_zoo.collectives.all_reduce, which is differentiable.",
        {"gradient": lambda e: _keeps_own_slice(e) and e.calls("reduce") and not e.calls("gather")},
    ),
    Mistake(
        "counted W times",
        "every rank already holds the complete gradient, and the backward pass of the gather sums it over ranks again.",
        "pass all_gather(rows, gradient='complete') where every rank computes the same loss.",
        {"gradient": lambda e: e.is_scaled("W", "1") and e.passes_on("W²")},
    ),
    Mistake(
        "rescaled by batch size",
        "a hand-written backward pass multiplies the gradient by the square root of the local batch size: the encoder's "
        "gradient is √W times too small.",
        "return the derivative of the value; change the learning rate instead of the gradient.",
        {"gradient": lambda e: e.is_scaled("1/√W", "1")},
    ),
    Mistake(
        "parameters not reduced",
        "the step reduces the encoder's gradient over ranks but not that of the loss's own parameters, so that each "
        "rank learns its own.",
        "wrap the loss in DistributedLoss, whose parameters get equal gradients on all ranks, or reduce their gradients "
        "as the encoder's.",
        {
            "value": lambda e: e.has_mean("1") and _lacks_parameter_reduction(e),
            "gradient": _lacks_parameter_reduction,
        },
        of_training=True,
    ),
    Mistake(
        "parameters scaled",
        "the encoder's gradient is right; the gradient of the loss's own parameters is wrong by a factor.",
        "do not scale the loss; scale the gradient of the embeddings.",
        {"gradient": lambda e: _has_scaled_parameters(e, "W") or _has_scaled_parameters(e, "1/W")},
        of_training=True,
    ),
    Mistake(
        "local parameters",
        "the gradient of the loss's own parameters differs between ranks before the gradient all-reduce; parameters "
        "outside the DDP model then diverge.",
        "pass the parameter through contrastive_zoo.collectives.replicated before it is used, or " + _WRAP_THE_LOSS,
        {"gradient": lambda e: _has_scaled_parameters(e, "1")},
    ),
    Mistake(
        "detached candidates",
        "local anchors are compared with detached candidates: the gradient of other ranks' anchors with respect to the "
        "local embeddings is lost, and the direction of the gradient is wrong.",
        "gather with a gradient (contrastive_zoo.collectives.all_gather), or " + _WRAP_THE_LOSS,
        {"value": lambda e: e.has_mean("1") and e.calls("gather") and not e.calls_in_backward and not e.has_direction},
    ),
    Mistake(
        "wrong direction",
        "the value is right and the direction of the gradient is wrong: the backward pass of a collective is not its "
        "adjoint, or a part of the graph is detached.",
        "use the collectives of contrastive_zoo, whose backward passes are their adjoints, and detach nothing.",
        {"gradient": lambda e: e.calls_in_backward and not e.has_direction},
    ),
    Mistake(
        "mask without offset",
        "local anchors are compared with gathered candidates, but the index of the positive (or of the anchor itself) "
        "lacks the offset of the local shard.",
        "add the number of samples on lower ranks to the index, or use contrastive_zoo.pair_masks.",
        {"value": lambda e: e.lacks_offset},
    ),
    Mistake(
        "labels by position",
        "the same id denotes different samples on different ranks (arange(n) on each), so unrelated samples become "
        "positives.",
        "use contrastive_zoo.engine.global_sample_ids, which numbers samples over all ranks.",
        {"value": lambda e: e.uses_positions},
    ),
    Mistake(
        "ignored grad_output",
        "a hand-written backward pass ignores grad_output: loss weights and gradient scalers have no effect.",
        "multiply by grad_output in backward.",
        {"other": _breaks("scales_with_grad_output")},
    ),
    Mistake(
        "overwritten tensors",
        "a hand-written backward pass keeps its tensors in one place, and a second forward pass overwrites them.",
        "save them with ctx.save_for_backward.",
        {"other": _breaks("gradients_accumulate")},
    ),
    Mistake(
        "state",
        "a queue, centre or running statistic is updated with local samples only, so that ranks diverge.",
        "update it with the gathered samples, in rank order.",
        {"other": _breaks("same_state")},
    ),
    Mistake(
        "overflow",
        "exponentials are summed over ranks without subtracting their common maximum.",
        "all-reduce the maximum first, subtract it, then all-reduce the sums.",
        {"other": _breaks("finite_at_extremes")},
    ),
    Mistake(
        "different random numbers",
        "each rank draws different random numbers, so that ranks compute different losses.",
        "draw on rank 0 and broadcast; or " + _WRAP_THE_LOSS,
        {"other": _breaks("same_random_numbers")},
    ),
    Mistake(
        "sharded parameters",
        "the gradient of sharded parameters is scaled for an all-reduce that does not take place.",
        "do not scale it: the gradient of a shard is complete on the rank that holds the shard.",
        {"other": _breaks("same_sharded_gradient")},
    ),
    Mistake(
        "later steps",
        "the first call is right and a later one is not: a rank reuses sizes, buffers or a path of an earlier call.",
        "decide from values that all ranks have exchanged in this step; do not reuse sizes, paths or buffers.",
        {"other": _breaks("same_at_later_steps")},
    ),
    Mistake(
        "settings",
        "ranks with different settings continue to train, each with another loss.",
        "compare a digest of all settings before gathering; or " + _WRAP_THE_LOSS,
        {"other": _breaks("settings_agree")},
    ),
    Mistake(
        "unequal parameters",
        "the loss's own parameters differ between ranks, for example proxies initialised with a seed per rank.",
        "use one seed for the loss on all ranks, or DistributedLoss(loss, broadcast_parameters=True), which also "
        "compares them at the first step and at intervals.",
        {"start": lambda e: True, "other": _breaks("parameters_agree")},
        of_training=True,
    ),
    Mistake(
        "missing argument",
        "a rank that lacks an argument raises or gathers less, while the other ranks wait.",
        "exchange which arguments are present before gathering; or " + _WRAP_THE_LOSS,
        {"other": _breaks("arguments_agree")},
    ),
    Mistake(
        "messages differ",
        "a rank calls another sequence of collectives than the others.",
        "decide from exchanged values whether a message is sent, and how large it is.",
        {"other": _breaks("same_messages")},
    ),
    Mistake(
        NOT_RECOGNISED,
        "value or gradients depend on the number of processes, and no known mistake explains how.",
        _WRAP_THE_LOSS,
        of_training=True,
    ),
)

MISTAKES = {x.name: x for x in _ENTRIES}
"""All mistakes by name, in the order in which their signatures are tried."""
