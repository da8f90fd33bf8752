"""Measure candidate tiles of the Triton kernels: where the rows of backends/triton/tile_configs.py
come from.

    python benchmarks/tune.py --head-dims 64 128 --lowering sm80 --json tiles.jsonl

Every candidate is compiled (in parallel, no GPU needed), dropped if it spills much or does not fit,
and timed on a full and on a causal problem of the benchmark grid. With --compile-only nothing is
timed.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import statistics
from concurrent.futures import ProcessPoolExecutor, wait
from dataclasses import asdict, dataclass
from multiprocessing import get_context

import torch
from tqdm import tqdm

from flashattn3.backends.device import SHARED_MEMORY_KIB
from flashattn3.backends.triton.config import TritonConfig
from flashattn3.backends.triton.tile_configs import Tile, TileConfig, Tiles
from flashattn3.call.fields import Options
from flashattn3.call.metadata import Metadata
from flashattn3.call.problem import Problem, describe

KERNELS = ("forward", "bwd", "bwd_dkdv", "bwd_dq")
OWN_KEYS = ("bwd", "bwd_dkdv")  # a program holds an n_block, with accumulators of dK and dV
MAX_STACK_BYTES = 320
COMPILE_SECONDS = 150
BLOCKS_N = tuple((block_n, 0) for block_n in (32, 64, 128))
# (block_n, slice_n) of forwards with mma.sync
SLICED_BLOCKS_N = tuple(
    (block_n, slice_n)
    for slice_n in (16, 32)
    for block_n in (32, 48, 64, 80, 96, 128)
    if block_n % slice_n == 0
)


@dataclass(frozen=True)
class Candidate:
    """One kernel with one tile on one problem: full or causal attention at a head dim."""

    kernel: str
    head_dim: int
    causal: bool
    tile: Tile
    capability: int
    lowering: int
    seqlen: int

    def problem(self) -> Problem:
        batch, heads = max(1, 16384 // self.seqlen), max(1, 2048 // self.head_dim)
        shape = (batch, self.seqlen, heads, self.head_dim)
        stride = (self.seqlen * heads * self.head_dim, heads * self.head_dim, self.head_dim, 1)
        qkv = Metadata(shape, stride, torch.bfloat16, torch.device("cuda", 0))
        return describe((qkv, qkv, qkv, None, None, None, None), Options(causal=self.causal))

    def launch(self):
        from flashattn3_bench.ahead_of_time import all_launches

        problem, tile = self.problem(), self.tile
        tiles = Tiles(tile, tile, tile, tile if self.kernel == "bwd" else None)
        tile_config = TileConfig(self.head_dim, self.lowering == 90, 0, tiles, tiles)
        arch = None if self.lowering == self.capability else f"sm{self.lowering}"
        programs = -(-problem.seqlen_q // tile.block_m) * problem.num_heads_q * problem.batch
        grid = (programs, 1, 1)
        config = TritonConfig(tile_config, tiles, 1, grid, arch, lowering=self.lowering)
        return all_launches(problem, config)[self.kernel]

    def flops(self) -> float:
        """Of the kernel's matrix products, two for each multiply-add; half if causal."""
        products = {"forward": 2, "bwd": 5, "bwd_dkdv": 4, "bwd_dq": 3}[self.kernel]
        problem = self.problem()
        pairs = problem.batch * problem.num_heads_q * self.seqlen**2 / (2 if self.causal else 1)
        return 2.0 * products * pairs * self.head_dim


def candidate_tiles(kernel: str, head_dim: int, wgmma: bool) -> list[Tile]:
    """The tiles worth compiling: accumulators must fit the registers of their warps. A forward with
    mma.sync multiplies its n_block whole or in slices."""
    tiles = []
    slices = SLICED_BLOCKS_N if kernel == "forward" and not wgmma else ()
    biases = (True, False) if kernel == "bwd" else (True,)
    for block_m, (block_n, slice_n), num_warps, num_stages, biased in itertools.product(
        (16, 32, 64, 128), BLOCKS_N + slices, (4, 8), (1, 2, 3), biases
    ):
        owned, streamed = (block_n, block_m) if kernel in OWN_KEYS else (block_m, block_n)
        accumulators = 2 * head_dim if kernel in OWN_KEYS else head_dim
        scores = streamed if kernel == "forward" else 2 * streamed
        registers = owned * (accumulators + scores) / (32 * num_warps)
        rows_per_warp = owned // num_warps
        if registers > 224 or registers < 40 or rows_per_warp < 8 or (wgmma and streamed < 32):
            continue
        tiles.append(Tile(block_m, block_n, num_warps, num_stages, slice_n, biased))
    return tiles


def compile_candidate(candidate: Candidate) -> dict | None:
    """Registers, stack and shared memory of one candidate; None if it does not compile or fit."""
    from flashattn3_bench.ahead_of_time import compile_kernel, resources

    try:
        kernel = compile_kernel(candidate.launch(), candidate.capability)
    except Exception as error:  # a tile that Triton cannot lower is no candidate
        return {"error": str(error)[-200:]}
    return asdict(resources(kernel))


def time_candidate(candidate: Candidate, tensors: list[torch.Tensor], rounds: int = 5) -> float:
    """Median milliseconds of a launch."""
    from flashattn3_bench.ahead_of_time import compile_kernel

    launch = candidate.launch()
    kernel = compile_kernel(launch, candidate.capability)
    arguments = (*tensors, *launch.scalars, *launch.constants.values())
    kernel[launch.grid](*arguments)
    times = []
    for _ in range(rounds):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        for _ in range(3):
            kernel[launch.grid](*arguments)
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) / 3)
    return statistics.median(times)


def make_tensors(candidate: Candidate) -> list[torch.Tensor]:
    """Random data in the shapes that the kernel's launch expects."""
    from flashattn3.backends.triton.launch_parts import lse_delta_shape

    problem = candidate.problem()
    qkv = (problem.batch, problem.seqlen_q, problem.num_heads_q, problem.head_dim)
    q, k, v, dout = (torch.randn(qkv, dtype=torch.bfloat16, device="cuda") for _ in range(4))
    out = [torch.empty_like(q) for _ in range(2)]
    shape = lse_delta_shape(problem)
    lse, delta = torch.full(shape, -100.0, device="cuda"), torch.zeros(shape, device="cuda")
    if candidate.kernel == "forward":
        return [q, k, v, out[0], lse, *[None] * 7]
    if candidate.kernel == "bwd_dq":
        return [q, k, v, dout, lse, delta, out[0], *[None] * 4]
    dq_accum = None
    if candidate.kernel == "bwd":
        columns = candidate.launch().constants["BLOCK_D"]
        dq_accum = torch.zeros(*shape, columns, device="cuda")
    return [q, k, v, dout, lse, delta, *out, dq_accum, *[None] * 4]


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--head-dims", type=int, nargs="+", default=[64, 128, 256])
    parser.add_argument("--kernels", nargs="+", choices=KERNELS, default=list(KERNELS))
    parser.add_argument(
        "--capability", type=int, help="of the chip, 90 for 9.0; default: the GPU at hand"
    )
    parser.add_argument("--lowering", type=int, help="older capability whose instructions to use")
    parser.add_argument(
        "--shared-memory-kib", type=int, help="default: what the lowering's chip has"
    )
    parser.add_argument("--seqlen", type=int, default=4096)
    parser.add_argument("--jobs", type=int, default=os.cpu_count())
    parser.add_argument("--compile-only", action="store_true")
    parser.add_argument("--best", type=int, default=4, help="candidates shown for each problem")
    parser.add_argument("--json", help="append one line for each candidate to this file")
    chosen = parser.parse_args(arguments)
    if chosen.capability is None:
        if not torch.cuda.is_available():
            parser.error("--capability must be given on a machine without a GPU")
        major, minor = torch.cuda.get_device_capability()
        chosen.capability = major * 10 + minor
    if not chosen.compile_only and not torch.cuda.is_available():
        parser.error("--compile-only must be given on a machine without a GPU")
    lowering = chosen.lowering or chosen.capability
    limit = (chosen.shared_memory_kib or SHARED_MEMORY_KIB[lowering]) * 1024
    candidates = [
        Candidate(kernel, head_dim, causal, tile, chosen.capability, lowering, chosen.seqlen)
        for kernel, head_dim in itertools.product(chosen.kernels, chosen.head_dims)
        for tile in candidate_tiles(kernel, head_dim, lowering == 90)
        for causal in (False, True)
    ]
    measured = measure(candidates, limit, chosen.jobs, chosen.compile_only)
    if chosen.json:
        with open(chosen.json, "a") as file:
            file.writelines(json.dumps(record) + "\n" for record in measured)
    report(measured, chosen.best)
    return 0


def compile_all(candidates: list[Candidate], jobs: int) -> list[dict]:
    """``compile_candidate`` of each, in parallel; given up after COMPILE_SECONDS."""
    pool = ProcessPoolExecutor(jobs, mp_context=get_context("spawn"))
    futures = [pool.submit(compile_candidate, candidate) for candidate in candidates]
    with tqdm(desc="compiling", total=len(futures), disable=None) as progress:
        for future in futures:
            future.add_done_callback(lambda _: progress.update())
        wait(futures, timeout=COMPILE_SECONDS)
    processes = list(pool._processes.values())
    pool.shutdown(wait=False, cancel_futures=True)
    for process in processes:
        process.kill()
    late = {"error": f"not compiled within {COMPILE_SECONDS} s"}
    return [
        future.result() if future.done() and not future.cancelled() else late for future in futures
    ]


def measure(candidates: list[Candidate], limit: int, jobs: int, compile_only: bool) -> list[dict]:
    compiled = compile_all(candidates, jobs)
    measured, tensors, made_for = [], [], None
    for candidate, needs in tqdm(
        list(zip(candidates, compiled, strict=True)), "timing", disable=None
    ):
        record = asdict(candidate) | {"tile": candidate.tile._asdict()} | needs
        measured.append(record)
        fits = "error" not in needs and needs["shared_memory_bytes"] <= limit
        if not fits or needs["stack_bytes"] > MAX_STACK_BYTES or compile_only:
            continue
        if made_for != (candidate.kernel, candidate.head_dim):
            tensors = make_tensors(candidate)
            made_for = (candidate.kernel, candidate.head_dim)
        try:
            record["milliseconds"] = time_candidate(candidate, tensors)
        except Exception as error:  # a launch that fails must not end the sweep
            record["error"] = str(error)[-200:]
            continue
        record["tflops"] = candidate.flops() / record["milliseconds"] * 1e-9
    return measured


def report(measured: list[dict], best: int) -> None:
    key = lambda record: (record["kernel"], record["head_dim"], record["causal"])  # noqa: E731
    for problem, records in itertools.groupby(sorted(measured, key=key), key):
        kernel, head_dim, causal = problem
        print(f"{kernel} d{head_dim} {'causal' if causal else 'full'}")
        timed = sorted((r for r in records if "tflops" in r), key=lambda r: -r["tflops"])
        for record in timed[:best]:
            tile = tuple(record["tile"].values())
            print(
                f"  {record['milliseconds']:7.3f} ms {record['tflops']:5.0f} TFLOP/s  tile {tile}  "
                f"{record['registers']} registers, stack {record['stack_bytes']}, "
                f"{record['shared_memory_bytes'] // 1024} KiB"
            )


if __name__ == "__main__":
    raise SystemExit(main())
