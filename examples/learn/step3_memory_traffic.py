"""Step 3: a toy memory that counts the bytes between a large slow memory and a small fast one.

python examples/learn/step3_memory_traffic.py [PATH.png]

Naive attention moves Θ(Nd + N²) elements, FlashAttention Θ(N² d² / M) with M elements of fast
memory (Dao et al. 2022, arXiv 2205.14135, theorem 2). On an SM, fast is shared memory.
"""

from collections.abc import Iterator

import numpy as np
from drawing import panels, save

BYTES = 4  # of an element


class Memory:
    """Arrays in slow memory; tiles in fast memory, which holds at most ``capacity`` elements."""

    def __init__(self, capacity: int, **arrays: np.ndarray) -> None:
        self.slow, self.capacity = arrays, capacity
        self.used = self.bytes_moved = 0

    def blocks(self, length: int, size: int) -> Iterator[slice]:
        """Loop over blocks of rows; tiles that a step loads or makes are dropped at its end."""
        before = self.used
        for first in range(0, length, size):
            yield slice(first, min(first + size, length))
            self.used = before

    def make(self, tile: np.ndarray) -> np.ndarray:
        self.used += tile.size
        assert self.used <= self.capacity, "the tiles do not fit"
        return tile

    def load(self, name: str, *place: slice) -> np.ndarray:
        tile = self.slow[name][place].copy()
        self.bytes_moved += tile.size * BYTES
        return self.make(tile)

    def store(self, tile: np.ndarray, name: str, *place: slice) -> None:
        self.slow[name][place] = tile
        self.bytes_moved += tile.size * BYTES


def naive(memory: Memory, n: int, d: int) -> None:
    """S = QKᵀ, P = softmax(S), O = PV: three passes, with S and P in slow memory."""
    memory.slow["s"], memory.slow["p"] = np.zeros((n, n)), np.zeros((n, n))
    size = int((d * d + memory.capacity) ** 0.5) - d  # size² + 2 size · d elements fit
    for rows in memory.blocks(n, size):
        for keys in memory.blocks(n, size):
            s = memory.load("q", rows) @ memory.load("k", keys).T
            memory.store(memory.make(s), "s", rows, keys)
    for rows in memory.blocks(n, memory.capacity // n):
        s = memory.load("s", rows)
        p = np.exp(s - s.max(axis=1, keepdims=True))
        memory.store(p / p.sum(axis=1, keepdims=True), "p", rows)
    for rows in memory.blocks(n, size):
        out = memory.make(np.zeros((rows.stop - rows.start, d)))
        for keys in memory.blocks(n, size):
            out += memory.load("p", rows, keys) @ memory.load("v", keys)
        memory.store(out, "out", rows)


def block_sizes(d: int, capacity: int) -> tuple[int, int]:
    """Rows of the tiles that stay and of those that pass by: both, and their scores, fit."""
    passing = min(d, capacity // (8 * d))
    return (capacity - passing * (2 * d + 4)) // (2 * d + passing + 4), passing


def online_step(memory: Memory, q, k, v, out, row_max, row_sum):
    """The online softmax of step 2, with out not yet divided by row_sum."""
    s = memory.make(q @ k.T)
    new_max = np.maximum(row_max, s.max(axis=1))
    p, decay = np.exp(s - new_max[:, None]), np.exp(row_max - new_max)
    return out * decay[:, None] + p @ v, new_max, row_sum * decay + p.sum(axis=1)


def flash_attention_1(memory: Memory, n: int, d: int) -> None:
    """Keys in the outer loop: K and V are read once, Q, O and two statistics once per key block."""
    staying, passing = block_sizes(d, memory.capacity)
    state = ("out", "row_max", "row_sum")
    memory.slow["row_max"], memory.slow["row_sum"] = np.full(n, -np.inf), np.zeros(n)
    for keys in memory.blocks(n, staying):
        k, v = memory.load("k", keys), memory.load("v", keys)
        for rows in memory.blocks(n, passing):
            q, *old = (memory.load(name, rows) for name in ("q", *state))
            for name, new in zip(state, online_step(memory, q, k, v, *old), strict=True):
                memory.store(new, name, rows)
    memory.slow["out"] /= memory.slow["row_sum"][:, None]  # a kernel keeps O divided: step 4


def flash_attention_2(memory: Memory, n: int, d: int) -> None:
    """Queries in the outer loop: O is written once, K and V are read once per query block."""
    staying, passing = block_sizes(d, memory.capacity)
    for rows in memory.blocks(n, staying):
        q, count = memory.load("q", rows), rows.stop - rows.start
        tiles = np.zeros((count, d)), np.full(count, -np.inf), np.zeros(count)
        state = [memory.make(tile) for tile in tiles]
        for keys in memory.blocks(n, passing):
            k, v = memory.load("k", keys), memory.load("v", keys)
            state = online_step(memory, q, k, v, *state)
        memory.store(state[0] / state[2][:, None], "out", rows)


ALGORITHMS = {"naive": naive, "FA1": flash_attention_1, "FA2": flash_attention_2}


def count(name: str, n: int, d: int, capacity: int) -> int:
    """Bytes that one head of n queries and keys moves; the result is compared with float64."""
    q, k, v = np.random.default_rng(0).standard_normal((3, n, d)) / d**0.25
    memory = Memory(capacity, q=q, k=k, v=v, out=np.zeros((n, d)))
    ALGORITHMS[name](memory, n, d)
    p = np.exp(q @ k.T)
    assert np.allclose(memory.slow["out"], p @ v / p.sum(axis=1, keepdims=True), atol=1e-12)
    return memory.bytes_moved


# What is varied, and the points (n, d, capacity).
SWEEPS = {
    "tokens": [(n, 64, 2**14) for n in (256, 512, 1024, 2048)],
    "head dim": [(1024, d, 2**14) for d in (16, 32, 64, 128)],
    "fast memory (elements)": [(1024, 64, m) for m in (2**12, 2**13, 2**14, 2**15, 2**16)],
}


def main() -> None:
    figure, axes = panels(len(SWEEPS), sharey=True)
    for axis, (label, points) in enumerate(SWEEPS.items()):
        print(f"MiB moved, by {label}")
        for name in ALGORITHMS:
            found = np.array([count(name, *point) for point in points]) / 2**20
            theory = [n * n + n * d if name == "naive" else (n * d) ** 2 / m for n, d, m in points]
            constants = found / theory
            print(f"  {name:6}", *(f"{x:6.1f}" for x in found))
            assert max(constants) < 2.5 * min(constants), f"{name} is not as the theory"
            places = [point[axis] for point in points]
            (dots,) = axes[axis].loglog(places, found, "o", base=2, label=name)
            dashed = np.multiply(theory, constants[-1])
            axes[axis].loglog(places, dashed, "--", base=2, color=dots.get_color())
        axes[axis].set_xlabel(label)
    axes[0].set_ylabel("MiB moved (dashed: theory)")
    axes[0].legend()
    save(figure, "memory-traffic")


if __name__ == "__main__":
    main()
