import torch
import torch.nn.functional as F
from digits import batches, make_encoder, views


def nt_xent(view1, view2, temperature=0.2):
    z = F.normalize(torch.cat([view1, view2]), dim=1)
    logits = (z @ z.T / temperature).fill_diagonal_(-torch.inf)  # no embedding is compared with itself
    return F.cross_entropy(logits, torch.arange(len(z)).roll(len(view1)))


model = make_encoder()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
for epoch in range(3):
    for numbers in batches(epoch):
        view1, view2 = views(numbers, epoch)
        z1, z2 = model(torch.cat([view1, view2])).chunk(2)
        loss = nt_xent(z1, z2)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    print(f"epoch {epoch}: loss {loss.item():.6f}")
