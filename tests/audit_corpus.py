"""Right and wrong trainings of the audit: loops as people write them, of all parts of tests/audit_parts.py."""

import os
import random
import tempfile
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FullyShardedDataParallel, MixedPrecision, MixedPrecisionPolicy, fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler

import contrastive_zoo as cz
from tests.audit_parts import AUGMENTATIONS, BATCH, ENCODERS, HALF, LOSSES, OPTIMIZERS, SCHEDULES, VALIDATIONS, Pairs

Wrap = Callable[["Parts", Any], nn.Module]
OfModel = Callable[[Any], object]


@dataclass(frozen=True)
class Parts:
    """The parts of a training, by name; ``mistake`` is the diagnosis that is expected, empty for a right training."""

    trainer: str
    precision: str = ""
    encoder: str = "residual"
    augmentation: str = ""
    validation: str = ""
    schedule: str = ""
    optimizer: str = "SGD"
    loss: str = "NTXent"
    sampler: str = "sharded"
    clears: str = "all"
    mistake: str = ""

    def __str__(self) -> str:
        default = Parts("")
        return ", ".join(x for key, x in vars(self).items() if key != "mistake" and x != getattr(default, key))

    def make_optimizer(self, *modules: nn.Module) -> torch.optim.Optimizer:
        return OPTIMIZERS[self.optimizer]([x for module in modules for x in module.parameters()])

    def make_loader(self, shuffle: bool = False) -> DataLoader[Any]:
        data = Pairs(more=self.sampler == "padded")
        if shuffle:
            return DataLoader(data, BATCH, shuffle=True, drop_last=True)
        of = {"sharded": {"drop_last": True}, "one shard": {"rank": 0}, "a seed per rank": {"seed": dist.get_rank()}}
        return DataLoader(data, BATCH, sampler=DistributedSampler(data, **of.get(self.sampler, {})))

    def augment(self, batch: dict[str, Tensor]) -> list[Tensor]:
        return [AUGMENTATIONS[self.augmentation](x) for x in batch.values()]

    def forward(self, model: nn.Module, batch: dict[str, Tensor]) -> list[Tensor]:
        """Embed both views in the precision of a loop by hand."""
        views = self.augment(batch)
        dtype = next(model.parameters()).dtype
        with self.autocast():
            if self.trainer in ("DDP", "FSDP1"):  # as SimCLR does
                return [*model(torch.cat(views).to(dtype)).chunk(2)]
            return [model(x.to(dtype)) for x in views]

    def autocast(self) -> AbstractContextManager[object]:
        dtype = {"autocast": HALF, "GradScaler": torch.float16}.get(self.precision)
        return torch.autocast("cpu", dtype) if dtype else nullcontext()

    def train(self) -> None:
        TRAINERS[self.trainer](self)


def in_ddp(parts: Parts, encoder: nn.Module) -> nn.Module:
    unused = parts.encoder in ("LayerDrop", "unused parameters") or parts.loss == "detached"
    return DistributedDataParallel(encoder, find_unused_parameters=unused)


def in_fsdp2(parts: Parts, encoder: Any) -> nn.Module:
    policy = MixedPrecisionPolicy(HALF, HALF if "reduced" in parts.precision else torch.float32)
    for module in (*encoder.blocks, encoder):
        fully_shard(module, mp_policy=policy if parts.precision else MixedPrecisionPolicy())
    return encoder


def in_fsdp1(parts: Parts, encoder: nn.Module) -> nn.Module:
    policy = MixedPrecision(HALF, HALF if "reduced" in parts.precision else torch.float32)
    device = torch.device("cpu")
    return FullyShardedDataParallel(encoder, device_id=device, mixed_precision=policy if parts.precision else None)


def start(parts: Parts, wrap: Wrap = in_ddp) -> tuple[Any, nn.Module, torch.optim.Optimizer, Any]:
    """Return the model, the loss, their optimizer and the loader of a loop by hand."""
    dist.init_process_group("gloo")
    model, loss_fn = wrap(parts, ENCODERS[parts.encoder]()), LOSSES[parts.loss]()
    if parts.loss in ("OpenCLIP", "own slice", "detached", "local loss"):
        loss_fn = DistributedDataParallel(loss_fn)
    for set_seed in (torch.manual_seed, np.random.seed, random.seed):
        set_seed(dist.get_rank())
    trained = [model] if parts.clears == "not optimized" else [model, loss_fn]
    return model, loss_fn, parts.make_optimizer(*trained), parts.make_loader()


def loop(parts: Parts, wrap: Wrap = in_ddp, reduce: OfModel = id, clip: OfModel = id) -> None:  # id does nothing
    model, loss_fn, optimizer, loader = start(parts, wrap)
    scheduler = SCHEDULES[parts.schedule](optimizer)
    scaler = torch.amp.GradScaler("cpu", enabled=parts.precision == "GradScaler")
    for epoch in range(2):
        loader.sampler.set_epoch(epoch)
        for batch in loader:
            loss = loss_fn(*parts.forward(model, batch))
            (model if parts.clears == "the model" else optimizer).zero_grad()
            scaler.scale(loss).backward()
            reduce(model)  # before each scaler looks for an overflow, which may be that of one rank
            scaler.unscale_(optimizer)
            clip(model)
            scaler.step(optimizer)
            scaler.update()
            scheduler.step()
            VALIDATIONS[parts.validation](model)


def accumulation(parts: Parts, divisor: int = 2) -> None:
    model, loss_fn, optimizer, loader = start(parts)
    scheduler = SCHEDULES[parts.schedule](optimizer)
    for index, batch in enumerate(loader):
        is_last = index % 2 == 1
        with nullcontext() if is_last else model.no_sync():
            (loss_fn(*parts.forward(model, batch)) / divisor).backward()
        if is_last:
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
            VALIDATIONS[parts.validation](model)


def adversarial(parts: Parts) -> None:
    """FGSM: the first backward pass is for the gradient of the input."""
    model, loss_fn, optimizer, loader = start(parts)
    for batch in loader:
        x, y = (view.requires_grad_() for view in parts.augment(batch))
        loss_fn(model(x), model(y)).backward()
        x, y = ((view + 0.05 * view.grad.sign()).detach() for view in (x, y))
        optimizer.zero_grad()
        loss_fn(model(x), model(y)).backward()
        optimizer.step()


def closures(parts: Parts) -> None:
    """LBFGS: the optimizer calls the loss several times."""
    model, loss_fn, optimizer, loader = start(replace(parts, optimizer="LBFGS"))
    for batch in loader:
        x, y = parts.augment(batch)

        def closure(x: Tensor = x, y: Tensor = y) -> Tensor:
            optimizer.zero_grad()
            loss = loss_fn(model(x), model(y))
            loss.backward()
            return loss

        optimizer.step(closure)


def accelerated(parts: Parts) -> None:
    from accelerate import Accelerator
    from accelerate.utils import set_seed

    accelerator = Accelerator(cpu=True, mixed_precision=parts.precision or "no", gradient_accumulation_steps=2)
    model, loss_fn = ENCODERS[parts.encoder](), LOSSES[parts.loss]()
    optimizer = parts.make_optimizer(model, loss_fn)
    model, optimizer, loader, scheduler = accelerator.prepare(
        model, optimizer, parts.make_loader(shuffle=True), SCHEDULES[parts.schedule](optimizer)
    )
    set_seed(accelerator.process_index)
    for batch in loader:
        with accelerator.accumulate(model):
            loss = loss_fn(*parts.forward(model, batch))
            accelerator.backward(loss)
            if accelerator.sync_gradients:
                accelerator.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
        VALIDATIONS[parts.validation](model)


class WithLoss(nn.Module):
    """The model of a trainer that expects its output to hold the loss."""

    def __init__(self, parts: Parts) -> None:
        super().__init__()
        self.parts, self.encoder, self.loss_fn = parts, ENCODERS[parts.encoder](), LOSSES[parts.loss]()

    def forward(self, x: Tensor, y: Tensor) -> dict[str, Tensor]:
        return {"loss": self.loss_fn(self.encoder(x), self.encoder(y))}


def hugging_face(parts: Parts) -> None:
    import transformers

    from contrastive_zoo.adapters.huggingface import ContrastiveTrainerMixin

    class Trainer(ContrastiveTrainerMixin, transformers.Trainer):
        def compute_loss(self, model: nn.Module, inputs: dict[str, Tensor], *args: Any, **kwargs: Any) -> Any:
            x, y = parts.augment(inputs)
            return super().compute_loss(model, {"x": x, "y": y}, *args, **kwargs)

    class Validate(transformers.TrainerCallback):
        def on_step_end(self, *args: Any, model: Any, **kwargs: Any) -> None:
            VALIDATIONS[parts.validation](model.encoder)

    args = transformers.TrainingArguments(
        tempfile.mkdtemp(), max_steps=6, per_device_train_batch_size=BATCH, use_cpu=True, bf16=parts.precision == "bf16",
        learning_rate=1e-2, report_to=[], disable_tqdm=True, dataloader_drop_last=True, remove_unused_columns=False,
        dataloader_pin_memory=False, warmup_steps=2 if parts.schedule else 0,
        ddp_find_unused_parameters=parts.encoder == "LayerDrop",
    )  # fmt: skip
    Trainer(WithLoss(parts), args, train_dataset=Pairs(), callbacks=[Validate()]).train()


def lightning_module(parts: Parts, manual: bool) -> None:
    import lightning

    class Module(lightning.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.encoder, self.loss_fn = ENCODERS[parts.encoder](), LOSSES[parts.loss]()
            self.automatic_optimization = not manual

        def training_step(self, batch: dict[str, Tensor], _: int) -> Tensor | None:
            x, y = parts.augment(batch)
            loss = self.loss_fn(self.encoder(x), self.encoder(y))
            if not manual:
                return loss
            first, second = self.optimizers()  # type: ignore[misc]  # two
            first.zero_grad()
            self.manual_backward(loss, retain_graph=True)
            first.step()
            second.zero_grad()
            self.manual_backward(self.loss_fn(self.encoder(x), self.encoder(y)) * 0.5)
            second.step()
            return None

        def on_train_batch_end(self, *_: Any) -> None:
            VALIDATIONS[parts.validation](self.encoder)

        def configure_optimizers(self) -> Any:
            if manual:
                return [parts.make_optimizer(self.encoder), parts.make_optimizer(self.loss_fn)]
            optimizer = parts.make_optimizer(self)
            return [optimizer], [{"scheduler": SCHEDULES[parts.schedule](optimizer), "interval": "step"}]

    trainer = lightning.Trainer(
        accelerator="cpu", devices=int(os.environ["WORLD_SIZE"]), strategy="ddp", max_epochs=1,
        precision=parts.precision or "32-true", logger=False, enable_checkpointing=False, enable_progress_bar=False,
        enable_model_summary=False, gradient_clip_val=None if manual else 1.0,
    )  # fmt: skip
    trainer.fit(Module(), parts.make_loader(shuffle=True))


def fabric(parts: Parts) -> None:
    from lightning.fabric import Fabric

    devices = int(os.environ["WORLD_SIZE"])
    fabric = Fabric(accelerator="cpu", devices=devices, strategy="ddp", precision=parts.precision or "32-true")
    fabric.launch()
    encoder, loss_fn = ENCODERS[parts.encoder](), LOSSES[parts.loss]()
    model, optimizer = fabric.setup(encoder, parts.make_optimizer(encoder, loss_fn))
    loader = fabric.setup_dataloaders(parts.make_loader(shuffle=True))
    scheduler = SCHEDULES[parts.schedule](optimizer)
    fabric.seed_everything(fabric.global_rank)
    for batch in loader:
        optimizer.zero_grad()
        fabric.backward(loss_fn(*(model(x) for x in parts.augment(batch))))
        fabric.clip_gradients(model, optimizer, max_norm=1.0)
        optimizer.step()
        scheduler.step()
        VALIDATIONS[parts.validation](model)


TRAINERS: dict[str, Callable[[Parts], None]] = {
    "DDP": partial(loop, clip=lambda model: nn.utils.clip_grad_norm_(model.parameters(), 1.0)),
    "average_gradients": partial(loop, wrap=lambda parts, encoder: encoder, reduce=cz.average_gradients),
    "no average": partial(loop, wrap=lambda parts, encoder: encoder),
    "GradCache": partial(loop, wrap=lambda parts, encoder: cz.GradCache(in_ddp(parts, encoder), 4)),
    "FSDP2": partial(loop, wrap=in_fsdp2),
    "FSDP1": partial(loop, wrap=in_fsdp1, clip=lambda model: model.clip_grad_norm_(1.0)),
    "accumulation": accumulation,
    "accumulation, not divided": partial(accumulation, divisor=1),
    "accumulation, divided twice": partial(accumulation, divisor=4),
    "FGSM": adversarial,
    "LBFGS": closures,
    "Accelerate": accelerated,
    "Hugging Face": hugging_face,
    "Lightning": partial(lightning_module, manual=False),
    "Lightning, two optimizers": partial(lightning_module, manual=True),
    "Fabric": fabric,
}


PLAIN, LOW = ["residual", "dropout"], "mixed, reduced in bfloat16"
ALL = [x for x in ENCODERS if x != "BatchNorm"]
BY_HAND = [*PLAIN, "unused parameters", "casts by hand"]

# For each trainer the precisions, and the encoders that people use with them
FORMS: dict[str, dict[str, list[str]]] = {
    "DDP": {"": ALL, "autocast": [*PLAIN, "unused parameters"], "GradScaler": PLAIN},
    "average_gradients": {"": ALL, "autocast": BY_HAND, "GradScaler": BY_HAND},
    "accumulation": {"": [*PLAIN, "casts by hand"], "autocast": ["residual"]},
    "GradCache": {"": [x for x in ALL if x not in ("unused parameters", "LayerDrop")], "autocast": ["dropout"]},
    "FGSM": {"": [*PLAIN, "autocast inside of forward"]},
    "LBFGS": {"": PLAIN},
    "FSDP2": {"": PLAIN, "mixed": PLAIN, LOW: ["residual"]},
    "FSDP1": {"": ["residual"], "mixed": ["residual"], LOW: ["dropout"]},
    "Accelerate": {"": [*PLAIN, "autocast inside of forward", "bfloat16 parameters"], "bf16": PLAIN},
    "Hugging Face": {"": [*PLAIN, "LayerDrop"], "bf16": PLAIN},
    "Lightning": {"": ["residual"], "bf16-mixed": PLAIN, "bf16-true": ["residual"]},
    "Lightning, two optimizers": {"": ["residual"], "bf16-mixed": ["residual"]},
    "Fabric": {"": ["dropout"], "bf16-mixed": ["residual"], "bf16-true": ["residual"]},
}


def right() -> Iterator[Parts]:
    """Yield every trainer in each of its precisions; the other parts take turns."""
    forms = [(*of, "NTXent") for of in FORMS.items()] + [("DDP", FORMS["accumulation"], "OpenCLIP")]
    for trainer, of_precisions, loss in forms:
        for precision, encoders in of_precisions.items():
            yield from (Parts(trainer, precision, encoder, loss=loss) for encoder in encoders)


def in_turn(setups: Iterator[Parts]) -> Iterator[Parts]:
    for index, x in enumerate(setups):
        turns = {"augmentation": [*AUGMENTATIONS], "validation": [*VALIDATIONS], "schedule": [*SCHEDULES]}
        chosen = {key: names[index % len(names)] for key, names in turns.items()}  # of 5, 4 and 3: every combination
        is_low = x.encoder == "bfloat16 parameters" or x.precision == "bf16-true"
        chosen["optimizer"] = "AdamW" if is_low or index % 3 == 2 else "SGD"
        yield replace(x, **chosen)


RIGHT = [*in_turn(right())]

MISTAKES: list[tuple[str, dict[str, str]]] = [
    ("times W", {"loss": "loss × W"}),
    ("divided by W", {"loss": "loss / W"}),
    ("local negatives", {"loss": "local loss"}),
    ("own slice", {"loss": "own slice"}),
    ("detached", {"loss": "detached"}),
    ("gathered first", {"loss": "gathered first"}),
    ("unequal parameters", {"loss": "loss parameters seeded per rank"}),
    ("trainer averages", {"loss": "sum with a trainer that averages"}),
    ("batch statistics", {"encoder": "BatchNorm"}),
    ("same shard", {"sampler": "one shard"}),
    ("sampler seeded per rank", {"sampler": "a seed per rank"}),
    ("repeated samples", {"sampler": "padded"}),
    ("not optimized", {"clears": "not optimized"}),
    ("never zeroed", {"clears": "the model"}),
    ("accumulation not divided", {"trainer": "accumulation, not divided"}),
    ("accumulation divided twice", {"trainer": "accumulation, divided twice"}),
    ("not reduced", {"trainer": "no average"}),
]


def wrong() -> Iterator[Parts]:
    """Yield every mistake on top of right trainings: in float32, under autocast, and with all that a loop may do."""
    for index, (mistake, changes) in enumerate(MISTAKES):
        augmentation, validation = [*AUGMENTATIONS][1 + index % 4], [*VALIDATIONS][1 + index % 3]
        for base in (
            Parts("DDP"),
            Parts("DDP", "autocast", "dropout", validation=validation),
            Parts("DDP", augmentation=augmentation, schedule="warm-up from 0", optimizer="AdamW"),
        ):
            yield replace(base, **changes, mistake=mistake)


WRONG = [*wrong()]
TRAININGS = {f"{x}{' (wrong)' * bool(x.mistake)}": x for x in [*RIGHT, *WRONG]}


def run(name: str) -> None:
    TRAININGS[name].train()
