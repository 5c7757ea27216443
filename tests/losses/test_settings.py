"""Settings: refused when a loss is built and at the call, by every loss, for every number that it takes."""

import math
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import contrastive_zoo as cz
from contrastive_zoo.loss_base.loss import Loss
from contrastive_zoo.loss_base.settings import Learnable, is_number
from contrastive_zoo.testing.catalogue import CATALOGUE, Entry
from tests.helpers import EVERY_CASE, close, numbers
from tools.vectors.cases import of_entry

N, D = 8, 4
LABELS = torch.arange(N) % 3
NAN = math.nan


def z(seed: int = 0, *, k: int = 0, dtype: torch.dtype = torch.float64) -> Tensor:
    return (numbers(N, k, D, seed=seed) if k else numbers(N, D, seed=seed)).to(dtype)


VIEWS = (z(1), z(2))
LABELLED = (z(1), LABELS)


class Checkpointed(cz.RowLoss):
    """A user's loss whose term is computed again for its gradient."""

    margin: Learnable = 0.3

    def rows(self, similarity: Tensor, positive: Tensor, negative: Tensor) -> tuple[Tensor, Tensor]:
        def term(x: Tensor) -> Tensor:
            return ((x + self.margin).exp() * negative).sum(1)

        return checkpoint(term, similarity, use_reentrant=False), negative.any(1)


@dataclass(frozen=True)
class Subject:
    """A loss, what it is called with, and of each number that it takes some that it refuses (NaN is among them)."""

    make: Callable[..., Loss]
    rows: tuple[Tensor, ...]
    refused: dict[str, tuple[Any, ...]] = field(default_factory=dict)
    given: dict[str, Any] = field(default_factory=dict)
    """Settings that others need."""

    def __call__(self, **settings: Any) -> Loss:
        return self.make(**{**self.given, **settings})


META = torch.empty((), device="meta")
COLD = (0, 0.0, -0.1, math.inf, -math.inf, "0.1", None, torch.ones(2), torch.tensor(-1.0), np.float32(0), 1e-300, META)
ANY = (math.inf, -math.inf, None, "1", 1e308, 10**400, -(2**63), torch.tensor(3, dtype=torch.uint8), META)
LEARNT = tuple(x for x in COLD if x is not None)
NAMES_BY_REFUSED: list[tuple[tuple[Any, ...], str]] = [
    ((0.0, -1.0, *ANY), "concentration eps high_norm la limit low_norm scale t teacher_temperature Circle.gamma"),
    ((0.0, -1.0, *ANY), "SoftTriple.gamma MultiSimilarity.alpha MultiSimilarity.beta ProxyAnchor.alpha SwAV.epsilon"),
    ((-1.0, *ANY), "hardness_strength nu t_n t_p tau BarlowTwins.lambda_ HCL.beta RankedList.epsilon"),
    ((-0.1, 1.1, *ANY), "centre_momentum imbalance momentum weight LeJEPA.lambda_ TiCo.beta VISReg.lambda_"),
    ((0, 1.5, *ANY), "code_views global_views num_bins num_slices LargeMarginSoftmax.margin"),
    ((0.0, 1.1, *ANY), "CosFace.sample_rate"),
    ((0.01, 101.0, *ANY), "RDMReg.p"),
    ((1, 2.5, *ANY), "num_points"),
    ((0.5, *ANY), "power AlignUniform.alpha"),
    ((-0.1, 1.0, *ANY), "tau_plus"),
    ((0.0, -1.0, "1"), "sigma base_temperature"),
    (LEARNT, "Clip.temperature SigLIP.temperature"),
    ((math.inf, "1"), "logit_bias false_negative_margin"),
    ((math.inf, -math.inf), "Margin.beta"),
    ((math.inf, -math.inf, "1"), "MultiSimilarity.epsilon"),
    ((0.0, 90.0, *ANY), "Angular.alpha"),
    ((-0.1, 3.2, *ANY), "low_margin high_margin ArcFace.margin CurricularFace.margin"),
    ((-1, 1.5, *ANY), "iterations"),
    ((0, 1.5, math.inf, "1", 10**400), "top_k"),
    ((1, 2.5, math.inf, "1", 10**400), "group_size"),
    ((-1.0, 181.0, *ANY), "TupletMargin.margin"),
]
"""What losses refuse as numbers, where that is more or less than numbers that are not finite; a temperature is positive."""
REFUSED = {name: values for values, names in NAMES_BY_REFUSED for name in names.split()}

OPTIONAL = {"negatives", "token mask"}


def kind_of(name: str) -> str:
    return name.partition(",")[0]


def subject(entry: Entry) -> Subject:
    case = of_entry(entry)
    given = {**case.settings, **({"num_slices": 8} if "num_slices" in entry.loss.fields else {})}
    of_losses = {name: x.default for name, x in entry.loss.fields.items() if x.init and name not in given}
    finite = {name: COLD if name == "temperature" else ANY for name, x in of_losses.items() if is_number(x)}
    names = ((name, key) for name in entry.loss.fields for key in (name, f"{entry.cls}.{name}"))
    refused = finite | {name: REFUSED[key] for name, key in names if key in REFUSED}
    refused.pop("sub_centers", None)
    rows = {name: torch.from_numpy(x) for name, x in case.arguments().items() if case.kinds[name] not in OPTIONAL}
    return Subject(entry.loss, (*rows.values(),), refused, given)


SUBJECTS = {x.cls: subject(x) for x in reversed(CATALOGUE.values())}  # of several rows the first
SUBJECTS["Margin, by class"] = replace(SUBJECTS["Margin"], given={"num_classes": 5})
SUBJECTS["Triplet, soft"] = replace(SUBJECTS["Triplet"], given={"soft": True})
SUBJECTS["Checkpointed"] = Subject(Checkpointed, LABELLED, {"margin": ANY})
SUBJECTS["Triplet, semi-hard"] = Subject(cz.Triplet, LABELLED, {"margin": (0.0, -1.0, *ANY)}, {"mining": "semi-hard"})
CASES = [(name, setting) for name, subject in SUBJECTS.items() for setting in subject.refused]


def said_by(make: Callable[[], Any]) -> str:
    with pytest.raises(ValueError, match=r"^\w+: .*\w") as raised:
        make()
    return str(raised.value)


def set_later(loss: Loss, setting: str, value: Any) -> None:
    """As a schedule would, or a training that has diverged."""
    held = getattr(loss, setting)
    if isinstance(held, nn.Parameter):
        held.data.fill_(value)
    elif isinstance(held, nn.Module):
        held.log_scale.data.fill_(value)
    else:
        setattr(loss, setting, value)


@pytest.mark.parametrize("name", SUBJECTS)
def test_what_makes_no_sense_is_refused_when_built_and_at_the_call(name: str) -> None:
    subject, of_name = SUBJECTS[name], f"{kind_of(name)}: "
    words = {x: ("other", np.zeros(0)) for x, held in vars(subject()).items() if isinstance(held, str) and x[0] != "_"}
    numbers_refused = {setting: (NAN, np.float64(NAN), *refused) for setting, refused in subject.refused.items()}
    for setting, value in ((setting, x) for setting, values in {**numbers_refused, **words}.items() for x in values):
        said = said_by(lambda setting=setting, value=value: subject(**{setting: value}))  # type: ignore[misc]  # defaults
        assert said.startswith(of_name), said
        assert "got" in said, said
        check = subject()._checks.get(setting)
        is_number = check is not None and check.bounds is not None and name != "Triplet, semi-hard"
        beyond = ("must hold values", "within the range of float32", "an integer up to 2**53")
        assert not is_number or any(x in said for x in (check.bounds.rule or setting, *beyond)), said
        assert setting not in words or repr(getattr(subject(), setting)) in said, said
        loss = subject().double()
        is_module = isinstance(getattr(loss, setting), nn.Module)
        if setting not in words and (not isinstance(value, float) or (is_module and not math.isnan(value))):
            continue  # a learnt temperature is an exponential, which is positive
        set_later(loss, setting, value)
        at_call = said_by(lambda loss=loss: loss(*subject.rows))  # type: ignore[misc]  # a default
        assert at_call.startswith(of_name), at_call
        assert setting not in words or at_call.partition(":")[2] == said.partition(":")[2]
        assert loss.settings_problem() is not None or is_module or name in ("DINO", "IBOT")


@pytest.mark.parametrize("value", [0, 1.5, NAN, "2", 2**62, torch.tensor(39, dtype=torch.uint8)])
def test_sizes_are_refused_when_built(value: Any) -> None:
    rule = "an integer up to 2**53" if value == 2**62 else "at least 1"
    for kind in {entry.loss for entry in CATALOGUE.values()}:
        sizes = {key: 2 for key, of_field in kind.fields.items() if not of_field.kw_only}
        for size in {*sizes, *({"sub_centers", "num_classes"} & kind.fields.keys())}:
            said = said_by(lambda kind=kind, settings={**sizes, size: value}: kind(**settings))
            assert said.startswith((f"{kind.__name__}: ", "MemoryQueue: "))
            assert rule in said or f"{size} is an integer, 1 …" in said, said
    assert rule in said_by(lambda: cz.MemoryQueue(value, 3))
    assert value == 2**62 or rule in said_by(lambda: cz.Matryoshka(cz.SupCon(), (1, value)))


def test_what_a_setting_may_be_is_left() -> None:
    assert cz.DCL(sigma=math.inf)(*VIEWS).isfinite()
    assert cz.Triplet(margin=-0.5)(*LABELLED).isfinite()
    assert cz.MultiSimilarity(epsilon=0.1)(*LABELLED).isfinite()
    close(cz.NTXent(temperature=1)(*VIEWS), cz.NTXent(temperature=1.0)(*VIEWS))


@pytest.mark.parametrize("kind", [np.float32, np.int64, np.float64, int, np.float16])
def test_numbers_of_numpy_and_integers_are_numbers(kind: Any) -> None:
    number, loss = kind(1), cz.NTXent()
    expected = cz.NTXent(temperature=1.0)(*VIEWS)
    close(cz.NTXent(temperature=number)(*VIEWS), expected)
    loss.temperature = number
    close(loss(*VIEWS), expected)
    assert not isinstance(loss.temperature, np.generic)


@pytest.mark.parametrize("name", [x for x in SUBJECTS if SUBJECTS[x].rows[-1].equal(SUBJECTS["SupCon"].rows[-1])])
def test_labels_of_any_integer_dtype(name: str) -> None:
    loss, (*rows, _), labels = SUBJECTS[name]().double().eval(), SUBJECTS[name].rows, LABELS % 2
    dtypes = (torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32)
    for dtype in dtypes if EVERY_CASE else dtypes[len(name) % len(dtypes) :][:1]:
        close(loss(*rows, labels.to(dtype)).detach(), loss(*rows, labels).detach())


@pytest.mark.parametrize("name", SUBJECTS)
def test_a_loss_in_64_bits_takes_rows_of_32(name: str) -> None:
    subject = SUBJECTS[name]
    rows = [x.float() if x.is_floating_point() else x for x in subject.rows]
    torch.manual_seed(0)
    loss = subject().double()
    value = loss(*rows)
    assert value.dtype == torch.float32
    torch.manual_seed(0)
    assert value.item() == pytest.approx(subject()(*rows).item(), rel=1e-4, abs=1e-5)
