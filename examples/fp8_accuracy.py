"""What FP8 costs in accuracy: the error of every form of q, k and v on three kinds of data, drawn.

python examples/fp8_accuracy.py [PATH.png]     (needs matplotlib: pip install 'flashattn3[demo]')
"""

import sys
from pathlib import Path

import torch

from flashattn3 import flash_attn_func
from flashattn3_bench.precision import PRECISIONS, arguments_in, errors


def normal(*shape: int) -> torch.Tensor:
    return torch.randn(shape).bfloat16()


def with_outliers(*shape: int) -> torch.Tensor:
    """Outliers, ten times as large, as in the FlashAttention-3 paper, section 4.3."""
    chosen = torch.rand(shape) < 0.001
    return (torch.randn(shape) + 10 * torch.randn(shape) * chosen).bfloat16()


# name → how to draw, queries, keys
DATA = {
    "normal": (normal, 512, 512),
    "outliers": (with_outliers, 512, 512),
    "long (a few queries, many keys)": (normal, 64, 8192),
}


def measure(draw, num_queries: int, num_keys: int, device: torch.device) -> dict[str, float]:
    """Precision → error of out, relative to its size, against float64."""
    torch.manual_seed(0)
    q, k, v = (draw(1, n, 4, 64).to(device) for n in (num_queries, num_keys, num_keys))
    reference = flash_attn_func(q.double(), k.double(), v.double(), backend="reference")
    found = {}
    for precision in PRECISIONS:
        # Tensors of 16 bits, or e4m3 with descales beside it, or BlockScaled: one function for all.
        out = flash_attn_func(**arguments_in(precision, q, k, v))
        found[precision] = errors(out, reference)["relative_error"]
    return found


def draw_figure(results: dict[str, dict[str, float]], path: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, panels = plt.subplots(1, len(results), figsize=(4 * len(results), 3.6), sharey=True)
    for panel, (title, found) in zip(panels, results.items(), strict=True):
        panel.bar(range(len(found)), list(found.values()), color="tab:green")
        panel.set_xticks(range(len(found)), list(found), rotation=35, ha="right", fontsize=8)
        panel.set_title(title, fontsize=10)
        panel.set_yscale("log")
    panels[0].set_ylabel("error / size of out")
    figure.tight_layout()
    figure.savefig(path, dpi=120)


def main() -> None:
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    results = {name: measure(*how, device) for name, how in DATA.items()}
    for name, found in results.items():
        print(name)
        for precision, error in found.items():
            print(f"  {precision:<32} {error:.2e}")
    path = Path(sys.argv[1] if len(sys.argv) > 1 else "out/fp8_accuracy.png")
    path.parent.mkdir(parents=True, exist_ok=True)
    draw_figure(results, path)
    print("drawn:", path)


if __name__ == "__main__":
    main()
