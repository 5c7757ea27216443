"""A loss's settings are those of its class and its constructor, for people, ``help()`` and programs that build losses."""

import copy
import inspect
import math
import pickle
import pydoc
import typing
from collections import UserList
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import contrastive_zoo as cz
from contrastive_zoo.loss_base.settings import Settings, field
from contrastive_zoo.ranks.suggestions import NAMES_ELSEWHERE
from contrastive_zoo.testing.worlds import Worlds
from tests.helpers import later
from tests.test_state import saved_and_loaded

Z = torch.eye(3)
LOSSES = [x for name in cz.__all__ if isinstance(x := getattr(cz, name), type) and issubclass(x, Settings) and x.fields]


class Scaled(cz.RowLoss):
    factor: float = field()
    made: Tensor  # no setting: torch's modules declare parameters so
    size: int = field(kw_only=False)
    kind: Literal["hard", "soft"] = "hard"
    start: nn.Module = field(factory=lambda: nn.Linear(1, 1))
    temperature: float | Tensor | nn.Module = 0.5

    def rows(self, similarity: Tensor, positive: Tensor, negative: Tensor) -> tuple[Tensor, Tensor]:
        return similarity.amax(1) / self.temperature, negative.any(1)


class Colder(Scaled):
    temperature = 0.1


class OwnConstructor(cz.NTXent):
    def __init__(self, scale: float) -> None:
        super().__init__(temperature=1 / scale)


def test_settings_of_a_known_loss() -> None:
    assert str(inspect.signature(cz.NTXent)) == (
        "(*, temperature: float | torch.Tensor | torch.nn.modules.module.Module = 0.1, normalize: bool = True, "
        "reduction: Literal['mean', 'sum', 'none'] = 'mean', check_finite: bool = True)"
    )
    assert (cz.NTXent.temperature, cz.DINO.centre_momentum) == (0.1, 0.9)
    assert (Colder.temperature, Scaled.temperature) == (0.1, 0.5)
    assert list(inspect.signature(Colder).parameters)[:3] == ["size", "factor", "kind"]
    assert str(inspect.signature(OwnConstructor)) == "(scale: float) -> None"
    assert "NTXent(*,temperature:float" in "".join(pydoc.plain(pydoc.render_doc(cz.NTXent)).replace("|", "").split())


@pytest.mark.parametrize("cls", [*LOSSES, Scaled, Colder], ids=lambda x: x.__name__)
def test_the_signature_has_the_fields_with_types_and_defaults(cls: type[Settings]) -> None:
    parameters = inspect.signature(cls).parameters
    if cls.__init__.__module__ != Settings.__module__:  # a composition, whose arguments are its own
        assert not {x.kind for x in parameters.values()} & {inspect.Parameter.VAR_KEYWORD}
        return
    types = typing.get_type_hints(cls)
    assert list(parameters) == [name for name, x in cls.fields.items() if x.init]
    for name, parameter in parameters.items():
        of_field = cls.fields[name]
        assert parameter.annotation == types[name]
        assert (parameter.kind is parameter.KEYWORD_ONLY) == of_field.kw_only
        assert parameter.default is of_field.default is getattr(cls, name, parameter.empty)
    of_init = {name: x.annotation for name, x in parameters.items()} | {"return": type(None)}
    assert typing.get_type_hints(cls.__init__) | {"return": type(None)} == of_init
    assert cls.__name__ in pydoc.plain(pydoc.render_doc(cls))


LEARNABLE: dict[str, Any] = {
    "number": 0.25,
    "tensor": torch.tensor(0.25),
    "parameter": nn.Parameter(torch.tensor([0.25])),
    "module": cz.LearnableTemperature(0.25),
}


def temperature_of(loss: Any) -> float:
    held = loss.temperature
    return torch.as_tensor(held() if isinstance(held, nn.Module) else held).item()


@pytest.mark.parametrize("kind", LEARNABLE)
def test_a_value_of_the_loss_hides_the_default_of_its_class(kind: str) -> None:
    loss = cz.NTXent(temperature=copy.deepcopy(LEARNABLE[kind]))
    unpickled = pickle.loads(pickle.dumps(loss))
    for x in (loss, copy.copy(loss), copy.deepcopy(loss), unpickled, saved_and_loaded(loss)):
        assert temperature_of(x) == pytest.approx(0.25)
        assert repr(x) == repr(loss)
        assert x.state_dict().keys() == loss.state_dict().keys()
        assert x(Z, Z).item() == pytest.approx(cz.NTXent(temperature=0.25)(Z, Z).item())
    loss = cz.NTXent()
    loss.temperature = copy.deepcopy(LEARNABLE[kind])  # as a schedule does, or somebody who makes it learnable later
    assert temperature_of(loss) == pytest.approx(0.25)
    assert cz.NTXent.temperature == 0.1


def test_each_loss_has_a_module_of_its_own_where_the_default_is_one() -> None:
    losses = [cz.Clip(), cz.Clip(), cz.Clip(temperature=cz.Clip.temperature), Scaled(1, factor=1.0)]
    held = [*(x.temperature for x in losses[:3]), cz.Clip.temperature, losses[3].start, Scaled.start]
    assert len({id(x) for x in held}) == 6
    assert inspect.signature(cz.Clip).parameters["temperature"].default is cz.Clip.temperature


def built(cls: type, tmp_path: Path, settings: str) -> Any:
    (file := tmp_path / "settings.yaml").write_text(settings)
    parser = pytest.importorskip("jsonargparse").ArgumentParser(exit_on_error=False)
    parser.add_argument("--config", action="config")
    parser.add_class_arguments(cls, "loss")
    return parser.instantiate(parser.parse_args(["--config", str(file)])).loss


def test_a_loss_is_built_from_a_file(tmp_path: Path) -> None:
    assert built(cz.NTXent, tmp_path, "loss: {temperature: 0.2}").temperature == 0.2
    assert built(cz.SupCon, tmp_path, "loss: {variant: in, reduction: sum}").variant == "in"
    assert built(cz.Clip, tmp_path, "loss: {}").temperature is not cz.Clip.temperature
    learnt = "{class_path: contrastive_zoo.LearnableTemperature, init_args: {initial: 0.2}}"
    assert temperature_of(built(cz.NTXent, tmp_path, f"loss: {{temperature: {learnt}}}")) == pytest.approx(0.2)
    assert built(Scaled, tmp_path, "loss: {size: 3, factor: 2, kind: soft}").kind == "soft"
    for wrong in ("{temprature: 0.2}", "{temperature: cold}", "{reduction: average}"):
        with pytest.raises(pytest.importorskip("jsonargparse").ArgumentError):
            built(cz.NTXent, tmp_path, f"loss: {wrong}")


@pytest.mark.parametrize("several", [list, tuple, UserList])
def test_a_setting_of_several_takes_any_sequence(several: Callable[[Any], Any]) -> None:
    """Hydra's lists are OmegaConf's ListConfig, a Sequence that is neither a list nor a tuple."""
    sampler = cz.data.GlobalBatchSampler(3, batch_size=2)
    assert cz.WeightedSum([cz.SupCon()], weights=several([2])).weights == (2.0,)
    assert cz.MNRL(directions=several(["query_to_doc"]))(Z, Z) == cz.MNRL()(Z, Z)
    assert cz.data.OneDatasetBatchSampler(several([sampler]), sizes=several([3])).sizes == (3,)
    assert cz.metrics.evaluate(Z, labels=torch.zeros(3).long(), metrics=several(["map"])) == {"map": 1.0}


def test_a_name_that_is_like_none_gets_no_suggestion() -> None:
    with pytest.raises(TypeError, match=r"NTXent has no setting 'zzz'\. It has: temperature, normalize, reduction"):
        cz.NTXent(zzz=0.1)  # type: ignore[call-arg]  # why: wrong on purpose
    with pytest.raises(AttributeError, match=r"has no attribute 'zzz'$"):
        _ = cz.zzz


def test_names_of_other_libraries_lead_to_names_that_exist() -> None:
    settings = {name for cls in LOSSES for name in cls.fields}
    options = {name for cls in (cz.DistributedLoss, cz.GradCache) for name in inspect.signature(cls).parameters}
    arguments = {name for cls in LOSSES if hasattr(cls, "inputs") for name in inspect.signature(cls.inputs).parameters}
    assert set(NAMES_ELSEWHERE.values()) <= {*cz.__all__, *cz.metrics.__all__, *settings, *options, *arguments}


def indices(embeddings, labels): ...


def pairs(embeddings, labels, indices_tuple=None): ...


class Miner(nn.Module):
    def forward(self, embeddings, labels): ...


def scaled(log_scale: float) -> cz.LearnableTemperature:
    return later(cz.LearnableTemperature(0.07), log_scale=nn.Parameter(torch.tensor([log_scale])))


NT_XENT = "NTXent(temperature=0.1, normalize=True, reduction='mean')"
OPTIONS = {"grad_reduction": "sum", "prefer_native": True, "check_finite": False, "check_equal": False,
           "check_distinct": False, "ring": True}  # fmt: skip
SHOWN: list[tuple[Callable[[], object], str]] = [
    (lambda: cz.DistributedLoss(cz.NTXent()), f"DistributedLoss(\n  (loss): {NT_XENT}\n)"),
    (lambda: cz.DistributedLoss(pairs, miner=indices), "DistributedLoss(loss=pairs, miner=indices)"),
    (lambda: cz.DistributedLoss(pairs, miner=Miner()), "DistributedLoss(\n  loss=pairs\n  (miner): Miner()\n)"),
    *(
        (lambda x=x: cz.DistributedLoss(cz.NTXent(), **x), f"DistributedLoss(\n  {of}\n  (loss): {NT_XENT}\n)")
        for x, of in (({name: value}, f"{name}={value!r}") for name, value in OPTIONS.items())
    ),
    (lambda: cz.NTXent(check_finite=False), NT_XENT.replace(")", ", check_finite=False)")),
    (
        lambda: cz.NTXent(temperature=cz.LearnableTemperature(0.07)),
        "NTXent(\n  normalize=True, reduction='mean'\n  (temperature): LearnableTemperature(0.07)\n)",
    ),
    (lambda: scaled(-math.log(0.125)), "LearnableTemperature(0.125)"),
    (lambda: scaled(100.0), "LearnableTemperature(0.01)"),  # the value that the next call uses
    (lambda: cz.LearnableTemperature(0.1, max_scale=math.inf), "LearnableTemperature(0.1, max_scale=inf)"),
    (lambda: cz.LearnableTemperature(0.07).to("meta"), "LearnableTemperature()"),
]


@pytest.mark.parametrize(("make", "text"), SHOWN, ids=lambda x: x if isinstance(x, str) else "")
def test_what_is_not_the_default_is_shown(make: Callable[[], object], text: str) -> None:
    assert repr(make()) == text


def test_a_process_group_is_shown_by_its_ranks(worlds: Worlds) -> None:
    shown, _ = worlds.run(2, lambda: repr(cz.DistributedLoss(cz.NTXent(), process_group=dist.group.WORLD)))
    assert shown.splitlines()[1] == "  process_group=<ranks [0, 1]>"
