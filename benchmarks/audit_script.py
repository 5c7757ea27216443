"""A plain training with DDP: torchrun --nproc-per-node 2 benchmarks/audit_script.py [width]"""

import sys

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import contrastive_zoo as cz

width = int(sys.argv[1]) if len(sys.argv) > 1 else 256
dist.init_process_group("gloo")
torch.manual_seed(0)
model = DistributedDataParallel(
    nn.Sequential(nn.Linear(64, width), nn.GELU(), nn.Linear(width, width), nn.GELU(), nn.Linear(width, 64))
)
loss_fn = cz.DistributedLoss(cz.NTXent(temperature=0.1))
optimizer = torch.optim.AdamW(model.parameters(), 1e-3)
for step in range(6):
    generator = torch.Generator().manual_seed(1000 * step + dist.get_rank())
    images = torch.randn(256, 64, generator=generator)
    optimizer.zero_grad()
    loss_fn(model(images), model(images + 0.1 * torch.randn(256, 64, generator=generator))).backward()
    optimizer.step()
dist.destroy_process_group()
