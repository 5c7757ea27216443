import sys
from pathlib import Path

import torch
import torch.distributed as dist
from digits import batches, classes, make_encoder, views
from torch.nn.parallel import DistributedDataParallel

import contrastive_zoo as cz

file, epochs = Path(sys.argv[1]), int(sys.argv[2])
dist.init_process_group("gloo")
rank, world_size = dist.get_rank(), dist.get_world_size()
encoder = make_encoder()
model = DistributedDataParallel(encoder)
loss_fn = cz.DistributedLoss(cz.NTXent(temperature=cz.LearnableTemperature(0.2)))
optimizer = torch.optim.SGD([*model.parameters(), *loss_fn.parameters()], lr=0.1, momentum=0.9)

parts = {"encoder": encoder, "loss": loss_fn, "optimizer": optimizer}
first = 0
if file.exists():
    saved = torch.load(file)
    first = saved.pop("epochs")
    for name, state in saved.items():
        parts[name].load_state_dict(state)

for epoch in range(first, epochs):
    for numbers in batches(epoch):
        view1, view2 = views(numbers.tensor_split(world_size)[rank], epoch)
        loss = loss_fn(*model(torch.cat([view1, view2])).chunk(2))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()

test = torch.arange(1500, 1797).tensor_split(world_size)[rank]  # each rank encodes its part
with torch.no_grad():
    moved, _ = views(test, 0)  # the test images are moved, too
    rates = cz.metrics.evaluate(encoder(moved), labels=classes[test], metrics=["hit_rate@1"])
if rank == 0:
    torch.save({name: part.state_dict() for name, part in parts.items()} | {"epochs": epochs}, file)
    print(f"{world_size} process(es), epochs {first} to {epochs - 1}: hit rate {rates['hit_rate@1']:.4f}")
dist.destroy_process_group()
