"""FedRE's Figures 1 to 4: when do the outputs of a network show the class shares of its training data?

Early in training with the square loss, the loss stays on a plateau, where the network's output for every input is
close to the class shares. This holds if all classes have the same mean (a square in a frame, nested rings). On
separated blobs it fails with one hidden layer, and holds with three. Run the script and open the page that it writes:

    python examples/fedre_figures.py --out fedre.html
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Sequence
from importlib.resources import files
from pathlib import Path

import torch

from equipoise.core.federation import Federation
from equipoise.papers.figures import HEIGHT, TOP, lines
from equipoise.papers.synthetic import Draw, blobs, errors, frame, one_client, plateau, rings, trace
from equipoise.report.markup import percent, svg, tag, text


# -- drawing --------------------------------------------------------------------------------------------------------
def scatter(fed: Federation) -> str:
    """Draw the training samples, with one colour per class."""
    side = HEIGHT - TOP
    low, span = float(fed.x.min()), float(fed.x.max() - fed.x.min())
    dots = [
        tag("circle", cx=10 + (x - low) / span * side, cy=10 + (1 - (y - low) / span) * side, r=2.5,
            style=f"fill: var(--c{int(label) % 7})")
        for (x, y), label in zip(fed.x.tolist(), fed.y, strict=True)
    ]  # fmt: skip
    return svg(side + 20, side + 20, *dots, title="Training samples")


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
    """Train one network with four hidden units, and show its samples, its loss and its estimates of the shares."""
    fed = one_client(draw, counts, [4], 50, seed)
    points = trace(fed, iterations)
    flat = plateau(points)
    truth = [n / sum(counts) for n in counts]
    seen = flat[len(flat) // 2] if flat else points[-1]
    rows = [
        [name, percent(share), percent(estimate), percent(error)]
        for name, share, estimate, error in zip(
            fed.classes, truth, seen.shares.tolist(), errors(seen, counts).tolist(), strict=True
        )
    ]
    worst = max((float(errors(point, counts).max()) for point in flat), default=math.nan)
    note = f"Counts {list(counts)}. " + (
        f"Plateau (shaded) from iteration {flat[0].iteration} to {flat[-1].iteration}; the largest error of any class"
        f" on it is {percent(worst)} % of its share. The table shows the middle of the plateau."
        if flat
        else "The loss has no plateau. The table shows the estimates at the end."
    )
    print(f"{title}. {note}")
    shaded = (float(flat[0].iteration), float(flat[-1].iteration)) if flat else None
    loss = lines({"loss": [(p.iteration, p.loss) for p in points]}, "iteration", shaded)
    estimates = {name: [(p.iteration, float(p.shares[c])) for p in points] for c, name in enumerate(fed.classes)}
    heads = ["class", "true share %", "estimate %", "error %"]
    return section(title, note, scatter(fed), loss, lines(estimates, "iteration", shaded), table(heads, rows))


def layers(counts: Sequence[int], depths: Sequence[int], iterations: int, seed: int) -> str:
    """Figure 4: with more hidden layers, the estimate is right for classes with different means, too."""
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
    parser.add_argument("--quick", action="store_true", help="fewer iterations, which take seconds")
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
