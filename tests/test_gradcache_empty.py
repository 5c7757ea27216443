"""Encoders of texts and BatchNorm on a rank without samples; encoders and inputs that GradCache refuses."""

from collections.abc import Callable, Sequence
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from transformers import BertConfig, BertModel

import contrastive_zoo as cz
from contrastive_zoo.testing.worlds import Worlds
from contrastive_zoo.wrapper import chunked_encoder
from tests.helpers import close, local_shard, numbers, refused

N, IN, D, TOKENS = 8, 4, 3, 6
Gradients = list[Tensor]


class Bert(nn.Module):
    """It takes no empty batch, and its mean over tokens takes no row without a token."""

    def __init__(self) -> None:
        super().__init__()
        sizes: dict[str, Any] = {"hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2, "vocab_size": 20}
        dropout = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
        config = BertConfig(**sizes, **dropout, intermediate_size=8, max_position_embeddings=TOKENS, type_vocab_size=1)
        self.bert, self.head = BertModel(config, add_pooling_layer=False), nn.Linear(8, D)

    def forward(self, input_ids: Tensor, attention_mask: Tensor, name: str) -> dict[str, Tensor]:
        hidden = self.bert(input_ids=input_ids, attention_mask=attention_mask).last_hidden_state
        mask = attention_mask[..., None].to(hidden.dtype)
        return {name: self.head((hidden * mask).sum(1) / mask.sum(1))}


def batch() -> dict[str, Any]:
    generator = torch.Generator().manual_seed(0)
    lengths = torch.randint(1, TOKENS + 1, (N, 1), generator=generator)
    ids = torch.randint(1, 20, (N, TOKENS), generator=generator)
    return {"input_ids": ids, "attention_mask": (torch.arange(TOKENS) < lengths).long(), "name": "z"}


def step(chunks: dict[str, int], shards: Sequence[int]) -> tuple[float, Gradients]:
    """Return the value of a step and the gradients of the encoder; without chunks on one process."""
    torch.manual_seed(0)
    model, inputs = Bert().double(), {**batch(), "labels": torch.arange(N) % 3}
    if chunks:
        inputs = {name: local_shard(x, shards) if isinstance(x, Tensor) else x for name, x in inputs.items()}
    labels = inputs.pop("labels")
    loss = cz.DistributedLoss(cz.SupCon())((cz.GradCache(model, **chunks) if chunks else model)(**inputs)["z"], labels)
    loss.backward()
    if chunks:
        cz.average_gradients(model)
    return loss.item(), [x.grad for x in model.parameters()]


@pytest.mark.parametrize("chunks", [{"chunk_size": 2}, {"chunk_tokens": 7}], ids=str)
@pytest.mark.parametrize("shards", [(0, 8), (5, 0, 3)])
def test_texts_with_an_empty_shard_are_those_of_one_process(
    chunks: dict[str, int], shards: tuple[int, ...], worlds: Worlds
) -> None:
    value, gradients = step({}, ())
    for found, of_rank in worlds.run(len(shards), step, chunks, shards):
        assert found == pytest.approx(value, abs=1e-10)
        for x, y in zip(of_rank, gradients, strict=True):
            close(x, y)


def test_a_row_of_zeros_has_no_gradient_in_numbers(worlds: Worlds) -> None:
    """The control: an encoder of texts needs a row of another rank, whose mask has a token."""

    def is_finite() -> bool:
        return all(x.isfinite().all() for x in step({"chunk_size": 2}, (0, 8))[1])

    def broken() -> bool:
        with patch.object(chunked_encoder, "broadcasted", lambda x, *_: torch.zeros_like(x)):
            return is_finite()

    assert worlds.run(2, is_finite) == [True] * 2
    assert worlds.run(2, broken) == [False] * 2


def test_batch_norm_gets_an_empty_batch(worlds: Worlds) -> None:
    """It refuses a single row, which would change its statistics, too."""

    def job(shards: tuple[int, ...]) -> tuple[Gradients, Tensor]:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(IN, 6), nn.BatchNorm1d(6), nn.Tanh(), nn.Linear(6, D)).double()
        z = cz.GradCache(model, N)(local_shard(numbers(N, IN, seed=0), shards))
        cz.DistributedLoss(cz.SupCon())(z, local_shard(torch.arange(N) % 3, shards)).backward()
        cz.average_gradients(model)
        return [x.grad for x in model.parameters()], model[1].running_mean

    ((expected, mean),) = worlds.run(1, job, (N,))
    empty, full = worlds.run(2, job, (0, N))
    for x, y, z in zip(empty[0], full[0], expected, strict=True):
        close(x, z)
        close(y, z)
    assert empty[1].tolist() == [0.0] * 6
    close(full[1], mean)


def test_a_batch_without_samples_anywhere_has_a_gradient_of_zero(worlds: Worlds) -> None:
    def job() -> bool:
        model = Answering(lambda z: {"z": z})
        z = cz.GradCache(model, 2)(torch.empty(0, IN))["z"]
        z.sum().backward()
        with torch.no_grad():
            assert z.shape == cz.GradCache(model, 2)(torch.empty(0, IN))["z"].shape == (0, D)
        return not any(x.grad.any() for x in model.parameters())

    assert worlds.run(1, job) + worlds.run(2, job) == [True] * 3


def test_other_arguments_on_the_rank_without_samples_are_refused(worlds: Worlds) -> None:
    def job() -> object:
        arguments = batch() if dist.get_rank() else {"input_ids": torch.zeros(0, TOKENS, dtype=torch.long)}
        return cz.GradCache(Bert(), 2)(**arguments)

    refused(worlds, 2, job, "a rank without samples has other arguments")


class Answering(nn.Linear):
    def __init__(self, answer: Callable[[Tensor], Any]) -> None:
        super().__init__(IN, D)
        self.answer = answer

    def forward(self, x: Tensor) -> Any:
        return self.answer(super().forward(x))


def without_gradient(z: Tensor) -> Tensor:
    with torch.no_grad():
        return 2 * z


ANSWERS: dict[str, Callable[[Tensor], Any]] = {
    "got None": lambda z: None,
    "got float32 []": lambda z: {"z": z, "loss": z.sum()},
    "got nested float32": lambda z: torch.nested.nested_tensor([*z], layout=torch.jagged),
    "got no output": lambda z: (),
}


@pytest.mark.parametrize("words", ANSWERS)
def test_an_output_that_is_no_embedding_is_refused_on_every_rank(words: str, worlds: Worlds) -> None:
    """Also where it is one rank's alone: the others learn of it in the loss's handshake."""

    def of_one_rank() -> None:
        z = cz.GradCache(Answering(ANSWERS[words] if dist.get_rank() else lambda z: z), 2)(torch.ones(5, IN))
        cz.DistributedLoss(cz.SupCon())(z, torch.arange(5) % 2)

    text = "the encoder returns embeddings, dense tensors [n, …], "
    refused(worlds, 2, of_one_rank, f"rank 1: {text}{words}")
    refused(worlds, 2, lambda: cz.cached_step(Answering(ANSWERS[words]), [torch.ones(5, IN)], torch.sum), text)


def test_nested_inputs_are_refused_on_every_rank(worlds: Worlds) -> None:
    def job() -> None:
        x = torch.ones(5, IN)
        cz.GradCache(Answering(lambda z: z), 2)(
            torch.nested.nested_tensor([*x], layout=torch.jagged) if dist.get_rank() else x
        )

    refused(worlds, 2, job, "rank 1: each input must be a dense tensor, got nested float32 [5, …]")


@pytest.mark.parametrize("answer", [torch.detach, without_gradient])
def test_an_encoder_that_would_not_be_trained_is_refused(answer: Callable[[Tensor], Tensor], worlds: Worlds) -> None:
    def job(wrap: Callable[[nn.Module], nn.Module]) -> None:
        z = cz.GradCache(wrap(Answering(answer)), 2)(numbers(5, IN, seed=dist.get_rank(), dtype=torch.float32))
        cz.DistributedLoss(cz.SupCon(temperature=cz.LearnableTemperature()))(z, torch.arange(5) % 2).backward()

    for wrap in (lambda model: model, DistributedDataParallel):
        text = refused(worlds, 2, lambda wrap=wrap: job(wrap), "the encoder's output has no gradient")
        assert "Remove detach() and no_grad() from its forward, or call encoder.requires_grad_(False)" in text


def test_an_encoder_without_gradient_is_evaluated_or_frozen() -> None:
    x = numbers(5, IN, seed=0, dtype=torch.float32)
    loss_fn = cz.SupCon(temperature=cz.LearnableTemperature())
    encoders = Answering(torch.detach).eval(), Answering(torch.detach).requires_grad_(False)
    for encoder in encoders:
        loss_fn(cz.GradCache(encoder, 2)(x), torch.arange(5) % 2).backward()
    with torch.no_grad():
        assert cz.GradCache(Answering(torch.detach), 2)(x).shape == (5, D)
    partly = Answering(lambda z: {"z": z, "norms": z.detach().norm(dim=1)})
    cz.GradCache(partly, 2)(x)["z"].sum().backward()
    assert partly.weight.grad is not None
