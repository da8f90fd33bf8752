"""The ladder: every program runs and checks itself; and what its kernels and counters promise."""

from __future__ import annotations

import sys
import warnings

import forked
import interpreter
import pytest
import torch
from helpers import GPU, ROOT, run_program, run_python

from flashattn3_bench import memory_traffic
from flashattn3_bench.checking import Case
from flashattn3_bench.ladder_suite import run_sparse, sparse_work
from flashattn3_bench.runner import Settings

LEARN = ROOT / "examples" / "learn"
if not LEARN.is_dir():
    pytest.skip("needs a source checkout", allow_module_level=True)
sys.path.insert(0, str(LEARN))
PROGRAMS = sorted(LEARN.glob("step*.py"))
BLOCK = 64 if GPU else 16


def test_the_ladder_has_seven_short_programs():
    assert [path.name[:5] for path in PROGRAMS] == [f"step{i}" for i in range(1, 8)]
    for path in LEARN.glob("*.py"):
        assert path.read_text().count("\n") < 150, path.name


def run_strictly(path: str) -> None:
    """A program with warnings of NumPy, by which Triton's interpreter computes, as errors."""
    if not GPU:
        interpreter.make_quick()
    warnings.simplefilter("error", RuntimeWarning)
    forked.run_file(path)


@pytest.mark.parametrize("path", PROGRAMS, ids=lambda path: path.stem)
def test_a_program_runs_and_its_checks_hold(path, tmp_path):
    printed = run_program(run_strictly, str(path), folder=tmp_path)
    drawn = [line for line in printed.splitlines() if line.startswith("drawn: ")]
    for line in drawn:
        assert (tmp_path / line.removeprefix("drawn: ")).read_bytes().startswith(b"\x89PNG")
    assert len(drawn) == (path.stem[:5] in ("step3", "step6", "step7"))


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("family", ["butterfly", "sliding window", "local and global"])
def test_block_sparse_attention_and_its_gradients(family, causal):
    from masks import FAMILIES, density, largest_error, reference, run
    from step4_flash_attention_1 import FlashAttention1

    length = 7 * BLOCK - 5  # the last block is partial
    device = "cuda" if GPU else "cpu"
    mask = FAMILIES[family](7).to(device)
    assert 0 < density(mask) < 1 and (mask.diagonal() == 1).all()
    given, found = run(FlashAttention1.apply, length, length, 32, mask, BLOCK, causal)
    assert largest_error(found, reference(*given, mask, BLOCK, causal)) < 2e-3
    # The check finds a mask with one block more.
    row, column = (6, 3) if family == "butterfly" else (5, 2)
    other = mask.clone()
    other[row, column] = 1 - other[row, column]
    assert largest_error(found, reference(*given, other, BLOCK, causal)) > 1e-2


def test_rows_without_visible_blocks_have_no_output_and_no_gradient():
    from masks import largest_error, reference, run
    from step4_flash_attention_1 import FlashAttention1

    mask = torch.zeros(3, 4, dtype=torch.uint8)
    mask[1, 2] = mask[2, 0] = 1
    mask = mask.cuda() if GPU else mask
    given, found = run(FlashAttention1.apply, 3 * BLOCK, 4 * BLOCK, 32, mask, BLOCK, False)
    assert largest_error(found, reference(*given, mask, BLOCK, False)) < 2e-3
    out, dq, dk, dv = found
    assert not out[:, :BLOCK].any() and not dq[:, :BLOCK].any()
    assert not dk[:, 3 * BLOCK :].any() and not dv[:, BLOCK : 2 * BLOCK].any()


def test_the_butterfly_is_the_papers():
    """Every pair of blocks is connected by log2 of their number layers; density (1 + log2) / n."""
    from masks import butterfly, density

    mask = butterfly(16)
    assert density(mask) == (1 + 4) / 16
    reached = torch.linalg.matrix_power(mask.double(), 4)
    assert (reached > 0).all()
    assert not (torch.linalg.matrix_power(mask.double(), 3) > 0).all()


@pytest.mark.parametrize(("n", "block_m", "block_n"), [(100, 32, 16), (64, 64, 64), (37, 8, 24)])
def test_the_counted_bytes_are_those_of_the_toy_memory(n, block_m, block_n, monkeypatch):
    import step3_memory_traffic as step3

    d, capacity = 16, 10**9
    case = Case("count", 1, n, n, 1, 1, d, d)
    monkeypatch.setattr(step3, "BYTES", memory_traffic.ELEMENT)
    monkeypatch.setattr(step3, "block_sizes", lambda *_: (block_m, block_n))
    lse = n * memory_traffic.FLOAT  # which step 3 does not store
    padded = -(-n // block_n) * block_n - n  # tiles are counted whole
    over = 2 * padded * -(-n // block_m) * d * memory_traffic.ELEMENT
    counted = memory_traffic.flash_attention_2(case, block_m, block_n)
    assert counted == step3.count("FA2", n, d, capacity) + lse + over
    if block_m == block_n:
        fa1 = memory_traffic.flash_attention_1(case, block_m, accumulator=memory_traffic.ELEMENT)
        assert fa1 == step3.count("FA1", n, d, capacity)


def test_causal_tiles_are_counted_up_to_the_diagonal():
    case = Case("causal", 1, 64, 96, 1, 1, 16, 16, causal=True)
    assert memory_traffic.visited(case, 32, 32) == 2 + 3
    assert memory_traffic.visited(case, 64, 32) == 3


@pytest.mark.skipif(GPU, reason="Triton's interpreter")
def test_a_block_sparse_record_has_its_density_and_fails_when_it_is_wrong(monkeypatch):
    settings = Settings(torch.device("cpu"), torch.float16, (), 2, 1.0)
    work = sparse_work(["fwd"], quick=True)
    (record,) = run_sparse(*work[1], settings, quick=True)
    assert (record["status"], record["density"]) == ("ok", 10 / 16)
    import masks

    monkeypatch.setattr(masks, "largest_error", lambda *_: 0.1)
    (record,) = run_sparse(*work[1], settings, quick=True)
    assert record["status"] == "FAILED" and "bound" in record["reason"]


AHEAD_OF_TIME = """
import sys
sys.path.insert(0, "examples/learn")
import step4_flash_attention_1 as fa1, step5_flash_attention_2 as fa2, triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from flashattn3_bench.ahead_of_time import resources

SIXTEEN = {"q_ptr", "k_ptr", "v_ptr", "dout_ptr", "dk_ptr", "dv_ptr"}
for kernel, module in [(m.forward_kernel, m) for m in (fa1, fa2)] + [
    (m.backward_kernel, m) for m in (fa1, fa2)
]:
    rows = 128 if kernel is fa2.forward_kernel else 64
    blocks = {"BLOCK": 64} if module is fa1 else {"BLOCK_M": rows, "BLOCK_N": 64}
    constants = {"D": 64, "CAUSAL": True, **blocks}
    sixteen = SIXTEEN | ({"out_ptr"} if kernel is fa2.forward_kernel else set())
    types = {
        name: "constexpr" if name in constants
        else "*u8" if name == "mask_ptr"
        else "*bf16" if name in sixteen
        else "*fp32" if name.endswith("_ptr")
        else "fp32" if name == "scale" else "i32"
        for name in kernel.arg_names
    }
    aligned = {
        (i,): [["tt.divisibility", 16]]
        for i, name in enumerate(kernel.arg_names)
        if name.endswith("_ptr") or name in ("sq", "sk")
    }
    source = ASTSource(kernel, types, constants, aligned)
    warps = 4 if module is fa1 else 8
    options = {"num_warps": warps, "num_stages": 2 if rows == 128 else 1}
    for capability in (80, 90):
        target = GPUTarget("cuda", capability, 32)
        compiled = resources(triton.compile(source, target=target, options=options))
        print(capability, compiled.stack_bytes)
"""


@pytest.mark.slow
def test_the_kernels_compile_for_gpus():
    found = run_python(AHEAD_OF_TIME, TRITON_INTERPRET="0")
    lines = [line.split() for line in found.splitlines()]
    assert len(lines) == 8
    # FlashAttention-1's backward spills on Ampere, where GEMMs take registers for their operands.
    assert all(spilled == "0" for capability, spilled in lines if capability == "90"), lines
