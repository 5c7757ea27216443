"""What a user writes, for type checkers: nothing runs it. They complain of the lines marked with error, and of no other."""

from typing import Literal

import torch
from torch import Tensor, nn
from typing_extensions import assert_type

import contrastive_zoo as cz

z, labels = torch.eye(2), torch.arange(2)

# settings: a wrong name, a wrong type, a wrong word
cz.NTXent(temprature=0.1)  # error
cz.NTXent(temperature="a")  # error
cz.NTXent(0.1)  # error
cz.SupCon(variant="outer")  # error
cz.ArcFace(10)  # error
cz.ArcFace(10, 8, weights=z)  # error
cz.DCL(sigma="0.5")  # error
cz.DistributedLoss(cz.NTXent(), grad_reduction="average")  # error
cz.DistributedLoss(cz.NTXent)(z, z).backward_()  # error
cz.NTXnet()  # error
cz.nt_xent(z, z, temperature=0.1)  # error
cz.losses.NTXnet()  # error
from contrastive_zoo import NTXnet  # error

cz.NTXent(temperature=0.1, normalize=False, reduction="none", check_finite=False)
cz.NTXent(temperature=torch.tensor(0.1))
cz.NTXent(temperature=cz.LearnableTemperature(0.07))
cz.SupCon(variant="in", reduction="sum")
cz.ArcFace(10, 8, sub_centers=3, margin=0.5, shard_over=cz.World.of())
cz.DINO(4, centre_momentum=0.5, teacher_temperature=0.07)
cz.SigLIP(logit_bias=-5.0)
cz.SigLIP(logit_bias=nn.Parameter(torch.tensor([-10.0])))
cz.Clip(temperature=cz.LearnableTemperature(0.05))
cz.MNRL(directions=("query_to_doc", "doc_to_query"))

# calls
cz.Clip()(z)  # error
cz.Clip()(z, text=z)  # error
cz.SupCon()(z, "labels")  # error
cz.NTXent()(z, z, wrld=cz.World.of())  # error
assert_type(cz.NTXent()(z, z, world=cz.World.of()), Tensor)
assert_type(cz.Clip()(images=z, texts=z), Tensor)
assert_type(cz.MNRL()(z, z, owners=labels, negatives=z), Tensor)
assert_type(cz.NTXent()(z, z), Tensor)
assert_type(cz.SupCon()(embeddings=z, labels=labels), Tensor)
assert_type(cz.DINO(2)(z, z), Tensor)
assert_type(cz.Matryoshka(cz.InfoNCE(), (1, 2))(z, z), Tensor)
assert_type(cz.WeightedSum([cz.NTXent(), cz.InfoNCE()])(z, z), Tensor)

# attributes
assert_type(cz.NTXent().normalize, bool)
assert_type(cz.DINO(4).teacher_temperature, float)
assert_type(cz.Clip().logit_scale, nn.Parameter)
cz.SupCon().variant = "both"  # error


class Mine(cz.RowLoss):
    def rows(self, similarity: Tensor, positive: Tensor, negative: Tensor) -> tuple[Tensor, Tensor]:
        return similarity.amax(1), negative.any(1)


class Cold(cz.NTXent):
    pass


class Hard(cz.RowLoss):
    margin: float = 0.5
    mining: Literal["all", "hard"] = "hard"

    def rows(self, similarity: Tensor, positive: Tensor, negative: Tensor) -> tuple[Tensor, Tensor]:
        return similarity.amax(1) + self.margin, negative.any(1)


Hard(margin=0.1, mining="all", normalize=False)
Hard(margin="a")  # error
Hard(mining="easy")  # error
Hard(margn=0.1)  # error


# the wrapper returns what its loss returns
assert_type(Mine()(z, labels), Tensor)
assert_type(Cold(temperature=0.01)(z, z), Tensor)
assert_type(cz.DistributedLoss(cz.NTXent(), process_group=None, ring=True)(z, z), Tensor)
assert_type(cz.DistributedLoss(Mine())(z, labels), Tensor)
assert_type(cz.DistributedLoss(lambda z, labels: {"loss": 1.0})(z, labels), dict[str, float])


def training(loss_fn: cz.DistributedLoss) -> Tensor:
    loss: Tensor = loss_fn(z, labels)
    return loss
