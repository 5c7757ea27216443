"""Mixed precision under DDP: torchrun --standalone --nproc-per-node 2 amp.py"""

import torch
import torch.distributed as dist
from sklearn.datasets import load_digits
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset

import contrastive_zoo as cz

dist.init_process_group("gloo")  # "nccl" with one GPU per process

# the sampler splits each batch of 200 images over the processes; the last one has 197
images, labels = load_digits(return_X_y=True)
data = TensorDataset(torch.Tensor(images / 16), torch.tensor(labels))
sampler = cz.data.GlobalBatchSampler(len(data), batch_size=200)
loader = DataLoader(data, batch_sampler=sampler, collate_fn=cz.data.CollateEmptyBatches(data[0]))

torch.manual_seed(0)  # equal parameters on all processes
model = DistributedDataParallel(nn.Sequential(nn.Linear(64, 128), nn.Tanh(), nn.Linear(128, 32)))
scaler = torch.amp.GradScaler("cpu", enabled=False)  # True for float16; bfloat16 does not need it
loss_fn = cz.DistributedLoss(cz.SupCon(temperature=cz.LearnableTemperature(0.5)))
optimizer = torch.optim.SGD([*model.parameters(), *loss_fn.parameters()], lr=0.1, momentum=0.9)

for epoch in range(2):
    sampler.set_epoch(epoch)
    for x, y in loader:
        with torch.autocast("cpu", torch.bfloat16):  # "cuda" on GPUs
            z = model(x)
        loss = loss_fn(z, y)  # computed in float32
        optimizer.zero_grad()
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
    if dist.get_rank() == 0:
        print(f"epoch {epoch}: loss {loss.item()}")
dist.destroy_process_group()
