"""Save and resume, also on another number of processes: torchrun --standalone --nproc-per-node 2 checkpoint.py"""

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from sklearn.datasets import load_digits
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset

import contrastive_zoo as cz

dist.init_process_group("gloo")  # "nccl" with one GPU per process
images, labels = load_digits(return_X_y=True)
data = TensorDataset(torch.Tensor(images / 16), torch.tensor(labels))


class Training:
    """All that a checkpoint holds: the encoder, the loss with its parameters, the optimizer, the place in the data."""

    def __init__(self):
        torch.manual_seed(0)  # equal parameters on all processes
        self.model = DistributedDataParallel(nn.Sequential(nn.Linear(64, 128), nn.Tanh(), nn.Linear(128, 32)))
        self.loss_fn = cz.DistributedLoss(cz.SupCon(temperature=cz.LearnableTemperature(0.5)))
        self.modules = nn.ModuleDict({"model": self.model, "loss": self.loss_fn})
        self.optimizer = torch.optim.SGD(self.modules.parameters(), lr=0.1, momentum=0.9)
        self.sampler = cz.data.GlobalBatchSampler(len(data), batch_size=200)

    def state_dict(self):
        modules, optimizer = get_state_dict(self.modules, self.optimizer)
        return {"modules": modules, "optimizer": optimizer, "sampler": self.sampler.get_position(step=0)}

    def load_state_dict(self, state):
        modules, optimizer = state["modules"], state["optimizer"]
        set_state_dict(self.modules, self.optimizer, model_state_dict=modules, optim_state_dict=optimizer)
        self.sampler.set_position(state["sampler"])

    def run(self, epoch):
        self.sampler.set_epoch(epoch)
        collate = cz.data.CollateEmptyBatches(data[0])
        for x, y in DataLoader(data, batch_sampler=self.sampler, collate_fn=collate):
            loss = self.loss_fn(self.model(x), y)
            self.optimizer.zero_grad()
            loss.backward()
            self.optimizer.step()
        if dist.get_rank() == 0:
            print(f"epoch {epoch}: loss {loss.item()}")


training = Training()
training.run(0)
dcp.save({"training": training}, checkpoint_id="checkpoint")
resumed = Training()
dcp.load({"training": resumed}, checkpoint_id="checkpoint")
resumed.run(resumed.sampler.epoch + 1)
dist.destroy_process_group()
