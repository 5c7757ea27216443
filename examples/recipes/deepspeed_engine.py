"""DeepSpeed: DS_ACCELERATOR=cpu torchrun --standalone --nproc-per-node 2 deepspeed_engine.py"""

import deepspeed
import torch
import torch.distributed as dist
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import contrastive_zoo as cz

deepspeed.init_distributed("gloo")  # "nccl" with one GPU per process

# the sampler splits each batch of 200 images over the processes; the last one has 197
images, labels = load_digits(return_X_y=True)
data = TensorDataset(torch.Tensor(images / 16), torch.tensor(labels))
sampler = cz.data.GlobalBatchSampler(len(data), batch_size=200)
loader = DataLoader(data, batch_sampler=sampler, collate_fn=cz.data.CollateEmptyBatches(data[0]))


class EncoderWithLoss(nn.Module):
    """DeepSpeed updates the parameters of one module, so the loss is in it."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)  # equal parameters on all processes
        self.encoder = nn.Sequential(nn.Linear(64, 128), nn.Tanh(), nn.Linear(128, 32))
        self.loss_fn = cz.DistributedLoss(cz.SupCon(temperature=cz.LearnableTemperature(0.5)))

    def forward(self, x, y):
        return self.loss_fn(self.encoder(x), y)  # local embeddings in, the loss of all processes out


model = EncoderWithLoss()
config = {
    "train_micro_batch_size_per_gpu": 100,  # not used: batches come from our loader
    "zero_optimization": {"stage": 2},
    "zero_allow_untested_optimizer": True,
    "gradient_clipping": 0.0,  # the default, 1.0, is not what the other recipes train with
}
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=config)

for epoch in range(2):
    sampler.set_epoch(epoch)
    for x, y in loader:
        loss = engine(x, y)
        engine.backward(loss)
        engine.step()
    if dist.get_rank() == 0:
        print(f"epoch {epoch}: loss {loss.item()}")
dist.destroy_process_group()
