"""The Triton kernels of cached calls compiled for every generation, with no GPU: shared memory,
spills, pipelined loads, instructions."""

from __future__ import annotations

import importlib.util
import itertools
from dataclasses import replace

import ptx
import pytest
from helpers import A100, B200, H100, L4, ORIN, RTX3090
from support.compiled import Report, assert_fits, compile_launches

from flashattn3.backends.device import DeviceInfo
from flashattn3.backends.triton.tile_configs import FIRST_WITH_FP8

if importlib.util.find_spec("triton") is None:
    pytest.skip("Triton is not installed", allow_module_level=True)
pytestmark = pytest.mark.slow

CHIPS = (A100, RTX3090, ORIN, L4, H100, B200)
# head dim, page size, queries of a sequence, options ("ragged": cu_seqlens_q; a dtype and kind of
# descales: of the cache): one query, a chunk of a prompt, and both in one call.
SHAPES = {
    "dense": (128, 0, 1, ""),
    "page-16": (128, 16, 1, ""),
    "page-256-every-option": (64, 256, 4, "every"),
    "chunk": (128, 16, 300, ""),
    "mixed": (128, 16, 300, "ragged"),
    "dim-256": (256, 16, 1, "every"),
    "dim-256-chunk": (256, 0, 300, ""),
    "spans": (128, 16, 300, "ragged spans"),
    "dim-256-spans": (256, 16, 1, "every spans"),
    "tree": (128, 16, 64, "tree"),
    "e4m3": (128, 16, 1, "e4m3 tokens"),
    "int8-dense": (128, 0, 1, "int8 heads"),
    "e4m3-chunk": (128, 16, 300, "e4m3 tokens"),
    "int8-pages": (64, 256, 4, "int8 pages"),
}
# Bytes of local memory for a thread: the largest that was seen, and a quarter of it with many
# queries; on 8.6 and 8.9 one query with every option spills a few too.
SPILL_BOUND_BYTES = {
    "chunk": 100,
    "mixed": 104,
    "dim-256-chunk": 90,
    "e4m3-chunk": 232,
    "page-256-every-option": 8,
    "spans": 72,
    "tree": 120,
    "dim-256-spans": 368,
}


# Chips that launch what another launches. Of these .ci/run compiles one of the heaviest problems.
ALIKE = {ORIN: A100, B200: A100, RTX3090: L4, L4: A100}
# Chunks of 16 bits and trees have one tile on 8.0 and 8.9, whose other tiles have fewer stages.
LIKE_A100 = "chunk", "dim-256-chunk", "tree"
HEAVIEST = "mixed"


def problems_of(dim: int, page: int, rows: int, kind: str, dim_v: int | None = None) -> tuple:
    """A cached call and an append. dim_v: where it is not dim."""
    import torch

    from flashattn3.call import cached as of_cache
    from flashattn3.call.metadata import metadata_of

    def of(*shape, dtype=torch.bfloat16):
        return torch.empty(shape, dtype=dtype, device="meta")

    b, heads, heads_kv, ints = 4, 32, 8, torch.int32
    dtypes = {"e4m3": torch.float8_e4m3fn, "int8": torch.int8}
    stored = dtypes.get(kind.partition(" ")[0], torch.bfloat16)
    caches = [of(99, page or 4096, heads_kv, x, dtype=stored) for x in (dim, dim_v or dim)]
    sizes = {"heads": (b, heads_kv), "pages": (99, 1, heads_kv), "tokens": (99, page, heads_kv)}
    per = next((name for name in sizes if name in kind), None)
    descale = of(*sizes[per], dtype=torch.float32) if per else None
    descales = {"k_descale": descale, "v_descale": descale}
    q, indices = of(b, rows, heads, dim), of(b, dtype=ints)
    table = of(b, 64, dtype=ints) if page else None
    tensors = of_cache.DecodeTensors(q, *caches, indices, table, **descales)
    angles = of(4096, dim // 2, dtype=torch.float32)
    new = [of(b, 1, heads_kv, x.shape[-1]) for x in caches]
    if per == "tokens":
        descales = {f"{name}_out": x for name, x in descales.items()}
    appended = of_cache.AppendTensors(
        *new, *caches, q, q, indices, table, rotary_cos=angles, rotary_sin=angles, **descales
    )  # fmt: skip
    options = of_cache.DecodeOptions(causal=True)
    edges = of(b + 1, dtype=ints)
    if "spans" in kind:
        options = options._replace(split_tokens=1024)
    if "ragged" in kind:
        tensors = tensors._replace(q=q.flatten(0, 1), cu_seqlens_q=edges)
    if "tree" in kind:
        tensors = tensors._replace(tree_mask=of(b, rows, 2, dtype=ints))
    if "every" in kind:
        factors = of(b, heads_kv, dtype=torch.float32)
        options = options._replace(window_left=500, softcap=30.0)
        tensors = tensors._replace(
            q=q.flatten(0, 1), cache_batch_idx=indices, cache_leftpad=indices, cu_seqlens_q=edges,
            cu_seqlens_k_new=edges, q_descale=factors, k_descale=factors, v_descale=factors,
            sinks=of(heads, dtype=torch.float32), scheduler_metadata=of(18, dtype=ints),
            alibi_slopes=of(heads, dtype=torch.float32),
        )  # fmt: skip
    metadata = tuple(map(metadata_of, tensors))
    problem = of_cache.describe_decode(metadata, options, rows)
    metadata = tuple(map(metadata_of, appended))
    other = of_cache.describe_append(metadata, of_cache.AppendOptions())
    return problem, other


def compile_all(
    device: DeviceInfo, names: tuple[str, ...], *of: object, padding: int = 0, aligned: bool = True
) -> list[Report]:
    """Runs in a process of its own. names: of kernels. of: the arguments of ``problems_of``."""
    from support.cached_launches import sample_launches

    from flashattn3.backends.triton.cache_tiles import select_tile

    problem, other = problems_of(*of)
    launches = sample_launches(problem, other, select_tile(problem, device), padding)
    return compile_launches({name: launches[name] for name in names}, device, aligned)


@pytest.mark.parametrize("chip", ALIKE)
def test_what_is_swept_is_launched_on_another_chip(chip):
    from flashattn3.backends.triton.cache_tiles import select_tile

    for shape in (shape for shape in SHAPES if is_swept(chip, shape)):
        problem, _ = problems_of(*SHAPES[shape])
        tiles = [select_tile(problem, device) for device in (chip, ALIKE[chip])]
        of_chip = {"num_ctas": 0, "arch": None, "native_fp8": False}
        assert tiles[0]._replace(**of_chip) == tiles[1]._replace(**of_chip)


def is_swept(chip: DeviceInfo, shape: str) -> bool:
    if chip == L4:
        return shape in LIKE_A100
    converts = "e4m3" in shape and chip == RTX3090  # which has no e4m3, as L4 has
    return chip in ALIKE and shape != HEAVIEST and not converts


KERNELS = [
    pytest.param(
        *of,
        id=f"sm{of[0].capability}-{of[1]}",
        marks=pytest.mark.sweep if is_swept(*of) else (),
    )
    for of in itertools.product(CHIPS, SHAPES)
]


@pytest.mark.parametrize(("chip", "shape"), KERNELS)
def test_kernels_fit_their_chip(chip, shape, compilers):
    from flashattn3.backends.triton.cache_tiles import select_tile

    names = "decode", "combine_parts", "append"
    reports = compilers.submit(compile_all, chip, names, *SHAPES[shape]).result()
    for report in reports:
        assert_fits(chip, report)
        bound = SPILL_BOUND_BYTES.get(shape, 0) * (report.kernel == "decode")
        assert report.stack_bytes <= bound, report.kernel
    decode, _, append = reports
    to_e4m3 = "e4m3" in shape and chip.lowering >= FIRST_WITH_FP8
    assert ("cvt.rn.satfinite.e4m3x2.f32" in append.ptx) == to_e4m3
    assert "mma" in decode.ptx
    # Keys 16 bytes at once, as many stages ahead as of a dense cache; entries of the table.
    widths = sorted(size for kind, size in ptx.memory_widths(decode.ptx) if kind == "cp.async")
    assert widths == [4, 16][SHAPES[shape][1] == 0 :]
    assert "ld.shared.b8" not in decode.ptx
    problem, _ = problems_of(*SHAPES[shape])
    tile, dense = (select_tile(x, chip) for x in (problem, replace(problem, page_size=0)))
    row = problem.head_dim * problem.cache_dtype.itemsize
    assert decode.shared_memory_bytes >= (dense.num_stages - 1) * tile.block_n * 2 * row
    assert tile.few_m == (16 if shape == "mixed" else 0)


def compile_combine(device: DeviceInfo, head_dim: int) -> tuple[int, bool]:
    """Bytes of local memory of a thread, and whether parts are loaded 8 bytes at once or more."""
    import torch

    from flashattn3.backends.triton.cache_tiles import select_tile
    from flashattn3.backends.triton.cached_launch import combine_rows_launch
    from flashattn3.call.cached import CombineProblem
    from flashattn3_bench.ahead_of_time import compile_kernel, resources

    dtypes = torch.float32, torch.bfloat16, torch.device("cuda", 0)
    problem = CombineProblem("flash_attn_combine", *dtypes, head_dim, head_dim, None)
    launch = combine_rows_launch(problem, select_tile(problem, device))
    rows, lse = (2**20 * head_dim, 2**16 * head_dim, 16 * head_dim, head_dim), (2**20, 2**16, 16, 1)
    strides = (*rows, *rows[1:], *lse, *lse[1:])
    sample = launch.sample(("fp32", "fp32", "bf16", "fp32"), strides, (64,) * 4)
    kernel = compile_kernel(sample, device.capability)
    widths = ptx.memory_widths(kernel.asm["ptx"])
    return resources(kernel).stack_bytes, any(kind == "ld" and n >= 8 for kind, n in widths)


@pytest.mark.parametrize("head_dim", [64, 512, 576])
@pytest.mark.parametrize("chip", [ORIN, H100], ids=lambda chip: f"sm{chip.capability}")
def test_combine_does_not_spill(chip, head_dim, compilers):
    assert compilers.submit(compile_combine, chip, head_dim).result() == (0, True)


@pytest.mark.parametrize(
    ("dims", "page_size", "queries"),
    [
        *(((40, 24), 0, 100), ((72, 72), 16, 100), ((40, 24), 0, 1)),
        pytest.param((104, 56), 0, 100, marks=pytest.mark.sweep),
    ],
    ids=str,
)
def test_odd_multiples_of_8_load_as_wide_as_the_next_of_16(dims, page_size, queries, compilers):
    names = "decode", "append"
    both = [
        compilers.submit(compile_all, H100, names, dim, page_size, queries, "", dim_v)
        for dim, dim_v in (dims, [x + 8 for x in dims])
    ]
    for odd, even in zip(*(submitted.result() for submitted in both), strict=True):
        widths = ptx.memory_widths(odd.ptx)
        assert widths == ptx.memory_widths(even.ptx)
        assert ("wgmma" in odd.ptx) == ("wgmma" in even.ptx)
        assert not odd.stale and not ptx.buffers_of_two_swizzles(odd.ptx)
        # append's tables of angles are loaded by the element, in either case.
        assert odd.kernel == "append" or all(size != 2 for _, size in widths)


# (dims, dtype of the caches, how their rows lie)
ONE_BUFFER = [
    *((dims, "", {"padding": 1}) for dims in ((40, 24), (64, 32), (32, 16), (128, 16))),
    *((dims, "", {"aligned": False}) for dims in ((40, 24), (64, 32), (32, 16), (128, 16))),
    *((dims, "e4m3", {}) for dims in ((64, 32), (40, 24))),
    ((40, 24), "e4m3", {"aligned": False}),
]


@pytest.mark.parametrize(("dims", "stored", "how"), ONE_BUFFER, ids=str)
def test_keys_and_values_in_one_buffer_have_one_swizzle(dims, stored, how, compilers):
    """As in test_ahead_of_time.py: single elements are not loaded ahead. Widened K and V are stored
    for WGMMA in turns."""
    of = dims[0], 0, 100, stored, dims[1]
    (decode,) = compilers.submit(compile_all, H100, ("decode",), *of, **how).result()
    assert "wgmma" in decode.ptx
    assert not decode.stale and not ptx.buffers_of_two_swizzles(decode.ptx)
    assert not how or not any(kind == "cp.async" for kind, _ in ptx.memory_widths(decode.ptx))
