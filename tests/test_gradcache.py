"""A step in chunks has the effects of a step at once, also on a rank without samples; what GradCache refuses."""

from collections.abc import Callable
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils import parametrizations

import contrastive_zoo as cz
from contrastive_zoo.testing.worlds import Worlds
from contrastive_zoo.wrapper import chunked_encoder
from tests.helpers import close, distance, error_message, later, local_shard, numbers, refused

IN, D = 4, 3
Gradients = list[Tensor]


def mlp(*middle: nn.Module, seed: int = 0) -> nn.Sequential:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(IN, 6), *middle, nn.Tanh(), nn.Linear(6, D)).double()


class TwoTowers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.left, self.right = mlp(seed=1), mlp(seed=2)

    def forward(self, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        return self.left(x), self.right(y)


class Answering(nn.Linear):
    def __init__(self, answer: Callable[[Tensor], Any] = lambda z: z) -> None:
        super().__init__(IN, D)
        self.answer = answer

    def forward(self, x: Tensor) -> Any:
        return self.answer(super().forward(x))


def gradients(module: nn.Module) -> Gradients:
    return [x.grad.clone() for x in module.parameters() if x.grad is not None]


def same(found: Gradients, expected: Gradients, tolerance: float = 1e-10) -> None:
    assert len(found) == len(expected) > 0
    for x, y in zip(found, expected, strict=True):
        close(x, y, tolerance)


def labels(n: int) -> Tensor:
    return torch.arange(n) % 3


def in_chunks(model: nn.Module, size: int) -> Callable[[Tensor], Tensor]:
    """Encode as GradCache does, with all activations at once."""
    return lambda x: torch.cat([x.new_empty(0, D), *(model(chunk) for chunk in x.split(size) if len(chunk))])


def test_gradients_of_several_outputs_and_two_views_beside_frozen_parameters() -> None:
    a, b = numbers(7, IN, seed=0), numbers(7, IN, seed=1)
    loss_fn = cz.InfoNCE(temperature=cz.LearnableTemperature(0.5), symmetric=True)
    for make, embed in (TwoTowers, lambda encode: encode(a, y=b)), (mlp, lambda encode: (encode(a), encode(b))):
        found = []
        for encoder in (lambda model: model, lambda model: cz.GradCache(model, 2)):
            model = make()
            next(model.parameters()).requires_grad_(False)
            trained = [p for p in (*model.parameters(), *loss_fn.parameters()) if p.requires_grad]
            found.append(torch.autograd.grad(loss_fn(*embed(encoder(model))), trained))
        same(*found)
    assert not cz.GradCache(mlp().requires_grad_(False), 2)(a).requires_grad


class Reader(nn.Module):
    """Texts as the means of their tokens' vectors, through an MLP. Like many models, it takes no batch without a token."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.head = nn.Embedding(20, IN).double(), mlp()
        nn.init.normal_(self.tokens.weight, generator=torch.Generator().manual_seed(1))
        self.seen: list[tuple[int, ...]] = []

    def forward(self, input_ids: Tensor, *, attention_mask: Tensor) -> Tensor:
        assert attention_mask.any()
        self.seen.append(tuple(input_ids.shape))
        mask = attention_mask[..., None].double()
        return self.head((self.tokens(input_ids) * mask).sum(1) / mask.sum(1).clamp(min=1))


class AllTokens(Reader):
    def forward(self, input_ids: Tensor, *, attention_mask: Tensor) -> Tensor:
        return self.tokens(input_ids)[attention_mask.bool()]


LENGTHS = (4, 1, 6, 0, 2, 6, 3, 1)  # of texts; one is empty, and they are in no order


def texts(lengths: tuple[int, ...] = LENGTHS, *, left: bool = False) -> tuple[Tensor, Tensor]:
    ids, mask = torch.arange(7 * len(lengths)).view(-1, 7) % 20, torch.arange(7) < torch.tensor(lengths)[:, None]
    return ids, (mask.flip(1) if left else mask).long()


@pytest.mark.parametrize(("kind", "of", "left"), [("tokens", 9, False), ("tokens", 9, True), ("size", 3, False)])
def test_chunks_of_texts(kind: str, of: int, left: bool, worlds: Worlds) -> None:
    def job(*shards: int) -> tuple[Tensor, Gradients, list[tuple[int, ...]]]:
        model = Reader()
        ids, mask, y = (local_shard(x, shards) for x in (*texts(left=left), labels(8)))
        z = cz.GradCache(DistributedDataParallel(model), **{f"chunk_{kind}": of})(ids, attention_mask=mask)
        cz.DistributedLoss(cz.SupCon())(z, y).backward()
        return z.detach(), gradients(model), model.seen

    model, (ids, mask) = Reader(), texts(left=left)
    expected = model(ids, attention_mask=mask)
    cz.SupCon()(expected, labels(8)).backward()
    for shards in [(8,), (3, 5), (7, 0, 1)]:
        found = worlds.run(len(shards), job, *shards)
        close(torch.cat([z for z, _, _ in found]), expected.detach())
        for _, of_rank, seen in found:
            same(of_rank, gradients(model))
            assert kind == "size" or max(rows * tokens for rows, tokens in seen) <= 9
            assert kind == "size" or shards != (8,) or seen == [(1, 6), (1, 6), (2, 4), (4, 2)] * 2


def test_a_row_of_zeros_would_be_noticed(worlds: Worlds) -> None:
    """The mutant: a rank without samples encodes zeros, whose mask has no token, and not a row of another rank."""

    def job() -> str | None:
        ids, mask = (local_shard(x, (0, 8)) for x in texts())
        with patch.object(chunked_encoder, "broadcasted", lambda x, *_: torch.zeros_like(x)):
            return error_message(lambda: cz.GradCache(Reader(), 2)(ids, attention_mask=mask), AssertionError)

    assert [text is None for text in worlds.run(2, job)] == [False, True]


def test_only_one_chunk_has_a_graph_at_a_time() -> None:
    seen: list[tuple[bool, int]] = []
    encoder = Answering(lambda z: seen.append((torch.is_grad_enabled(), len(z))) or z)
    loss = cz.GradCache(encoder, 3)(torch.ones(8, IN)).square().sum()
    assert seen == [(False, 3), (False, 3), (False, 2)]
    loss.backward()
    assert seen[3:] == [(True, 3), (True, 3), (True, 2)]


def test_dropout_is_another_one_without_the_states_of_the_first_pass() -> None:
    """The control: trainings with dropout are those of one process in tests/test_gradcache_trainers.py."""
    found = []
    for states in (chunked_encoder.set_random_states, lambda *_: None):
        model = mlp(nn.Dropout(0.5))
        torch.manual_seed(5)
        with patch.object(chunked_encoder, "set_random_states", states):
            cz.GradCache(model, 3)(numbers(8, IN, seed=0)).exp().mean().backward()
        found.append(gradients(model))
    assert max(map(distance, *found)) > 1e-3


def trained_with_buffers(kind: str, cached: bool) -> list[Tensor]:
    """Return parameters and buffers after some steps: of three chunks, or of one under DDP, which copies rank 0's."""
    torch.manual_seed(0)
    model = mlp(nn.BatchNorm1d(6)) if kind == "batch norm" else mlp()
    if kind == "spectral norm":
        parametrizations.spectral_norm(model[0])  # its vectors move with each pass, and the output with them
    rank, shards, size = (dist.get_rank(), (5, 3), 5) if dist.is_initialized() else (0, (9,), 3)
    wrapped = DistributedDataParallel(model.double()) if dist.is_initialized() else model.double()
    optimizer, loss_fn = torch.optim.SGD(model.parameters(), lr=0.1), cz.DistributedLoss(cz.SupCon(temperature=0.5))
    for step in range(4):
        x, y = (part.split(shards)[rank] for part in (numbers(sum(shards), IN, seed=step), labels(sum(shards))))
        optimizer.zero_grad()
        loss_fn((cz.GradCache if cached else in_chunks)(wrapped, size)(x), y).backward()
        optimizer.step()
    return [x.detach() for x in (*model.parameters(), *model.buffers())]


@pytest.mark.parametrize("kind", ["spectral norm", "batch norm"])
def test_buffers_are_those_of_a_plain_training(kind: str, worlds: Worlds) -> None:
    found = [(trained_with_buffers(kind, True), trained_with_buffers(kind, False))]
    if kind == "spectral norm":  # BatchNorm has the statistics of a rank under DDP
        found += zip(*(worlds.run(2, trained_with_buffers, kind, cached) for cached in (True, False)), strict=True)
    for pair in found:
        same(*pair)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_autocast_and_a_scaler(dtype: torch.dtype) -> None:
    x, found = numbers(8, IN, seed=0, dtype=torch.float32), list[Gradients]()
    for encoder in (in_chunks, cz.GradCache):
        model, scaler = mlp().float(), torch.amp.GradScaler("cpu", init_scale=1024.0)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        # with its cache, autocast adds the plain chunks' gradients up in 16 bits
        with torch.autocast("cpu", dtype=dtype, cache_enabled=encoder is cz.GradCache):
            scaler.scale(cz.SupCon(temperature=0.5)(encoder(model, 3)(x), labels(8))).backward()
            assert model[0](x).requires_grad  # the first pass has left no weights without a graph in autocast's cache
        scaled = gradients(model)
        scaler.step(optimizer)
        found.append([*scaled, *gradients(model), *(p.detach() for p in model.parameters())])
    same(*found, 1e-6)
    assert found[0][0].abs().max() > 1.0  # it was scaled


def test_batch_norm_gets_an_empty_batch(worlds: Worlds) -> None:
    """It refuses a single row, which would change its statistics, too."""

    def job(shards: tuple[int, ...], chunk_size: int = 8) -> tuple[Gradients, Tensor]:
        model = mlp(nn.BatchNorm1d(6))
        z = cz.GradCache(model, chunk_size)(local_shard(numbers(8, IN, seed=0), shards))
        cz.DistributedLoss(cz.SupCon())(z, local_shard(labels(8), shards)).backward()
        cz.average_gradients(model)
        return gradients(model), model[1].running_mean

    ((expected, mean),) = worlds.run(1, job, (8,))
    empty, full = worlds.run(2, job, (0, 8))
    same(empty[0], expected)
    same(full[0], expected)
    assert not empty[1].any()
    close(full[1], mean)
    (_, fewer_chunks), _ = worlds.run(2, job, (2, 6), 2)
    close(fewer_chunks, 0.1 * mlp()[0](numbers(8, IN, seed=0)[:2]).mean(0).detach())


def test_no_samples_anywhere_give_zeros_and_a_rank_may_encode_alone_without_gradients(worlds: Worlds) -> None:
    def job() -> bool:
        model = Answering(lambda z: {"z": z})
        z = cz.GradCache(model, 2)(torch.empty(0, IN))["z"]
        z.sum().backward()
        with torch.no_grad():
            assert z.shape == cz.GradCache(model, 2)(torch.empty(0, IN))["z"].shape == (0, D)
            assert dist.get_rank() or cz.GradCache(model, 2)(torch.ones(5, IN))["z"].shape == (5, D)
        return not any(x.grad.any() for x in model.parameters())

    assert worlds.run(1, job) + worlds.run(2, job) == [True] * 3


def test_an_output_or_an_encoder_may_have_no_gradient() -> None:
    x, loss_fn = numbers(5, IN, seed=0, dtype=torch.float32), cz.SupCon(temperature=cz.LearnableTemperature())
    for encoder in (Answering(torch.detach).eval(), Answering(torch.detach).requires_grad_(False)):
        loss_fn(cz.GradCache(encoder, 2)(x), labels(5)).backward()
    with torch.no_grad():
        assert cz.GradCache(Answering(torch.detach), 2)(x).shape == (5, D)
    partly = Answering(lambda z: {"z": z, "norms": z.detach().norm(dim=1), "lengths": torch.full((len(z),), IN)})
    found = cz.GradCache(partly, 2)(x)
    found["z"].sum().backward()
    assert partly.weight.grad is not None
    assert found["lengths"].tolist() == [IN] * 5


def by_rank(first: Any, second: Any) -> Any:
    return (first, second)[dist.get_rank()]


def chunked(model: nn.Module, *inputs: Any) -> Any:
    return cz.GradCache(model, 2)(*inputs)


def trained(answer: Callable[[Tensor], Any], wrap: Callable[[nn.Module], nn.Module] = lambda model: model) -> None:
    """Train rank 1's encoder with such an answer; other ranks learn of it in the loss's handshake."""
    x = numbers(5, IN, seed=dist.get_rank(), dtype=torch.float32)
    z = cz.GradCache(wrap(Answering(answer)), 2)(x)
    cz.DistributedLoss(cz.SupCon(temperature=cz.LearnableTemperature()))(z, labels(5)).backward()


def jagged(z: Tensor) -> Tensor:
    return torch.nested.nested_tensor([*z], layout=torch.jagged)


def around_fsdp() -> Tensor:
    encoder = mlp()
    fully_shard(encoder[0])
    return fully_shard(nn.Sequential(cz.GradCache(encoder, 2)))(torch.ones(4, IN).double())


def read(lengths: tuple[int, ...] = LENGTHS, *, model: type[Reader] = Reader, tokens: int = 9, gap: int = 0) -> Tensor:
    ids, mask = texts(lengths)
    return cz.GradCache(model(), chunk_tokens=tokens)(ids, attention_mask=mask.roll(gap, 1))


EMBEDDINGS = "rank 1: the encoder returns embeddings, dense tensors [n, …], got "
INPUTS = "rank 1: each input must be a dense tensor, got "
OF_ZERO_3 = later(nn.Parameter(torch.ones(D, IN)), ds_id=0)
UNTRAINED = "the encoder's output has no gradient … Remove detach() and no_grad() from its forward"
BAD: dict[str, Callable[[], Any]] = {
    f"{EMBEDDINGS}None": lambda: trained(by_rank(torch.clone, lambda z: None)),
    f"{EMBEDDINGS}float32 []": lambda: trained(by_rank(torch.clone, lambda z: {"z": z, "loss": z.sum()})),
    f"{EMBEDDINGS}nested float32": lambda: trained(by_rank(torch.clone, jagged)),
    f"{EMBEDDINGS}no output": lambda: trained(by_rank(torch.clone, lambda z: ())),
    f"{EMBEDDINGS[8:]}float32 [].": lambda: cz.GradCache(Answering(torch.sum), 5)(torch.ones(5, IN)),
    UNTRAINED: lambda: trained(torch.detach),
    f"{UNTRAINED}, or": lambda: trained(torch.no_grad()(torch.neg), DistributedDataParallel),
    f"{INPUTS}nested float32 [5, …]": lambda: chunked(Answering(), by_rank(torch.clone, jagged)(torch.ones(5, IN))),
    "samples has other arguments": lambda: chunked(mlp(), *by_rank((torch.ones(0, 7), "z"), (torch.ones(3, 7),))),
    "inputs carry a gradient": lambda: chunked(mlp(), numbers(2, IN, seed=0).requires_grad_(by_rank(False, True))),
    "one number of rows, got [2, 3]": lambda: chunked(TwoTowers(), torch.ones(2, IN), torch.ones(by_rank(2, 3), IN)),
    "got no tensor": lambda: chunked(mlp()),
    "integers or bools [n, tokens], got None": lambda: cz.GradCache(Reader(), chunk_tokens=9)(texts()[0]),
    "got one with gaps or on both sides": lambda: read(gap=dist.get_rank()),
    "one row for each of 1 samples, got float64 [7, 4]. Pass chunk_size": lambda: read((7,), model=AllTokens),
    "at most chunk_tokens=5 tokens, got 6 for sample 1. Cut": lambda: read((1, 5 + dist.get_rank()), tokens=5),
    "Use stage 1 or 2": lambda: chunked(later(Answering(), weight=OF_ZERO_3), torch.ones(4, IN)),
    "Call fully_shard on the encoder": around_fsdp,
    "Leave static_graph out": lambda: trained(torch.clone, lambda x: DistributedDataParallel(x, static_graph=True)),
    "Answering owns the backward pass": lambda: chunked(later(Answering(), backward=sum, step=sum), torch.ones(4, IN)),
}


@pytest.mark.parametrize("words", BAD)
def test_bad_input_is_refused_on_every_rank(words: str, worlds: Worlds) -> None:
    assert refused(worlds, 2, BAD[words], words).startswith("GradCache: ")
