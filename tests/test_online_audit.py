"""An online audit changes no bit of a training, accuses no right one, and names a mistake in its log."""

import logging
import random

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn.parallel import DistributedDataParallel
from torch.utils._pytree import tree_leaves

import contrastive_zoo as cz
from contrastive_zoo.testing.auditing.running import OnlineAudit, TrainingState, is_plain, logger
from contrastive_zoo.testing.report import AuditReport
from contrastive_zoo.testing.worlds import Worlds


class Lines(logging.Handler):
    """Keeps what is logged."""

    def __init__(self) -> None:
        super().__init__()
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(f"{record.levelname} {record.getMessage()}")


class Stateful(nn.Module):
    """An encoder whose state is of every kind: dropout, a number, a queue in a list, a mean in a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(4, 6), nn.Dropout(0.2), nn.Linear(6, 3))
        self.register_buffer("calls", torch.zeros(()))
        self.queue: list[int] = []

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        self.queue.append(len(x))
        result: Tensor = self.layers(x)
        return result


class Counter:
    """Counts steps, which no class of torch does."""

    count = 0


def trained(kind: str, every: int | None, damage: bool = False) -> tuple[Tensor, AuditReport | None, list[str]]:
    """Train four steps; return all state as one vector, the last report, and the lines of the log."""
    rank = dist.get_rank()
    torch.manual_seed(0)
    random.seed(rank)
    encoder, counter = Stateful(), Counter()
    encoder.train(kind not in UNLIKE)  # no dropout
    model = (
        DistributedDataParallel(encoder, find_unused_parameters=kind == "finds unused") if kind in ALIKE else encoder
    )
    loss = cz.NTXent(temperature=cz.LearnableTemperature(0.2))
    group = dist.new_group() if kind == "right" else None
    loss_fn = loss if kind == "local negatives" else cz.DistributedLoss(loss, process_group=group)
    optimizer = torch.optim.AdamW([*encoder.parameters(), *loss_fn.parameters()], 0.01)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0, growth_interval=3)

    def step(view1: Tensor, weight: float, *, view2: Tensor) -> Tensor:
        counter.count += 1
        optimizer.zero_grad()
        value = weight * loss_fn(model(view1), model(view2))
        scaler.scale(value).backward()
        for module in {"not reduced": [], "local negatives": [encoder, loss_fn]}.get(kind, []):
            cz.average_gradients(module)
        scaler.step(optimizer)
        scaler.update()
        scheduler.step()
        return value.detach() + 0 * random.random()

    audited = step if every is None else OnlineAudit(step, every=every, state=(counter,), loss=loss)
    patch = pytest.MonkeyPatch()
    if damage:
        patch.setattr(TrainingState, "put_back", lambda self: None)
    lines, level = Lines(), logger.level
    logger.addHandler(lines)
    logger.setLevel(logging.INFO)
    generator = torch.Generator().manual_seed(rank)
    torch.manual_seed(rank)
    values = []
    for _ in range(4):
        x = torch.randn(5 + rank, 4, generator=generator)
        values.append(audited(x, 1.0, view2=-x + 0.1))
    logger.removeHandler(lines)
    logger.setLevel(level)
    patch.undo()
    state = tree_leaves([x.state_dict() for x in (encoder, loss_fn, optimizer, scheduler, scaler)])
    state += [*values, torch.get_rng_state(), random.random(), *encoder.queue, counter.count]
    state += [x.grad for x in encoder.parameters()]
    vector = torch.cat([torch.as_tensor(x, dtype=torch.float64).reshape(-1) for x in state if x is not None])
    return vector, getattr(audited, "report", None), lines.lines


ALIKE, UNLIKE = ("right", "finds unused"), ("local negatives", "not reduced")
"""Trainings with DDP, and trainings with a mistake."""


def test_a_right_training_goes_on_as_without_the_audit(worlds: Worlds) -> None:
    plain, audited = worlds.run(2, trained, "right", None), worlds.run(2, trained, "right", 3)
    for (expected, _, _), (found, report, _) in zip(plain, audited, strict=True):
        assert torch.equal(expected, found)
        assert report is not None
        assert report.ok is True, str(report)
    lines = [x[2] for x in audited]
    assert [len(x) for x in lines] == [2, 0]
    for number, line in zip((1, 4), lines[0], strict=True):
        assert line.startswith(f"INFO the training: step {number} is the same on 2 processes as on one, largest error ")
    assert "of the time since the last" in lines[0][1]
    damaged = worlds.run(2, trained, "right", 3, True)[0]
    assert not torch.equal(damaged[0], plain[0][0]), "nothing was put back, and nothing shows it"


@pytest.mark.parametrize("mistake", UNLIKE)
def test_a_mistake_is_named_in_the_log_and_the_training_goes_on(mistake: str, worlds: Worlds) -> None:
    plain, audited = worlds.run(2, trained, mistake, None), worlds.run(2, trained, mistake, 3)
    assert all(torch.equal(x[0], y[0]) for x, y in zip(plain, audited, strict=True))
    first, later = audited[0][2]
    assert f"step 1 is not the same as on one process: {mistake}: " in first
    for line in (first, later):
        assert line.startswith("WARNING")
        assert "Fix: " in line
        assert "\n" not in line


def test_what_one_process_cannot_repeat_is_said(worlds: Worlds) -> None:
    _, report, lines = worlds.run(2, trained, "finds unused", 4)[0]
    assert report is not None
    assert report.ok is None
    assert "find_unused_parameters): audit the script" in lines[0]


def differing_intervals() -> str:
    with pytest.raises(ValueError, match="every must be the same") as error:
        OnlineAudit(print, every=2 + dist.get_rank())()
    return str(error.value)


def test_bad_arguments_are_refused(worlds: Worlds) -> None:
    with pytest.raises(ValueError, match="every is a number of steps, at least 1, got 0"):
        OnlineAudit(print, every=0)
    with pytest.raises(ValueError, match="a function of a batch, got 3"):
        OnlineAudit(3)  # type: ignore[arg-type]  # the mistake
    with pytest.raises(ValueError, match=r"OnlineAudit: loss is a torch\.nn\.Module"):
        OnlineAudit(print, loss=torch.relu_)
    errors = worlds.run(2, differing_intervals)
    assert errors[0] == errors[1]
    assert "got [2, 3] of ranks 0, 1" in errors[0]


def test_tensors_of_others_are_left_alone() -> None:
    with FakeTensorMode():
        other = nn.Linear(2, 2)
    state = TrainingState()
    plain = nn.Linear(2, 2)
    assert [is_plain(x) for x in (plain.weight, other.weight)] == [True, False]
    state.put_back()
