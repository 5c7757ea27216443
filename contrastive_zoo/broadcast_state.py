"""The parameters and buffers of a loss, set to rank 0's: ranks that were seeded differently drew different ones."""

from contrastive_zoo.collectives import broadcast
from contrastive_zoo.loss_summary import LossModules, loss_name
from contrastive_zoo.row_checks import described
from contrastive_zoo.session import meet
from contrastive_zoo.world import World


def broadcast_from_rank_0(modules: LossModules, world: World) -> None:
    """Set parameters and buffers of a loss to rank 0's, as DDP does for a model at construction.

    Raises:
        ValueError: on every rank alike, ranks hold parameters of other names, dtypes or shapes.

    Examples:
        >>> from torch import nn
        >>> broadcast_from_rank_0(LossModules(nn.Linear(2, 1)), World())
    """
    state = dict(modules.shared_state())
    kinds = {name: described(x) for name, x in state.items()}
    meet(loss_name(modules.loss), {}, world=world, settings={"broadcast_parameters": "now", **kinds})
    for x in state.values():
        x.data.copy_(broadcast(x.detach(), process_group=world))
