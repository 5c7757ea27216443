"""What losses share: settings kept in a module, the checks a step begins with, temperature, and rows of one kind."""

import functools
import inspect
import math
import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar, get_args

import numpy as np
import torch
from torch import Tensor, nn

from contrastive_zoo.class_docstring import class_docstring
from contrastive_zoo.collectives import derived, replicated
from contrastive_zoo.compiling import uncompiled
from contrastive_zoo.engine.dense_mode import is_dense
from contrastive_zoo.engine.precision import rounded, wide
from contrastive_zoo.engine.reduction import REDUCTIONS
from contrastive_zoo.engine.unit_rows import unit
from contrastive_zoo.handshake import kind, refuse_empty
from contrastive_zoo.masks import labels_problem
from contrastive_zoo.session import Session, meet, refuse
from contrastive_zoo.world import Shards, World


class Loss(nn.Module):
    """A function of the zoo with its settings kept; the base of every own loss.

    The settings are the keyword-only arguments of the function that a class is declared with, as in
    ``class NTXent(Loss, function=nt_xent)``. One that is a module, such as
    :class:`LearnableTemperature`, becomes a submodule and is asked for its value at every call.

    Args:
        check_finite: whether rows with NaN or infinite values are refused.
        settings: as the function takes them.

    Raises:
        TypeError: a setting that the function does not have.
        ValueError: a setting that makes no sense, such as a temperature that is not positive or an unknown reduction. At
            the call, on every rank alike, what any loss refuses: such a setting (attributes may be set later), rows, views
            or labels that do not fit together (labels missing, not integers, not one per row; towers or views of different
            shape), NaN or infinite rows (unless ``check_finite=False``), ranks that bring different widths, dtypes or
            settings, or no rows at all.

    Example:
        >>> import contrastive_zoo as cz
        >>> cz.NTXent(temperature=0.2)
        NTXent(temperature=0.2, normalize=True, reduction='mean')
    """

    __call__: Callable[..., Tensor]
    function: ClassVar[Callable[..., Tensor]]
    check: ClassVar[Callable[..., str | None]] = staticmethod(lambda: None)
    __signature__: ClassVar[inspect.Signature]
    _defaults: ClassVar[dict[str, Any]] = {}
    _told_to_wrap: ClassVar[bool] = False
    made: ClassVar[tuple[str, ...]] = ()
    """Settings of the function that the constructor makes itself."""
    refused: ClassVar[tuple[str, ...]] = ()
    """Arguments of the constructor that this loss has no use for."""
    rank_local: ClassVar[frozenset[str]] = frozenset()
    """Arguments that mean something on the rank that brings them alone, such as positions among its own rows."""
    supports_ring: ClassVar[bool] = False
    """Whether candidates can pass from rank to rank, one shard at a time."""

    def __init_subclass__(
        cls,
        function: Callable[..., Tensor] | None = None,
        check: Callable[..., str | None] = lambda: None,
        **kwargs: Any,
    ) -> None:
        """``check`` names some settings of ``function`` and returns what is wrong with them in words, or None."""
        super().__init_subclass__(**kwargs)
        if function is not None:
            cls.function, cls.check = staticmethod(function), staticmethod(check)
            parameters = inspect.signature(function).parameters.values()
            keep = [x for x in parameters if x.kind is x.KEYWORD_ONLY and x.name != "world"]
            cls._defaults = {x.name: x.default for x in keep}
            cls.__signature__ = cls._constructor(keep)
            if function.__doc__:
                compared = [x for x in parameters if x.kind is not x.KEYWORD_ONLY]
                cls.__doc__ = class_docstring(
                    cls.__name__,
                    vars(cls).get("__doc__"),
                    function.__doc__,
                    function_name=function.__name__,
                    compared=[f"*{x.name}" if x.kind is x.VAR_POSITIONAL else x.name for x in compared],
                    settings=list(cls.__signature__.parameters),
                    inherited=[base.__doc__ for base in cls.__mro__[1:] if issubclass(base, Loss)],
                )

    @classmethod
    def _constructor(cls, of_function: Sequence[inspect.Parameter]) -> inspect.Signature:
        """What the constructor takes: its own arguments, then the function's settings that it passes on."""
        own = {x.name: x for x in list(inspect.signature(cls.__init__).parameters.values())[1:]}
        of_function = [own.get(x.name, x) for x in of_function if x.name not in cls.made]
        passed_on = {x.name for x in of_function} | {"check_finite"} | set(cls.refused)
        first = [x for x in own.values() if x.name not in passed_on and x.kind is not x.VAR_KEYWORD]
        finite = inspect.Parameter("check_finite", inspect.Parameter.KEYWORD_ONLY, default=True, annotation=bool)
        return inspect.Signature([*first, *of_function, finite])

    def __init__(self, *, check_finite: bool = True, **settings: Any) -> None:
        super().__init__()
        self.check_finite = check_finite
        for name in settings:
            if name not in self._defaults:
                known = ", ".join(self._defaults)
                raise TypeError(f"{type(self).__name__} has no setting {name!r}. It has: {known}, check_finite.")
        for name, value in (self._defaults | settings).items():
            setattr(self, name, value)
        if self._defaults:  # other losses are complete at the end of their own constructors
            self.refuse_bad_settings()

    def __setattr__(self, name: str, value: Any) -> None:
        """NumPy's numbers become Python's, which multiply tensors and print alike on every rank."""
        super().__setattr__(name, value.item() if isinstance(value, np.generic) else value)

    def settings(self) -> Mapping[str, Any]:
        """The settings at this moment: of a learnable one, its present value, [] also where its parameter is [1]."""
        current = {name: getattr(self, name) for name in self._defaults}
        values = {name: value() if isinstance(value, nn.Module) else value for name, value in current.items()}
        return {name: real(x) if isinstance(self._defaults[name], float) else x for name, x in values.items()}

    def settings_problem(self) -> str | None:
        """What is wrong with the settings at this moment, in words; None if nothing is. It asks no other rank.

        The value of a setting that is a module is known at the call only, and judged there.
        """
        current = {name: getattr(self, name) for name in self._defaults}
        now = {name: self._defaults[name] if isinstance(x, nn.Module) else x for name, x in current.items()}
        shared = {name: now[name] for name in ("temperature", "reduction") if name in now}
        check = type(self).check
        named = {name: now[name] for name in inspect.signature(check).parameters if name in now}
        return shared_problem(**shared) or check(**named)

    def refuse_bad_settings(self) -> None:
        """Say what is wrong with the settings; for the end of a constructor.

        Raises:
            ValueError: :meth:`settings_problem` says something.
        """
        if problem := self.settings_problem():
            raise ValueError(f"{type(self).__name__}: {problem}")

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *args: Any) -> None:
        _widen_numbers(self, state_dict, prefix)
        super()._load_from_state_dict(state_dict, prefix, *args)

    @uncompiled
    def forward(self, *rows: Tensor, world: World | None = None, **named_rows: Tensor) -> Tensor:
        """The function of these rows.

        Args:
            rows: as the function takes them.
            world: who else holds rows; None is nobody. ``DistributedLoss`` passes the process group's.
            named_rows: as the function takes them.
        """
        world = self.local() if world is None else world
        self.refuse_other_than_tensors(rows, named_rows, world)
        return type(self).function(*rows, **named_rows, **self.settings(), world=world)

    def can_be_replicated(self, *rows: Any, **named_rows: Any) -> bool:
        """Whether every rank can compute the loss from the gathered arguments: not a part of it, nor with rank-local ones.

        Args:
            rows: as :meth:`forward` takes them.
            named_rows: as :meth:`forward` takes them.
        """
        if any(getattr(x, "reduction", None) == "none" or getattr(x, "sharded", False) for x in self.modules()):
            return False
        names, _ = _takes(getattr(type(self), "function", type(self).forward))
        given = {**dict(zip(names, rows, strict=False)), **named_rows}
        return not any(given.get(name) is not None for name in self.rank_local)

    def can_ring(self) -> bool:
        """Whether candidates can pass from rank to rank instead of being gathered."""
        return self.supports_ring

    def refuse_other_than_tensors(self, rows: Sequence[Any], named_rows: Mapping[str, Any], world: World) -> None:
        """Say so, on every rank, if what is to be compared is not a tensor; where None is a default, it is allowed.

        Raises:
            ValueError: an argument is something else.
        """
        names, optional = _takes(getattr(type(self), "function", type(self).forward))
        for index, x in enumerate(rows):
            name = names[index] if index < len(names) else f"view {index}"
            self._refuse_other_than_tensor(name, x, name in optional, world)
        for name, x in named_rows.items():
            self._refuse_other_than_tensor(name, x, name in optional, world)

    def _refuse_other_than_tensor(self, name: str, x: Any, optional: bool, world: World) -> None:
        if not isinstance(x, Tensor) and not (optional and x is None):
            refuse(type(self).__name__, f"{name} must be a tensor, got {type(x).__name__}.", world=world)

    def local(self) -> World:
        """A world of this process alone; says once if there are others that this loss will not see."""
        world = World.of()
        if world.size == 1:
            return Session.of(world, check_finite=self.check_finite)
        if not Loss._told_to_wrap:
            Loss._told_to_wrap = True
            warnings.warn(
                f"{type(self).__name__} compares this process's own rows only, though {world.size} processes run: "
                f"its negatives are local. For the global batch write DistributedLoss({type(self).__name__}(...)).",
                stacklevel=6,  # the caller's line: beyond forward, what wraps it and two of torch's frames
            )
        return Session.of(World(), check_finite=self.check_finite)

    def extra_repr(self) -> str:
        own = {x: getattr(self, x) for x in self._defaults if x not in self._modules and x not in self._parameters}
        own |= {} if self.check_finite else {"check_finite": False}
        return ", ".join(f"{name}={value!r}" for name, value in own.items())


@functools.cache
def _takes(function: Callable[..., Tensor]) -> tuple[list[str], set[str]]:
    """Names of what a function compares, and of what may be None."""
    parameters = [x for x in inspect.signature(function).parameters.values() if x.name != "self"]
    named = [x.name for x in parameters if x.kind is x.POSITIONAL_OR_KEYWORD]
    return named, {x.name for x in parameters if x.default is None}


class LearnableTemperature(nn.Module):
    """A temperature that is learnt as the logarithm of its inverse, as CLIP does: t = exp(−θ).

    The scale 1/t = exp(θ) is kept at or below ``max_scale`` by clamping θ itself before each use, not its gradient, so
    that θ never gets stuck beyond the bound.

    Args:
        initial: t at the start, > 0; CLIP's is 0.07.
        max_scale: largest 1/t; CLIP's is 100.

    Raises:
        ValueError: an initial temperature that is not positive and finite, or below 1 / max_scale.

    Example:
        >>> t = LearnableTemperature(0.5)
        >>> t()
        tensor(0.5000, grad_fn=<ExpBackward0>)

    Source: Radford et al. 2021, §2.5, https://arxiv.org/abs/2103.00020
    """

    def __init__(self, initial: float = 0.07, *, max_scale: float = 100.0) -> None:
        super().__init__()
        if not (
            is_number(initial, above=0) and is_number(max_scale, above=0, finite=False) and initial * max_scale >= 1
        ):
            raise ValueError(
                f"LearnableTemperature: the initial temperature is positive and at least 1 / max_scale, got {initial} "
                f"with max_scale={max_scale}."
            )
        self.log_scale = nn.Parameter(torch.tensor([-math.log(initial)]))  # FSDP shards no parameter of shape []
        self.max_scale = max_scale

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *args: Any) -> None:
        _widen_numbers(self, state_dict, prefix)
        super()._load_from_state_dict(state_dict, prefix, *args)

    def forward(self) -> Tensor:
        """t, a positive number, []."""
        log_scale = real(self.log_scale)
        if log_scale.item() > math.log(self.max_scale):
            # .data: two forward passes before a backward one are fine, the values that autograd keeps are exp's results
            log_scale.data.fill_(math.log(self.max_scale))
        t = (-log_scale).exp()
        t.log_scale = log_scale  # which few pairs differentiate by at once
        return t

    def extra_repr(self) -> str:
        """The temperature at this moment, where this process holds it: a shard of it, or none yet, has no value."""
        theta = self.log_scale
        here = type(theta) is nn.Parameter and theta.numel() == 1 and not theta.is_meta
        value = [f"{math.exp(-min(theta.item(), math.log(self.max_scale))):.4g}"] if here else []
        return ", ".join([*value, *([] if self.max_scale == 100 else [f"max_scale={self.max_scale:g}"])])


class LearntScale(Loss):
    """A loss whose temperature is learnt from the given one on; ``logit_scale`` is log(1/t), as in open_clip's models.

    Example:
        >>> from contrastive_zoo.losses.clip import Clip
        >>> Clip(temperature=0.5).logit_scale
        Parameter containing:
        tensor([0.6931], requires_grad=True)
    """

    max_scale: ClassVar[float] = 100.0

    def __init__(self, **settings: Any) -> None:
        temperature = settings.pop("temperature", self._defaults["temperature"])
        if not isinstance(temperature, nn.Module):
            if problem := shared_problem(temperature=temperature):
                raise ValueError(f"{type(self).__name__}: {problem}")
            temperature = LearnableTemperature(temperature, max_scale=self.max_scale)
        super().__init__(temperature=temperature, **settings)

    @property
    def logit_scale(self) -> nn.Parameter:
        """log(1/t), [1]."""
        return self.get_parameter("temperature.log_scale")


def begin(
    caller: str,
    rows: Mapping[str, Tensor | None],
    *,
    world: World,
    problem: str | None = None,
    temperature: float | Tensor = 1.0,
    reduction: str = "mean",
    **settings: object,
) -> list[Shards]:
    """Check what every loss checks, agree on it with all ranks, and learn how the rows lie over them.

    Rows that are None are not there; of a setting that is a tensor, which is learnt, nothing is compared.

    Raises:
        ValueError: on every rank alike: a temperature that is not positive, an unknown reduction, ``problem``, no rows
            at all, or whatever :func:`contrastive_zoo.session.meet` finds.

    Example:
        >>> from contrastive_zoo.world import ALONE
        >>> begin("NTXent", {"views": torch.ones(2, 3)}, temperature=0.0, world=ALONE)
        Traceback (most recent call last):
        ...
        ValueError: NTXent: temperature must be positive and finite, got 0.0. For a logit scale s pass temperature=1/s.
    """
    problem = problem or shared_problem(temperature, reduction)
    given_rows = {name: x for name, x in rows.items() if x is not None}
    settings = {"reduction": reduction, "temperature": temperature, **settings}
    fixed = {name: x for name, x in settings.items() if not isinstance(x, Tensor)}
    shards = meet(caller, given_rows, world=world, problem=problem, settings=fixed)
    refuse_empty(caller, shards[0])
    return shards


def begin_labelled(
    caller: str,
    embeddings: Tensor | None,
    labels: Tensor | None,
    *,
    normalize: bool = True,
    problem: str | None = None,
    world: World,
    **settings: Any,
) -> tuple[Tensor, Tensor, Shards]:
    """:func:`begin` for labelled rows: these, :func:`prepared`, their labels, and how they lie over the ranks.

    Example:
        >>> from contrastive_zoo.world import ALONE
        >>> begin_labelled("Loss", torch.eye(2), torch.tensor([0, 7]), world=ALONE)[1:]
        (tensor([0, 7]), Shards(sizes=(2,), rank=0))
    """
    problem = labelled_problem(embeddings, labels) or problem
    named = {"embeddings": embeddings, "labels": labels}
    shards, *_ = begin(caller, named, problem=problem, normalize=normalize, world=world, **settings)
    assert embeddings is not None  # begin has refused it
    assert labels is not None
    return prepared(embeddings, normalize=normalize, world=world), whole_labels(labels, world), shards


def meet_views(
    caller: str, views: Sequence[Tensor], *, problem: str | None = None, world: World, **settings: Any
) -> Shards:
    """:func:`begin` for views of the same samples: how these lie over the ranks.

    Example:
        >>> from contrastive_zoo.world import ALONE
        >>> meet_views("Loss", [torch.ones(2, 1), torch.ones(2, 1)], world=ALONE)
        Shards(sizes=(2,), rank=0)
    """
    named = {f"view {index}": view for index, view in enumerate(views)}
    return begin(caller, named, problem=views_problem(views) or problem, world=world, **settings)[0]


def begin_views(
    caller: str, views: Sequence[Tensor], *, normalize: bool = True, world: World, **settings: Any
) -> tuple[list[Tensor], Shards]:
    """:func:`meet_views`, and the views :func:`prepared`.

    Example:
        >>> from contrastive_zoo.world import ALONE
        >>> begin_views("Loss", [torch.ones(2, 1), 3 * torch.ones(2, 1)], world=ALONE)[0][1].tolist()
        [[1.0], [1.0]]
    """
    shards = meet_views(caller, views, normalize=normalize, world=world, **settings)
    return [prepared(view, normalize=normalize, world=world) for view in views], shards


def rows_problem(name: str, rows: Tensor) -> str | None:
    """What is wrong with embeddings, in words; None if nothing is.

    Example:
        >>> rows_problem("queries", torch.ones(3))
        'queries are floating-point rows [n, d], got float32 [3].'
    """
    if rows.ndim != 2 or not rows.is_floating_point():
        return f"{name} are floating-point rows [n, d], got {kind(rows)}."
    return None


def shared_problem(temperature: object = 1.0, reduction: object = "mean") -> str | None:
    """What is wrong with the settings that losses share, in words; None if nothing is.

    Example:
        >>> shared_problem(reduction="average")
        "reduction is one of mean, sum, none, got 'average'."
    """
    several = isinstance(temperature, Tensor) and temperature.numel() != 1
    if several or not is_number(temperature, above=0):
        got = temperature.tolist() if isinstance(temperature, Tensor) else temperature
        return f"temperature must be positive and finite, got {got}. For a logit scale s pass temperature=1/s."
    return None if reduction in REDUCTIONS else f"reduction is one of {', '.join(REDUCTIONS)}, got {reduction!r}."


def word_problem(name: str, word: object, words: Any, *, one_of: bool = False) -> str | None:
    """What is wrong with a word that should be one of a Literal's, in words; None if nothing is.

    Example:
        >>> from typing import Literal
        >>> word_problem("variant", "both", Literal["out", "in"])
        "variant is 'out' or 'in', got 'both'."
        >>> word_problem("variant", "both", Literal["out", "in"], one_of=True)
        "variant is one of 'out', 'in', got 'both'."
    """
    known = get_args(words)
    listed = f"one of {', '.join(map(repr, known))}" if one_of else " or ".join(map(repr, known))
    return None if word in known else f"{name} is {listed}, got {word!r}."


def is_number(
    x: object,
    *,
    above: float | None = None,
    below: float | None = None,
    low: float | None = None,
    high: float | None = None,
    finite: bool = True,
    whole: bool = False,
) -> bool:
    """Whether x is a number within bounds: Python's, NumPy's, or one or more in a tensor. NaN never is.

    Args:
        x: what may be a number. A tensor on the meta device, which holds none yet, is not judged.
        above: the numbers are larger.
        below: the numbers are smaller.
        low: the smallest of them.
        high: the largest of them.
        finite: whether infinities are left out.
        whole: whether they are integers.

    Example:
        >>> is_number(1, above=0, high=1), is_number(torch.nan), is_number("1")
        (True, False, False)
    """
    each = [] if isinstance(x, Tensor) and x.is_meta else _each(x)
    kinds = (int, np.integer) if whole else (int, float, np.integer, np.floating)
    return all(
        isinstance(value, kinds)
        and not math.isnan(value)
        and (math.isfinite(value) or not finite)
        and (above is None or value > above)
        and (below is None or value < below)
        and (low is None or value >= low)
        and (high is None or value <= high)
        for value in each
    )


def number_problem(rule: str | None = None, fix: str = "", /, **settings: Any) -> str | None:
    """What is wrong with settings that must be numbers within bounds, in words; None if nothing is.

    Args:
        rule: what is expected, as a sentence without its end; None says it of each name by the bounds.
        fix: a sentence that says what to do.
        settings: numbers by their names, and bounds by the names that :func:`is_number` gives them.

    Example:
        >>> number_problem(low=0, high=1, weight=2.0)
        'weight must be from 0 to 1, got 2.0.'
        >>> number_problem("margin is an angle in degrees", "The paper has 5.73.", low=0, margin=torch.nan)
        'margin is an angle in degrees, got nan. The paper has 5.73.'
    """
    bounds = {name: settings.pop(name) for name in _BOUNDS if name in settings}
    for name, value in settings.items():
        if not is_number(value, **bounds):
            got = value.tolist() if isinstance(value, Tensor) else value
            return f"{rule or f'{name} must be {_expected(**bounds)}'}, got {got}. {fix}".rstrip()
    return None


def _each(x: object) -> list[object]:
    return x.detach().flatten().tolist() if isinstance(x, Tensor) else [x]


_BOUNDS = ("above", "below", "low", "high", "finite", "whole")


def _expected(
    above: float | None = None,
    below: float | None = None,
    low: float | None = None,
    high: float | None = None,
    finite: bool = True,
    whole: bool = False,
) -> str:
    """The most usual bounds in words."""
    if low is not None and high is not None:
        return f"from {low} to {high}"
    size = ["positive"] if above == 0 else [] if low is None else [f"at least {low}"]
    return " and ".join([*size, "an integer" if whole else "finite" if finite else "a number"])


def positive_problem(**settings: object) -> str | None:
    """What is wrong with settings that must be positive numbers, in words; None if nothing is.

    Example:
        >>> positive_problem(scale=-1.0)
        'scale must be positive and finite, got -1.0.'
    """
    return number_problem(above=0, **settings)


def instance_problem(loss: object) -> str | None:
    """What is wrong with a loss that may be a class in place of its instance, in words; None if nothing is.

    Example:
        >>> instance_problem(LearnableTemperature)
        'pass an instance, LearnableTemperature(...), not the class LearnableTemperature.'
    """
    if not isinstance(loss, type):
        return None
    return f"pass an instance, {loss.__name__}(...), not the class {loss.__name__}."


def towers_problem(rule: str, mend: str = "", **towers: Tensor) -> str | None:
    """What is wrong with rows that belong together index by index, in words; None if nothing is.

    Example:
        >>> towers_problem("row i is one pair", "Pass as many.", queries=torch.ones(2, 3), keys=torch.ones(4, 3))
        'row i is one pair, got queries float32 [2, 3] and keys float32 [4, 3]. Pass as many.'
    """
    (first, one), *others = towers.items()
    for name, other in others:
        if one.shape != other.shape or one.dtype != other.dtype:
            return f"{rule}, got {first} {kind(one)} and {name} {kind(other)}. {mend}".rstrip()
    return rows_problem(first, one)


def views_problem(views: Sequence[Tensor]) -> str | None:
    """What is wrong with views of the same samples, in words; None if nothing is.

    Example:
        >>> views_problem([torch.ones(2, 3)])
        'two or more views are compared, got 1. Call loss(view1, view2).'
    """
    if len(views) < 2:
        return f"two or more views are compared, got {len(views)}. Call loss(view1, view2)."
    for index, view in enumerate(views):
        if view.shape != views[0].shape or view.dtype != views[0].dtype:
            return (
                f"views must pair row by row, got view 0 {kind(views[0])} and view {index} {kind(view)}. "
                "Pass the same samples, in the same order, in every view."
            )
    return rows_problem("views", views[0])


def labelled_problem(embeddings: Tensor | None = None, labels: Tensor | None = None, *more: Tensor) -> str | None:
    """What is wrong with labelled rows, in words; None if nothing is.

    Example:
        >>> labelled_problem(torch.ones(2, 3))
        'labels are missing: call loss(embeddings, labels) with one integer per row.'
    """
    if embeddings is None or more:
        return "one tensor of embeddings and one of labels are compared: call loss(embeddings, labels)."
    if labels is None:
        return "labels are missing: call loss(embeddings, labels) with one integer per row."
    return rows_problem("embeddings", embeddings) or labels_problem("labels", labels, len(embeddings))


def prepared(rows: Tensor, *, normalize: bool, world: World) -> Tensor:
    """Rows in at least 32 bits, on the unit sphere if asked; a zero row stays zero.

    Example:
        >>> prepared(torch.tensor([[3.0, 4.0]]), normalize=True, world=World())
        tensor([[0.6000, 0.8000]])
    """
    return derived(lambda x: unit(wide(x)) if normalize else wide(x), rows, world=world)


def whole_labels(labels: Tensor, world: World) -> Tensor:
    """Labels as int64: those of another dtype cannot be sorted (bool), or would be taken for masks (uint8).

    Example:
        >>> whole_labels(torch.tensor([True, False]), World())
        tensor([1, 0])
    """
    return labels if labels.dtype == torch.int64 else derived(lambda x: x.long(), labels, world=world)


def narrowed(rows: Tensor, like: Tensor, world: World) -> Tensor:
    """Prepared rows that are numbers of ``like``'s dtype if that has 16 bits, for products of such to take as they are.

    Example:
        >>> narrowed(torch.tensor([[1.001]]), torch.tensor([[2.0]], dtype=torch.bfloat16), World())
        tensor([[1.]])
    """
    return rows if is_dense() else derived(lambda x: rounded(x, like.dtype), rows, world=world)


def in_a_row(rows: Sequence[Tensor], world: World) -> Tensor:
    """Views one after the other.

    Example:
        >>> in_a_row([torch.zeros(1, 2), torch.ones(1, 2)], World())
        tensor([[0., 0.],
                [1., 1.]])
    """
    return derived(lambda *x: torch.cat(x), *rows, world=world)


def numbered(shards: Shards, like: Tensor, *, views: int = 1) -> Tensor:
    """Numbers of my samples in the global batch, view after view.

    Example:
        >>> numbered(Shards((1, 2), rank=1), torch.ones(2, 3), views=2)
        tensor([1, 2, 1, 2])
    """
    return torch.arange(shards.start, shards.start + shards.size, device=like.device).repeat(views)


def real(x: Any) -> Any:
    """A number as formulas take it: a tensor of shape [1] as [], Python's and NumPy's as float; anything else as it is.

    A parameter of shape [1] would otherwise raise its dtype to the result's, and its shape to the loss's; a number of
    NumPy's would round what is computed of it to its own few digits.

    Example:
        >>> real(torch.ones(1)), real(torch.ones(2)), real(1), real("mean")
        (tensor(1.), tensor([1., 1.]), 1.0, 'mean')
    """
    if isinstance(x, (int, np.integer, np.floating)) and not isinstance(x, bool):
        return float(x)
    return x.reshape(()) if isinstance(x, Tensor) and x.shape == (1,) else x


def _widen_numbers(module: nn.Module, state_dict: dict[str, Any], prefix: str) -> None:
    """Parameters that were saved as [], before they became [1] for FSDP's sake, as [1]."""
    for name, parameter in module.named_parameters(recurse=False):
        saved = state_dict.get(prefix + name)
        if isinstance(saved, Tensor) and saved.ndim == 0 and parameter.shape == (1,):
            state_dict[prefix + name] = saved.reshape(1)


def logit_scale(temperature: float | Tensor, world: World) -> float | Tensor:
    """1 / temperature; a learnable one is used by each rank for its own rows and gets the gradient of all.

    Example:
        >>> from contrastive_zoo.world import ALONE
        >>> logit_scale(0.5, ALONE)
        2.0
    """
    temperature = real(temperature)
    if isinstance(temperature, Tensor):
        return 1 / wide(replicated(temperature, process_group=world))
    return 1 / temperature
