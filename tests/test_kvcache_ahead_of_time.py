"""The Triton kernels of cached calls compiled for every generation, with no GPU: shared memory,
spills, pipelined loads, instructions."""

from __future__ import annotations

import importlib.util
import json
from dataclasses import asdict

import pytest
from helpers import A100, B200, H100, L4, ORIN, RTX3090, run_python

from flashattn3.dispatch.device import SHARED_MEMORY_KIB

if importlib.util.find_spec("triton") is None:
    pytest.skip("Triton is not installed", allow_module_level=True)
pytestmark = pytest.mark.slow

CHIPS = (A100, RTX3090, ORIN, L4, H100, B200)
# head dim, page size, queries of a sequence, every option: one query and a chunk of a prompt.
SHAPES = {
    "dense": (128, 0, 1, False),
    "page-16": (128, 16, 1, False),
    "page-256-every-option": (64, 256, 4, True),
    "chunk": (128, 16, 300, False),
    "dim-256": (256, 16, 1, True),
    "dim-256-chunk": (256, 0, 300, False),
}
# Bytes of local memory for a thread: the largest that was seen, and a quarter of it with many
# queries; on 8.0 (pages of 16) and on 8.6 and 8.9 (every option) one query spills a few too.
SPILL_BOUND_BYTES = {
    "chunk": 144,
    "dim-256-chunk": 112,
    "page-16": 16,
    "page-256-every-option": 8,
}
CODE = """
import json, torch
from flashattn3.backends.triton.kernels.ahead_of_time import compile_kernel, resources
from flashattn3.backends.triton.kvcache import select_tile
from flashattn3.backends.triton.kvcache_launch import sample_launches
from flashattn3.dispatch.device import DeviceInfo
from flashattn3.kvcache.problem import *

def of(*shape, dtype=torch.bfloat16):
    return torch.empty(shape, dtype=dtype, device="meta")

device = DeviceInfo(**{device})
dim, page, rows, every = {shape}
b, heads, heads_kv, ints = 4, 32, 8, torch.int32
cache = of(99, page or 4096, heads_kv, dim)
q, indices = of(b, rows, heads, dim), of(b, dtype=ints)
table = of(b, 64, dtype=ints) if page else None
tensors = DecodeTensors(q, cache, cache, indices, table)
angles = of(4096, dim // 2, dtype=torch.float32)
new = q[:, :1, :heads_kv]
appended = AppendTensors(new, new, cache, cache, q, q, indices, table,
                         rotary_cos=angles, rotary_sin=angles)
options = DecodeOptions(causal=True)
if every:
    edges, factors = of(b + 1, dtype=ints), of(b, heads_kv, dtype=torch.float32)
    options = options._replace(window_left=500, softcap=30.0)
    tensors = tensors._replace(
        q=q.flatten(0, 1), cache_batch_idx=indices, cache_leftpad=indices, cu_seqlens_q=edges,
        cu_seqlens_k_new=edges, q_descale=factors, k_descale=factors, v_descale=factors,
        sinks=of(heads, dtype=torch.float32), scheduler_metadata=of(18, dtype=ints),
    )
problem = describe_decode(tuple(map(metadata_of, tensors)), options, rows)
other = describe_append(tuple(map(metadata_of, appended)), AppendOptions())
tile = select_tile(problem, device)
for name, launch in sample_launches(problem, other, tile).items():
    kernel = compile_kernel(launch, device.capability)
    needs = resources(kernel)
    ptx = kernel.asm["ptx"]
    print(json.dumps([name, needs.stack_bytes, needs.shared_memory_bytes, "trap;" in ptx,
                      "cp.async" in ptx, "mma" in ptx]))
"""


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("chip", CHIPS, ids=lambda chip: f"sm{chip.capability}")
def test_kernels_fit_their_chip(chip, shape):
    code = CODE.replace("{device}", repr(asdict(chip))).replace("{shape}", repr(SHAPES[shape]))
    told = run_python(code, TRITON_INTERPRET=None, TRITON_OVERRIDE_ARCH=None)
    reports = [json.loads(line) for line in told.splitlines() if line.startswith("[")]
    assert [report[0] for report in reports] == ["decode", "combine_parts", "append"]
    budget = min(SHARED_MEMORY_KIB[chip.lowering] * 1024, chip.shared_memory_bytes)
    for name, stack_bytes, shared_memory_bytes, traps, loads_ahead, multiplies in reports:
        assert not traps, name
        assert shared_memory_bytes <= budget, name
        assert stack_bytes <= SPILL_BOUND_BYTES.get(shape, 0) * (name == "decode"), name
        if name == "decode":
            assert loads_ahead and multiplies
