"""Define the base class of every loss of this library: a module that holds the settings of a function."""

import functools
import inspect
import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar

import numpy as np
from torch import Tensor, nn

from contrastive_zoo.class_docstring import class_docstring
from contrastive_zoo.compiling import traced_as
from contrastive_zoo.devices import values_problem
from contrastive_zoo.loaded_state import loading_problem, own_tensors
from contrastive_zoo.loss_base import argument_types
from contrastive_zoo.loss_base.argument_types import unchecked
from contrastive_zoo.loss_base.checks import shared_problem
from contrastive_zoo.loss_base.graph_operator import NOT_REDUCED, GraphModule
from contrastive_zoo.loss_base.numbers import real, widen_numbers
from contrastive_zoo.loss_summary import attribute
from contrastive_zoo.row_checks import tensor_problem
from contrastive_zoo.session import Session, refuse
from contrastive_zoo.world import World

SENDS_NO_ROWS = "it sums statistics over ranks and gathers no candidates, so a ring would save nothing"
"""Why a loss of moments, or of class weights, refuses a ring."""


class Loss(GraphModule):
    """A loss function with its settings; the base class of every loss of this library.

    The settings are the keyword-only arguments of the function that a class is declared with, as in
    ``class NTXent(Loss, function=nt_xent)``. A setting that is a module, such as
    :class:`LearnableTemperature`, becomes a submodule; every call computes its value.

    Args:
        check_finite: whether NaN and infinite embeddings are refused.
        settings: keyword-only arguments of the function.

    Raises:
        TypeError: a setting that the function does not have.
        ValueError: an invalid setting, such as a temperature that is not positive or an unknown reduction. At the call,
            on every rank, what any loss refuses: an invalid setting (attributes may be set later); labels that are
            missing, not integers or not one per row; towers or views of different shape; NaN or infinite embeddings
            (unless ``check_finite=False``); widths, dtypes or settings that differ between ranks; no rows on any rank.

    Examples:
        >>> import contrastive_zoo as cz
        >>> cz.NTXent(temperature=0.2)
        NTXent(temperature=0.2, normalize=True, reduction='mean')
    """

    __call__: Callable[..., Tensor]
    function: ClassVar[Callable[..., Tensor]]
    check: ClassVar[Callable[..., str | None]] = staticmethod(lambda: None)
    __signature__: ClassVar[inspect.Signature]
    _defaults: ClassVar[dict[str, Any]] = {}
    _warned_about_local_negatives: ClassVar[bool] = False
    made: ClassVar[tuple[str, ...]] = ()
    """Settings of the function that the constructor creates."""
    begins_once: ClassVar[bool] = False
    """Whether the function meets the other ranks once, and returns what it computes from what they have agreed on."""
    refused: ClassVar[tuple[str, ...]] = ()
    """Arguments of the base class's constructor that this loss does not take."""
    rank_local: ClassVar[frozenset[str]] = frozenset()
    """Arguments that only their own rank can interpret, such as indices of its local rows."""
    supports_ring: ClassVar[bool] = False
    """Whether candidates can be exchanged in a ring, one shard at a time."""
    ring_refusal: ClassVar[str] = "it compares each anchor with all candidates at once, or sends no candidates"
    """Why they cannot, where they cannot."""

    def __init_subclass__(
        cls,
        function: Callable[..., Tensor] | None = None,
        check: Callable[..., str | None] = lambda: None,
        begins_once: bool = False,
        **kwargs: Any,
    ) -> None:
        """Declare a loss.

        ``check`` takes some settings of ``function`` and returns what is wrong with them, or None. ``begins_once`` says that
        ``function`` calls :func:`contrastive_zoo.loss_base.preparation.begin_once` and no other loss.
        """
        super().__init_subclass__(**kwargs)
        if function is not None:
            cls.function, cls.check, cls.begins_once = staticmethod(function), staticmethod(check), begins_once
            vars(inspect.unwrap(function)).setdefault("loss_name", cls.__name__)  # the first word of its errors
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
        """Return the signature of the constructor: its own arguments, then the function's settings that it passes on."""
        own = {x.name: x for x in list(inspect.signature(cls.__init__).parameters.values())[1:]}
        of_function = [own.get(x.name, x) for x in of_function if x.name not in cls.made]
        passed_on = {x.name for x in of_function} | {"check_finite"} | set(cls.refused)
        first = [x for x in own.values() if x.name not in passed_on and x.kind is not x.VAR_KEYWORD]
        finite = inspect.Parameter("check_finite", inspect.Parameter.KEYWORD_ONLY, default=True, annotation=bool)
        return inspect.Signature([*first, *of_function, finite])

    def __init__(self, *, check_finite: bool = True, **settings: Any) -> None:
        super().__init__()
        self.check_finite = check_finite
        for name, value in settings.items():
            if isinstance(value, nn.Module) and _needs_arguments(value):
                raise ValueError(
                    f"{type(self).__name__}: a module as {name} is called without arguments, as LearnableTemperature is, "
                    f"got {type(value).__name__}."
                )
            if name not in self._defaults:
                known = ", ".join(self._defaults)
                raise TypeError(f"{type(self).__name__} has no setting {name!r}. It has: {known}, check_finite.")
        for name, value in (self._defaults | settings).items():
            setattr(self, name, value)
        if self._defaults:  # other losses call this at the end of their constructors
            self.refuse_bad_settings()

    def __setattr__(self, name: str, value: Any) -> None:
        """Convert NumPy numbers to Python's, which do not change a tensor's dtype and print the same on every rank."""
        super().__setattr__(name, value.item() if isinstance(value, np.generic) else value)

    def settings(self) -> Mapping[str, Any]:
        """Return the current settings; a learnable one as its current value, [] even if its parameter is [1]."""
        values = {}
        for name, default in self._defaults.items():
            value = getattr(self, name)
            value = value() if isinstance(value, nn.Module) else value
            values[name] = real(value) if isinstance(default, float) else value
        return values

    def settings_problem(self) -> str | None:
        """Return what is wrong with the current settings, or None. No rank communicates.

        The value of a setting that is a module is checked at the call.
        """
        current = {name: getattr(self, name) for name in self._defaults}
        now = {name: self._defaults[name] if isinstance(x, nn.Module) else x for name, x in current.items()}
        shared = {name: now[name] for name in ("temperature", "reduction") if name in now}
        if (function := getattr(type(self), "function", None)) is not None:
            wrong = argument_types.settings_problem(function, now)
            if wrong is not None:
                return wrong
        check = type(self).check
        named = {name: now[name] for name in inspect.signature(check).parameters if name in now}
        return shared_problem(**shared) or check(**named)

    def refuse_bad_settings(self) -> None:
        """Raise if settings are invalid; call this at the end of a constructor.

        Raises:
            ValueError: :meth:`settings_problem` returns a message.
        """
        if problem := self.settings_problem():
            raise ValueError(f"{type(self).__name__}: {problem}")

    def _load_from_state_dict(
        self, state_dict: dict[str, Any], prefix: str, local_metadata: dict[str, Any], strict: bool, *lists: list[str]
    ) -> None:
        """Load all parameters and buffers or none: a centre without its prototypes would be another loss's."""
        widen_numbers(self, state_dict, prefix)
        if problem := loading_problem(own_tensors(self), state_dict, prefix):
            *_, error_messages = lists
            error_messages.append(f"{type(self).__name__}: {problem} It stays as it was.")
        else:
            super()._load_from_state_dict(state_dict, prefix, local_metadata, strict, *lists)

    def graph_problem(self) -> str | None:
        if getattr(self, "reduction", None) == "none":
            return NOT_REDUCED
        function = getattr(type(self), "function", None)
        if function is None or function.__module__.startswith("contrastive_zoo."):
            return None
        return f"{function.__name__} is no function of this library, and may return anything."

    @traced_as(GraphModule.traced_forward)
    def forward(self, *rows: Tensor, world: World | None = None, **named_rows: Tensor) -> Tensor:
        """Return the function's value.

        Args:
            rows: positional arguments of the function.
            world: the ranks that share the batch; None is this rank alone. ``DistributedLoss`` passes its own.
            named_rows: the same arguments by name.
        """
        world = self.local() if world is None else world
        function = type(self).function
        if isinstance(world, Session) and (declared := world.declared_settings(self)) is not None:
            return unchecked(function)(*rows, **named_rows, **declared, world=world)  # the declaration has checked all
        self.refuse_other_than_tensors(rows, named_rows, world)
        settings = self.settings()
        # not those that come from a state, which another call in the same sum of losses may change before this is computed
        if isinstance(world, Session) and not self._buffers and type(self).settings is Loss.settings:
            world.keep_settings(self, settings)
        return function(*rows, **named_rows, **settings, world=world)

    def can_be_replicated(self, *rows: Any, **named_rows: Any) -> bool:
        """Return whether every rank can compute the whole loss from the gathered arguments; not with rank-local arguments.

        Args:
            rows: as in :meth:`forward`.
            named_rows: as in :meth:`forward`.
        """
        if any(attribute(x, "reduction") == "none" or attribute(x, "sharded") for x in self.modules()):
            return False
        given = {**dict(zip(self.tensor_arguments(), rows, strict=False)), **named_rows}
        return not any(given.get(name) is not None for name in self.rank_local)

    def tensor_arguments(self) -> list[str]:
        """Return the names of the tensors of a call, in order."""
        return _tensor_arguments(getattr(type(self), "function", type(self).forward))[0]

    def ragged_dims(self) -> Mapping[str, int]:
        """Return the dimension, by the name of the argument, whose size may differ between ranks."""
        return {}

    def can_ring(self) -> bool:
        """Return whether candidates can be exchanged in a ring instead of being gathered."""
        return self.supports_ring

    def ring_problem(self) -> str | None:
        """Return why candidates cannot be exchanged in a ring, or None."""
        return None if self.can_ring() else self.ring_refusal

    def refuse_other_than_tensors(self, rows: Sequence[Any], named_rows: Mapping[str, Any], world: World) -> None:
        """Raise on every rank if an argument is not a tensor; None is allowed where it is the default.

        Raises:
            ValueError: an argument is not a tensor, or this loss is on the meta device.
        """
        if (problem := values_problem(self)) is not None:
            refuse(type(self).__name__, problem, world=world)
        names, optional = _tensor_arguments(getattr(type(self), "function", type(self).forward))
        given = [(names[i] if i < len(names) else f"view {i}", x) for i, x in enumerate(rows)] + [*named_rows.items()]
        for name, x in given:
            problem = None if x is None and name in optional else tensor_problem(name, x)
            if problem is not None:
                refuse(type(self).__name__, problem, world=world)

    def local(self) -> World:
        """Return a world of this process alone; warn once if other processes run, which this loss ignores."""
        world = World.of()
        if world.size == 1:
            return Session.of(world, check_finite=self.check_finite)
        if not Loss._warned_about_local_negatives:
            Loss._warned_about_local_negatives = True
            warnings.warn(
                f"{type(self).__name__} compares this process's own rows only, though {world.size} processes run: "
                f"its negatives are local. For the global batch write DistributedLoss({type(self).__name__}(...)).",
                stacklevel=6,  # the caller's line: above forward, its decorator and two frames of torch
            )
        return Session.of(World(), check_finite=self.check_finite)

    def extra_repr(self) -> str:
        own = {x: getattr(self, x) for x in self._defaults if x not in self._modules and x not in self._parameters}
        own |= {} if self.check_finite else {"check_finite": False}
        return ", ".join(f"{name}={value!r}" for name, value in own.items())


def _needs_arguments(module: nn.Module) -> bool:
    """Return whether the module cannot be called without arguments."""
    try:
        inspect.signature(module.forward).bind()
    except TypeError:
        return True
    return False


@functools.cache
def _tensor_arguments(function: Callable[..., Tensor]) -> tuple[list[str], set[str]]:
    """Return the names of a function's tensor arguments, and of those that may be None."""
    parameters = [x for x in inspect.signature(function).parameters.values() if x.name != "self"]
    named = [x.name for x in parameters if x.kind is x.POSITIONAL_OR_KEYWORD]
    return named, {x.name for x in parameters if x.default is None}
