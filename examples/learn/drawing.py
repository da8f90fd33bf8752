"""What the programs of this folder draw with: panels without a window, and where files go."""

import sys
from pathlib import Path


def panels(count: int, width: float = 3.7, height: float = 3.6, down: bool = False, **options):
    """A figure and its panels, left to right, or down. width, height: inches of a panel."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    rows, columns = (count, 1) if down else (1, count)
    options |= {"figsize": (width * columns, height * rows), "layout": "constrained"}
    figure, grid = plt.subplots(rows, columns, squeeze=False, **options)
    return figure, list(grid.flat)


def schedule(panel, tasks: list[dict], title: str) -> None:
    """A line for each unit, a bar for each task, in the color of the warpgroup that it is for."""
    lines = [*sorted({t["who"] for t in tasks} - {"copies", "tensor cores"}, reverse=True)]
    lines += ["tensor cores", "copies"]
    for task in tasks:
        color = f"C{task['label']}" if task["label"].isdigit() else "lightgray"
        bar = (task["begin"], task["end"] - task["begin"])
        panel.broken_barh([bar], (lines.index(task["who"]) - 0.4, 0.8), color=color, ec="white")
    panel.set(yticks=range(len(lines)), yticklabels=lines, xlim=(0, 12000), title=title)


def save(figure, name: str) -> None:
    """To the path on the command line, or to out/learn/NAME.png."""
    path = Path(sys.argv[1] if len(sys.argv) > 1 else f"out/learn/{name}.png")
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=120)
    print("drawn:", path)
