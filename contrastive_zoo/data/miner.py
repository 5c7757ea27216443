"""Miners on the embeddings of all ranks, for users who call the miner themselves."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from contrastive_zoo.loss_base.loss_modules import LossModules
from contrastive_zoo.ranks.adjoints import device_of
from contrastive_zoo.ranks.compiling import uncompiled
from contrastive_zoo.ranks.handshake import refuse_empty, reserve_payload
from contrastive_zoo.ranks.messages import reported
from contrastive_zoo.ranks.one_process import in_one_process
from contrastive_zoo.ranks.randomness import one_stream
from contrastive_zoo.ranks.session import Session, agree, refuse
from contrastive_zoo.ranks.transport import payload_of
from contrastive_zoo.ranks.world import Processes, ProcessGroupAttribute, World
from contrastive_zoo.wrapper.arguments import Arguments, GlobalIndices
from contrastive_zoo.wrapper.distributed import Wrapper
from contrastive_zoo.wrapper.loss_call import paired_problem, refuse_bad_callable


class DistributedMiner(Wrapper):
    """``miner`` on the embeddings of all ranks: the indices that one process finds, on every rank.

    :class:`contrastive_zoo.DistributedLoss` takes them as ``indices_tuple``; ``DistributedLoss(loss, miner=miner)`` does the
    same and gathers once. The wrapper has the miner's attributes; keys of its state begin with ``miner.``.

    Args:
        miner: called as ``miner(embeddings, labels)``, or ``miner(embeddings, labels, ref_emb, ref_labels)``; returns a
            tuple of index tensors.
        process_group: a process group, a 1-d DeviceMesh, or None for the default group at the time of the call.
        check_finite: whether embeddings with NaN or infinite values are refused, if there are several ranks.

    Raises:
        ValueError: no miner, or a distributed one. At the call, on every rank alike: labels that are not one per embedding,
            ranks that bring different widths or dtypes, no embeddings, or a miner that returns anything but a tuple.

    Examples:
        >>> def hardest(z, labels):
        ...     alike = labels[:, None] == labels
        ...     similarity = z @ z.T
        ...     positives = similarity.where(alike, torch.inf).argmin(1)
        ...     negatives = similarity.where(~alike, -torch.inf).argmax(1)
        ...     return torch.arange(len(z)), positives, negatives
        >>> DistributedMiner(hardest)(torch.eye(3), torch.tensor([0, 0, 1]))
        (tensor([0, 1, 2]), tensor([1, 0, 2]), tensor([2, 2, 0]))
    """

    process_group = ProcessGroupAttribute()
    _wrapped = "miner"
    _also_read = ("_record_these", "_record_these_stats")  # they list what record-keeper writes

    def __init__(
        self, miner: Callable[..., Any], *, process_group: Processes = None, check_finite: bool = True
    ) -> None:
        super().__init__()
        refuse_bad_callable("DistributedMiner", "miner", miner)
        self.process_group, self.check_finite, self.miner = process_group, check_finite, miner

    @uncompiled
    @torch.no_grad()
    def forward(
        self, embeddings: Tensor, labels: Tensor, ref_emb: Tensor | None = None, ref_labels: Tensor | None = None
    ) -> GlobalIndices:
        """What the miner finds among all ranks' embeddings, or reference embeddings, from this rank's."""
        name = getattr(self.miner, "__name__", type(self.miner).__name__)
        world = World.of(self.process_group, name)
        session = Session.of(world, check_finite=self.check_finite)
        rows: dict[str, Any] = {"embeddings": embeddings, "labels": labels}
        if ref_emb is not None:
            rows |= {"ref_emb": ref_emb, "ref_labels": ref_labels}
        device = None
        if world.size > 1:
            arguments = Arguments.of(rows)
            device = device_of(arguments.rows)
            problem = arguments.problem or paired_problem(arguments.leaves)
            if problem is not None:  # the statement is made of rows that can be sent
                refuse(name, problem, world=session)
            settings = {**LossModules(self.miner).settings(), **arguments.compared}
            stated: dict[str, Any] = {"same": arguments.same, "payload": payload_of(arguments.rows.values(), session)}
            agreed = agree(name, arguments.rows, world=session, settings=settings, **stated)
            reserve_payload(agreed.needed, session)
            refuse_empty(name, agreed.shards[0])
            rows = arguments.gathered(agreed, session)
        with reported(session), one_stream(session, device):  # every rank mines the same rows
            result = in_one_process(lambda: self.miner(*rows.values()), name, session)
        if not isinstance(result, (tuple, list)):
            forms = "(anchors, positives, negatives) or (anchors, positives, anchors, negatives)"
            words = f"a miner returns a tuple of indices, {forms}, got {type(result).__name__}."
            refuse(name, words, world=session)
        return GlobalIndices(result)
