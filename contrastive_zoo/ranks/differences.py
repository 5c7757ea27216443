"""What ranks found different between them, in words; and code of the user that fails on all ranks where it fails on any."""

import math
from collections.abc import Callable, Mapping, Sequence
from typing import TypeVar

from contrastive_zoo.ranks.world import World


def results_difference(results: Mapping[str, Sequence[float | None]], tolerance: float) -> str | None:
    """Return what came out differently in the previous call, in words; ``results`` are by name and rank, None if missing."""
    for name, words in _RESULTS.items():
        values = results[name]
        if any(x is None for x in values):
            continue
        absolute = tolerance if name == "value" else tolerance**0.5
        for rank, value in enumerate(values):
            owner, first = 0, values[0]
            if name == "other anchor":  # the last one of the next rank that has any
                others = [x % len(values) for x in range(rank + 1, rank + 1 + len(values))]
                owner = next((x for x in others if results["anchor"][x] is not None), rank)
                first = results["anchor"][owner]
            if first is None or value is None or (math.isnan(first) and math.isnan(value)):
                continue
            if not math.isclose(first, value, rel_tol=tolerance**0.5, abs_tol=absolute):
                return words.format(owner=owner, first=first, rank=rank, second=value)
    return None


_RESULTS = {
    "other anchor": (
        "two ranks computed different losses of the same anchor: rank {owner}, which holds it, found {first:.9g}, and rank "
        "{rank} found {second:.9g}. rows() may use only its arguments, settings and parameters, row by row. Look for a "
        "number in an object or a global, and draw random numbers from the global generators. check_equal=False turns this "
        "check off."
    ),
    "value": (
        "its last value must be equal on all ranks, but rank 0 found {first:.9g} and rank {rank} found {second:.9g}. Look "
        "for unequal parameters (torch.manual_seed(0) before you construct the loss) or a number in a closure or a global. "
        "A generator of its own, and operations that are not deterministic, differ too. check_equal=False turns this "
        "check off."
    ),
    "sample": (
        "two ranks computed different losses of the same samples: rank 0 found {first:.9g} and rank {rank} found "
        "{second:.9g}. Look for a number in an object, a closure or a global that differs, and make it a setting or a "
        "buffer. If compute() draws random numbers, state Inputs(…, whole=True): every rank then computes all of the loss, "
        "with the same numbers. check_equal=False turns this check off."
    ),
    "gradient": (
        "the gradient of its parameters came out differently on two ranks, before any all-reduce. In compute(), a parameter "
        "or learnable setting that meets local embeddings is batch.shared(parameter): its gradient is then summed over "
        "ranks. One that multiplies what batch.reduce() returns is used directly. check_equal=False turns this check off."
    ),
}

SAME_TENSOR_DIFFERS = (
    "ranks disagree on which arguments are one tensor: one rank passed the same tensor twice, another passed two tensors. "
    "Pass the same tensor twice on every rank, or a copy on every rank, such as x.clone()."
)


def copies_difference(ranks: Sequence[int], world_size: int) -> str:
    """Which ranks brought the same embeddings, in words."""
    if len(ranks) == world_size:
        return f"every rank brought the very same embeddings. {_GATHERED_BEFORE} {_COPIES}"
    named = f"{', '.join(map(str, ranks[:-1][:5]))}{', …' if len(ranks) > 6 else ''} and {ranks[-1]}"
    return f"ranks {named} brought the very same embeddings. {_COPIES}"


_GATHERED_BEFORE = (
    "If they were gathered before (Lightning's all_gather, accelerator.gather, torch.distributed), pass this rank's own "
    "embeddings: those of all ranks are compared here, and every sample would count once for each rank."
)

_COPIES = (
    "If they hold one model in parts (tensor, context, sequence or pipeline parallel), pass the ranks with different "
    "samples, process_group=mesh.get_group('dp'). If they read the same data, give each its own shard, such as by a "
    "DistributedSampler."
)


def combined(texts: list[str]) -> str:
    """The problems that ranks have stated, as one text; the rank is named unless all ranks state the same."""
    result = [(rank, text) for rank, text in enumerate(texts) if text]
    if len({text for _, text in result}) == 1 and len(result) == len(texts):
        return result[0][1]
    return " ".join(f"rank {rank}: {text}" for rank, text in result)


def statements_difference(signatures: list[str]) -> str:
    """The first line in which some rank's statement differs from rank 0's, in words."""
    lines = [dict(line.split("|", 1) for line in text.splitlines()) for text in signatures]
    # in the order of the longest statement, in which a name that others lack stands where it belongs
    names = list(dict.fromkeys(name for by_name in sorted(lines, key=len, reverse=True) for name in by_name))
    for name in names:
        result = [by_name.get(name) for by_name in lines]
        first, other = result[0], next((rank for rank, value in enumerate(result) if value != result[0]), None)
        if other is None:
            continue
        second = result[other]
        if first is None or second is None:
            has, lacks = (other, 0) if first is None else (0, other)
            return (
                f"ranks disagree on what they bring: rank {has} brought {name}, rank {lacks} brought none. "
                f"Pass {name} on every rank or on none."
            )
        if "|" not in first or "|" not in second:
            first, second = (text.replace("|", " ").strip() for text in (first, second))
            return (
                f"ranks disagree on {name}: rank 0 has {first}, rank {other} has {second}. "
                "It must be the same on every rank."
            )
        for what, a, b in zip(("dtype", "width", "gradient"), first.split("|"), second.split("|"), strict=True):
            if a != b:
                # rows of one dimension are embeddings
                kind = "size" if what == "width" and "," in a else what
                return _DIFFERENCES[kind].format(name=name, other=other, first=_in_words(a), second=_in_words(b))
    raise AssertionError(f"digests differ, signatures do not: {signatures}")


_DIFFERENCES = {
    "dtype": "ranks disagree on the dtype of {name}: rank 0 brought {first}, rank {other} brought {second}. "
    "Every rank must run under the same precision.",
    "width": "ranks disagree on the width of {name}: rank 0 brought {first}, rank {other} brought {second}. "
    "Every rank must use the same encoder head.",
    "size": "ranks disagree on the width of {name}: rank 0 brought {first}, rank {other} brought {second}. Pad tokens to "
    "one length on every rank. If dimension 1 of an argument counts samples, pass batch_dim={{{name!r}: 1}}.",
    "gradient": "ranks disagree on whether {name} carry a gradient: rank 0 brought rows{first}, rank {other} rows"
    "{second}. A rank without samples must still run the encoder on its empty batch, or its backward pass "
    "would leave the others waiting.",
}


def _in_words(text: str) -> str:
    """``[128]`` as ``d=128``; other text unchanged; no text as a missing gradient."""
    if text.startswith("[") and text.count(",") == 0:
        return f"d={text.strip('[]')}" if text != "[]" else "one number a row"
    return text or " without gradient"


R = TypeVar("R")


def failing_together(caller: str, function: Callable[[], R], world: World) -> R:
    """Return the function's result on this rank, or raise on every rank if it, which sends no messages, raised on any."""
    if world.size == 1:
        return function()
    try:
        result, error = function(), None
    except Exception as raised:
        error = raised
    if not any(failed for (failed,) in world.exchange([error is not None])):
        return result
    texts = world.exchange_text("" if error is None else f"{type(error).__name__}: {str(error).rstrip('.')}.")
    if error is not None and len({*texts}) == 1:
        raise error
    raise ValueError(f"{caller}: {combined(texts)}") from error
