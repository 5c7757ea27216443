"""FSDP2: torchrun --standalone --nproc-per-node 2 fsdp.py"""

import torch
import torch.distributed as dist
from sklearn.datasets import load_digits
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.utils.data import DataLoader, TensorDataset

import contrastive_zoo as cz

dist.init_process_group("gloo")  # "nccl" with one GPU per process

# the sampler splits each batch of 200 images over the processes; the last one has 197
images, labels = load_digits(return_X_y=True)
data = TensorDataset(torch.Tensor(images / 16), torch.tensor(labels))
sampler = cz.data.GlobalBatchSampler(len(data), batch_size=200)
loader = DataLoader(data, batch_sampler=sampler, collate_fn=cz.data.CollateEmptyBatches(data[0]))

torch.manual_seed(0)  # equal parameters on all processes
model = nn.Sequential(nn.Linear(64, 128), nn.Tanh(), nn.Linear(128, 32))
fully_shard(model)  # each process keeps all parameters of the loss, which are few
loss_fn = cz.DistributedLoss(cz.SupCon(temperature=cz.LearnableTemperature(0.5)))
optimizer = torch.optim.SGD([*model.parameters(), *loss_fn.parameters()], lr=0.1, momentum=0.9, foreach=False)

for epoch in range(2):
    sampler.set_epoch(epoch)
    for x, y in loader:
        loss = loss_fn(model(x), y)  # local embeddings in, the loss of all processes out
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    if dist.get_rank() == 0:
        print(f"epoch {epoch}: loss {loss.item()}")
dist.destroy_process_group()
