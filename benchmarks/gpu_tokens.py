"""Time and memory of MaxSim on this GPU: kernels, torch, the dense formula, late-interaction-kernels and flash-maxsim.

    python benchmarks/gpu_tokens.py [--peers FOLDER] [--out FILE]

InfoNCE of all queries and documents, bfloat16 unit tokens, forward and backward, medians by CUDA events, beside the time of
2 · 2 · (query tokens) · (document tokens) · d FLOP at the rate of a large matrix product: the scores, and the gradients of
documents as a product with selected tokens. Value and gradients are compared with the dense formula in float64 first.
"""

import sys
from collections.abc import Callable, Iterator
from importlib import import_module
from pathlib import Path

import torch
import torch.nn.functional as F
from gpu_suite.measure import LIMIT, Ceilings, median_ms, peak_mb, reason_of
from suite.harness import command_line
from torch import Tensor

import contrastive_zoo as cz

Scores = Callable[[Tensor, Tensor], Tensor]
SIZES = [(128, 32, 1030, 128), (512, 32, 128, 128), (2048, 32, 128, 128)]
"""Pairs, tokens of a query and of a document, width: ColPali, ColBERT, and a large batch of it."""
SMALL = (8, 19, 70, 128)


def dense(queries: Tensor, documents: Tensor) -> Tensor:
    return torch.einsum("iad,jbd->ijab", queries, documents).max(3).values.sum(2)


def as_called(implementation: str) -> Callable[[Tensor, Tensor], Tensor]:
    loss = cz.MaxSim(normalize=False)

    def run(queries: Tensor, documents: Tensor) -> Tensor:
        with cz.engine.use_implementation(implementation):
            return loss(queries, documents)

    return run


def info_nce(scores: Scores) -> Callable[[Tensor, Tensor], Tensor]:
    def run(queries: Tensor, documents: Tensor) -> Tensor:
        logits = scores(queries, documents)
        logits = logits if logits.dtype == torch.float64 else logits.float()
        return F.cross_entropy(logits, torch.arange(len(queries), device=queries.device))

    return run


IMPLEMENTATIONS: dict[str, Callable[[], Callable[[Tensor, Tensor], Tensor]]] = {
    "ours, kernels": lambda: as_called("triton"),
    "ours, torch": lambda: as_called("torch"),
    "dense": lambda: info_nce(dense),
    "late-interaction-kernels": lambda: info_nce(import_module("late_interaction_kernels").maxsim),
    "flash-maxsim": lambda: info_nce(import_module("flash_maxsim").flash_maxsim_batched_train),
}


def drawn(size: tuple[int, int, int, int], device: str) -> list[Tensor]:
    pairs, of_query, of_document, width = size
    generator = torch.Generator().manual_seed(0)
    rows = [torch.randn(pairs, length, width, generator=generator) for length in (of_query, of_document)]
    return [F.normalize(x, dim=2).to(device, torch.bfloat16).requires_grad_() for x in rows]


def with_clear_maxima(device: str) -> list[Tensor]:
    """Return tokens near those of a basis, all of them in each document: products that are rounded select the same ones."""
    pairs, of_query, of_document, width = SMALL
    generator = torch.Generator().manual_seed(0)
    rows = []
    for length in (of_query, of_document):
        chosen = torch.stack([torch.randperm(of_document, generator=generator)[:length] for _ in range(pairs)])
        rows.append(torch.eye(width)[chosen] + 0.03 * torch.randn(pairs, length, width, generator=generator))
    return [F.normalize(x, dim=2).to(device, torch.bfloat16).requires_grad_() for x in rows]


def value_and_gradients(loss: Callable[[Tensor, Tensor], Tensor], rows: list[Tensor]) -> list[Tensor]:
    value = loss(*rows)
    return [value.detach(), *torch.autograd.grad(value, rows)]


def relative_error(loss: Callable[[Tensor, Tensor], Tensor], device: str = "cuda") -> float:
    """Return the largest error of value and gradients against the dense formula in float64, relative to each's norm."""
    rows = with_clear_maxima(device)
    expected = value_and_gradients(info_nce(dense), [x.detach().double().requires_grad_() for x in rows])
    pairs = zip(value_and_gradients(loss, rows), expected, strict=True)
    return max(float((x.double() - y).norm() / y.norm()) for x, y in pairs)


def line(name: str, size: tuple[int, int, int, int], ceilings: Ceilings) -> str:
    pairs, of_query, of_document, width = size
    model = 1e3 * 4 * pairs**2 * of_query * of_document * width / ceilings.flop
    head = f"| {pairs:,} | {of_query} | {of_document:,} | {name} |"
    try:
        loss = IMPLEMENTATIONS[name]()
        error = relative_error(loss)
        if not error <= LIMIT:
            return f"{head} relative error {error:.2g}, which is more than {LIMIT:g} | {model:.3g} | – |"
        rows = drawn(size, "cuda")

        def step() -> object:
            return value_and_gradients(loss, rows)

        return f"{head} {median_ms(step):.3g} | {model:.3g} | {peak_mb(step):,.0f} |"
    except Exception as problem:
        return f"{head} {reason_of(problem)} | {model:.3g} | – |"


def lines() -> Iterator[str]:
    ceilings = Ceilings.measured()
    yield f"{torch.cuda.get_device_name()}, torch {torch.__version__}. {ceilings}."
    yield "\n| pairs | query tokens | document tokens | implementation | ms | model ms | MB beyond inputs |"
    yield "|---" * 7 + "|"
    for size in SIZES:
        for name in IMPLEMENTATIONS:
            torch.cuda.empty_cache()
            yield line(name, size, ceilings)


def main() -> None:
    parser = command_line(__doc__, peers="")
    parser.add_argument("--out", type=Path, help="a file to which the table is added")
    options = parser.parse_args()
    sys.path[:0] = [options.peers] if options.peers else []
    for text in lines():
        print(text, flush=True)
        if options.out:
            with options.out.open("a") as file:
                file.write(text + "\n")


if __name__ == "__main__":
    main()
