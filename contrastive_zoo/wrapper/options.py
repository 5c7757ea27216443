"""The options of DistributedLoss: which are refused, which ranks compare, and how they are printed."""

from collections.abc import Callable
from typing import Any, Literal

import torch
from torch import nn

from contrastive_zoo.loss_base.loss import Loss
from contrastive_zoo.loss_base.loss_modules import loss_name, without_ddp
from contrastive_zoo.ranks.row_checks import flag_problem, word_problem
from contrastive_zoo.wrapper.loss_call import signature

GradReduction = Literal["mean", "sum"]


def refuse_bad_options(grad_reduction: str, **flags: object) -> None:
    if word_problem("grad_reduction", grad_reduction, GradReduction):
        raise ValueError(
            f"DistributedLoss: grad_reduction is 'mean' or 'sum', what the trainer does with gradients, got "
            f"{grad_reduction!r}. DDP, FSDP, Lightning, Accelerate and Hugging Face average: 'mean'."
        )
    if problem := flag_problem(**flags):
        raise ValueError(f"DistributedLoss: {problem}")


def refuse_bad_loss(loss: Any, miner: Callable[..., Any] | None, ring: bool) -> None:
    """Refuse what is no loss of embeddings, and a miner or a ring that the loss does not support."""
    if not callable(loss):
        raise ValueError(f"DistributedLoss: a loss can be called, got {type(loss).__name__}, which cannot.")
    bare = without_ddp(loss)
    name, is_own = loss_name(bare), isinstance(bare, Loss)
    kinds = [kind for x in (bare.modules() if isinstance(bare, nn.Module) else ()) for kind in type(x).__mro__]
    if any(kind.__module__.startswith("sentence_transformers.") and kind.__name__ == "BaseModel" for kind in kinds):
        raise ValueError(
            f"DistributedLoss: {name} holds the encoder and takes its tokens. Ranks must exchange embeddings, not tokens. "
            "Use contrastive_zoo.adapters.sentence_transformers.DistributedSentenceLoss(loss)."
        )
    if miner is not None and is_own:
        raise ValueError(
            f"DistributedLoss: {name} weighs all pairs itself and takes no miner's indices. "
            "Leave the miner out, or pass a loss that takes indices_tuple."
        )
    takes = None if miner is None else signature(bare)
    if takes and not any(x.name == "indices_tuple" or x.kind is x.VAR_KEYWORD for x in takes.parameters.values()):
        raise ValueError(
            f"DistributedLoss: {name}{takes} takes no indices_tuple, which is how a miner's indices reach a "
            "loss. Leave the miner out."
        )
    reason = bare.ring_problem() if is_own else "every rank computes it from the embeddings of all ranks"
    if ring and reason is not None:
        raise ValueError(
            f"DistributedLoss: with a ring, candidates pass from rank to rank. {name} cannot be computed so: {reason}. "
            "Leave ring out."
        )


def shown(option: Any) -> str:
    """An option as ``repr`` prints it: a function by its name, a process group by its ranks."""
    if isinstance(option, torch.distributed.ProcessGroup):
        return f"<ranks {torch.distributed.get_process_group_ranks(option)}>"
    return loss_name(option) if callable(option) else repr(option)
