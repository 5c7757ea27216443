"""Accelerate: torchrun --standalone --nproc-per-node 2 accelerate_loop.py"""

import torch
from accelerate import Accelerator
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import contrastive_zoo as cz

accelerator = Accelerator(cpu=True)

# the sampler splits each batch of 200 images over the processes, so the loader stays out of prepare()
images, labels = load_digits(return_X_y=True)
data = TensorDataset(torch.Tensor(images / 16), torch.tensor(labels))
sampler = cz.data.GlobalBatchSampler(len(data), batch_size=200)
loader = DataLoader(data, batch_sampler=sampler, collate_fn=cz.data.CollateEmptyBatches(data[0]))

torch.manual_seed(0)  # equal parameters on all processes
model = nn.Sequential(nn.Linear(64, 128), nn.Tanh(), nn.Linear(128, 32))
loss_fn = cz.DistributedLoss(cz.SupCon(temperature=cz.LearnableTemperature(0.5))).to(accelerator.device)
optimizer = torch.optim.SGD([*model.parameters(), *loss_fn.parameters()], lr=0.1, momentum=0.9)
model, optimizer = accelerator.prepare(model, optimizer)

for epoch in range(2):
    sampler.set_epoch(epoch)
    for x, y in loader:
        x, y = x.to(accelerator.device), y.to(accelerator.device)
        loss = loss_fn(model(x), y)  # local embeddings in: no accelerator.gather
        optimizer.zero_grad()
        accelerator.backward(loss)
        optimizer.step()
    accelerator.print(f"epoch {epoch}: loss {loss.item()}")
accelerator.end_training()
