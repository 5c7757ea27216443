"""The page of each loss in the reference, written when the site is built: docstring, cost, other names and a picture."""

import math

import torch
from torch import Tensor, nn

import contrastive_zoo as cz
from contrastive_zoo.testing.catalogue import CATALOGUE, Entry
from tools.pages import table

SAMPLES, WIDTH = 4096, 128
"""Of the call whose path is looked up: on eight ranks it is large enough for each ring and each kernel."""

POINTS, STEPS = 12, 40
"""Points of a picture, of three classes or six samples, and steps of gradient descent."""

COLOURS = ("#1f77b4", "#e6550d", "#31a354", "#9467bd", "#d4a017", "#17becf")

_SHAPES: dict[str, tuple[int, ...]] = {
    "rows": (WIDTH,),
    "several": (3, WIDTH),
    "negatives": (WIDTH,),
    "labels": (),
    "hierarchy": (3,),
    "binary": (),
    "counts": (),
    "scores": (),
    "several scores": (3,),
}
_INTEGERS = ("labels", "hierarchy", "binary", "counts")


def by_class() -> dict[str, list[Entry]]:
    """Return the entries of the catalogue by the name of their class."""
    found: dict[str, list[Entry]] = {}
    for entry in CATALOGUE.values():
        found.setdefault(entry.cls, []).append(entry)
    return found


def path_of(cls: str) -> str:
    """Return where the page of a loss is.

    Examples:
        >>> path_of("NTXent")
        'reference/losses/NTXent.md'
    """
    return f"reference/losses/{cls}.md"


def page(entries: list[Entry]) -> str:
    """Return the page of one loss."""
    cls = entries[0].cls
    rows = [[_call(x), x.engine, *_support(x), f"`{x.name}`"] for x in entries]
    heads = ("settings", "cost", "`ring=True`", "GPU kernel", "on the command line")
    peers = "".join(f"- {x.strip()}\n" for entry in entries for x in entry.peers.split(",") if x.strip())
    return f"""---
title: {cls}
---
::: contrastive_zoo.{cls}
    options: {{ members: false, heading_level: 1 }}

## Cost

{table(heads, rows, texts=5)}

A cost counts matrix products of N × d × N (GEMM), forward and backward together. "Cached" is the cost if the logits fit into
`memory_budget`. N is the number of embeddings on all ranks.
{_elsewhere(peers)}{_picture(entries[0])}"""


def _elsewhere(peers: str) -> str:
    return f"\n## In other libraries\n\nThe same formula:\n\n{peers}" if peers else ""


def _call(entry: Entry) -> str:
    settings = ", ".join(f"{name}={value!r}" for name, value in entry.settings.items())
    return f"`{settings}`" if settings else "default"


def _support(entry: Entry) -> tuple[str, str]:
    """Return whether a ring and a kernel compute the loss."""
    loss, width = entry.make(), entry.settings.get("embedding_size") or entry.settings.get("out_dim", WIDTH)
    tensors = []
    for kind in (x for x in entry.kinds.values() if x in _SHAPES):  # without masks of tokens
        shape = (SAMPLES, *(width if x == WIDTH else x for x in _SHAPES[kind]))
        dtype = torch.int64 if kind in _INTEGERS else torch.float32
        tensors.append(torch.empty(shape, dtype=dtype, device="meta"))
    plan = cz.explain(loss, *tensors, world_size=8, device="cuda").plan
    return "no" if loss.ring_problem() else "yes", "yes" if plan.arithmetic == "kernel" else "no"


def _picture(entry: Entry) -> str:
    """Return what the loss does to twelve points, for losses of views and of labelled embeddings."""
    if entry.call == "other" or "out_dim" in entry.settings:
        return ""
    groups = torch.arange(POINTS) % (3 if entry.call == "labels" else POINTS // 2)
    before, after = trajectory(entry, groups)
    what = "three classes, a colour each" if entry.call == "labels" else "two views of six samples, a colour each"
    return f"""
## What it does to a few points

Twelve points in two dimensions: {what}. They start at the circles. Gradient descent on this loss takes them to the dots.

{drawn(before, after, groups)}
"""


def trajectory(entry: Entry, groups: Tensor) -> tuple[Tensor, Tensor]:
    """Return the points before and after gradient descent with steps of one length, which become shorter."""
    torch.manual_seed(5)
    small = {"num_classes": 3, "embedding_size": 2}
    loss = entry.loss(**{name: small.get(name, value) for name, value in entry.settings.items()}).double()
    angles = 2 * math.pi * torch.rand(POINTS, dtype=torch.float64)
    points = nn.Parameter(torch.stack([angles.cos(), angles.sin()], 1) * (0.8 + 0.2 * torch.rand(POINTS, 1)))
    before = points.detach().clone()
    for step in range(STEPS):
        inputs = [points, groups] if entry.call == "labels" else [*points.chunk(2)]
        gradients = torch.autograd.grad(loss(*inputs), [points, *loss.parameters()], allow_unused=True)
        with torch.no_grad():
            for x, gradient in zip([points, *loss.parameters()], gradients, strict=True):
                if gradient is not None:
                    x.sub_(0.1 * (1 - step / STEPS) * gradient / gradient.norm(dim=-1).max().clamp(min=1e-6))
    return before, points.detach()


def drawn(before: Tensor, after: Tensor, groups: Tensor) -> str:
    """Return an SVG whose axes and circle have the colour of the text, light or dark."""
    scale = 90 / max(1.1, before.norm(dim=1).max().item(), after.norm(dim=1).max().item())
    marks = [f'<circle r="{scale:.1f}" fill="none" stroke="currentColor" stroke-opacity=".3"/>']
    for start, end, group in zip((scale * before).tolist(), (scale * after).tolist(), groups.tolist(), strict=True):
        (x, y), (u, v), colour = start, end, COLOURS[group]
        marks.append(
            f'<line x1="{x:.1f}" y1="{-y:.1f}" x2="{u:.1f}" y2="{-v:.1f}" stroke="{colour}" stroke-opacity=".5"/>'
            f'<circle cx="{x:.1f}" cy="{-y:.1f}" r="3" fill="none" stroke="{colour}"/>'
            f'<circle cx="{u:.1f}" cy="{-v:.1f}" r="4" fill="{colour}"/>'
        )
    label = "Points before and after gradient descent"
    return f'<svg viewBox="-100 -100 200 200" width="320" role="img" aria-label="{label}">{"".join(marks)}</svg>'
