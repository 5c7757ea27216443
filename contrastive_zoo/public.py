"""Every public name. It is imported when the first of them is asked for."""

from contrastive_zoo import adapters as adapters
from contrastive_zoo import data as data
from contrastive_zoo import engine as engine
from contrastive_zoo import losses as losses
from contrastive_zoo import metrics as metrics
from contrastive_zoo import testing as testing
from contrastive_zoo.loss_base.class_loss import ClassLoss as ClassLoss
from contrastive_zoo.loss_base.row_loss import RowLoss as RowLoss
from contrastive_zoo.loss_base.state import one_step as one_step
from contrastive_zoo.loss_base.temperature import LearnableTemperature as LearnableTemperature
from contrastive_zoo.losses import *
from contrastive_zoo.metrics.monitor import Monitor as Monitor
from contrastive_zoo.ranks import collectives as collectives
from contrastive_zoo.ranks.messages import CommunicationError as CommunicationError
from contrastive_zoo.ranks.world import World as World
from contrastive_zoo.wrapper.averaging import average_gradients as average_gradients
from contrastive_zoo.wrapper.averaging import parameter_groups as parameter_groups
from contrastive_zoo.wrapper.distributed import DistributedLoss as DistributedLoss
from contrastive_zoo.wrapper.explain import explain as explain
from contrastive_zoo.wrapper.grad_cache import GradCache as GradCache
