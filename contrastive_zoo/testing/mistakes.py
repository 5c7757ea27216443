"""The known mistakes: what each does wrong, and its fix."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Diagnosis:
    """A mistake and its fix.

    Args:
        mistake: a short name.
        why: what the loss does wrong, in a sentence.
        fix: what to do, in a line.
    """

    mistake: str
    why: str
    fix: str

    def __str__(self) -> str:
        return f"{self.mistake}: {self.why} Fix: {self.fix}"


NOT_RECOGNISED = "not recognised"
"""Name of the diagnosis of a loss that fits no known mistake."""

_WRAP_THE_LOSS = "wrap the one-process loss: DistributedLoss(loss)."

DIAGNOSES = {
    x.mistake: x
    for x in (
        Diagnosis(
            "hang",
            "a rank does not enter a collective that the others wait in, for example because it has no samples or no valid "
            "pair.",
            "run the same collectives on every rank; a rank without a valid pair contributes a zero that is still "
            "connected to the graph.",
        ),
        Diagnosis(
            "uneven shards",
            "the loss works on equal shards and raises on unequal ones.",
            "gather with contrastive_zoo.collectives.all_gather, which accepts any number of samples per rank; or "
            + _WRAP_THE_LOSS,
        ),
        Diagnosis(
            "raises",
            "the loss works on one process and raises on several.",
            _WRAP_THE_LOSS,
        ),
        Diagnosis(
            "own slice",
            "the backward pass of the gather keeps only the local slice, so the gradient average of DDP divides the "
            "encoder's gradient by W; the gradient of the loss's own parameters is right.",
            "gather with contrastive_zoo.collectives.all_gather, whose backward pass sums over ranks; do not multiply "
            "the loss by W, which also scales the value and the gradient of the loss's own parameters.",
        ),
        Diagnosis(
            "statistic without gradient",
            "a statistic is all-reduced without gradient: its value is right, but each rank differentiates only its local "
            "term, and the gradient average of DDP divides the encoder's gradient by W.",
            "reduce the statistic with contrastive_zoo.collectives.all_reduce, which is differentiable.",
        ),
        Diagnosis(
            "times W",
            "the loss is multiplied by W to cancel the gradient average of DDP; the logged value and the gradient of the "
            "loss's own parameters are W times too large.",
            "do not scale the value; scale only the gradient of the gathered embeddings, as DistributedLoss does.",
        ),
        Diagnosis(
            "detached",
            "the gathered embeddings carry no gradient: the encoder learns nothing from this loss.",
            "gather with contrastive_zoo.all_gather.",
        ),
        Diagnosis(
            "detached candidates",
            "local anchors are compared with detached candidates: the gradient of other ranks' anchors with respect to the "
            "local embeddings is lost, and the direction of the gradient is wrong.",
            "gather with a gradient (contrastive_zoo.collectives.all_gather), or " + _WRAP_THE_LOSS,
        ),
        Diagnosis(
            "wrong direction",
            "the value is right and the direction of the gradient is wrong: the backward pass of a collective is not its "
            "adjoint, or a part of the graph is detached.",
            "use the collectives of contrastive_zoo, whose backward passes are their adjoints, and detach nothing.",
        ),
        Diagnosis(
            "counted W times",
            "every rank already holds the complete gradient, and the backward pass of the gather sums it over ranks again.",
            "pass all_gather(rows, gradient='complete') where every rank computes the same loss.",
        ),
        Diagnosis(
            "local loss",
            "each rank returns the mean over its local anchors: gradients are right on even shards, the value is that of "
            "one rank, and on uneven shards samples of small shards have a larger weight.",
            "return global sum / global count on every rank, as DistributedLoss does.",
        ),
        Diagnosis(
            "mean of means",
            "the means of the ranks are averaged: on uneven shards samples of small shards have a larger weight.",
            "divide the global sum by the global count.",
        ),
        Diagnosis(
            "local negatives",
            "each rank compares only its local samples; those of other ranks are ignored.",
            _WRAP_THE_LOSS,
        ),
        Diagnosis(
            "mask without offset",
            "local anchors are compared with gathered candidates, but the index of the positive (or of the anchor itself) "
            "lacks the offset of the local shard.",
            "add the number of samples on lower ranks to the index, or use contrastive_zoo.pair_masks.",
        ),
        Diagnosis(
            "views split wrongly",
            "several views are gathered in one tensor and split in the wrong places: the blocks of the ranks are "
            "P N P N … and are read as P P … N N ….",
            "gather each view separately.",
        ),
        Diagnosis(
            "labels by position",
            "the same id denotes different samples on different ranks (arange(n) on each), so unrelated samples become "
            "positives.",
            "use contrastive_zoo.engine.global_sample_ids, which numbers samples over all ranks.",
        ),
        Diagnosis(
            "labels not gathered",
            "the embeddings of all ranks are combined with the labels of one rank.",
            "gather labels with the embeddings (contrastive_zoo.collectives.all_gather takes integers), or "
            + _WRAP_THE_LOSS,
        ),
        Diagnosis(
            "own rank first",
            "each rank puts its local samples first, so results that depend on the order (miners, queues, ties) differ.",
            "keep rank order, as contrastive_zoo.collectives.all_gather does.",
        ),
        Diagnosis(
            "local parameters",
            "the gradient of the loss's own parameters differs between ranks before the gradient all-reduce; parameters "
            "outside the DDP model then diverge.",
            "pass the parameter through contrastive_zoo.collectives.replicated before it is used, or " + _WRAP_THE_LOSS,
        ),
        Diagnosis(
            "parameters scaled",
            "the encoder's gradient is right; the gradient of the loss's own parameters is wrong by a factor.",
            "do not scale the loss; scale the gradient of the embeddings.",
        ),
        Diagnosis(
            "trainer sums",
            "the loss assumes a trainer that averages gradients and runs under one that sums: all gradients are W times too "
            "large.",
            "DistributedLoss(loss, grad_reduction='sum').",
        ),
        Diagnosis(
            "trainer averages",
            "the loss assumes a trainer that sums gradients and runs under one that averages: all gradients are W times too "
            "small.",
            "DistributedLoss(loss, grad_reduction='mean').",
        ),
        Diagnosis(
            "ignored grad_output",
            "a hand-written backward pass ignores grad_output: loss weights and gradient scalers have no effect.",
            "multiply by grad_output in backward.",
        ),
        Diagnosis(
            "overwritten tensors",
            "a hand-written backward pass keeps its tensors in one place, and a second forward pass overwrites them.",
            "save them with ctx.save_for_backward.",
        ),
        Diagnosis(
            "state",
            "a queue, centre or running statistic is updated with local samples only, so that ranks diverge.",
            "update it with the gathered samples, in rank order.",
        ),
        Diagnosis(
            "overflow",
            "exponentials are summed over ranks without subtracting their common maximum.",
            "all-reduce the maximum first, subtract it, then all-reduce the sums.",
        ),
        Diagnosis(
            "later steps",
            "the first call is right and a later one is not: a rank reuses sizes, buffers or a path of an earlier call.",
            "decide from values that all ranks have exchanged in this step; do not reuse sizes, paths or buffers.",
        ),
        Diagnosis(
            "different random numbers",
            "each rank draws different random numbers, so that ranks compute different losses.",
            "draw on rank 0 and broadcast; or " + _WRAP_THE_LOSS,
        ),
        Diagnosis(
            "sharded parameters",
            "the gradient of sharded parameters is scaled for an all-reduce that does not take place.",
            "do not scale it: the gradient of a shard is complete on the rank that holds the shard.",
        ),
        Diagnosis(
            "settings",
            "ranks with different settings continue to train, each with another loss.",
            "compare a digest of all settings before gathering; or " + _WRAP_THE_LOSS,
        ),
        Diagnosis(
            "unequal parameters",
            "the loss's own parameters differ between ranks, for example proxies initialised with a seed per rank.",
            "use one seed for the loss on all ranks, or DistributedLoss(loss, broadcast_parameters=True), which also "
            "compares them at the first step and at intervals.",
        ),
        Diagnosis(
            "missing argument",
            "a rank that lacks an argument raises or gathers less, while the other ranks wait.",
            "exchange which arguments are present before gathering; or " + _WRAP_THE_LOSS,
        ),
        Diagnosis(
            "messages differ",
            "a rank calls another sequence of collectives than the others.",
            "decide from exchanged values whether a message is sent, and how large it is.",
        ),
        Diagnosis(
            "gathered first",
            "the embeddings are gathered before the loss, which gathers them again: every sample counts W times.",
            "pass the local embeddings (and local labels) to the loss.",
        ),
        Diagnosis(
            "local loss × W",
            "each rank returns the mean over its local anchors, multiplied by W: the gather already sums gradients over "
            "ranks, so all gradients are W times too large.",
            "do not multiply the loss by W; return global sum / global count on every rank, as DistributedLoss does.",
        ),
        Diagnosis(
            "rescaled by batch size",
            "a hand-written backward pass multiplies the gradient by the square root of the local batch size: the encoder's "
            "gradient is √W times too small.",
            "return the derivative of the value; change the learning rate instead of the gradient.",
        ),
        Diagnosis(
            "not reduced",
            "the step does not reduce the encoder's gradient over ranks, so that replicas diverge.",
            "wrap the model in DistributedDataParallel, or call contrastive_zoo.average_gradients(model) after backward.",
        ),
        Diagnosis(
            "parameters not reduced",
            "the step reduces the encoder's gradient over ranks but not that of the loss's own parameters, so that each "
            "rank learns its own.",
            "wrap the loss in DistributedLoss, whose parameters get equal gradients on all ranks, or reduce their gradients "
            "as the encoder's.",
        ),
        Diagnosis(
            NOT_RECOGNISED,
            "value or gradients depend on the number of processes, and no known mistake explains how.",
            _WRAP_THE_LOSS,
        ),
    )
}
"""All diagnoses by short name."""
