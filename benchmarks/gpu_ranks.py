"""Times of a step of several ranks, a GPU each: kernels and torch operations, embeddings gathered and in a ring.

    torchrun --standalone --nproc-per-node=gpu benchmarks/gpu_ranks.py [--rows N] [--width D] [--out FILE]

Forward and backward of ``DistributedLoss`` in bfloat16, N embeddings a tower of all ranks together (NT-Xent: of both views).
A step's time is that of its slowest rank; medians. Memory is the peak of a rank beyond its inputs. On GPUs
the last rows are steps that a CUDA graph replays.
"""

import argparse
import os
import statistics
from collections.abc import Callable
from itertools import product
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F
from suite.harness import command_line, seconds_per_call, slowest

import contrastive_zoo as cz

LOSSES: dict[str, Callable[[], torch.nn.Module]] = {
    "CLIP": cz.Clip,
    "SigLIP": cz.SigLIP,
    "NT-Xent": lambda: cz.NTXent(temperature=0.1),
}


def captured(step: Callable[[], None]) -> Callable[[], None]:
    """Return the replay of a step that a CUDA graph recorded, after the usual ones on another stream."""
    stream, graph = torch.cuda.Stream(), torch.cuda.CUDAGraph()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(3):
            step()
    torch.cuda.current_stream().wait_stream(stream)
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):  # a thread of NCCL asks for events meanwhile
        step()
    return graph.replay


def measured(
    name: str, implementation: str, ring: bool, options: argparse.Namespace, device: torch.device, capture: bool = False
) -> str:
    count = options.rows // dist.get_world_size() // (2 if name == "NT-Xent" else 1)
    generator = torch.Generator().manual_seed(dist.get_rank())
    views = (F.normalize(torch.randn(count, options.width, generator=generator), dim=1) for _ in range(2))
    rows = [x.to(device, torch.bfloat16).requires_grad_() for x in views]
    settings = {"check_finite": False, "check_equal": False, "check_distinct": False}
    loss, on_gpu = cz.DistributedLoss(LOSSES[name](), ring=ring, **settings).to(device), device.type == "cuda"

    def step() -> None:
        with cz.engine.use_implementation(implementation):
            loss(*rows).backward()
        for x in rows:
            x.grad = None

    replayed = captured(step) if capture else step

    def run() -> None:
        replayed()
        if on_gpu:
            torch.cuda.synchronize()

    for _ in range(3):
        seconds_per_call(run, 1)
    memory = "–"
    if on_gpu:
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
    times = [seconds_per_call(run, 1) for _ in range(options.steps)]
    if on_gpu:
        memory = f"{slowest(torch.cuda.max_memory_allocated() - before) / 1e6:.0f}"
    exchange = "ring" if ring else "gathered, captured" if capture else "gathered"
    return f"| {name} | {implementation} | {exchange} | {1e3 * statistics.median(times):.3g} | {memory} |"


def write(lines: list[str], options: argparse.Namespace) -> None:
    if dist.get_rank() == 0:
        print(*lines, sep="\n")
        if options.out:
            options.out.write_text("\n".join(lines) + "\n")


def main() -> None:
    parser = command_line(__doc__, rows=65_536, width=768, steps=20, device="cuda")
    parser.add_argument("--out", type=Path, help="a file for the table")
    options = parser.parse_args()
    device = torch.device(options.device)
    if device.type == "cuda":
        device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
        torch.cuda.set_device(device)
    dist.init_process_group("cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo")
    name = torch.cuda.get_device_name() if device.type == "cuda" else "CPU"
    lines = [
        f"{dist.get_world_size()} ranks on {name}, torch {torch.__version__}, {options.rows:,} × {options.width}.",
        "",
        "| loss | implementation | rows | ms | MB beyond inputs |",
        "|---|---|---|---|---|",
    ]
    cases = product(LOSSES, ("auto", "torch"), (False, True))
    lines += [measured(*case, options, device) for case in cases]
    write(lines, options)
    if device.type == "cuda":  # last, since a capture that fails may end the ranks
        write([*lines, *(measured(x, "auto", False, options, device, True) for x in LOSSES)], options)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
