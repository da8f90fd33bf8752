"""Every Triton kernel of every tile row, compiled for every chip that takes the row, with no GPU.

Other processes compile: two of them, which compile ahead; one if pytest-xdist already spreads the
tests.

Traps, shared memory and instructions must be right with any Triton. The number of bytes that a
kernel spills depends on the compiler: its bounds hold for the versions that they were measured
with.
"""

from __future__ import annotations

import os
import re
from functools import cache
from importlib import metadata, util

import ptx
import pytest
from helpers import A100, B200, H100, L4, LOWERED_H100, ORIN, RTX3090, RTX5090, described
from support.compiled import Report, assert_fits, compile_launches

from flashattn3.backends.device import DeviceInfo
from flashattn3.backends.triton.backend import FIRST_WITH_FP8
from flashattn3.backends.triton.tile_configs import TILE_CONFIGS

if util.find_spec("triton") is None:
    pytest.skip("Triton is not installed", allow_module_level=True)
pytestmark = pytest.mark.slow
TRITON = metadata.version("triton")
MEASURED_TRITONS = ("3.6", "3.9")  # .ci/run pins one of them

# The heaviest features, and the plainest: nothing is masked, so every other loop is compiled away.
FEATURES = {
    "varlen-causal-window": {"varlen": True, "causal": True, "window_left": 500},
    "softcap-split": {"softcap": 20.0, "num_splits": 2, "causal": True},
    "full": {},
    "mask": {"mask": True},
    "mask-slopes": {"mask": True, "slopes": True},
}
# Bytes of local memory that a thread may spill to, by the instructions that multiply matrices, by
# kernel and by head dim of the row: the largest of what MEASURED_TRITONS need, plus a quarter, at
# least 64.
SPILL_BOUND_BYTES = {
    "mma.sync": {
        "forward": {32: 224, 64: 120, 96: 290, 128: 140, 160: 120, 192: 64, 256: 112},
        "bwd": {64: 400, 96: 824, 128: 872, 160: 200, 192: 224, 256: 416},
        "bwd_dkdv": {32: 288, 64: 784, 96: 784, 128: 904, 160: 64, 192: 160, 256: 190},
        "bwd_dq": {32: 160, 64: 504, 96: 264, 128: 344, 160: 376, 192: 64, 256: 136},
    },
    "wgmma": {
        "forward": {32: 64, 64: 64, 128: 64, 192: 64, 256: 70},
        "bwd_dkdv": {32: 64, 64: 64, 80: 310, 96: 600, 128: 600, 192: 940, 256: 550},
        "bwd_dq": {32: 64, 64: 64, 128: 64, 192: 64, 256: 710},
    },
}
EIGHT_BIT = ("float8_e4m3fn", "int8")
# The same of the forward on 8 bits, by whether the chip multiplies it; it has the tiles of 16 bits.
FP8_SPILL_BOUND_BYTES = {
    False: {32: 128, 64: 64, 128: 340, 256: 620},
    True: {32: 210, 64: 64, 128: 150, 256: 640},
}
# With slopes or a bias, of any kernel; measured with Triton 3.9 alone.
SPILL_BOUND_OF_SCORES = {"mma.sync": 1000, "wgmma": 610}
ROW_KERNELS_BOUND_BYTES = {32: 64, 64: 64, 128: 64, 256: 320}  # of merge and statistics
PRODUCTS = ("forward", "bwd", "bwd_dkdv", "bwd_dq")  # kernels that multiply matrices
HEADS = 5  # odd: strides have no more factors of 2 than the head dim


def launches_of(
    device: DeviceInfo,
    head_dim: int,
    features: dict,
    dtype_name: str,
    head_dim_v: int | None = None,
    padding: int = 0,
) -> dict:
    """Every kernel that the problem may launch on the device, by name; those of deterministic
    gradients too.

    padding: elements between two rows.
    """
    import torch

    from flashattn3 import masks
    from flashattn3.backends.triton.backend import BACKEND
    from flashattn3.call.dtypes import EIGHT_BIT, v_dtype
    from flashattn3.call.operands import Scaled, Tensors
    from flashattn3_bench.ahead_of_time import all_launches

    features = dict(features)
    dtype = getattr(torch, dtype_name)
    wide = torch.empty(4001, HEADS, head_dim + padding, device="meta", dtype=dtype)
    rows, dim_v = wide[..., :head_dim], head_dim_v or head_dim
    odd_q = features.pop("odd_q", False)
    values = torch.empty(4001, HEADS, dim_v + padding, device="meta", dtype=v_dtype(dtype))
    values = values[..., :dim_v]
    tensors = Tensors(rows[None], rows[None], values[None])
    if features.pop("varlen", False):
        edges = torch.empty(4, device="meta", dtype=torch.int32)
        tensors = Tensors(rows, rows, values, edges, edges, edges[1:], edges[1:])
    if features.pop("mask", False):
        mask = masks.from_bool(torch.empty(1, HEADS, 4001, 4001, device="meta").bool())
        slopes = torch.empty(HEADS, device="meta") if features.pop("slopes", False) else None
        tensors = Tensors(*tensors[:3], *(None,) * 5, slopes, None, *mask.tensors)
    if dtype in EIGHT_BIT and features:  # the plainest has no descales either
        batch = 1 if tensors.cu_seqlens_q is None else 3
        descale = torch.empty(batch, HEADS, 32, device="meta")
        tensors = Tensors(*(Scaled(x, descale, 128) for x in tensors[:3]), *tensors[3:])
    for name in features.pop("terms", ()):
        shape, of = TERMS[name]
        of = dtype if of else torch.float32
        name = name.removeprefix("own_")
        term = torch.empty(shape, device="meta", dtype=of)[..., :4001]
        tensors = tensors._replace(**{name: term})
    if odd_q:
        q = torch.empty(1, 4001, HEADS, head_dim + 1, device="meta", dtype=dtype)
        tensors = tensors._replace(q=q[..., :head_dim])
    launches = {}
    for deterministic in (True, False):
        problem = described(tensors, **features, deterministic=deterministic)
        launches |= all_launches(problem, BACKEND.configure(problem, device))
    return launches


# Shape of what changes scores, of which keys past the last are cut, and whether it has q's dtype.
# Rows of own_bias begin at multiples of 16 bytes, so that its loads are pipelined.
TERMS = {
    "sinks": ((HEADS,), False),
    "alibi_slopes": ((HEADS,), False),
    "bias": ((1, 1, 4001, 4001), True),
    "own_bias": ((1, HEADS, 4001, 4008), True),
}


def compile_all(
    device: DeviceInfo,
    head_dim: int,
    features: dict,
    dtype_name: str,
    aligned: bool = True,
    head_dim_v: int | None = None,
    padding: int = 0,
    only: str | None = None,
) -> list[Report]:
    """Runs in a process of its own. only: the name of the one kernel to compile."""
    launches = launches_of(device, head_dim, features, dtype_name, head_dim_v, padding)
    wanted = {name: launch for name, launch in launches.items() if only in (None, name)}
    return compile_launches(wanted, device, aligned)


@pytest.fixture(scope="session")
def compiler(request, compilers):
    """compile_all in another process: a function of its arguments that returns its result, which it
    keeps."""
    ahead = {}
    for item in request.session.items:
        if "PYTEST_XDIST_WORKER" not in os.environ and "compiled" in item.fixturenames:
            arguments = item.callspec.params["compiled"]
            ahead[arguments] = ahead.get(arguments) or submit(compilers, arguments)
    return cache(lambda of: (ahead.pop(of, None) or submit(compilers, of)).result())


def submit(pool, arguments):
    device, head_dim, features, *rest = arguments
    return pool.submit(compile_all, device, head_dim, FEATURES[features], *rest)


CHIPS = (A100, RTX3090, ORIN, L4, H100, LOWERED_H100, B200, RTX5090)
# Chip → the head dims of its rows.
HEAD_DIMS = {
    chip: sorted({x.head_dim for x in TILE_CONFIGS if x.wgmma == (chip.lowering == 90)})
    for chip in CHIPS
}
# Rows of 8 bits, which the kernels multiply with all columns at a time.
WHOLE_HEAD_DIMS = (32, 64, 128, 256)
# Both sets of tiles of every row on every chip that takes it; each other feature on a chip of each
# kind, and where columns are in parts.
ALL = [(chip, d, "varlen-causal-window", "bfloat16") for chip in CHIPS for d in HEAD_DIMS[chip]]
ALL += [(chip, d, "full", "float16") for chip in CHIPS for d in HEAD_DIMS[chip]]
for of in EIGHT_BIT:
    of_full = 64 if of == "int8" else 128
    ALL += [(chip, 128, "softcap-split", of) for chip in (A100, L4, H100)]
    ALL += [(chip, of_full, "full", of) for chip in (A100, L4, H100)]
    ALL += [(chip, d, "varlen-causal-window", of) for chip in CHIPS for d in WHOLE_HEAD_DIMS]
ALL += [(A100, 128, "softcap-split", "bfloat16")]
ALL += [(H100, d, "softcap-split", "bfloat16") for d in (96, 128, 192)]
ALL += [(chip, d, "mask", "bfloat16") for chip, d in ((A100, 64), (A100, 256), (H100, 128))]
ALL += [(H100, 64, "mask-slopes", "bfloat16")]


def name_of(arguments) -> str:
    chip, head_dim, features, dtype_name = arguments
    lowered = f"-as-{chip.lowering}" * (chip.lowering != chip.capability)
    return f"sm{chip.capability}{lowered}-d{head_dim}-{features}-{dtype_name}"


# Chips that launch what another launches. Of these .ci/run compiles the heaviest features in 16
# bits at some head dims, for registers and instructions of their own.
ALIKE = {ORIN: A100, RTX3090: L4, L4: A100, LOWERED_H100: A100, B200: A100, RTX5090: L4}
THREE_DIMS = (96, 128, 256)  # one in parts
OWN_REGISTERS = {ORIN: THREE_DIMS, B200: (96,), RTX5090: (256,)}
OWN_REGISTERS |= {RTX3090: (128,), LOWERED_H100: (256,)}
# The chip of 8 bits that multiplies int8 alone, and chips with tiles of their own.
OWN_TILES = {(L4, False): (128, 160, 256), (L4, True): WHOLE_HEAD_DIMS, (RTX3090, True): (128,)}


def twin_of(arguments) -> tuple | None:
    """The same of the chip that launches what this one does, if one is compiled for."""
    chip, head_dim, features, dtype_name = arguments
    eight_bit = dtype_name in EIGHT_BIT
    if chip not in ALIKE or head_dim in OWN_TILES.get((chip, eight_bit), ()):
        return None
    other = A100 if (chip, eight_bit) == (RTX3090, True) else ALIKE[chip]  # L4 multiplies e4m3
    found = other, head_dim, features, dtype_name
    return found if found in ALL else None


def is_swept(arguments) -> bool:
    chip, head_dim, features, dtype_name = arguments
    if (features, dtype_name) == ("full", "float16") and head_dim not in THREE_DIMS:
        return True  # but for the forward, which has tiles of its own: FORWARDS
    if dtype_name in EIGHT_BIT and features != "varlen-causal-window":
        # Each chip has each of these features, in one of both dtypes; the heaviest ones in both.
        return (chip is L4) != ((features == "softcap-split") == (dtype_name == "int8"))
    heaviest = (features, dtype_name) == ("varlen-causal-window", "bfloat16")
    if heaviest and head_dim in OWN_REGISTERS.get(chip, ()):
        return False
    return twin_of(arguments) is not None


def param_of(arguments):
    marks = pytest.mark.sweep if is_swept(arguments) else ()
    return pytest.param(arguments, id=name_of(arguments), marks=marks)


@pytest.mark.parametrize("chip", ALIKE)
def test_what_is_swept_is_launched_on_another_chip(chip):
    swept = [of for of in ALL if of[0] is chip and is_swept(of) and twin_of(of)]
    assert len(swept) >= len(HEAD_DIMS[chip])
    for arguments in swept:
        found, other = (
            launches_of(of, head_dim, FEATURES[features], dtype_name)
            for of, head_dim, features, dtype_name in (arguments, twin_of(arguments))
        )
        assert found.keys() == other.keys()
        for name, launch in found.items():
            assert_alike(launch, other[name])


def assert_alike(launch, other) -> None:
    """The two launches compile the same kernel, but for their chips."""
    options, others = ({**of.options, "arch": None} for of in (launch, other))
    assert (launch.constants, options) == (other.constants, others)


@pytest.mark.parametrize(("chip", "head_dim"), [(A100, 16), (L4, 64)])
def test_few_columns_of_k_beside_many_of_v_spill_little(chip, head_dim, compilers):
    """ptxas spilled 7 KB per thread where the kernel of dK and dV had as few of K as q. Each of
    both dims has the same blocks on both chips, whose tiles differ."""
    arguments = chip, head_dim, {"causal": True}, "bfloat16", True, 256, 0, "bwd_dkdv"
    (report,) = compilers.submit(compile_all, *arguments).result()
    assert report.stack_bytes <= SPILL_BOUND_BYTES["mma.sync"]["bwd_dkdv"][256]


# Columns of Q and of V, features, chips. The row of V up to 128 columns beside more of Q has a tile
# of its own, the same on every chip.
FORWARDS = [((256, 128), features, A100) for features in FEATURES if features != "mask"]
FORWARDS += [((192, 128), "varlen-causal-window", A100)]
# out in float32 goes through shared memory, of which this chip has the least.
IN_PARTS = [d for d in HEAD_DIMS[RTX5090] if d not in WHOLE_HEAD_DIMS]
FORWARDS += [((d, d), "softcap-split", RTX5090) for d in IN_PARTS]
FORWARDS += [
    ((d, d), "full", chip)
    for chip, dims in ((A100, HEAD_DIMS[A100]), (L4, (160,)), (H100, HEAD_DIMS[H100]))
    for d in dims
    if d not in THREE_DIMS
]
# Blocks of a bias beside those of K and V: the most shared memory of a row.
FORWARDS += [((160, 160), "stored-bias-odd-q", H100), ((32, 32), "stored-bias-causal", L4)]


@pytest.mark.parametrize("dims, features, chip", FORWARDS, ids=lambda x: getattr(x, "name", str(x)))
def test_forwards_fit_their_chip(chip, dims, features, compilers):
    options = (FEATURES | OF_SCORES)[features]
    of = dims[0], options, "float16" if features == "full" else "bfloat16"
    alone = True, dims[1], 0, "forward"
    (report,) = compilers.submit(compile_all, chip, *of, *alone).result()
    assert_fits(chip, report)
    assert_instructions(chip, report)
    assert report.stack_bytes <= spill_bound_bytes(chip, dims[1], False, "forward")
    if dims[0] != dims[1]:
        assert report.shared_memory_bytes <= RTX5090.shared_memory_bytes
        launch, *others = (launches_of(x, *of, dims[1])["forward"] for x in (A100, L4, RTX5090))
        for other in others:
            assert_alike(launch, other)


@pytest.fixture(scope="module", params=map(param_of, ALL))
def compiled(request, compiler) -> tuple[DeviceInfo, int, str, str, list[Report]]:
    """chip, head dim of the row, features, dtype and the reports. pytest runs the tests of one in a
    row."""
    return *request.param, compiler(request.param)


def test_kernels_fit_their_chip(compiled):
    chip, head_dim, features, dtype_name, reports = compiled
    fp8 = dtype_name in EIGHT_BIT
    wanted = {"forward", "combine"}
    if not fp8:
        wanted |= {"bwd_preprocess", "bwd_dkdv", "bwd_dq"}
        if adds_dq(chip, head_dim) and (features, head_dim) != ("mask", 256):
            wanted |= {"bwd", "bwd_postprocess"}
    assert {report.kernel for report in reports} == wanted
    for report in reports:
        assert_fits(chip, report)
        if report.kernel in PRODUCTS:
            assert_instructions(chip, report)
            assert ("e4m3" in report.ptx) == (fp8 and chip.lowering >= FIRST_WITH_FP8)
            assert (".s32.s8.s8" in report.ptx) == (dtype_name == "int8")
        assert ptx.target_of(report.ptx).removesuffix("a") == f"sm_{chip.capability}"


@pytest.mark.skipif(
    not TRITON.startswith(tuple(f"{version}." for version in MEASURED_TRITONS)),
    reason=f"spill bounds were measured with Triton {MEASURED_TRITONS}, this is {TRITON}",
)
def test_kernels_spill_no_more_than_measured(compiled):
    chip, head_dim, _, dtype_name, reports = compiled
    for report in reports:
        spilled = report.stack_bytes
        bound = spill_bound_bytes(chip, head_dim, dtype_name in EIGHT_BIT, report.kernel)
        assert spilled <= bound, f"{report.kernel}: spills {spilled} bytes, bound {bound}"


OF_SCORES = {
    "slopes-sinks-causal": {
        "terms": ("alibi_slopes", "sinks"),
        "causal": True,
        "return_max_logit": True,
    },
    "slopes-full": {"terms": ("alibi_slopes",)},
    "bias": {"terms": ("bias",)},
    "stored-bias": {"terms": ("own_bias",)},
    "stored-bias-causal": {"terms": ("own_bias",), "causal": True},
    "stored-bias-odd-q": {"terms": ("own_bias",), "odd_q": True},
}
SCORES = [(A100, 128, "slopes-sinks-causal"), (A100, 128, "bias"), (H100, 128, "bias")]
SCORES += [(H100, 64, "slopes-full"), (H100, 64, "stored-bias")]


@pytest.mark.parametrize("chip, head_dim, name", SCORES)
def test_kernels_that_change_scores_fit_their_chip(compilers, chip, head_dim, name):
    reports = compilers.submit(compile_all, chip, head_dim, OF_SCORES[name], "bfloat16").result()
    assert ("bwd_dbias" in {report.kernel for report in reports}) == (name == "bias")
    for report in reports:
        assert_fits(chip, report)
        if TRITON.startswith("3.9."):
            assert report.stack_bytes <= SPILL_BOUND_OF_SCORES[products_of(chip)], report.kernel


def test_dq_is_added_once(compiled):
    chip, head_dim, features, dtype_name, reports = compiled
    added = [report for report in reports if report.kernel == "bwd"]
    if not added or features not in ("varlen-causal-window", "full"):
        pytest.skip("its loops over dQ are not counted")
    for report in added:
        assert_dq_is_added_once(report, chip, head_dim, features, dtype_name)


# Without a mask, in bfloat16: Orin's Triton compiles these in .ci/run too.
ADDED = [(A100, d, "full") for d in THREE_DIMS[::2]]
# Fewer head dims than the row, and one in parts of a tile that another chip has.
SWEPT = [(A100, d, "varlen-causal-window") for d in (40, 80, 136)]
SWEPT += [(A100, 128, "full"), (RTX5090, 192, "varlen-causal-window")]
ADDED += [pytest.param(*of, marks=pytest.mark.sweep) for of in SWEPT]


@pytest.mark.parametrize("chip, head_dim, features", ADDED)
def test_dq_of_further_kernels_is_added_once(compiler, chip, head_dim, features):
    (report,) = compiler((chip, head_dim, features, "bfloat16", True, None, 0, "bwd"))
    assert_dq_is_added_once(report, chip, head_dim, features, "bfloat16")


def assert_dq_is_added_once(report, chip, head_dim, features, dtype_name) -> None:
    """From the registers of its GEMM: in each loop one RED per element, and no warp holds a copy of
    another's tile, which it would add too. ``dq_accum.py`` makes consecutive what a warp adds: all
    warps are along one side."""
    launch = launches_of(chip, head_dim, FEATURES[features], dtype_name)["bwd"]
    num_warps = launch.options["num_warps"]
    rows, columns, part = (launch.constants[x] for x in ("BLOCK_M", "BLOCK_D", "PART_D"))
    loops = 2 if features == "full" else 3
    of_a_thread = rows * columns // (32 * num_warps)
    assert report.ptx.count("red.relaxed.gpu.global.add.f32") == loops * of_a_thread
    widths = [min(part, columns - first) for first in range(0, columns, part)]
    tile = rf"tensor<({rows}x\d+)xf32, (#\w+)>"
    added = re.findall(rf'inline_asm "{{ red.*? %[\w#]+, (%[\w#]+) : .*?, {tile} ->', report.ttgir)
    assert sorted(shape for _, shape, _ in added) == sorted(
        f"{rows}x{width}" for width in widths * loops
    )
    for value, shape, layout in added:
        product = rf"{value} = tt\.dot .* -> tensor<{shape}xf32, {layout}>"
        assert re.search(product, report.ttgir), "converted"
        warps = rf"^{layout} = .*warpsPerCTA = \[(1, {num_warps}|{num_warps}, 1)\]"
        assert re.search(warps, report.ttgir, re.M)


# Beside what ALL compiles of the next multiple of 16.
WIDE = [(A100, 120, "full", "float16"), (A100, 88, "varlen-causal-window", "bfloat16")]
WIDE += [(H100, 88, "softcap-split", "bfloat16")]
assert {*ALL} >= {(chip, dim + 8, *of) for chip, dim, *of in WIDE}
SWEPT = [(chip, 72, "full") for chip in (RTX3090, ORIN, L4, H100)] + [(H100, 40, "full")]
SWEPT += [(A100, d, "full") for d in (40, 56, 72, 88, 104, 120)]
SWEPT += [(A100, 72, "varlen-causal-window"), (H100, 72, "softcap-split")]
WIDE += [pytest.param(*of, "bfloat16", marks=pytest.mark.sweep) for of in SWEPT]


@pytest.mark.parametrize(
    "chip, dim, features, of", WIDE, ids=lambda x: getattr(x, "name", str(x)).replace(" ", "")
)
def test_odd_multiples_of_8_load_and_store_as_wide_as_the_next_of_16(
    compiler, chip, dim, features, of
):
    found, wanted = (compiler((chip, d, features, of)) for d in (dim, dim + 8))
    for odd, even in zip(found, wanted, strict=True):
        widths = ptx.memory_widths(odd.ptx)
        assert widths == ptx.memory_widths(even.ptx), odd.kernel
        if odd.kernel != "bwd_postprocess":  # it gathers single floats
            assert widths["ld", 16] + widths["cp.async", 16] > 0, odd.kernel
        assert ("ld", 2) not in widths and ("st", 2) not in widths, odd.kernel
        assert odd.ptx.count(";") <= 1.05 * even.ptx.count(";"), odd.kernel


@pytest.mark.parametrize(
    ("chip", "of"),
    [(A100, "int8"), (L4, "float8_e4m3fn"), *((H100, of) for of in EIGHT_BIT)],
)
def test_odd_multiples_of_8_load_8_bytes_of_8_bit_inputs(compiler, chip, of):
    """Their rows are multiples of 8 bytes apart. 4 bytes: lse, descales."""
    for report in compiler((chip, 72, "varlen-causal-window", of)):
        widths = ptx.memory_widths(report.ptx)
        assert min(size for _, size in widths) >= 4, report.kernel
        if report.kernel == "forward":
            assert widths["cp.async", 8] > 0


@pytest.mark.parametrize(("head_dim", "only"), [(64, None), (72, "forward")])
def test_no_load_of_an_unaligned_tensor_is_wider_than_an_element(compiler, head_dim, only):
    for report in compiler((A100, head_dim, "full", "bfloat16", False, None, 0, only)):
        widths = ptx.memory_widths(report.ptx)
        assert {size for _, size in widths} <= {2, 4}, report.kernel
        if report.kernel in PRODUCTS:
            assert widths["ld", 2] > 0, report.kernel


# K's block is wider than V's, which has a narrower swizzle, or the other way round.
UNLIKE_BLOCKS = ((64, 32), (32, 16), (128, 16), (72, 8), (32, 64), (160, 24))


# Unaligned, or with odd strides: kernels with the same constants.
@pytest.mark.parametrize(
    ("dims", "padding"), [(dims, i % 2) for i, dims in enumerate(UNLIKE_BLOCKS)], ids=str
)
def test_single_elements_of_k_and_v_have_one_swizzle(compiler, dims, padding):
    """Such loads are not pipelined: K and V take turns in one buffer, which ptxas 12.8 gets wrong
    if their swizzles differ."""
    head_dim, dim_v = dims
    even, odd = (launches_of(H100, head_dim, {}, "bfloat16", dim_v, x)["forward"] for x in (0, 1))
    elementwise = odd.constants_of(True)
    assert even.constants_of(False) | {"STRIDE_UNIT": 1} == elementwise | {"STRIDE_UNIT": 1}
    of = (H100, head_dim, "full", "bfloat16", padding > 0, dim_v, padding, "forward")
    (report,) = compiler(of)
    assert "wgmma" in report.ptx
    assert ptx.memory_widths(report.ptx)["cp.async", 16] == 0
    assert not ptx.buffers_of_two_swizzles(report.ptx)
    assert not report.stale


FEWER_COLUMNS = (56, 8), (64, 16), (128, 40), (256, 32)


# Each two of dims, dtype and alignment at each of their values.
@pytest.mark.parametrize(
    ("dims", "of", "aligned"),
    [(FEWER_COLUMNS[i], EIGHT_BIT[j], (i + j) % 2 == 0) for i in range(4) for j in range(2)],
    ids=str,
)
def test_eight_bit_k_and_fewer_columns_of_v_have_one_swizzle(compiler, dims, of, aligned):
    """V is converted, so that it is not pipelined either."""
    head_dim, dim_v = dims
    features = "varlen-causal-window" if aligned else "full"
    (report,) = compiler((H100, head_dim, features, of, aligned, dim_v, 0, "forward"))
    assert "wgmma" in report.ptx
    assert not ptx.buffers_of_two_swizzles(report.ptx)
    assert not report.stale


def spill_bound_bytes(chip: DeviceInfo, head_dim: int, fp8: bool, kernel: str) -> int:
    if fp8 and kernel == "forward":
        return FP8_SPILL_BOUND_BYTES[chip.lowering >= FIRST_WITH_FP8][head_dim]
    whole = min(row for row in WHOLE_HEAD_DIMS if row >= head_dim)
    if kernel in PRODUCTS:
        bounds = SPILL_BOUND_BYTES[products_of(chip)][kernel]
        return bounds.get(head_dim, bounds.get(whole))
    return ROW_KERNELS_BOUND_BYTES[whole]


def adds_dq(chip: DeviceInfo, head_dim: int) -> bool:
    return products_of(chip) == "mma.sync" and head_dim > 32


def products_of(chip: DeviceInfo) -> str:
    return "wgmma" if chip.lowering == 90 else "mma.sync"


def assert_instructions(chip: DeviceInfo, report: Report) -> None:
    """The code uses the tensor cores of the generation that it is lowered to, and loads ahead."""
    if chip.lowering < 90:
        ptx.assert_ampere(report.ptx, report.kernel, pipelined=report.options["num_stages"] > 1)
        return
    # A warpgroup's product has 64 rows: of keys in the kernels of dK and dV.
    owned = "BLOCK_N" if report.kernel in ("bwd", "bwd_dkdv") else "BLOCK_M"
    products = products_of(chip) if report.constants[owned] >= 64 else "mma.sync"
    assert products in report.ptx, f"{report.kernel}: no {products}"
