"""What the programs of this folder draw with: panels without a window, and where files go."""

import sys
from pathlib import Path


def panels(count: int, width: float = 3.7, height: float = 3.6, **options):
    """A figure and its panels, left to right."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    size = {"figsize": (width * count, height), "layout": "constrained"}
    figure, grid = plt.subplots(1, count, squeeze=False, **size, **options)
    return figure, list(grid[0])


def save(figure, name: str) -> None:
    """To the path on the command line, or to out/learn/NAME.png."""
    path = Path(sys.argv[1] if len(sys.argv) > 1 else f"out/learn/{name}.png")
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=120)
    print("drawn:", path)
