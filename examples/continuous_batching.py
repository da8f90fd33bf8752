"""A small server loop: sequences come and go, pages are lent and taken back, and every step is the
replay of one CUDA graph (on a CPU the same call without a graph).

python examples/continuous_batching.py
"""

import torch
from torch import Tensor

from flashattn3 import append_kvcache, flash_attn_func, flash_attn_with_kvcache

SLOTS, PAGE_SIZE, NUM_PAGES, MAX_PAGES = 4, 16, 40, 8
HEADS, HEADS_KV, HEAD_DIM = 8, 2, 64


class Server:
    """Static buffers that the graph reads: new q, k, v, lengths, page table. Page 0 belongs to no
    sequence: empty slots write their token there."""

    def __init__(self, device: torch.device) -> None:
        dtype = torch.float16 if device.type == "cuda" else torch.float32
        new = {"device": device, "dtype": dtype}
        shape = (NUM_PAGES, PAGE_SIZE, HEADS_KV, HEAD_DIM)
        self.caches = torch.empty(shape, **new), torch.empty(shape, **new)
        self.q = torch.zeros(SLOTS, 1, HEADS, HEAD_DIM, **new)
        self.k, self.v = (torch.zeros(SLOTS, 1, HEADS_KV, HEAD_DIM, **new) for _ in range(2))
        self.lengths = torch.zeros(SLOTS, dtype=torch.int32, device=device)
        self.table = torch.zeros((SLOTS, MAX_PAGES), dtype=torch.int32, device=device)
        self.free = list(range(1, NUM_PAGES))
        self.pages: list[list[int]] = [[] for _ in range(SLOTS)]
        self.run = self._captured() if device.type == "cuda" else self._step

    def _step(self) -> Tensor:
        place = {"cache_seqlens": self.lengths, "page_table": self.table}
        append_kvcache(self.k, self.v, *self.caches, **place)
        place["cache_seqlens"] = self.lengths + 1
        return flash_attn_with_kvcache(self.q, *self.caches, **place, causal=True)

    def _captured(self):
        self._step()  # compiles the kernels
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            out = self._step()

        def replay() -> Tensor:
            graph.replay()
            return out

        return replay

    def admit(self, slot: int) -> None:
        self.lengths[slot] = 0
        self._lend(slot)

    def _lend(self, slot: int) -> None:
        page = self.free.pop()
        self.table[slot, len(self.pages[slot])] = page
        self.pages[slot].append(page)

    def grow(self, slot: int, length: int) -> None:
        """Make room for one more token."""
        if length == len(self.pages[slot]) * PAGE_SIZE:
            self._lend(slot)

    def release(self, slot: int) -> None:
        self.free += self.pages[slot]
        self.pages[slot] = []
        self.table[slot] = 0
        self.lengths[slot] = 0


def main() -> None:
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    torch.manual_seed(0)
    server = Server(device)
    waiting = [("a", 40), ("b", 3), ("c", 17), ("d", 20), ("e", 33), ("f", 5)]
    running: dict[int, tuple[str, int]] = {}  # slot → name, tokens that it still wants
    history: dict[int, list[tuple[Tensor, Tensor]]] = {}
    finished, steps, largest = [], 0, 0.0
    while waiting or running:
        for slot in range(SLOTS):
            if slot not in running and waiting:
                running[slot], history[slot] = waiting.pop(0), []
                server.admit(slot)
        for x in (server.q, server.k, server.v):  # a model would write these
            x.normal_()
        for slot in running:
            server.grow(slot, len(history[slot]))
        out = server.run()
        for slot, (name, wanted) in list(running.items()):
            history[slot].append((server.k[slot, 0].clone(), server.v[slot, 0].clone()))
            server.lengths[slot] += 1
            k, v = (torch.stack(x)[None] for x in zip(*history[slot], strict=True))
            right = flash_attn_func(server.q[slot][None], k, v)
            largest = max(largest, (out[slot] - right[0]).abs().max().item())
            running[slot] = (name, wanted - 1)
            if wanted == 1:
                finished.append(name)
                server.release(slot)
                del running[slot]
        steps += 1
    assert sorted(finished) == list("abcdef") and len(server.free) == NUM_PAGES - 1
    assert largest < 5e-3, f"largest difference {largest}"
    print(f"{len(finished)} sequences in {steps} steps, in the order {' '.join(finished)}")
    print(f"largest difference to attention without a cache: {largest:.1e}")


if __name__ == "__main__":
    main()
