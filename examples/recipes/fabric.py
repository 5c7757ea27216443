"""Lightning Fabric: torchrun --standalone --nproc-per-node 2 fabric.py"""

import os

import torch
from lightning.fabric import Fabric
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import contrastive_zoo as cz

fabric = Fabric(accelerator="cpu", devices=int(os.environ.get("LOCAL_WORLD_SIZE", "1")), strategy="ddp")
fabric.launch()

# the sampler splits each batch of 200 images over the processes, so the loader needs no set-up by Fabric
images, labels = load_digits(return_X_y=True)
data = TensorDataset(torch.Tensor(images / 16), torch.tensor(labels))
sampler = cz.data.GlobalBatchSampler(len(data), batch_size=200)
loader = DataLoader(data, batch_sampler=sampler, collate_fn=cz.data.CollateEmptyBatches(data[0]))

torch.manual_seed(0)  # equal parameters on all processes
encoder = nn.Sequential(nn.Linear(64, 128), nn.Tanh(), nn.Linear(128, 32))
loss_fn = cz.DistributedLoss(cz.SupCon(temperature=cz.LearnableTemperature(0.5)))
loss_fn = loss_fn.to(fabric.device)
optimizer = torch.optim.SGD([*encoder.parameters(), *loss_fn.parameters()], lr=0.1, momentum=0.9)
model, optimizer = fabric.setup(encoder, optimizer)

for epoch in range(2):
    sampler.set_epoch(epoch)
    for x, y in loader:
        x, y = fabric.to_device((x, y))
        loss = loss_fn(model(x), y)  # local embeddings in: no fabric.all_gather
        optimizer.zero_grad()
        fabric.backward(loss)
        optimizer.step()
    fabric.print(f"epoch {epoch}: loss {loss.item()}")
