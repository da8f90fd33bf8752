"""Step 7: 8 bits. What one outlier does to a scale, and what block scales and a rotation do then.

python examples/learn/step7_fp8.py [PATH.png]

Incoherent processing: QuIP (arXiv 2307.13304) and FlashAttention-3 (arXiv 2407.08608).
"""

import numpy as np
import torch
from drawing import panels, save

from flashattn3 import quantize_block_fp8

E4M3, INT8 = torch.float8_e4m3fn, torch.int8
LARGEST = {E4M3: 448.0, INT8: 127.0}
BLOCK = 128  # tokens that share a scale


def rounded(x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """x, which has magnitudes up to LARGEST, as the 8 bits hold it."""
    return (x.round() if dtype == INT8 else x).to(dtype).double()


def quantize(x: torch.Tensor, block: int, dtype: torch.dtype) -> torch.Tensor:
    """x (tokens, d) rounded to 8 bits, with one scale for each block of tokens."""
    parts = x.split(block)
    descales = [part.abs().max() / LARGEST[dtype] for part in parts]
    return torch.cat([rounded(p / s, dtype) * s for p, s in zip(parts, descales, strict=True)])


def hadamard(d: int) -> torch.Tensor:
    """The orthogonal matrix (d, d) of entries ±1 / sqrt(d), with a random sign for each row."""
    matrix = torch.ones(1, 1, dtype=torch.float64)
    while len(matrix) < d:
        matrix = torch.cat([torch.cat([matrix, matrix], 1), torch.cat([matrix, -matrix], 1)])
    signs = torch.randint(0, 2, (d, 1)) * 2 - 1
    return signs * matrix / d**0.5


def outlier_data(tokens: int, d: int) -> torch.Tensor:
    """N(0, 1) + N(0, 100) · Bernoulli(0.001), as in FlashAttention-3, section 4.3."""
    chosen = torch.rand(tokens, d, dtype=torch.float64) < 0.001
    x = torch.randn(tokens, d, dtype=torch.float64)
    return x + 10 * torch.randn(tokens, d, dtype=torch.float64) * chosen


def attend(q, k, v):
    return (q @ k.T / q.shape[1] ** 0.5).softmax(1) @ v


def relative_error(found, exact) -> float:
    return ((found - exact).square().mean().sqrt() / exact.square().mean().sqrt()).item()


SCHEMES = {  # tokens that share a scale (None: all), rotation, dtype of q and k
    "one scale, e4m3": (None, False, E4M3),
    "block scales, e4m3": (BLOCK, False, E4M3),
    "block scales, int8": (BLOCK, False, INT8),
    "block scales and rotation, e4m3": (BLOCK, True, E4M3),
    "block scales and rotation, int8": (BLOCK, True, INT8),
}


def errors(q, k, v) -> dict[str, tuple[float, float]]:
    """Of each scheme: error of k, and of out, both relative, against float64."""
    rotation, exact, found = hadamard(q.shape[1]), attend(q, k, v), {}
    for name, (block, rotated, dtype) in SCHEMES.items():
        size = block or len(q)
        # (QH)(KH)ᵀ = QKᵀ: an orthogonal H changes no score.
        q_in, k_in = (x @ rotation if rotated else x for x in (q, k))
        q8, k8 = quantize(q_in, size, dtype), quantize(k_in, size, dtype)
        out = attend(q8, k8, quantize(v, size, E4M3))
        found[name] = relative_error(k8, k_in), relative_error(out, exact)
    return found


def is_what_the_package_does(x: torch.Tensor) -> bool:
    """quantize_block_fp8 on the same numbers, in 16 bits: (batch, tokens, heads, d)."""
    x = x.bfloat16()
    ours = quantize(x.double(), BLOCK, E4M3)
    package = quantize_block_fp8(x[None, :, None], kind="k", block=BLOCK).dequantize()
    return relative_error(package[0, :, 0].double(), ours) < 1e-2


def draw(k: torch.Tensor, found: dict) -> None:
    figure, (before, after, bars) = panels(3, 4)
    rotated = k @ hadamard(k.shape[1])
    for panel, x, title in ((before, k, "K"), (after, rotated, "K rotated")):
        image = x[:BLOCK].abs().numpy()
        shown = panel.imshow(image, vmin=0, vmax=8, cmap="magma", aspect="auto")
        panel.set(title=f"{title}: largest {image.max():.0f}", xlabel="column", ylabel="token")
    figure.colorbar(shown, ax=after, label="magnitude")
    places = np.arange(len(found))
    bars.barh(places + 0.2, [error for error, _ in found.values()], 0.4, label="K")
    bars.barh(places - 0.2, [error for _, error in found.values()], 0.4, label="out")
    bars.set(yticks=places, yticklabels=list(found), xlabel="relative error")
    bars.invert_yaxis()
    bars.legend()
    save(figure, "fp8")


def main() -> None:
    torch.manual_seed(0)
    q, k, v = (outlier_data(1024, 64) for _ in range(3))
    normal = errors(*(torch.randn(1024, 64, dtype=torch.float64) for _ in range(3)))
    found = errors(q, k, v)
    print(f"{'error of K / of out, relative':33} normal data      with outliers")
    for name in SCHEMES:
        texts = (f"{a:.4f} / {b:.4f}" for a, b in (normal[name], found[name]))
        print(f"{name:33}", "  ".join(texts))
    exact = attend(q, k, v)
    rotation = hadamard(64)
    assert relative_error(attend(q @ rotation, k @ rotation, v), exact) < 1e-12
    assert found["block scales and rotation, int8"][1] < found["block scales, int8"][1]
    assert found["block scales and rotation, e4m3"][1] < found["block scales, e4m3"][1]
    assert is_what_the_package_does(k)
    draw(k, found)


if __name__ == "__main__":
    main()
