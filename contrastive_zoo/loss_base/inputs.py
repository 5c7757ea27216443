"""What a call of a loss brings, as data: tensors by name, and what is wrong with them on this rank."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from contrastive_zoo.engine.batch import Part
from contrastive_zoo.ranks.row_checks import ValueRule


@dataclass(frozen=True)
class Inputs:
    """What a loss states of a call before anything is sent or computed."""

    # the tensors by name, whose dimension 0 counts samples; arguments that are None are left out
    rows: Mapping[str, Tensor]
    problem: str | None = None  # what is wrong with them on this rank, in words; None if nothing is
    values: Sequence[ValueRule] = ()  # what their values must be, such as classes; read after ``problem``
    # further values that must be equal on every rank, such as the shape of class weights
    compared: Mapping[str, object] = field(default_factory=dict)
    # whether only this rank can interpret them, as it can indices of its own rows: no rank can then compute all
    local: bool = False
    whole: bool = False  # whether every rank has to compute all of the loss, from the rows of all ranks
    parts: Sequence[Part] = ()  # the views of the members of a sum of losses
    host: Mapping[str, Any] = field(default_factory=dict)  # what the host has read of the tensors, for ``compute``

    @classmethod
    def of(cls, rows: Mapping[str, Tensor | None], problem: str | None = None, **more: Any) -> "Inputs":
        """Return the inputs of a call, some of whose arguments may be None."""
        return cls({name: x for name, x in rows.items() if x is not None}, problem, **more)
