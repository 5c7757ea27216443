"""The base class of every loss of this library: settings kept in a module."""

import functools
import inspect
import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar

import numpy as np
from torch import Tensor, nn

from contrastive_zoo.class_docstring import class_docstring
from contrastive_zoo.compiling import uncompiled
from contrastive_zoo.loss_base.checks import shared_problem
from contrastive_zoo.loss_base.numbers import real, widen_numbers
from contrastive_zoo.session import Session, refuse
from contrastive_zoo.world import World


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
        widen_numbers(self, state_dict, prefix)
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
