"""The mistakes of a training that the audit names, and their fixes."""

from __future__ import annotations

from contrastive_zoo.testing.mistakes import DIAGNOSES, NOT_RECOGNISED, Diagnosis

_OWN = (
    Diagnosis(
        "no process group",
        "the script never initialises torch.distributed: every process trains its own model.",
        "call torch.distributed.init_process_group before the training, or use the launcher of the trainer.",
    ),
    Diagnosis(
        "different numbers of steps",
        "a rank ends its training earlier than another one, which waits for it or trains alone.",
        "give all ranks equally many batches; DistributedLoss accepts empty ones (ShardedBatches of examples/digits.py).",
    ),
    Diagnosis(
        "same shard",
        "every rank trains on the same samples: the batch is one shard, repeated W times.",
        "use a sampler that splits the data over ranks, such as torch.utils.data.DistributedSampler.",
    ),
    Diagnosis(
        "not sharded",
        "every rank draws from the whole dataset, so that a sample is seen W times in an epoch.",
        "use a sampler that splits the data over ranks, such as torch.utils.data.DistributedSampler.",
    ),
    Diagnosis(
        "repeated samples",
        "a sampler repeats samples so that all shards have the same size; the loss compares a repeated sample with itself.",
        "drop_last=True, even_batches=False, or a sampler that yields uneven shards: ShardedBatches of examples/digits.py.",
    ),
    Diagnosis(
        "no set_epoch",
        "every epoch has the order of the first one, and so the same batches with the same negatives.",
        "call sampler.set_epoch(epoch) before each epoch.",
    ),
    Diagnosis(
        "not optimized",
        "no optimizer holds the parameters of the loss: they keep their initial values.",
        "Optimizer([*model.parameters(), *loss_fn.parameters()]), or make the loss a member of the model.",
    ),
    Diagnosis(
        "never zeroed",
        "gradients are not cleared between steps and add up: the trainer clears those of the model only.",
        "optimizer.zero_grad() in place of model.zero_grad(); for the Hugging Face Trainer, ContrastiveTrainerMixin of "
        "contrastive_zoo.adapters.huggingface, or the loss as a member of the model.",
    ),
    Diagnosis(
        "times W",
        "the loss is multiplied by the number of processes before the backward pass: all gradients are W times too large.",
        "leave the factor out. The Hugging Face Trainer multiplies with average_tokens_across_devices=True: use "
        "ContrastiveTrainerMixin of contrastive_zoo.adapters.huggingface.",
    ),
    Diagnosis(
        "accumulation not divided",
        "the loss of each micro-batch is not divided by the number of accumulated micro-batches: gradients are a sum.",
        "divide the loss by their number. For the Hugging Face Trainer use ContrastiveTrainerMixin of "
        "contrastive_zoo.adapters.huggingface.",
    ),
    Diagnosis(
        "times W, accumulation not divided",
        "the loss is multiplied by the number of processes and not divided by the number of accumulated micro-batches.",
        "use ContrastiveTrainerMixin of contrastive_zoo.adapters.huggingface, or divide the loss by both.",
    ),
    Diagnosis(
        "divided by W",
        "the loss is divided by the number of processes before the backward pass, and the trainer averages gradients.",
        "leave the division out.",
    ),
    Diagnosis(
        "batch statistics",
        "the encoder computes statistics of the local batch (BatchNorm): an embedding depends on the other samples of its "
        "rank.",
        "torch.nn.SyncBatchNorm.convert_sync_batchnorm(model), or a normalisation of single samples.",
    ),
)

_OF_A_LOSS = (
    "unequal parameters",
    "gathered first",
    "local negatives",
    "detached",
    "own slice",
    "not reduced",
    "parameters not reduced",
    "parameters scaled",
    "trainer averages",
    "trainer sums",
    NOT_RECOGNISED,
)

MISTAKES: dict[str, Diagnosis] = {x.mistake: x for x in (*_OWN, *(DIAGNOSES[name] for name in _OF_A_LOSS))}
"""All mistakes that the audit names, by short name: those of a training, and those of a loss."""


def table() -> str:
    """Return all diagnoses as a table in Markdown, which the documentation shows."""
    rows = [f"| {x.mistake} | {x.why} | {x.fix} |".replace("|W|", "W") for x in MISTAKES.values()]
    return "\n".join(["| diagnosis | what happens | fix |", "| --- | --- | --- |", *rows])


__all__ = ["MISTAKES", "NOT_RECOGNISED", "Diagnosis"]
