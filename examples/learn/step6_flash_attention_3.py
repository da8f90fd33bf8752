"""Step 6: FlashAttention-3, the schedule of the Hopper forward as an event simulation, drawn.

python examples/learn/step6_flash_attention_3.py [PATH.png]

One SM: a producer copies K and V into stages; warpgroups of 64 query rows multiply on the tensor
cores, which serve one GEMM at a time, and compute their softmax. The tasks compute on real tiles,
so a stage that is overwritten too early makes the result wrong.
"""

import numpy as np
import torch
from drawing import panels, save, schedule
from simulation import Machine, done

# Measured on an H100 (docs/log/hopper-instructions.md). Elements of a softmax per cycle and SM, of
# one, two or three warpgroups at once, beside idle and beside busy tensor cores:
SOFTMAX_RATE = {False: (13.4, 15.6, 15.6), True: (8.0, 9.6, 9.6)}
COPY_BYTES_PER_CYCLE = 64
WAIT_CYCLES = 45  # for a barrier whose phase is already complete
ROWS = 64  # of a warpgroup


def gemm_cycles(n: int, k: int) -> float:
    """64 rows, n columns, depth k, 16 bits: n / 2 cycles for a depth of 16."""
    return n / 2 * k / 16


def simulate(overlap: bool, free: bool, n=128, d=128, consumers=2, stages=2, num_blocks=12):
    """The machine after one work tile, and the error of its result against float64.

    overlap: QK of the next block is issued before PV of this one, and both run beside the softmax.
    free: warpgroups run unsynchronised (ping-pong); else they wait for each other in every step.
    """
    rng = np.random.default_rng(0)
    q = rng.standard_normal((consumers * ROWS, d)) / d**0.5
    k, v = tensors = rng.standard_normal((2, num_blocks * n, d))
    machine, results = Machine(SOFTMAX_RATE), {}
    stage, loaded, released, steps = {}, set(), {}, [0] * consumers

    def is_empty(which: int, j: int):  # K: 0, V: 1
        return lambda: j < stages or released.get((which, j - stages)) == consumers

    def copy(which: int, j: int) -> None:
        def arrive() -> None:
            stage[which, j % stages] = tensors[which][j * n : j * n + n]
            loaded.add((which, j))

        machine.start("copy", "copies", "KV"[which], n * d * 2 / COPY_BYTES_PER_CYCLE, arrive)

    def producer():
        order = [(0, 0), *(x for j in range(1, num_blocks) for x in ((0, j), (1, j - 1)))]
        for load in [*order, (1, num_blocks - 1)]:  # K0 K1 V0 K2 V1 ...
            yield is_empty(*load)
            copy(*load)

    def consumer(me: int):
        rows, out, row_sum = q[me * ROWS : me * ROWS + ROWS], np.zeros((ROWS, d)), 0.0
        tile, row_max = {}, np.full((ROWS, 1), -np.inf)

        def start_qk(j: int):
            yield lambda: (0, j) in loaded

            def multiply() -> None:
                tile[j] = rows @ stage[0, j % stages].T

            return machine.start("gemm", "tensor cores", str(me), gemm_cycles(n, d), multiply)

        def start_pv(j: int):
            yield lambda: (1, j) in loaded

            def multiply() -> None:
                np.add(out, tile.pop(j) @ stage[1, j % stages], out=out)

            return machine.start("gemm", "tensor cores", str(me), gemm_cycles(d, n), multiply)

        def finish(task: dict, which: int, j: int):
            yield done(task)
            released[which, j] = released.get((which, j), 0) + 1  # an arrival at its empty barrier

        for j in range(num_blocks):
            scores = yield from start_qk(j)
            if overlap and j > 0:
                values = yield from start_pv(j - 1)
            yield from finish(scores, 0, j)
            yield done(machine.start("wait", f"softmax {me}", "", WAIT_CYCLES))
            new_max = np.maximum(row_max, tile[j].max(1, keepdims=True))
            decay, tile[j], row_max = np.exp(row_max - new_max), np.exp(tile[j] - new_max), new_max
            row_sum = row_sum * decay + tile[j].sum(1, keepdims=True)
            yield done(machine.start("softmax", f"softmax {me}", str(me), ROWS * n))
            if overlap and j > 0:
                yield from finish(values, 1, j - 1)
            out *= decay  # only when the PV GEMM of the block before has left O
            if not overlap:
                yield from finish((yield from start_pv(j)), 1, j)
            steps[me] += 1
            if not free:
                yield lambda: min(steps) >= steps[me]
        if overlap:
            yield from finish((yield from start_pv(j)), 1, j)
        results[me] = out / row_sum

    machine.run([producer(), *map(consumer, range(consumers))])
    exact = np.exp(q @ k.T)
    exact = exact @ v / exact.sum(1, keepdims=True)
    return machine, np.abs(np.concatenate([results[i] for i in range(consumers)]) - exact).max()


def real_kernel(share: float) -> None:
    """Time the Hopper kernel where one can run, beside the simulated share of the tensor cores."""
    from triton.testing import do_bench

    from flashattn3 import available_backends, flash_attn_func

    if "hopper" not in available_backends():
        return print("the Hopper kernels cannot run here: nothing is timed beside the simulation")
    q = torch.randn(1, 16384, 16, 128, device="cuda", dtype=torch.bfloat16)
    flops = 4 * 16 * 16384**2 * 128 / do_bench(lambda: flash_attn_func(q, q, q)) * 1e3
    sms = torch.cuda.get_device_properties(0).multi_processor_count
    clock = flops / share / (sms * 4096) / 1e9  # 4096 FLOP per cycle and SM
    print(f"the kernel: {flops / 1e12:.0f} TFLOP/s, the simulated share at {clock:.2f} GHz")


VARIANTS = {  # overlap, free
    "one GEMM after another, in step": (False, False),
    "ping-pong": (False, True),
    "overlap, in step": (True, False),
    "overlap and ping-pong": (True, True),
}


def main() -> None:
    figure, axes = panels(len(VARIANTS), 9, 1.8, down=True, sharex=True)
    for panel, (name, how) in zip(axes, VARIANTS.items(), strict=True):
        machine, error = simulate(*how)
        title = f"{name}: {machine.time:.0f} cycles, tensor cores busy {machine.busy():.0%}"
        print(title)
        assert error < 1e-12, "a stage was overwritten while it was read"
        schedule(panel, machine.tasks, title)
    axes[-1].set_xlabel("cycles")
    save(figure, "flash-attention-3")
    # The tile of our kernel at head dim 128: 192 x 64, three warpgroups, four stages.
    machine, error = simulate(True, True, n=64, consumers=3, stages=4, num_blocks=24)
    assert error < 1e-12
    print(f"192 x 64 with three warpgroups: tensor cores busy {machine.busy():.0%}")
    real_kernel(machine.busy())


if __name__ == "__main__":
    main()
