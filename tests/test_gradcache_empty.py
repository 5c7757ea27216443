"""Encoders that take no empty batch on a rank without samples; encoders and inputs that GradCache refuses."""

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
from tests.helpers import close, error_message, local_shard, numbers, refused

N, IN, D, TOKENS, STEPS = 8, 4, 3, 6, 3
SHARDS = [(0, 8), (5, 0, 3)]
Gradients = list[Tensor]


class Mlp(nn.Module):
    """It takes no empty batch."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(IN, 6), nn.Tanh(), nn.Linear(6, D))

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        assert len(x) > 0
        return {"z": self.layers(x)}


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


class WithBatchNorm(Mlp):
    """It takes an empty batch, and no single row."""

    def __init__(self) -> None:
        super().__init__()
        self.layers.insert(1, nn.BatchNorm1d(6))

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        return {"z": self.layers(x)}


def batch(encoder: Callable[[], nn.Module], step: int) -> dict[str, Any]:
    if encoder is not Bert:
        return {"x": numbers(N, IN, seed=step)}
    generator = torch.Generator().manual_seed(step)
    lengths = torch.randint(1, TOKENS + 1, (N, 1), generator=generator)
    ids = torch.randint(1, 20, (N, TOKENS), generator=generator)
    return {"input_ids": ids, "attention_mask": (torch.arange(TOKENS) < lengths).long(), "name": "z"}


WAYS: dict[str, Callable[[nn.Module], Callable[..., Any]]] = {
    "by hand": lambda model: cz.GradCache(model, 2),
    "DDP inside": lambda model: cz.GradCache(DistributedDataParallel(model), 3),
    "DDP around": lambda model: DistributedDataParallel(cz.GradCache(model, 2)),
    "chunks of tokens": lambda model: cz.GradCache(DistributedDataParallel(model), chunk_tokens=7),
}


def train(encoder: Callable[[], nn.Module], way: str, shards: Sequence[int]) -> list[tuple[float, list[Tensor]]]:
    """Return the value of each step and its gradients, of the encoder and of the loss; without shards on one process."""
    torch.manual_seed(0)
    model, loss_fn = (
        encoder().double(),
        cz.DistributedLoss(cz.SupCon(temperature=cz.LearnableTemperature(0.5)).double()),
    )
    encode, parameters = WAYS[way](model) if shards else model, [*model.parameters(), *loss_fn.parameters()]
    optimizer, found = torch.optim.SGD(parameters, lr=0.1), []
    for step in range(STEPS):
        inputs = {**batch(encoder, step), "labels": (torch.arange(N) + step) % 3}
        if shards:
            inputs = {name: local_shard(x, shards) if isinstance(x, Tensor) else x for name, x in inputs.items()}
        labels = inputs.pop("labels")
        loss = loss_fn(encode(**inputs)["z"], labels)
        loss.backward()
        if way == "by hand":
            cz.average_gradients(model)
        found.append((loss.item(), [x.grad.clone() for x in parameters]))
        optimizer.step()
        optimizer.zero_grad()
    return found


CASES = [(Mlp, way) for way in list(WAYS)[:3]] + [(Bert, way) for way in WAYS]


@pytest.mark.parametrize(("encoder", "way"), CASES)
@pytest.mark.parametrize("shards", SHARDS)
def test_a_training_with_an_empty_shard_is_that_of_one_process(
    encoder: Callable[[], nn.Module], way: str, shards: tuple[int, ...], worlds: Worlds
) -> None:
    expected = train(encoder, way, ())
    for found in worlds.run(len(shards), train, encoder, way, shards):
        for (value, gradients), (of_one, gradients_of_one) in zip(found, expected, strict=True):
            assert value == pytest.approx(of_one, abs=1e-10)
            for x, y in zip(gradients, gradients_of_one, strict=True):
                close(x, y)


def test_a_row_of_zeros_has_no_gradient_in_numbers(worlds: Worlds) -> None:
    """The control: an encoder of texts needs a row of another rank, whose mask has a token."""

    def job() -> str | None:
        with patch.object(chunked_encoder, "broadcasted", lambda x, *_: torch.zeros_like(x)):
            return error_message(lambda: train(Bert, "by hand", (0, 8)))

    assert all("NaN" in (text or "") for text in worlds.run(2, job))


def test_batch_norm_gets_an_empty_batch(worlds: Worlds) -> None:
    """It refuses a single row, which would change its statistics, too."""

    def job(shards: tuple[int, ...]) -> tuple[Gradients, Tensor]:
        torch.manual_seed(0)
        model = WithBatchNorm().double()
        z = cz.GradCache(model, N)(local_shard(numbers(N, IN, seed=0), shards))["z"]
        cz.DistributedLoss(cz.SupCon())(z, local_shard(torch.arange(N) % 3, shards)).backward()
        cz.average_gradients(model)
        return [x.grad for x in model.parameters()], model.layers[1].running_mean

    ((expected, mean),) = worlds.run(1, job, (N,))
    empty, full = worlds.run(2, job, (0, N))
    for x, y, z in zip(empty[0], full[0], expected, strict=True):
        close(x, z)
        close(y, z)
    assert empty[1].tolist() == [0.0] * 6
    close(full[1], mean)


def test_a_rank_without_chunks_borrows_a_row(worlds: Worlds) -> None:
    def job(shards: tuple[int, ...]) -> tuple[float, Gradients]:
        torch.manual_seed(0)
        model, x = Mlp().double(), local_shard(numbers(N, IN, seed=0), shards)
        ddp, chunks = DistributedDataParallel(model), x.split(3) if len(x) else []
        loss = cz.cached_step(ddp, chunks, cz.DistributedLoss(cz.SupCon()), local_shard(torch.arange(N) % 3, shards))
        return loss.item(), [x.grad for x in model.parameters()]

    ((value, gradients),) = worlds.run(1, job, (N,))
    for found, of_rank in worlds.run(3, job, (5, 0, 3)):
        assert found == pytest.approx(value, abs=1e-10)
        for x, y in zip(of_rank, gradients, strict=True):
            close(x, y)


def test_a_batch_without_samples_anywhere_has_a_gradient_of_zero(worlds: Worlds) -> None:
    def job() -> bool:
        model = Mlp()
        z = cz.GradCache(model, 2)(torch.empty(0, IN))["z"]
        z.sum().backward()
        with torch.no_grad():
            assert z.shape == cz.GradCache(model, 2)(torch.empty(0, IN))["z"].shape == (0, D)
        return not any(x.grad.any() for x in model.parameters())

    assert worlds.run(1, job) + worlds.run(2, job) == [True] * 3


def test_other_arguments_on_the_rank_without_samples_are_refused(worlds: Worlds) -> None:
    def job() -> object:
        arguments = batch(Bert, 0) if dist.get_rank() else {"input_ids": torch.zeros(0, TOKENS, dtype=torch.long)}
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
