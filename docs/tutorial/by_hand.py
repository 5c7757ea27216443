import torch
import torch.distributed as dist
import torch.nn.functional as F
from digits import batches, make_encoder, views
from torch.nn.parallel import DistributedDataParallel


def nt_xent(view1, view2, temperature=0.2):
    z = F.normalize(torch.cat([view1, view2]), dim=1)
    logits = (z @ z.T / temperature).fill_diagonal_(-torch.inf)
    return F.cross_entropy(logits, torch.arange(len(z)).roll(len(view1)))


def gather(local):
    shards = [torch.empty_like(local) for _ in range(world_size)]
    dist.all_gather(shards, local)
    shards[rank] = local  # all_gather has no gradient, so put the local embeddings back
    return torch.cat(shards)


dist.init_process_group("gloo")  # "nccl" with GPUs
rank, world_size = dist.get_rank(), dist.get_world_size()
model = DistributedDataParallel(make_encoder())
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
for epoch in range(3):
    for numbers in batches(epoch):
        view1, view2 = views(numbers.tensor_split(world_size)[rank], epoch)
        z1, z2 = model(torch.cat([view1, view2])).chunk(2)
        loss = nt_xent(gather(z1), gather(z2))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    if rank == 0:
        print(f"epoch {epoch}: loss {loss.item():.6f}")
dist.destroy_process_group()
