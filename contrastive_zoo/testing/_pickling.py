"""Pickling of jobs for the ranks, and of results for the caller."""

from __future__ import annotations

import functools
import io
import operator
import pickle
import pickletools
import sys
import types
from typing import Any

try:
    import cloudpickle
except ImportError as error:
    raise ImportError("contrastive_zoo.testing needs cloudpickle: pip install 'contrastive_zoo[testing]'") from error

import torch
from torch import Tensor


def dump_job(job: Any) -> bytes:
    """Pickle a job for the ranks. Code that they cannot import, and test modules, are pickled by value."""
    return _dump(_JobPickler, job)


def imported_by(job: bytes) -> list[str]:
    """Return the modules of installed packages that a pickled job imports, as far as this process has imported them.

    Examples:
        >>> from contrastive_zoo.testing.worlds import Worlds
        >>> "hypothesis.core" in imported_by(dump_job(__import__("hypothesis").given))
        True
    """
    words = {word for _, word, _ in pickletools.genops(job) if isinstance(word, str)}
    return sorted(x for x in words & sys.modules.keys() if "-packages" in str(getattr(sys.modules[x], "__file__", "")))


def dump_result(result: Any) -> bytes:
    """Pickle what a rank sends to the caller: tensors detached, classes that the caller has by name."""
    return _dump(_ResultPickler, result)


def _dump(pickler: type[cloudpickle.Pickler], value: Any) -> bytes:
    with io.BytesIO() as file:
        pickler(file).dump(value)
        return file.getvalue()


class _JobPickler(cloudpickle.Pickler):
    def reducer_override(self, obj: Any) -> Any:
        if isinstance(obj, types.CodeType):  # cloudpickle 3.1.3 leaves out the file that tracebacks and warnings name
            _, parts = self.dispatch_table[types.CodeType](obj)
            return _code_of_file, (obj.co_filename, *parts)
        if isinstance(obj, (types.FunctionType, type)) and _pickled_by_value(obj.__module__):
            cloudpickle.register_pickle_by_value(sys.modules[obj.__module__])
        return super().reducer_override(obj)


class _ResultPickler(cloudpickle.Pickler):
    def reducer_override(self, obj: Any) -> Any:
        if type(obj) is Tensor and obj.layout is torch.strided:
            return _compact(obj).__reduce_ex__(pickle.HIGHEST_PROTOCOL)
        if isinstance(obj, type) and _lookup(obj.__module__, obj.__qualname__) is not obj:
            # A class that was sent by value is returned by name: cloudpickle would overwrite the original's attributes.
            return _original_class, (obj.__module__, obj.__qualname__, cloudpickle.dumps(obj))
        return super().reducer_override(obj)


def _code_of_file(file: str, *parts: Any) -> types.CodeType:
    return types.CodeType(*parts).replace(co_filename=file)


def _compact(tensor: Tensor) -> Tensor:
    """Return the values without graph and hooks; a view of a larger storage is copied, so that only its part is sent."""
    tensor = tensor.detach()
    return tensor.clone() if tensor.untyped_storage().nbytes() > tensor.nbytes else tensor


def _original_class(module: str, qualname: str, pickled: bytes) -> Any:
    result = _lookup(module, qualname)
    return result if isinstance(result, type) else pickle.loads(pickled)


def _lookup(module: str, qualname: str) -> Any:
    try:
        return operator.attrgetter(qualname)(sys.modules[module])
    except (KeyError, AttributeError):
        return None


@functools.cache
def _pickled_by_value(name: str | None) -> bool:
    """Whether code of a module is pickled by value: test modules, which must not run again, and those not importable."""
    module = sys.modules.get(name or "")
    package = (name or "").partition(".")[0]
    if module is None or package in ("__main__", "contrastive_zoo"):  # cloudpickle pickles __main__ by value anyway
        return False
    loader = getattr(getattr(module, "__spec__", None), "loader", None)
    if type(loader).__module__.startswith("_pytest") and "site-packages" not in (getattr(module, "__file__", "") or ""):
        return True
    return not any(finder.find_spec(package, None) for finder in sys.meta_path)
