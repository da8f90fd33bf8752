"""The Triton backend's launches, without a GPU: what a kernel is told of strides, and which of its
two forms takes a tensor that is not aligned."""

from types import SimpleNamespace

import pytest
import torch
from helpers import A100, B200, H100, LOWERED_H100, RTX5090, described

from flashattn3.backends.device import DeviceInfo, describe_device
from flashattn3.backends.registry import REFERENCE, TRITON
from flashattn3.call.operands import Scaled, Tensors

pytest.importorskip("triton")

import triton
import triton.language as tl

import flashattn3.backends.triton.launch as triton_launch
from flashattn3.backends.packed import as_cached
from flashattn3.backends.triton.backend import TritonLaunch, _forward_tile
from flashattn3.backends.triton.cache_tiles import LARGEST_FEW_ROWS, select_tile
from flashattn3.backends.triton.columns import blocks_alike, fp8_columns, padded
from flashattn3.backends.triton.kernels import dq_accum, launch, variable_launch
from flashattn3.backends.triton.kernels.column_parts import column_parts
from flashattn3.backends.triton.tile_configs import Tile
from flashattn3_bench.ahead_of_time import all_launches


@pytest.mark.parametrize(
    "strides, unit",
    [
        ((64, 1024, 0), 1),
        ((16,), 1),
        ((72, 8 * 72, 4096 * 8 * 72), 8),
        ((40, 0), 8),
        ((36, 72), 4),
        ((33, 66), 1),
        ((64, 65), 1),
        ((2**33 + 8,), 8),
    ],
)
def test_strides_have_the_largest_unit_up_to_8(strides, unit):
    """Triton finds multiples of 16 itself."""
    assert launch.stride_unit(*strides) == unit


def launches(
    head_dim: int, width: int, head_dim_v: int | None = None, chip: DeviceInfo = A100, **features
) -> dict:
    """Of q, k and v that are views of rows of ``width`` elements."""
    rows = torch.empty(1, 64, 3, width, device="meta", dtype=torch.bfloat16)
    q, v = rows[..., :head_dim], rows[..., : head_dim_v or head_dim]
    problem = described(Tensors(q, q, v), **features)
    return all_launches(problem, TRITON.configure(problem, chip))


@pytest.mark.parametrize(
    "shape, units",
    [
        ({"head_dim": 64, "width": 64}, {1}),
        ({"head_dim": 72, "width": 72}, {8}),
        ({"head_dim": 64, "width": 72}, {8, 1}),  # combine and preprocess read dense rows of 64
        ({"head_dim": 64, "width": 128, "head_dim_v": 40}, {8, 1}),  # postprocess: rows of 64
        ({"head_dim": 72, "width": 73}, {1, 8}),
    ],
)
def test_kernels_are_told_the_unit_of_all_strides(shape, units):
    found = {name: of.constants["STRIDE_UNIT"] for name, of in launches(**shape).items()}
    assert set(found.values()) == units
    for name in ("forward", "bwd"):
        assert found[name] == (8 if 8 in units and shape["width"] != 73 else 1)


@pytest.mark.parametrize("chip", [A100, H100, LOWERED_H100, B200, RTX5090])
@pytest.mark.parametrize("head_dim", [64, 128])
def test_forwards_with_mma_sync_have_slices_and_constant_token_strides(head_dim, chip):
    constants = launches(head_dim, head_dim, chip=chip)["forward"].constants
    strides = constants["K_STRIDE_S"], constants["V_STRIDE_S"]
    if chip.lowering == 90:
        assert (constants["SLICE_N"], strides) == (constants["BLOCK_N"], (0, 0))
    else:
        assert (constants["SLICE_N"], strides) == (16, (3 * head_dim, 3 * head_dim))


@pytest.mark.parametrize("excess, constant", [(0, True), (8, False)])
def test_a_token_stride_is_a_constant_if_a_block_has_offsets_of_32_bits(excess, constant):
    block_n = launches(64, 64)["forward"].constants["BLOCK_N"]
    stride = (2**31 - 256) // block_n // 8 * 8 + excess
    q = torch.empty(1, 64, 1, 64, device="meta", dtype=torch.bfloat16)
    k = torch.empty_strided(q.shape, (64 * stride, stride, 64, 1), device="meta", dtype=q.dtype)
    for tensors, of_k in ((Tensors(q, k, q), True), (Tensors(q, q, k), False)):
        problem = described(tensors)
        constants = all_launches(problem, TRITON.configure(problem, A100))["forward"].constants
        found = constants["K_STRIDE_S"], constants["V_STRIDE_S"]
        wanted = (stride if constant else 0), 64
        assert found == (wanted if of_k else wanted[::-1])


SLICED = Tile(32, 48, 4, 2, 16)


@pytest.mark.parametrize("constant", [True, False], ids=["constant-strides", "run-time-strides"])
@pytest.mark.parametrize(
    "features",
    [
        {},
        {"causal": True},
        {"window_left": 70, "window_right": 9},
        {"num_splits": 3, "softcap": 2.0},
    ],
    ids=["full", "causal", "window", "splits-softcap"],
)
def test_slices_of_a_block_that_is_no_power_of_two(features, constant, device, monkeypatch):
    if not constant:
        monkeypatch.setattr(triton_launch, "_constant_stride", lambda stride, tile: 0)
    generator = torch.Generator(device).manual_seed(0)
    shapes = (2, 70, 2, 64), (2, 149, 1, 64), (2, 149, 1, 40)
    of = {"dtype": torch.float16, "device": device, "generator": generator}
    tensors = Tensors(*(torch.randn(shape, **of) for shape in shapes))
    problem = described(tensors, **features)
    device_info = describe_device(tensors.q.device)
    config = TRITON.configure(problem, device_info)
    splits = features.get("num_splits", 1)
    grid = (SLICED.num_m_blocks(70) * 2 * 2 * splits, 1, 1)
    config = config._replace(
        tiles=config.tiles._replace(forward=SLICED), num_splits=splits, grid=grid, packed=None
    )
    found = TritonLaunch(problem, config).forward(tensors)
    wanted = REFERENCE.prepare(problem, device_info).forward(tensors)
    for x, y in zip(found, wanted, strict=True):
        torch.testing.assert_close(x, y, atol=2e-3, rtol=2e-3)


@pytest.mark.parametrize("block, block_n", [(None, 48), (128, 32)])
def test_an_n_block_lies_within_a_descale_block(block, block_n):
    x = torch.empty(1, 512, 2, 64, device="meta", dtype=torch.float8_e4m3fn)
    descale = torch.empty(1, 2, 4 if block else 1, device="meta")
    side = Scaled(x, descale, block)
    problem = described(Tensors(side, side, side))
    assert _forward_tile(SLICED, problem, A100) == SLICED._replace(block_n=block_n)


@pytest.mark.parametrize("chip", [A100, H100, LOWERED_H100, B200, RTX5090])
@pytest.mark.parametrize("head_dim", [32, 64, 128, 256])
def test_cached_kernels_multiply_whole_blocks_of_a_power_of_two(head_dim, chip):
    """Triton has no ranges of another length, and these kernels have no slices."""
    q = torch.empty(1, 300, 8, head_dim, device="meta", dtype=torch.bfloat16)
    k = q[:, :, :2]
    cached = as_cached(described(Tensors(q, k, k), causal=True))
    assert cached.rows > LARGEST_FEW_ROWS
    tile = select_tile(cached, chip)
    assert tile.block_n == padded(tile.block_n)


@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("chip", [A100, H100, LOWERED_H100, B200, RTX5090])
@pytest.mark.parametrize("head_dim", [32, 64, 128, 256])
def test_dq_is_added_where_that_was_measured(head_dim, chip, deterministic):
    found = launches(head_dim, head_dim, chip=chip, deterministic=deterministic).keys()
    adds = head_dim != 32 and chip.lowering != 90 and not deterministic
    of_dq = ["bwd", "bwd_postprocess"] if adds else ["bwd_dkdv", "bwd_dq"]
    assert [*found] == ["forward", "combine", "bwd_preprocess", *of_dq]


@pytest.mark.parametrize("rows", [15, 16])
@pytest.mark.parametrize("batch", [1, 300])
def test_dq_is_not_added_where_its_sum_would_be_mostly_padding(batch, rows):
    """A dense batch, and as many sequences in a varlen batch."""
    dense = torch.empty(batch, rows, 3, 64, device="meta", dtype=torch.bfloat16)
    packed, edges = dense.flatten(0, 1), torch.empty(batch + 1, device="meta", dtype=torch.int32)
    lengths = {"max_seqlen_q": 4096, "max_seqlen_k": 4096, "function": "flash_attn_varlen_func"}
    for tensors, options in (
        (Tensors(dense, dense, dense), {}),
        (Tensors(packed, packed, packed, edges, edges), lengths),
    ):
        problem = described(tensors, **options)
        assert (TRITON.configure(problem, A100).tiles.bwd is None) == (rows < 16)


def test_tcgen05_has_no_slices_no_parts_and_does_not_add_dq():
    chip = B200._replace(lowering=100)
    x = torch.empty(1, 64, 2, 64, device="meta", dtype=torch.bfloat16)
    found = _forward_tile(SLICED, described(Tensors(x, x, x)), chip)
    assert found == SLICED._replace(block_n=32, slice_n=0)
    found = launches(96, 256, 80, chip)
    assert "bwd" not in found
    for name in ("forward", "bwd_dkdv", "bwd_dq"):
        assert columns_of(found[name], True) == (128, 128, 128, 128)


@triton.jit
def _write_elements(
    out, BLOCK_M: tl.constexpr, BLOCK_D: tl.constexpr, PART_D: tl.constexpr, NUM_WARPS: tl.constexpr
):
    columns = column_parts(BLOCK_D, PART_D)
    pointers = dq_accum.dq_accum_pointers(out, BLOCK_M, columns, NUM_WARPS)
    for i in tl.static_range(len(columns)):
        elements = tl.arange(0, BLOCK_M)[:, None] * BLOCK_D + columns[i][None, :]
        tl.store(pointers[i], elements)


@pytest.mark.parametrize("num_warps", [4, 8])
@pytest.mark.parametrize(
    "block_d, part_d", [(16, 16), (64, 64), (128, 128), (80, 64), (96, 64), (192, 64), (160, 128)]
)
@pytest.mark.parametrize("block_m", [16, 32, 64])
def test_dq_accum_is_a_permutation(block_m, block_d, part_d, num_warps, device):
    """And the lanes of a warp, the next columns of even index of eight rows, are consecutive."""
    elements = torch.empty(block_m * block_d, dtype=torch.int32, device=device)
    _write_elements[(1,)](elements, block_m, block_d, part_d, num_warps)
    place = elements.argsort().view(block_m, block_d)
    assert elements.sort().values.tolist() == list(range(block_m * block_d))
    for part in range(0, block_d, part_d):
        lanes = place[:8, part : part + 8 : 2].flatten()
        assert (lanes - lanes[0]).tolist() == list(range(32))


@pytest.mark.parametrize(
    "dims, blocks",
    [
        ((40, 24), (64, 64)),
        ((24, 40), (64, 64)),
        ((32, 16), (32, 32)),
        ((256, 32), (256, 64)),
        ((128, 64), (128, 64)),
        ((16, 8), (16, 16)),
    ],
)
def test_blocks_alike_have_one_swizzle(dims, blocks):
    assert blocks_alike(*dims) == blocks


def test_single_element_loads_have_blocks_alike_with_wgmma():
    """Odd strides are known beforehand, the address of a tensor is not."""

    def blocks(launch, aligned):
        constants = launch.constants_of(aligned)
        return constants["BLOCK_D"], constants["BLOCK_DV"]

    for chip, alike in ((H100, (64, 64)), (A100, (64, 32))):
        even, odd = (launches(64, width, 32, chip)["forward"] for width in (64, 73))
        assert (blocks(even, True), blocks(even, False)) == ((64, 32), alike)
        assert (blocks(odd, True), blocks(odd, False)) == (alike, alike)


# Dims → the columns and their parts of Q and V, and those where WGMMA loads single elements.
FORWARD_PARTS = {
    (96, 96): ((96, 64, 96, 64), (128, 128, 128, 128)),
    (80, 72): ((80, 64, 80, 64), (128, 128, 128, 128)),
    (40, 104): ((48, 32, 128, 128), (64, 64, 128, 128)),
    (192, 128): ((192, 128, 128, 128), (192, 128, 128, 128)),
    (160, 8): ((160, 128, 16, 16), (192, 128, 64, 64)),
    (136, 255): ((144, 128, 256, 256), (192, 128, 256, 256)),
}
BACKWARD_PARTS = {
    (96, 96): (96, 64, 96, 64),
    (80, 40): (80, 64, 64, 64),
    (128, 104): (128, 128, 128, 128),
    (192, 160): (192, 64, 160, 64),
    (64, 256): (128, 128, 256, 256),
    (136, 160): (160, 64, 160, 64),
    (200, 100): (256, 256, 128, 128),
}


def columns_of(launch, aligned) -> tuple[int, ...]:
    constants = launch.constants_of(aligned)
    return tuple(constants[x] for x in ("BLOCK_D", "PART_D", "BLOCK_DV", "PART_DV"))


@pytest.mark.parametrize("dims", FORWARD_PARTS)
def test_the_forward_multiplies_columns_in_parts(dims):
    """WGMMA needs pipelined loads, those of aligned tensors with even strides, or one swizzle."""
    parts, alike = FORWARD_PARTS[dims]
    with_wgmma = parts if dims[1] % 8 == 0 else alike
    for chip, width, of_aligned, of_unaligned in (
        (A100, 256, parts, parts),
        (A100, 259, parts, parts),
        (H100, 256, with_wgmma, alike),
        (H100, 259, alike, alike),
    ):
        launch = launches(dims[0], width, dims[1], chip)["forward"]
        found = columns_of(launch, True), columns_of(launch, False)
        assert found == (of_aligned, of_unaligned), (chip.name, width)


@pytest.mark.parametrize("dims", BACKWARD_PARTS)
def test_the_backward_multiplies_columns_in_parts(dims):
    """Kernels with WGMMA have parts as narrow as their rows."""
    found = launches(dims[0], 256, dims[1], A100)
    assert columns_of(found["bwd"], True) == BACKWARD_PARTS[dims]
    for name in ("bwd_preprocess", "bwd_postprocess"):  # agree on dq_accum
        constants = found[name].constants
        assert (constants["BLOCK_D"], constants["PART_D"]) == BACKWARD_PARTS[dims][:2]
    found = launches(dims[0], 256, dims[1], H100)
    wanted = (144, 64, 160, 64) if dims == (136, 160) else BACKWARD_PARTS[dims]
    for name in ("bwd_dkdv", "bwd_dq"):
        assert columns_of(found[name], True) == wanted


@pytest.mark.parametrize("head_dim", [8, 56, 64, 128, 256])
@pytest.mark.parametrize("head_dim_v", [8, 16, 40, 64, 256])
def test_eight_bit_v_has_at_least_the_swizzle_of_k_with_wgmma(head_dim, head_dim_v):
    """In bytes: V is multiplied in float16."""
    columns = fp8_columns(head_dim, head_dim_v, wgmma=True)
    of_k, of_v = (min(128, bytes_) for bytes_ in (columns["BLOCK_D"], 2 * columns["BLOCK_DV"]))
    assert of_v >= of_k
    assert columns["BLOCK_DV"] >= padded(head_dim_v)


def recorded_launches(module, monkeypatch):
    """A kernel for a launch of the module, and the list of its launches: its constants where Triton
    looks at the arguments, "started" where the compiled kernel is started without a look."""
    launched = []

    class Compiled:
        pass

    def kernel(*arguments, **constants):
        launched.append(constants)
        return Compiled()

    monkeypatch.setattr(module, "CompiledKernel", Compiled)
    monkeypatch.setattr(module, "starter", lambda _: lambda *arguments: launched.append("started"))
    return kernel, launched


ALIGNED, UNALIGNED = (SimpleNamespace(data_ptr=lambda at=at: at) for at in (160, 168))


def test_a_variable_launch_compiles_for_the_unit_of_each_calls_strides(monkeypatch):
    kernel, launched = recorded_launches(variable_launch, monkeypatch)
    constants = {"STRIDE_UNIT": 1, "BLOCK": 32}
    grid, wide = (1, 1, 1), {"BLOCK": 64}
    run = variable_launch.VariableLaunch({grid: kernel}, 1, constants, {}, wide, 1)
    for stride in (64, 40, 36, 33, 40, 36, 128):
        run(grid, (ALIGNED,), (stride, 7), ())
    run(grid, (UNALIGNED,), (40, 7), ())
    inspected = [(x["STRIDE_UNIT"], x["BLOCK"]) for x in launched if x != "started"]
    assert inspected == [(1, 32), (8, 32), (4, 32), (1, 64), (8, 64)]
    assert launched[4:7] == ["started"] * 3
    assert run.constants == constants


def test_a_tensor_that_is_not_aligned_takes_tritons_own_specialization(monkeypatch):
    kernel, launched = recorded_launches(launch, monkeypatch)
    run = launch.Launch({(1, 1, 1): kernel}, ("bf16",), (1, 1, 1), (), {}, {})
    for tensor in (UNALIGNED, ALIGNED, ALIGNED, UNALIGNED, ALIGNED):
        run(tensor)
    assert [x == "started" for x in launched] == [False, False, True, False, True]
