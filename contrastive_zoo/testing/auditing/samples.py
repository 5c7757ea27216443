"""Which samples the ranks trained on: equal shards, repeated samples, an order that never changes."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from contrastive_zoo.testing.auditing.loaders import Epoch
from contrastive_zoo.testing.auditing.records import Call, Record, Step


def of_samples(records: Sequence[Record], steps: object) -> Iterator[tuple[str, str]]:
    """Yield the mistakes in the ranks' samples, each with what was measured."""
    digests = [[_digests(step) for step in record.steps] for record in records]
    together = [list(ranks) for ranks in zip(*digests, strict=False)]
    if len(records) > 1:
        if equal := [i for i, x in enumerate(together) if x[0] and all(y == x[0] for y in x)]:
            yield "same shard", f"all ranks have the same {len(together[equal[0]][0])} samples at step {equal[0] + 1}"
            return
        yield from _in_an_epoch(records, together)
    yield from _same_order(records, together)


def _in_an_epoch(records: Sequence[Record], together: Sequence[Sequence[list[str]]]) -> Iterator[tuple[str, str]]:
    """Compare the indices of the ranks' loaders; without these, the contents of the samples of each step."""
    loaders = [x for x in zip(*(record.samplers for record in records), strict=False) if _same_dataset(x)]
    for epochs in loaders:
        each = [[i for batch in epoch.batches for i in batch] for epoch in epochs]
        total, distinct, size = sum(map(len, each)), len(set().union(*each)), epochs[0].size
        if all(epoch.complete and len(set(x)) == size for epoch, x in zip(epochs, each, strict=True)):
            yield "not sharded", f"the {epochs[0].sampler} of every rank yields all {size} samples in an epoch"
        elif 0 < total - distinct < total * (1 - 1 / len(records)) / 2:
            repeated = f"{total - distinct} of {total} samples of an epoch are repeated"
            yield "repeated samples", f"{repeated} ({epochs[0].sampler}, {size} samples in the dataset)"
    if not loaders:
        for i, ranks in enumerate(together):
            if shared := sum(map(len, ranks)) - len(set().union(*ranks)):
                yield "repeated samples", f"{shared} of {sum(map(len, ranks))} samples of step {i + 1} are repeated"
                return


def _same_dataset(epochs: Sequence[Epoch]) -> bool:
    return bool(epochs[0].first) and len({(x.first, x.size) for x in epochs}) == 1


def _same_order(records: Sequence[Record], together: Sequence[Sequence[list[str]]]) -> Iterator[tuple[str, str]]:
    """Compare the first step of every later epoch with the first step."""
    if not any(epoch.shuffles for epoch in records[0].samplers):
        return
    previous = records[0].steps[0].epoch if records[0].steps else 0
    for i, step in enumerate(records[0].steps[: len(together)]):
        if step.epoch > previous and together[i] == together[0] and any(together[i]):
            yield "no set_epoch", f"step {i + 1} begins an epoch with the samples of step 1, in the same order"
            return
        previous = step.epoch


def _digests(step: Step) -> list[str]:
    """Return a digest of every sample of a step: of the inputs of the first encoder, or of a loss that holds its encoder."""
    first = [(micro.encoders or micro.losses)[0] for micro in step.micro_batches if micro.encoders or micro.losses]
    return [digest for call in first for digest in _row_digests(call)]


def _row_digests(call: Call) -> list[str]:
    tensors = [x for x in call.arguments.leaves if isinstance(x, Tensor) and x.ndim]
    rows = [x for x in tensors if len(x) == len(tensors[0])]
    if not rows:
        return []
    return [hashlib.sha256(b"".join(_bytes(x[i]) for x in rows)).hexdigest() for i in range(len(rows[0]))]


def _bytes(x: Tensor) -> bytes:
    """Return the bytes of a sample; of tokens, without the padding at the end."""
    if x.ndim == 1 and not x.is_floating_point():
        filled = x.nonzero()
        x = x[: int(filled[-1]) + 1] if len(filled) else x[:0]
    return x.contiguous().view(-1).view(torch.uint8).numpy().tobytes() if x.numel() else b""
