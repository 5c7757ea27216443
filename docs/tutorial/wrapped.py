import torch
import torch.distributed as dist
from digits import batches, make_encoder, views
from torch.nn.parallel import DistributedDataParallel

import contrastive_zoo as cz

dist.init_process_group("gloo")  # "nccl" with GPUs
rank, world_size = dist.get_rank(), dist.get_world_size()
model = DistributedDataParallel(make_encoder())
loss_fn = cz.DistributedLoss(cz.NTXent(temperature=0.2))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
for epoch in range(3):
    for numbers in batches(epoch):
        view1, view2 = views(numbers.tensor_split(world_size)[rank], epoch)
        z1, z2 = model(torch.cat([view1, view2])).chunk(2)
        loss = loss_fn(z1, z2)  # local embeddings in, the loss of the global batch out
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    if rank == 0:
        print(f"epoch {epoch}: loss {loss.item():.6f}")
dist.destroy_process_group()
