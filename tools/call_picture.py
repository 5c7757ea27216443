"""Draw one small and one large call of ``DistributedLoss(NTXent())`` as they happen: ``python -m tools.call_picture``.

Two processes call it three times; in the third, rank 0 notes which of the functions in :data:`LANDMARKS` are entered, in
which order. The pictures stand in ``docs/pages/figures``; a test compares them with what happens today.
"""

import sys
from html import escape
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

import contrastive_zoo as cz
from contrastive_zoo.testing.worlds import Worlds

FIGURES = Path(__file__).parent.parent / "docs" / "pages" / "figures"
SIZES = {"call-small": 32, "call-large": 2048}  # samples of each rank, by the name of the picture

ROOMS = ("your script", "wrapper", "loss_base", "losses", "engine", "ranks")
MESSAGE = "message"


class Event(NamedTuple):
    """One line of a picture: where it happens, and what it is in words."""

    room: str
    text: str


LANDMARKS: dict[str, Event] = {
    "DistributedLoss.forward": Event("wrapper", "loss_fn(view1, view2)"),
    "Loss.stated": Event("loss_base", "settings are evaluated, inputs() states the views"),
    "OwnStep.statement": Event("wrapper", "what all ranks must agree on"),
    "shake_hands": Event("ranks", "problems and differences raise here, on every rank"),
    "World.start_host_gather": Event(MESSAGE, "handshake: header, and the views of a small batch"),
    "OwnStep.value": Event("wrapper", "the batch: all ranks' views, or this rank's"),
    "_Gathered.forward": Event("ranks", "all ranks' views, from the handshake"),
    "NTXent.compute": Event("losses", "the formula"),
    "ViewPairs.cross_entropy": Event("engine", "picks the implementation"),
    "_SmallBatch.forward": Event("engine", "value and gradient of the whole batch"),
    "_LogSumExp.forward": Event("engine", "log-sum-exps of local anchors, tile by tile"),
    "_start_uncached_gather": Event(MESSAGE, "gather of embeddings, or of statistics"),
    "exchange_rows": Event(MESSAGE, "results go to the ranks that own the rows"),
    "all_reduced": Event(MESSAGE, "all-reduce of sum and count"),
    "_SmallBatch.backward": Event("engine", "backward(): gradients of this rank's rows"),
    "_Gathered.backward": Event("ranks", "this rank's slice, times 2 for DDP"),
    "_LogSumExp.backward": Event("engine", "backward(): tiles once more"),
    "_ScaleGradient.backward": Event("ranks", "times 2 for DDP"),
}
"""The functions that are noted, by qualified name, and what each does."""


def events_of(samples: int) -> list[str]:
    """Return which landmarks the third step of this rank enters, forward and backward, one after the other."""
    torch.manual_seed(dist.get_rank())
    views = [torch.randn(samples, 32, requires_grad=True) for _ in range(2)]
    loss_fn, names = cz.DistributedLoss(cz.NTXent()), list[str]()
    package = str(Path(cz.__file__).parent)

    def note(frame: Any, event: str, _: Any) -> None:
        code = frame.f_code
        is_landmark = event == "call" and code.co_filename.startswith(package) and code.co_qualname in LANDMARKS
        if is_landmark and names[-1:] != [code.co_qualname]:
            names.append(code.co_qualname)

    for step in range(3):
        sys.setprofile(note if step == 2 else None)
        loss_fn(*views).backward()
        sys.setprofile(None)
    return names


WIDTH, LANE, ROW, TOP = 900, 150, 34, 46


def picture(names: list[str]) -> str:
    """Return the SVG of one call: a lane for each room, a line for each event, a bar for each message."""
    events = [LANDMARKS[name] for name in names]
    height = TOP + ROW * len(events) + 20
    centres = {room: 75 + LANE * index for index, room in enumerate(ROOMS)}
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" font-family="sans-serif" font-size="13">',
        f'<rect width="{WIDTH}" height="{height}" fill="#ffffff"/>',
    ]
    for room, x in centres.items():
        lines.append(f'<text x="{x}" y="22" text-anchor="middle" font-weight="bold">{room}</text>')
        lines.append(f'<line x1="{x}" y1="32" x2="{x}" y2="{height - 12}" stroke="#c8c8c8"/>')
    before = "your script"
    for index, event in enumerate(events):
        y = TOP + ROW * index + ROW // 2
        if event.room == MESSAGE:
            lines.append(f'<rect x="20" y="{y - 12}" width="{WIDTH - 40}" height="24" rx="4" fill="#ffe3b3"/>')
            text = f"message between all ranks: {event.text}"
            lines.append(f'<text x="{WIDTH // 2}" y="{y + 4}" text-anchor="middle">{escape(text)}</text>')
            continue
        x = centres[event.room]
        lines += _arrow(centres[before], x, y)
        side, at = ("end", x - 12) if x > WIDTH / 2 else ("start", x + 12)
        style = f'text-anchor="{side}" stroke="#fff" stroke-width="4" paint-order="stroke"'
        lines.append(f'<circle cx="{x}" cy="{y}" r="5" fill="#1f77b4"/>')
        lines.append(f'<text x="{at}" y="{y - 7}" {style}>{escape(event.text)}</text>')
        before = event.room
    return "\n".join([*lines, "</svg>", ""])


def _arrow(start: int, end: int, y: int) -> list[str]:
    if start == end:
        return []
    tip = end - 6 if end > start else end + 6
    back = tip - 7 if end > start else tip + 7
    return [
        f'<line x1="{start}" y1="{y}" x2="{tip}" y2="{y}" stroke="#1f77b4"/>',
        f'<path d="M {tip} {y} L {back} {y - 4} L {back} {y + 4} Z" fill="#1f77b4"/>',
    ]


if __name__ == "__main__":
    with Worlds(timeout=60) as worlds:
        for name, samples in SIZES.items():
            entered = worlds.run(2, events_of, samples)[0]
            (FIGURES / f"{name}.svg").write_text(picture(entered), encoding="utf-8")
