"""Fields: a loss's settings are annotated attributes of its class, which are also what is checked and compared."""
# No `from __future__ import annotations` here or in the losses: annotations are read as objects.

import inspect
import math
import typing
from collections.abc import Callable, Sequence
from itertools import starmap
from types import SimpleNamespace, UnionType
from typing import Annotated, Any, ClassVar, Literal, NamedTuple, TypeGuard

import numpy as np
import torch
from torch import Tensor, nn
from typing_extensions import dataclass_transform

from contrastive_zoo.loss_base.state import real
from contrastive_zoo.ranks.row_checks import described, flag_problem, tensor_problem, word_problem
from contrastive_zoo.ranks.suggestions import did_you_mean

_SMALLEST, _LARGEST = torch.finfo(torch.float32).tiny, torch.finfo(torch.float32).max
_FLOAT32 = f"within the range of float32, {_SMALLEST:.2g} … {_LARGEST:.2g}"


class Bounds(NamedTuple):
    """The bounds of a number, and how an error says them; a setting with bounds may also be a tensor or a module."""

    rule: str | None = None  # what the number must be, in words; None lists the bounds
    fix: str = ""  # what to pass instead
    above: float | None = None  # exclusive
    below: float | None = None  # exclusive
    low: float | None = None  # inclusive
    high: float | None = None  # inclusive
    finite: bool = True  # whether infinities are refused
    whole: bool = False  # whether it is an integer
    several: bool = False  # whether a tensor may hold any number of them
    constant: bool = False  # whether the loss has no derivative by it, and refuses a tensor that requires a gradient

    def problem(self, name: str, value: Any) -> str | None:
        """Return what is wrong with a value, in words; None if it is within the bounds."""
        if self.constant and isinstance(value, Tensor) and value.requires_grad:
            return f"{name} is a constant, got a tensor that requires a gradient. Pass {name}.detach()."
        if self.hold(value):
            return None
        if isinstance(value, Tensor) and (problem := tensor_problem(name, value)) is not None:
            return problem
        expected = self.rule or f"{name} must be {self._in_words()}"
        if isinstance(value, int) and abs(value) > 2**53:
            expected = f"{name} must be a float, or an integer up to 2**53"
        elif isinstance(value, (float, np.floating)) and not self.whole and self._is_beyond_float32(float(value)):
            expected = f"{name} must be {_FLOAT32}"
        return f"{expected}, got {_shown(value)}. {self.fix}".rstrip()

    def _is_beyond_float32(self, x: float) -> bool:
        return _LARGEST < abs(x) < math.inf or (self.above == 0 and 0 < x < _SMALLEST)

    def ends(self) -> tuple[float, float]:
        """Return the least and the largest number within the bounds; float32 holds both, and the inverse of the least."""
        largest = _LARGEST if self.finite else math.inf
        above = -largest if self.above is None else math.nextafter(self.above, math.inf)
        below = largest if self.below is None else math.nextafter(self.below, -math.inf)
        low, high = -largest if self.low is None else self.low, largest if self.high is None else self.high
        return max(low, above, _SMALLEST if self.above == 0 else -largest), min(high, below)

    def hold(self, x: object) -> bool:
        """Return whether x is a number within the bounds: Python's, NumPy's, or that of a tensor. NaN never is.

        A parameter on the meta device holds no numbers yet and passes. A tensor on an accelerator passes, too: reading it
        would wait for all that is queued there.
        """
        if not isinstance(x, Tensor):
            return self._hold_for_number(x)
        if x.is_meta:
            return not self.whole and isinstance(x, nn.Parameter)
        if x.numel() != 1 and not self.several:
            return False
        return not x.is_cpu or all(map(self._hold_for_number, _values(x)))

    def _hold_for_number(self, x: Any) -> bool:
        if isinstance(x, (np.integer, np.floating)):  # NumPy compares in x's own precision
            x = int(x) if isinstance(x, np.integer) else float(x)
        if not isinstance(x, int if self.whole else (int, float)) or isinstance(x, bool):
            return False
        least, most = self.ends()
        return least <= x <= most and (isinstance(x, float) or abs(x) <= 2**53)

    def _in_words(self) -> str:
        if self.low is not None and self.high is not None:
            return f"{'an integer ' * self.whole}from {self.low} to {self.high}"
        size = ["positive"] if self.above == 0 else [] if self.low is None else [f"at least {self.low}"]
        return " and ".join([*size, "an integer" if self.whole else "finite" if self.finite else "a number"])


def is_number(x: object, **bounds: Any) -> bool:
    return Bounds(**bounds).hold(x)


def are_numbers(x: object, **bounds: Any) -> TypeGuard[Sequence[Any]]:
    return isinstance(x, Sequence) and len(x) > 0 and all(is_number(number, **bounds) for number in x)


def _holds_numbers(x: Tensor) -> bool:
    """Return whether a tensor's values may be settings: real, dense, and of 16 bits or more: −3 is 253 in uint8."""
    return tensor_problem("", x) is None and not x.is_complex() and x.dtype.itemsize > 1


def _values(x: Tensor) -> list[object]:
    """Return the least and the largest number of a tensor; where it holds none, the tensor itself, which is no number."""
    if not _holds_numbers(x):
        return [x]
    # bounds hold for all numbers if they hold for the least and the largest, which are NaN if any number is
    return [x.item()] if x.numel() == 1 else [y.item() for y in x.detach().aminmax()] if x.numel() else []


def _shown(x: object) -> str:
    """Return a number, or the numbers of a small tensor, as errors write them."""
    if isinstance(x, Tensor) and x.numel() <= 8 and _holds_numbers(x):
        return str(x.tolist())
    return str(x) if isinstance(x, float) else described(x)


Number = Annotated[float, Bounds()]
Positive = Annotated[float, Bounds(above=0)]
NonNegative = Annotated[float, Bounds(low=0)]
Share = Annotated[float, Bounds(low=0, high=1)]
Momentum = Annotated[float, Bounds(low=0, high=1, constant=True)]
Threshold = Momentum
Smoothing = Momentum  # the share of a target that is spread evenly over all candidates
Constant = Annotated[float, Bounds(above=0, constant=True)]  # a positive number that is not learnt
Size = Annotated[int, Bounds(low=1, whole=True)]
Temperature = Annotated[float | Tensor | nn.Module, Bounds(fix="For a logit scale s pass temperature=1/s.", above=0)]
"""A number is constant; a tensor, or a module that returns one, such as :class:`LearnableTemperature`, is learnable."""
Learnable = Annotated[float | Tensor | nn.Module, Bounds()]  # any finite number, by the same rule
Bins = Annotated[int, Bounds(f"num_bins is an integer, 1 … {2**24}", low=1, high=2**24, whole=True)]
"""A number of bins of a histogram: float32 resolves no more than 2²⁴ of them."""
Reduction = Literal["mean", "sum", "none"]


_MISSING: Any = inspect.Parameter.empty
_WORDS, _WIDE = (bool, str), (torch.float32, torch.float64)
_PLAIN = frozenset({bool, float, str, type(None)})  # types of settings that a loss computes with as they are


class Field(NamedTuple):
    """A setting. As a class attribute it gives the default; a loss has a value, a parameter or a submodule of that name."""

    default: Any = _MISSING  # its value if it is not passed; missing for a required one
    factory: Callable[[], Any] | None = None  # returns the default, if each loss needs its own
    init: bool = True  # whether the constructor takes it; otherwise ``__post_init__`` makes it
    kw_only: bool = True  # whether it is passed by name only
    annotation: Any = _MISSING

    def __get__(self, instance: Any, owner: type) -> Any:
        if instance is not None:
            raise AttributeError  # Python then asks nn.Module.__getattr__, which finds parameters and submodules
        return self.default

    def as_parameter(self, name: str) -> inspect.Parameter:
        """Return it as the constructor shows it: the type without its bounds."""
        kind = inspect.Parameter.KEYWORD_ONLY if self.kw_only else inspect.Parameter.POSITIONAL_OR_KEYWORD
        return inspect.Parameter(name, kind, default=self.default, annotation=_without_bounds(self.annotation))


def field(
    *, default: Any = _MISSING, factory: Callable[[], Any] | None = None, init: bool = True, kw_only: bool = True
) -> Any:
    """Declare a setting that is required, positional, made by the constructor, or has a default of its own for each loss."""
    return Field(default if factory is None else factory(), factory, init, kw_only)


@dataclass_transform(kw_only_default=True, field_specifiers=(field,))
class Settings(nn.Module):
    """A module whose annotated class attributes are its settings, keyword-only arguments of its constructor.

    An annotation says what a value may be: ``bool``, a ``Literal`` of words, or ``Annotated[float, Bounds(...)]``. A setting
    is an attribute like any other: it may be set later, and is checked again at the next call. A rule between several
    settings extends :meth:`settings_problem`. What a loss makes of its settings, it makes in ``__post_init__``.

    Examples:
        >>> class Scaled(Settings):
        ...     scale: Positive = 1.0
        >>> Scaled(scale=2.0)
        Scaled(scale=2.0)
        >>> Scaled(scale=-1.0)
        Traceback (most recent call last):
        ...
        ValueError: Scaled: scale must be positive and finite, got -1.0.
    """

    fields: ClassVar[dict[str, Field]] = {}
    _own_fields: ClassVar[dict[str, Field]] = {}  # those that the class itself declares
    _taken: ClassVar[inspect.Signature] = inspect.Signature()  # those that the constructor takes
    _checks: ClassVar[dict[str, "Check"]] = {}  # of those whose annotation says what a value may be

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        held, hints, inherited = vars(cls), _annotations(cls), dict[str, Field]()
        for base in cls.__mro__[1:]:  # each one's own: the second of two bases may redefine what both inherit
            inherited = {**inherited, **vars(base).get("_own_fields", {}), **inherited}
        # an annotation may be a text
        of_class = {name for name, hint in hints.items() if str(hint).startswith(("ClassVar", "typing.ClassVar"))}
        declared = [name for name in hints if name in held and name not in of_class]
        redefined = [name for name in inherited if name in held and name not in declared]
        cls._own_fields = {}
        for name in (*declared, *redefined):
            value = held[name]
            hint = hints[name] if name in declared else inherited[name].annotation
            of_field = (value if isinstance(value, Field) else Field(value))._replace(annotation=hint)
            cls._own_fields[name] = of_field
            if of_field.default is _MISSING:
                delattr(cls, name)
            else:
                setattr(cls, name, of_field)
        new = {name: x for name, x in cls._own_fields.items() if name not in inherited}
        old = {name: cls._own_fields.get(name, x) for name, x in inherited.items()}
        cls.fields = dict(sorted({**new, **old}.items(), key=lambda entry: entry[1].kw_only))
        checks = ((name, _check_of(x.annotation)) for name, x in cls.fields.items())
        cls._checks = {name: x for name, x in checks if x is not None}
        cls._taken = inspect.Signature([x.as_parameter(name) for name, x in cls.fields.items() if x.init])
        if getattr(cls.__init__, "__module__", None) == __name__:  # not one of the class's own
            _show_settings(cls)

    def __init__(self, *args: Any, **settings: Any) -> None:
        super().__init__()
        kind, taken = type(self).__name__, self._taken
        has = f"It has: {', '.join(taken.parameters)}."
        if unknown := settings.keys() - taken.parameters.keys():
            name = min(unknown)
            raise TypeError(f"{kind} has no setting {name!r}.{did_you_mean(name, taken.parameters)} {has}")
        try:
            passed = taken.bind(*args, **settings)
        except TypeError as error:
            raise TypeError(f"{kind}: {error}. {has}") from None
        passed.apply_defaults()
        for name, value in passed.arguments.items():
            of_field = self.fields[name]
            if value is of_field.default and of_field.factory is not None:
                value = of_field.factory()
            setattr(self, name, value.item() if isinstance(value, np.generic) else value)
        modules = {name: x for name, x in self._modules.items() if name in self._checks and x is not None}
        problem = self.settings_problem() or next(filter(None, starmap(_module_problem, modules.items())), None)
        if problem is not None:
            raise ValueError(f"{kind}: {problem}")
        for name, check in self._checks.items():
            if check.bounds is not None and check.bounds.whole and getattr(self, name) is not None:
                setattr(self, name, int(getattr(self, name)))
        self.__post_init__()

    def __post_init__(self) -> None:
        """Make what follows from the settings: parameters, buffers, submodules."""

    def _setting(self, name: str) -> Any:
        """Return a setting that is no plain attribute: a submodule or a parameter, which nn.Module is slow to find."""
        return self._modules.get(name) or getattr(self, name, None)

    def settings_problem(self) -> str | None:
        """Return what is wrong with the present settings, or None; a rule between several settings extends this."""
        present, modules = self.__dict__, self._modules
        for name, check in self._checks.items():
            if modules.get(name) is not None and check.bounds is not None and not check.bounds.whole:
                continue  # its value is checked at the call
            value = present[name] if name in present else self._setting(name)
            if (value in check.words) if type(value) in _WORDS else check.holds(value):
                continue
            if (problem := check(name, value)) is not None:
                return problem
        return None

    def evaluated(self) -> tuple[SimpleNamespace, dict[str, Any], str | None]:
        """Return the values of all settings in one step, those that modules have returned, and what is wrong with these.

        A module is called once. A tensor [1] becomes a number []: it would change the shape of what it is multiplied with.
        """
        values, problem, checks = SimpleNamespace(), None, self._checks
        computed: dict[str, Any] = {}
        present, now = self.__dict__, values.__dict__
        for name in self.fields:
            value = present[name] if name in present else self._setting(name)
            if type(value) in _PLAIN:
                now[name] = value
                continue
            if isinstance(value, np.generic):  # it would compute in a precision of its own
                value = present[name] = value.item()
            bounds = checks[name].bounds if name in checks else None
            if bounds is not None:
                if isinstance(value, nn.Module):
                    value = computed[name] = value()
                    problem = problem or (None if checks[name].holds(value) else bounds.problem(name, value))
                if bounds.whole:
                    value = present[name] = int(value)
                else:
                    value = real(value)
                if isinstance(value, Tensor) and torch.is_grad_enabled() and not value.requires_grad:
                    value = value.clone()  # a schedule may set it in place before the backward pass
            now[name] = value
        return values, computed, problem

    def extra_repr(self) -> str:
        """Show the settings; modules and parameters stand below."""
        shown = {name: self.__dict__[name] for name, x in self.fields.items() if x.init and name in self.__dict__}
        return ", ".join(f"{name}={x!r}" for name, x in shown.items() if name != "check_finite" or x is not True)


class Check(NamedTuple):
    """What an annotation says of a value: a Literal's words, a number's bounds, a flag; and whether None is allowed."""

    kind: Any
    bounds: Bounds | None = None
    optional: bool = False
    words: frozenset[Any] = frozenset()  # all right values of a Literal or a flag
    least: float = math.inf  # of the floats that are right
    most: float = -math.inf

    def holds(self, x: object) -> bool:
        """Return whether x is a right float, or a tensor that holds one: the usual case of a number, in little time."""
        if type(x) is float:
            return self.least <= x <= self.most
        if type(x) is not Tensor or x.ndim or x.layout is not torch.strided or not x.is_cpu or x.dtype not in _WIDE:
            return False
        refused = x.requires_grad and self.bounds is not None and self.bounds.constant
        return not refused and self.least <= x.item() <= self.most

    def __call__(self, name: str, value: object) -> str | None:
        if value is None and self.optional:
            return None
        if self.bounds is not None:
            return self.bounds.problem(name, value)
        return flag_problem(**{name: value}) if self.kind is bool else word_problem(name, value, self.kind)


def _show_settings(cls: Any) -> None:
    """Give a class a constructor whose signature has its settings: ``help()``, notebooks, Hydra and LightningCLI read it."""

    def __init__(self: Any, *args: Any, **settings: Any) -> None:  # noqa: N807  # as dataclasses do
        Settings.__init__(self, *args, **settings)

    of_self = inspect.Parameter("self", inspect.Parameter.POSITIONAL_OR_KEYWORD)
    parameters = cls._taken.parameters
    __init__.__qualname__ = f"{cls.__qualname__}.__init__"
    __init__.__annotations__ = {name: x.annotation for name, x in parameters.items()} | {"return": None}
    __init__.__signature__ = inspect.Signature([of_self, *parameters.values()])  # type: ignore[attr-defined]  # mypy does not know it
    cls.__init__ = __init__


def _annotations(cls: type) -> dict[str, Any]:
    """Return the annotations of a class, evaluated; a text that names what only a function knows stays a text."""
    try:
        return inspect.get_annotations(cls, eval_str=True)
    except NameError:
        return inspect.get_annotations(cls)


def _without_bounds(hint: Any) -> Any:
    try:
        return typing.get_type_hints(SimpleNamespace(__annotations__={"": hint}))[""]
    except NameError:
        return hint


def _check_of(hint: Any) -> Check | None:
    origin = typing.get_origin(hint)
    if origin in (typing.Union, UnionType):
        present = [x for x in typing.get_args(hint) if x is not type(None)]
        check = _check_of(present[0]) if len(present) == 1 else None
        return None if check is None else check._replace(optional=True)
    if origin is Annotated:
        bounds = next((x for x in hint.__metadata__ if isinstance(x, Bounds)), None)
        ends = () if bounds is None or bounds.whole else bounds.ends()
        return None if bounds is None else Check(hint.__origin__, bounds, False, frozenset(), *ends)
    if hint is bool or origin is Literal:
        return Check(hint, words=frozenset(typing.get_args(hint) or (True, False)))
    return None


def _module_problem(name: str, module: nn.Module) -> str | None:
    """Return why a module cannot be a setting, or None: it is called without arguments."""
    try:
        inspect.signature(module.forward).bind()
    except TypeError:
        got = f"got {type(module).__name__}"
        return f"a module as {name} is called without arguments, as LearnableTemperature is, {got}."
    return None
