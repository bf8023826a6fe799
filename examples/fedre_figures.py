"""FedRE's Figures 1 to 4: when does a network tell the class shares of its training data?

Early in training with the square loss, the loss stays on a plateau, where the network answers every input with the
class shares. That holds where all classes have the same mean (a square in a frame, nested rings). With one hidden
layer it fails on separated blobs, and with three it holds there, too. Run it and open the page that it writes:

    python examples/fedre_figures.py --out fedre.html
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable, Sequence
from importlib.resources import files
from itertools import takewhile
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from equipoise import models
from equipoise.engines import Serial
from equipoise.estimation import SquareLoss, shares
from equipoise.federation import Federation, Split
from equipoise.local import Local
from equipoise.method import Chain
from equipoise.network import Network
from equipoise.report.markup import apart, colour, label, percent, svg, tag, text, ticks
from equipoise.round import one_round, start

LR = 0.1  # of plain gradient descent on all samples
SPAN, FLAT = 200, 0.01  # on the plateau the loss falls by less than 1 % in 200 iterations
TEST = 50  # samples per class of the balanced set that the outputs are averaged over

Draw = Callable[[Sequence[int], torch.Generator], list[Tensor]]  # counts -> the points of each class


def frame(counts: Sequence[int], draw: torch.Generator) -> list[Tensor]:
    """Figure 1: the first class in the unit square in the middle, the second around it."""
    inner = 1 + torch.rand(counts[0], 2, generator=draw)
    many = 3 * torch.rand(20 * counts[1] + 100, 2, generator=draw)
    outer = many[((many < 1) | (many > 2)).any(1)][: counts[1]]
    return [inner, outer]


def rings(counts: Sequence[int], draw: torch.Generator) -> list[Tensor]:
    """Figure 3: one ring around the other, each centred on the origin."""
    points = []
    for ring, count in enumerate(counts):
        angle = 2 * math.pi * torch.rand(count, generator=draw)
        radius = 0.4 * ring + 0.25 * torch.rand(count, generator=draw)
        ring_points = torch.stack([radius * angle.cos(), radius * angle.sin()], 1)
        points.append(ring_points - ring_points.mean(0))
    return points


def blobs(counts: Sequence[int], draw: torch.Generator) -> list[Tensor]:
    """Figure 4: classes with means of their own, around a circle."""
    turns = [2 * math.pi * i / len(counts) for i in range(len(counts))]
    centres = [(0.7 * math.cos(turn), 0.7 * math.sin(turn)) for turn in turns]
    return [
        torch.tensor(centre) + 0.13 * torch.randn(count, 2, generator=draw)
        for centre, count in zip(centres, counts, strict=True)
    ]


def one_client(draw: Draw, counts: Sequence[int], hidden: Sequence[int], every: int, seed: int) -> Federation:
    """One client with all samples, which takes `every` full-batch steps in a round; the server holds the test set."""
    source = torch.Generator().manual_seed(seed)
    points, test = draw(counts, source), draw([TEST] * len(counts), source)
    labels = torch.arange(len(counts))
    torch.manual_seed(seed)
    network = Network(models.build("mlp", (2,), len(counts), hidden=list(hidden), activation="sigmoid"))
    return Federation(
        network=network,
        x=torch.cat(points),
        y=labels.repeat_interleave(torch.tensor(counts)),
        offsets=torch.tensor([0, sum(counts)]),
        indices=torch.arange(sum(counts)),
        classes=tuple(f"class {c + 1}" for c in range(len(counts))),
        local=Local(lr=LR, batch="full", epochs=every),
        auxiliary=Split(torch.cat(test), labels.repeat_interleave(TEST)),
    )


class Point(NamedTuple):
    iteration: int
    loss: float
    shares: Tensor  # the mean output on the test set


def trace(fed: Federation, iterations: int) -> list[Point]:
    """Training as FedRE's clients do it, seen once in a round."""
    chain, engine = Chain(SquareLoss()), Serial(fed)
    state = start(fed, chain, engine)
    target = torch.eye(len(fed.classes))[fed.y]

    def look() -> Point:
        held = fed.auxiliary_for("trace")
        fitted = engine.outputs(state.params, state.buffers, fed.x)
        mean = engine.outputs(state.params, state.buffers, held.x).mean(0)
        loss = float((fitted - target).square().sum(1).mean())
        return Point(state.round * fed.local.epochs, loss, shares(mean))

    points = [look()]
    while points[-1].iteration < iterations:
        state, _ = one_round(state, fed, chain, engine)
        points.append(look())
    return points


def plateau(points: Sequence[Point]) -> list[Point]:
    """The first stretch on which the loss falls by less than 1 % in 200 iterations."""
    loss = {point.iteration: point.loss for point in points}

    def flat(point: Point) -> bool:
        before = loss.get(point.iteration - SPAN)
        return before is not None and point.loss > (1 - FLAT) * before

    first = next((place for place, point in enumerate(points) if flat(point)), len(points))
    return list(takewhile(flat, points[first:]))


def errors(point: Point, counts: Sequence[int]) -> Tensor:
    """Of each class, as a part of its true share."""
    truth = torch.tensor(counts) / sum(counts)
    return (point.shares - truth).abs() / truth


# -- drawing --------------------------------------------------------------------------------------------------------
WIDTH, HEIGHT, LEFT, RIGHT, TOP, BOTTOM = 520.0, 300.0, 44.0, 90.0, 14.0, 40.0


def scatter(fed: Federation) -> str:
    """The training samples, a colour for each class."""
    side = HEIGHT - TOP
    low, span = float(fed.x.min()), float(fed.x.max() - fed.x.min())
    dots = [
        tag("circle", cx=10 + (x - low) / span * side, cy=10 + (1 - (y - low) / span) * side, r=2.5,
            style=f"fill: var(--c{int(label) % 7})")
        for (x, y), label in zip(fed.x.tolist(), fed.y, strict=True)
    ]  # fmt: skip
    return svg(side + 20, side + 20, *dots, title="Training samples")


def lines(series: dict[str, list[tuple[float, float]]], axis: str, shaded: tuple[float, float] | None = None) -> str:
    """Curves over a common axis, named at their ends; a stretch of the axis may be shaded."""
    every = [point for points in series.values() for point in points]
    x0, x1 = min(x for x, _ in every), max(x for x, _ in every)
    ys = ticks(0, max(y for _, y in every), 6)

    def place(x: float, y: float) -> tuple[float, float]:
        across = LEFT + (x - x0) / (x1 - x0) * (WIDTH - LEFT - RIGHT)
        return across, HEIGHT - BOTTOM - y / ys[-1] * (HEIGHT - TOP - BOTTOM)

    parts = []
    if shaded:
        (a, top), (b, bottom) = place(shaded[0], ys[-1]), place(shaded[1], 0)
        parts.append(tag("rect", x=a, y=top, width=b - a, height=bottom - top, class_="band"))
    for y in ys:
        (a, at), (b, _) = place(x0, y), place(x1, y)
        parts.append(tag("line", x1=a, x2=b, y1=at, y2=at, class_="grid"))
        parts.append(label(LEFT - 8, at + 4, f"{y:g}", class_="tick", text_anchor="end"))
    for x in ticks(x0, x1, 6, least_step=1):
        if x0 <= x <= x1:
            parts.append(label(place(x, 0)[0], HEIGHT - BOTTOM + 18, f"{x:g}", class_="tick", text_anchor="middle"))
    parts.append(label((LEFT + WIDTH - RIGHT) / 2, HEIGHT - 4, axis, class_="tick", text_anchor="middle"))
    ends = apart([place(*points[-1])[1] for points in series.values()], 15, TOP, HEIGHT - BOTTOM)
    for index, ((name, points), end) in enumerate(zip(series.items(), ends, strict=True)):
        path = " ".join("{:.1f},{:.1f}".format(*place(x, y)) for x, y in points)
        line = tag("polyline", points=path, class_="line")
        parts.append(tag("g", line, label(WIDTH - RIGHT + 8, end + 4, name, class_="name"), class_=colour(index)))
    return svg(WIDTH, HEIGHT, *parts, title=axis)


def table(heads: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    head = tag("tr", *(tag("th", text(name)) for name in heads))
    body = [tag("tr", *(tag("td", text(cell)) for cell in row)) for row in rows]
    return tag("div", tag("table", tag("thead", head), tag("tbody", *body)), class_="scroll")


def section(title: str, note: str, *figures: str) -> str:
    pair = tag("div", *(tag("figure", figure) for figure in figures), class_="pair")
    return tag("section", tag("h2", text(title)), tag("p", text(note), class_="note"), pair)


def page(*sections: str) -> str:
    style = files("equipoise.report").joinpath("page.css").read_text(encoding="utf-8")
    head = '<meta charset="utf-8">' + tag("title", "Class shares read off a model") + tag("style", style)
    body = tag("main", tag("header", tag("h1", "Class shares read off a model: Figures 1 to 4 of FedRE")), *sections)
    return f'<!doctype html>\n<html lang="en"><head>{head}</head><body>{body}</body></html>\n'


# -- the experiments ------------------------------------------------------------------------------------------------
def experiment(title: str, draw: Draw, counts: Sequence[int], iterations: int, seed: int) -> str:
    """One network with four hidden units: its samples, its loss, and what it says of the shares on the way."""
    fed = one_client(draw, counts, [4], 50, seed)
    points = trace(fed, iterations)
    flat = plateau(points)
    truth = [n / sum(counts) for n in counts]
    seen = flat[len(flat) // 2] if flat else points[-1]
    rows = [
        [name, percent(share), percent(said), percent(error)]
        for name, share, said, error in zip(
            fed.classes, truth, seen.shares.tolist(), errors(seen, counts).tolist(), strict=True
        )
    ]
    worst = max((float(errors(point, counts).max()) for point in flat), default=math.nan)
    note = f"Counts {list(counts)}. " + (
        f"Plateau (shaded) from iteration {flat[0].iteration} to {flat[-1].iteration}; the largest error of any class"
        f" on it is {percent(worst)} % of its share. The table is of its middle."
        if flat
        else "The loss is never flat before it is small: there is no plateau to read off. The table is of the end."
    )
    print(f"{title}. {note}")
    shaded = (float(flat[0].iteration), float(flat[-1].iteration)) if flat else None
    loss = lines({"loss": [(p.iteration, p.loss) for p in points]}, "iteration", shaded)
    said = {name: [(p.iteration, float(p.shares[c])) for p in points] for c, name in enumerate(fed.classes)}
    heads = ["class", "true share %", "estimate %", "error %"]
    return section(title, note, scatter(fed), loss, lines(said, "iteration", shaded), table(heads, rows))


def layers(counts: Sequence[int], depths: Sequence[int], iterations: int, seed: int) -> str:
    """Figure 4: with more hidden layers the estimate becomes right for classes with different means, too."""
    found = []
    for depth in depths:
        fed = one_client(blobs, counts, [4] * depth, iterations, seed)
        found.append(errors(trace(fed, iterations)[-1], counts))
    series = {
        f"class {c + 1}": [(depth, 100 * float(error[c])) for depth, error in zip(depths, found, strict=True)]
        for c in range(len(counts))
    }
    note = f"Counts {list(counts)}, four units per layer, error of the estimate in % after {iterations} iterations."
    for depth, error in zip(depths, found, strict=True):
        print(f"Figure 4, {depth} hidden layers: errors {', '.join(percent(e) for e in error.tolist())} %")
    rows = [[str(d), *(percent(e) for e in error.tolist())] for d, error in zip(depths, found, strict=True)]
    return section(
        "Figure 4: four classes with different means", note, scatter(fed), lines(series, "hidden layers"),
        table(["hidden layers", *(f"class {c + 1}" for c in range(len(counts)))], rows),
    )  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("fedre.html"))
    parser.add_argument("--quick", action="store_true", help="fewer iterations, in seconds")
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args()
    torch.set_num_threads(1)  # the networks are tiny
    part, depths, steps = (10, (1, 3), 300) if given.quick else (1, (1, 2, 3, 4), 1000)
    sections = [
        experiment("Figures 1 and 2: two classes", frame, (10, 90), 8000 // part, given.seed),
        experiment("Figure 3: three classes with the same mean", rings, (100, 50, 250), 6000 // part, given.seed),
        experiment("Where it fails: three separated blobs", blobs, (100, 50, 250), 3000 // part, given.seed),
        layers((50, 100, 150, 200), depths, steps, given.seed),
    ]
    given.out.write_text(page(*sections), encoding="utf-8")
    print(f"wrote {given.out}")


if __name__ == "__main__":
    main()
