"""The Hopper backend: plans, reasons and what it calls, without a GPU and without its library; and
on a Hopper GPU what is its own: copies for TMA, and tile counters that launches must not share."""

from __future__ import annotations

import ctypes
import math
import warnings
from types import SimpleNamespace

import pytest
import torch
from helpers import (
    A100,
    ALL_CONFIGS,
    B200,
    CPU,
    GPUS,
    H100,
    LOWERED_H100,
    ROOT,
    SIXTEEN_BIT,
    WITHOUT_HOPPER,
    described,
    library_double,
    meta_qkv,
    on_hopper_gpu,
)

from flashattn3 import UnsupportedError, flash_attn_func, masks
from flashattn3.backends.hopper import library as hopper_library
from flashattn3.backends.hopper.backend import HopperBackend
from flashattn3.backends.hopper.kernel_configs import (
    BACKWARD_CONFIGS,
    BIAS,
    FORWARD_CONFIGS,
    LARGEST,
    NO_TERM,
    SLOPES,
    all_configs,
    select_backward_config,
    select_forward_config,
)
from flashattn3.backends.hopper.launch_record import LaunchRecord
from flashattn3.backends.hopper.library import Library
from flashattn3.backends.triton.backend import TritonBackend
from flashattn3.call.dtypes import EIGHT_BIT, FP8, INT8
from flashattn3.call.operands import Tensors
from flashattn3.call.permuted_v import permute_v
from flashattn3.run.planner import choose

DTYPES = {"fp16": torch.float16, "bf16": torch.bfloat16, "e4m3": FP8, "int8": INT8}


class Recorder:
    """Stands in for the compiled operator: keeps its arguments and fills the results."""

    def __call__(self, launch, q, k, v, *rest):
        self.launch, self.qkv = launch, (q, k, v)
        self.indices, self.descales = rest[:4], rest[4:]
        out = q.new_ones(*q.shape[:-1], (v.shape[-1] + 7) // 8 * 8)
        return out, torch.full((*out.shape[:-3], out.shape[-2], out.shape[-3]), 2.0)


class GradientRecorder:
    """The same of the compiled backward."""

    def __call__(self, launch, dout, dlse, out, lse, q, k, v, *indices):
        self.launch, self.given, self.qkv = launch, (dout, dlse, out, lse), (q, k, v)
        self.indices = indices
        columns = ((x.shape[-1] + 7) // 8 * 8 for x in (q, k, v))
        return tuple(x.new_ones(*x.shape[:-1], c) for x, c in zip((q, k, v), columns, strict=True))


def hopper(
    configs=ALL_CONFIGS, error=None, forward=None, backward=None, only_measured=False
) -> HopperBackend:
    library = library_double(configs, error, forward=forward, backward=backward)
    return HopperBackend(library=lambda: library, only_measured=only_measured)


def never() -> Library:
    raise AssertionError("the library is looked for only where a Hopper GPU is")


def qkv(d=64, dv=None, **of):
    return meta_qkv(d=d, dv=dv, **{"heads": (8, 4), **of})


def with_mask(tensors, batch=1, heads=1):
    sizes = tensors.q.shape[1], tensors.k.shape[1]
    seen = torch.empty(batch, heads, *sizes, device="meta", dtype=torch.bool)
    return Tensors(
        *tensors[: Tensors._fields.index("mask_entries_q")], *masks.from_bool(seen).tensors
    )


def plan(tensors, candidate=None, device=H100, **options):
    backends = (candidate or hopper(), *WITHOUT_HOPPER)
    return choose(described(tensors, **options), device, backends)


# Head dims of q and v → those of the rows of both passes.
GOLDEN = {(8, 8): (64, 64), (64, 64): (64, 64), (65, 65): (96, 96), (96, 96): (96, 96)}
GOLDEN |= dict.fromkeys([(128, 64), (64, 128), (128, 128)], (128, 128))
GOLDEN |= dict.fromkeys([(129, 128), (160, 64), (192, 128)], (192, 128))
GOLDEN |= dict.fromkeys([(160, 160), (192, 129), (192, 192), (64, 136)], (192, 192))
GOLDEN |= dict.fromkeys([(193, 64), (64, 193), (200, 200), (256, 256)], (256, 256))
# Options of a call, and whether its kernel has a mask.
GOLDEN_OPTIONS = [({}, False), ({"causal": True}, True), ({"window_left": 9}, True)]
GOLDEN_OPTIONS += [({"deterministic": True}, False), ({"sm_margin": 8}, False)]


@pytest.mark.parametrize("dims", GOLDEN, ids=str)
@pytest.mark.parametrize("dtype", SIXTEEN_BIT)
def test_an_h100_with_the_library_gets_the_rows(dims, dtype):
    for options, masked in GOLDEN_OPTIONS:
        found = plan(qkv(*dims, dtype=dtype), **options)
        assert found.backend.name == "hopper" and found.declined == ()
        forward, gradient = found.launch.config.kernel_config, found.launch.config.gradient_config
        assert forward.masked == masked and gradient.measured
        for row in (forward, gradient):
            assert DTYPES[row.dtype] == dtype
            assert (row.head_dim, row.head_dim_v) == GOLDEN[dims]
        assert found.launch.config.describe()["gradient"] == gradient.name


# rows and head dim of a call with split_tokens → its kernel
SPANS = {(1, 64): "decode_bf16_d64", (64, 104): "decode_bf16_d128", (1024, 64): "forward_bf16_d64"}
SPANS |= {(1024, 128): "forward_bf16_d128", (1024, 256): "forward_bf16_d256"}


@pytest.mark.parametrize("backend", [None, "hopper"])
@pytest.mark.parametrize(("rows", "dim"), SPANS)
def test_split_tokens_has_a_kernel_of_spans_whatever_the_addresses(rows, dim, backend):
    """A copy of what TMA cannot read changes no bit, another kernel would."""
    shape, options = (2, 1024, 4, dim), {"split_tokens": 1024, "backend": backend}
    tensors = qkv(dim, seqlen_q=rows)
    behind = torch.empty(1 + math.prod(shape), device="meta", dtype=torch.bfloat16)[1:].view(shape)
    for k, copied in ((tensors.k, "nothing"), (behind, "k")):
        found = plan(tensors._replace(k=k), hopper(only_measured=True), **options)
        described = found.launch.describe()
        assert described["kernel config"].startswith(SPANS[rows, dim])
        assert described["kernel config"].endswith("_spans") and described["copied first"] == copied


def test_split_tokens_is_never_left_out_for_another_option():
    slopes = qkv()._replace(alibi_slopes=torch.empty(8, device="meta"))
    with pytest.raises(UnsupportedError, match="hopper: split_tokens=1024: takes no alibi_slopes"):
        plan(slopes, split_tokens=1024)
    said = "hopper: split_tokens=1024: takes no return_max_logit"
    with pytest.raises(UnsupportedError, match=said):
        plan(qkv(), split_tokens=1024, return_max_logit=True)


# block_m → batch and seqlen_q of 16 heads whose work tiles have so many rows.
ROWS_OF = {64: (1, 64), 128: (1, 768), 192: (64, 768)}
KEYS_OF = {(64, 96): 257, (64, 112): 197}  # head dim and block_n → keys in such blocks


@pytest.mark.parametrize("config", FORWARD_CONFIGS)
def test_a_row_that_no_gpu_has_run_is_left_to_who_names_the_backend(config):
    dtype = DTYPES[config.dtype]
    longest = config.max_seqlen_k or KEYS_OF.get((config.head_dim, config.block_n), 4096)
    batch, seqlen_q = ROWS_OF[config.block_m]
    sizes = {"batch": batch, "seqlen_q": seqlen_q, "seqlen_k": longest, "heads": (16, 16)}
    tensors = qkv(config.head_dim, config.head_dim_v, dtype=dtype, **sizes)
    careful = hopper(only_measured=True)
    if config.term == SLOPES:
        tensors = tensors._replace(alibi_slopes=torch.empty(16, device="meta"))
    if config.term == BIAS:
        shape = 1, 16, seqlen_q, longest
        tensors = tensors._replace(bias=torch.empty(*shape, device="meta", dtype=dtype))
    if config.listed:
        tensors = with_mask(tensors)
    causal = config.masked and not config.listed
    options = {"causal": causal, "return_max_logit": config.term == LARGEST}
    found = plan(tensors, careful, **options)
    assert found.backend.name == ("hopper" if config.measured else "triton")
    named = plan(tensors, careful, backend="hopper", **options)
    assert named.launch.config.kernel_config == config


def test_what_changes_scores_chooses_the_kernel():
    """Sinks have no kernel config of their own; a bias has one up to head dim 128, alone but for
    sinks; 8 bits have sinks alone."""
    slopes, sinks = torch.empty(8, device="meta"), torch.empty(8, device="meta")
    bias = torch.empty(1, 8, 1024, 1024, device="meta", dtype=torch.bfloat16)

    def terms(tensors, **options):
        config = plan(tensors, **options).launch.config
        gradient = config.gradient_config
        return config.kernel_config.term, gradient and gradient.term

    given = qkv()
    assert terms(given._replace(sinks=sinks)) == (NO_TERM, NO_TERM)
    assert plan(given._replace(sinks=sinks)).launch.config.packed is None
    assert terms(given._replace(sinks=sinks, alibi_slopes=slopes)) == (SLOPES, SLOPES)
    assert terms(given, return_max_logit=True) == (LARGEST, NO_TERM)
    assert terms(given._replace(bias=bias, sinks=sinks)) == (BIAS, BIAS)
    with_bias, wide = given._replace(bias=bias), qkv(192, 128)._replace(bias=bias)
    masked = with_mask(given, 2, 8)
    rows, keys = {"q": given.q[:, :0]}, {"k": given.k[:, :0], "v": given.v[:, :0]}
    empty = [
        given._replace(**rows, bias=bias[..., :0, :]),
        given._replace(**keys, bias=bias[..., :0]),
    ]
    assert terms(masked._replace(sinks=sinks), softcap=5.0) == (NO_TERM, NO_TERM)
    for changed, options, reason in (
        (with_bias._replace(alibi_slopes=slopes), {}, "has no kernel for bias and alibi_slopes"),
        (with_bias, {"return_max_logit": True}, "has no kernel for bias and return_max_logit"),
        (with_bias, {"softcap": 5.0}, "has no kernel for bias and capped scores"),
        (wide, {}, "takes a bias up to head_dim 128"),
        *((of_nothing, {}, "takes no bias without rows or keys") for of_nothing in empty),
        (masked._replace(alibi_slopes=slopes), {}, "has no kernel for mask and alibi_slopes"),
        (masked, {"return_max_logit": True}, "has no kernel for mask and return_max_logit"),
        (
            given._replace(alibi_slopes=slopes),
            {"return_max_logit": True},
            "has no kernel for alibi_slopes and return_max_logit",
        ),
    ):
        assert dict(plan(changed, **options).declined)["hopper"].startswith(reason)
    narrow = qkv(dtype=FP8)
    assert terms(narrow._replace(sinks=sinks)) == (NO_TERM, None)
    assert terms(with_mask(narrow)) == (NO_TERM, None)
    assert plan(with_mask(narrow)).launch.config.kernel_config.listed
    for changed, options, name in (
        (narrow._replace(alibi_slopes=slopes), {}, "alibi_slopes"),
        (narrow, {"return_max_logit": True}, "return_max_logit"),
        (narrow._replace(bias=bias), {}, "bias"),
    ):
        declined = dict(plan(changed, **options).declined)
        assert declined["hopper"] == f"has no kernel of 8 bits for {name}"
    declined = dict(plan(with_mask(qkv(256, 256, dtype=FP8))).declined)
    assert declined["hopper"] == "takes a mask of 8 bits up to head_dim 128"


# Head dims of q and v → those of the rows with lists of blocks.
LISTED = {(8, 8): (64, 64), (64, 64): (64, 64), (65, 65): (128, 128), (64, 128): (128, 128)}
LISTED |= {(192, 128): (192, 192), (192, 136): (256, 256), (256, 256): (256, 256)}


@pytest.mark.parametrize("dims", LISTED, ids=str)
@pytest.mark.parametrize("dtype", SIXTEEN_BIT)
def test_a_mask_gets_a_row_with_lists_and_the_gradient_too(dims, dtype):
    for sizes in ((1, 1), (2, 8)):
        launch = plan(with_mask(qkv(*dims, dtype=dtype), *sizes)).launch
        config, gradient = launch.config.kernel_config, launch.config.gradient_config
        assert config.listed and launch.config.packed is None and launch.keep is None
        assert gradient.listed
        assert (config.head_dim, gradient.head_dim) == LISTED[dims]
    few = plan(with_mask(qkv(*dims, dtype=dtype, seqlen_q=1))).launch.config
    reason = "q is copied" if dims == (65, 65) else "packs no calls with mask"
    assert few.packed is None and few.packing.reason == reason


@pytest.mark.parametrize("config", BACKWARD_CONFIGS)
def test_a_gradient_that_no_gpu_has_run_is_left_to_who_names_the_backend(config, monkeypatch):
    tensors = qkv(config.head_dim, config.head_dim_v, dtype=DTYPES[config.dtype])
    for measured in ("", "H100, 2026-11-22"):
        now = config._replace(measured=measured)
        monkeypatch.setattr(
            "flashattn3.backends.hopper.backend.select_backward_config", lambda *_, now=now: now
        )
        found = plan(tensors, hopper(only_measured=True))
        assert found.backend.name == "hopper"
        assert found.launch.config.gradient_config == (now if measured else None)
        found = plan(tensors, hopper(only_measured=True), backend="hopper")
        assert found.launch.config.gradient_config == now


def test_a_gradient_whose_row_is_not_in_the_build_runs_on_triton():
    some = hopper(ALL_CONFIGS - {select_backward_config("bf16", 64, 64).name})
    assert plan(qkv(64), some, backend="hopper").launch.config.gradient_config is None
    assert plan(qkv(128), some).launch.config.gradient_config is not None


@pytest.mark.parametrize("head_dim", [128, 192, 256])
def test_the_gradient_of_a_softcap_too_small_for_the_kernels_runs_on_triton(head_dim):
    assert plan(qkv(head_dim), softcap=0.02).launch.config.gradient_config is not None
    assert plan(qkv(head_dim), softcap=0.01).launch.config.gradient_config is None


def test_explain_says_which_kernels_leave_sms_free():
    both = "forward and gradient"
    for dims, kernels in (
        ((128, 128), both),
        ((192, 128), both),
        ((192, 192), "forward"),
        ((256, 256), "forward"),
    ):
        described = plan(qkv(*dims), sm_margin=4).launch.config.describe()
        assert described["sm_margin applies to"] == kernels


@pytest.mark.parametrize("backend", ["hopper", "triton"])
@pytest.mark.parametrize("long", ["seqlen_q", "seqlen_k"])
def test_more_rows_than_are_counted_in_32_bits_are_refused_by_name(long, backend):
    reason = rf"({backend}|hopper): .*counts rows in 32 bits: .* up to 1073740800, found 1073740801"
    with pytest.raises(UnsupportedError, match=reason):
        plan(qkv(8, heads=(1, 1), **{long: 2**30 - 1023}), backend=backend)
    assert plan(qkv(8, heads=(1, 1), **{long: 2**30 - 1024})).backend.name == "hopper"


@pytest.mark.parametrize("dtype", EIGHT_BIT)
def test_the_operator_of_8_bits_gets_v_in_slots_and_whether_to_accumulate_fast(dtype):
    calls = []

    def forward(*arguments):
        calls.append(arguments)
        return torch.ones(2, 9, 4, 64), torch.ones(2, 4, 9)

    q, v = torch.ones(2, 9, 4, 64, dtype=dtype), torch.ones(2, 9, 4, 64).to(FP8)
    slots, tensors = permute_v(v, None), Tensors(q, q, v)
    library = library_double(forward=forward, permute_v=lambda v, *_: permute_v(v, None))
    backend = HopperBackend(library=lambda: library, only_measured=False)
    plans = [plan(tensors, backend, use_fast_accum=fast) for fast in (False, True)]
    assert plans[0] != plans[1] and not plans[1].unused_hints
    for found in plans:
        found.launch.forward(tensors)
        launch, *qkv = calls[-1][:4]
        assert [x.dtype for x in qkv] == [dtype, dtype, FP8]
        assert torch.equal(qkv[2].view(torch.uint8), slots.view(torch.uint8))
        assert launch.config == FORWARD_CONFIGS.index(found.launch.config.kernel_config)
    kept, fast = (arguments[0].record for arguments in calls)
    assert (kept.use_fast_accum, fast.use_fast_accum) == (False, True)
    assert kept._replace(use_fast_accum=True) == fast


def test_without_the_library_triton_runs_and_the_reason_names_the_command():
    found = plan(qkv(), hopper(error="the Hopper kernels were not built"))
    assert found.backend.name == "triton"
    reason = dict(found.declined)["hopper"]
    assert reason == (
        f"the Hopper kernels were not built; to build them, in {ROOT}: "
        "FLASHATTN3_BUILD=cuda pip install --no-build-isolation ."
    )


def test_a_row_that_was_left_out_of_the_build_is_named():
    some = frozenset(config.name for config in all_configs() if config.head_dim == 128)
    found = plan(qkv(96), hopper(some), causal=True)
    kernel_config = select_forward_config("bf16", 96, 96, True, seqlen_k=1024)
    assert found.backend.name == "triton"
    assert found.declined == (
        ("hopper", f"kernel config {kernel_config.name} is not in this build (FLASHATTN3_KERNELS)"),
    )
    assert plan(qkv(128), hopper(some)).backend.name == "hopper"


UNAVAILABLE = [
    (CPU, "needs an NVIDIA GPU, the tensors are on 'cpu'"),
    (A100, "needs compute capability 9.0, A100 has 8.0"),
    (B200, "needs compute capability 9.0, B200 has 10.0"),
    (LOWERED_H100, "disabled: TRITON_INTERPRET or TRITON_OVERRIDE_ARCH is set"),
    (H100._replace(interpreted=True), "disabled: TRITON_INTERPRET or TRITON_OVERRIDE_ARCH is set"),
    (H100._replace(shared_memory_bytes=99 * 1024), "memory for a block, H100 has 101376"),
]


def test_elsewhere_nobody_looks_for_the_library():
    for device, reason in UNAVAILABLE:
        assert reason in HopperBackend(library=never).unavailable_reason(device)
    taken = {gpu.name for gpu in GPUS if plan(qkv(), device=gpu).backend.name == "hopper"}
    assert taken == {"H100"}


DECLINED = [
    (qkv(dtype=torch.float32), {}, "computes in float16 and bfloat16, not in torch.float32"),
    (qkv(264), {}, "takes head dims up to 256, head_dim is 264"),
    (qkv(64, 264), {}, "takes head dims up to 256, head_dim_v is 264"),
    (qkv(), {"softmax_scale": 1e-40}, "computes scores in torch.float32: softmax_scale must be 0"),
]


@pytest.mark.parametrize(("tensors", "options", "reason"), DECLINED, ids=lambda x: str(x)[:30])
def test_what_it_declines_and_why(tensors, options, reason):
    with pytest.raises(UnsupportedError) as caught:
        plan(tensors, backend="hopper", **options)
    assert f"(hopper: {reason}" in str(caught.value)


def test_explain_shows_what_the_prepared_launch_holds():
    described = plan(qkv()).launch.config.describe()
    shown = {name: described[name] for name in ("grid", "shared_memory_bytes", "workspace_bytes")}
    assert shown == {"grid": (11, 1, 1), "shared_memory_bytes": 2048, "workspace_bytes": 16}


def views() -> dict[str, tuple[Tensors, str]]:
    """Layouts, and the names of what TMA cannot read where it is."""
    q, k, v = qkv(batch=2, seqlen_q=10, seqlen_k=10, heads=(4, 4))[:3]
    packed = torch.empty(2, 10, 3, 4, 64, device="meta", dtype=torch.bfloat16)
    wide = torch.empty(2, 10, 4, 68, device="meta", dtype=torch.bfloat16)
    flat = torch.empty(2 * 10 * 4 * 64 + 8, dtype=torch.bfloat16)
    one = torch.empty(1, 1, 1, 12, dtype=torch.bfloat16, device="meta")
    return {
        "contiguous": (Tensors(q, k, v), "nothing"),
        "packed": (Tensors(*packed.unbind(2)), "nothing"),
        "heads first": (Tensors(q.transpose(1, 2).contiguous().transpose(1, 2), k, v), "nothing"),
        "odd pitch": (Tensors(q, wide[..., :64], v), "k"),
        "expanded": (Tensors(q, k, v[:, :, :1].expand(-1, -1, 4, -1)), "v"),
        "one row": (Tensors(one, one, one), "nothing"),
        "misaligned": (
            Tensors(flat[1:-7].view(2, 10, 4, 64), *[flat[8:].view(2, 10, 4, 64)] * 2),
            "q",
        ),
        "narrow": (qkv(40, batch=2, seqlen_q=10, seqlen_k=10), "nothing"),
        "narrow and odd": (qkv(33, 64, batch=2, seqlen_q=10, seqlen_k=10), "q, k"),
        "sparse rows": (Tensors(torch.empty_like(q).mT.contiguous().mT, k, v), "nothing"),
    }


def test_explain_says_what_is_copied():
    assert views()["misaligned"][0].q.data_ptr() % 16 != 0
    for name, (tensors, copied) in views().items():
        assert plan(tensors).launch.config.describe()["copied first"] == copied, name


SIZES = 2, 9, 9, 9, 9, 4, 2, 64, 64
RECORD = LaunchRecord(*SIZES, False, 0.25, 5.0, 3, 0, 132, 2, 0, 0, 0, True, False, False)
OF_RECORD = {"causal": True, "window_left": 3}
OF_RECORD |= {name: getattr(RECORD, name) for name in ("softmax_scale", "softcap", "sm_margin")}


def test_one_operator_call_in_each_pass_with_the_row_and_the_options():
    recorder, gradients = Recorder(), GradientRecorder()
    tensors = Tensors(*(torch.randn(2, 9, heads, 64).half() for heads in (4, 2, 2)))
    dlse = torch.randn(4, 9).expand(2, 4, 9)
    for deterministic in (False, True):
        options = OF_RECORD | {"deterministic": deterministic}
        launch = plan(tensors, hopper(forward=recorder, backward=gradients), **options).launch
        out, lse = launch.forward(tensors)
        assert (out.shape, out.dtype) == ((2, 9, 4, 64), torch.float16)
        assert (lse.shape, lse.dtype) == ((2, 4, 9), torch.float32)
        assert out.is_contiguous() and (out == 1).all() and (lse == 2).all()
        given = (torch.randn_like(out), dlse, out, lse)
        found = launch.backward(*given, tensors)
        assert [x.shape for x in found] == [x.shape for x in tensors[:3]]
        assert all((x == 1).all() and x.is_contiguous() for x in found)
        assert all(x is y for x, y in zip(gradients.given, given, strict=True))
        assert recorder.descales == (None,) * 3
        record = RECORD._replace(deterministic=deterministic)
        config = launch.config
        for of_pass, row, rows in (
            (recorder, config.kernel_config, FORWARD_CONFIGS),
            (gradients, config.gradient_config, BACKWARD_CONFIGS),
        ):
            assert all(x is y for x, y in zip(of_pass.qkv, tensors, strict=False))
            assert of_pass.indices == (None,) * 4
            assert of_pass.launch == (rows.index(row), record)


def test_copies_begin_where_tma_can_read_and_results_are_dense_again():
    recorder, gradients = Recorder(), GradientRecorder()
    tensors = Tensors(*(torch.randn(2, 9, 4, d).half() for d in (33, 33, 21)))
    launch = plan(tensors, hopper(forward=recorder, backward=gradients)).launch
    out, lse = launch.forward(tensors)
    assert out.shape == (2, 9, 4, 21) and out.is_contiguous()
    dout = torch.randn_like(out)
    found = launch.backward(dout, None, out, lse, tensors)
    assert [x.shape for x in found] == [x.shape for x in tensors[:3]]
    assert all(x.is_contiguous() for x in found)
    passed = *recorder.qkv, *gradients.qkv, gradients.given[0], gradients.given[2]
    for before, after in zip((*tensors[:3] * 2, dout, out), passed, strict=True):
        assert torch.equal(before, after)
        assert all(stride % 8 == 0 for stride in after.stride()[:-1])
        assert after.data_ptr() % 16 == 0 and after.stride(-1) == 1


def test_the_operators_of_calls_that_change_scores_get_what_changes_them():
    """Sinks, slopes and bias behind the descales, and max_logit, -inf, where the call asks for it;
    the gradients of sinks and bias behind the others."""
    given = Tensors(*(torch.randn(2, 9, heads, 20).half() for heads in (4, 2, 2)))
    tensors = given._replace(sinks=torch.randn(4), alibi_slopes=torch.rand(2, 4))
    recorder, gradients = Recorder(), GradientRecorder()

    def backward(*arguments):
        *others, with_dbias = arguments
        dbias = torch.ones(1, 4, 9, 16) if with_dbias else None  # rows of 16 bytes
        return (*gradients(*others), torch.ones(4), dbias)

    library = library_double(forward_scores=recorder, backward_scores=backward)
    backend = HopperBackend(library=lambda: library, only_measured=False)
    with_sinks = given._replace(sinks=tensors.sinks)
    found = plan(with_sinks, backend, return_max_logit=True)
    out, lse, max_logit = found.launch.forward(with_sinks)
    assert recorder.descales[:6] == (None, None, None, tensors.sinks, None, None)
    assert recorder.descales[6] is max_logit
    assert recorder.indices == (None,) * 4
    assert out.shape == (2, 9, 4, 20)
    assert max_logit.tolist() == [-math.inf] * 4 and max_logit.dtype == torch.float32
    out = plan(tensors, backend).launch.forward(tensors)[0]
    assert recorder.descales == (None, None, None, tensors.sinks, tensors.alibi_slopes, None)
    launch = plan(tensors, backend).launch
    *sides, dsinks, dbias = launch.backward(torch.ones_like(out), None, out, lse, tensors, False)
    assert [x.shape for x in sides] == [x.shape for x in given[:3]]
    assert gradients.indices == (None,) * 4 + (tensors.sinks, tensors.alibi_slopes, None)
    assert dsinks.tolist() == [1.0] * 4 and dbias is None
    assert len(launch.backward(torch.ones_like(out), None, out, lse, tensors)) == 3
    tensors = given._replace(bias=torch.randn(1, 4, 9, 9).half())
    launch = plan(tensors, backend).launch
    launch.forward(tensors)
    read = recorder.descales[5]
    assert torch.equal(read, tensors.bias) and read.stride(2) == 16
    dbias = launch.backward(torch.ones_like(out), None, out, lse, tensors, True)[4]
    assert torch.equal(dbias, torch.ones(1, 4, 9, 9)) and dbias.is_contiguous()


@pytest.mark.parametrize(("batch", "queries", "keys"), [(2, 3, 0), (2, 0, 3), (0, 3, 3)])
def test_sinks_without_scores_have_the_gradient_of_lse(batch, queries, keys):
    rows = (torch.randn(batch, n, 4, 64).half() for n in (queries, keys, keys))
    given = Tensors(*rows, sinks=torch.randn(4))

    def backward(launch, dout, dlse, out, lse, q, k, v, *rest):
        return q, k, v, torch.full((4,), math.nan), None

    library = library_double(backward_scores=backward)
    backend = HopperBackend(library=lambda: library, only_measured=False)
    launch = plan(given, backend).launch
    out, lse = torch.zeros(batch, queries, 4, 64).half(), torch.randn(batch, 4, queries)
    dlse = torch.randn(batch, 4, queries)
    lse[1:, 2, :1] = -math.inf  # a row of no sequence
    dsinks = launch.backward(out, dlse, out, lse, given, False)[3]
    wanted = dlse.masked_fill(lse.isinf(), 0).sum((0, 2))
    torch.testing.assert_close(dsinks, wanted)
    assert launch.backward(out, None, out, lse, given, False)[3].tolist() == [0.0] * 4


def test_only_gradients_that_tma_cannot_read_are_copied():
    recorder = GradientRecorder()
    tensors = qkv(64, dtype=torch.float16, batch=2, seqlen_q=10, seqlen_k=10, heads=(4, 4))
    tensors = Tensors(*(torch.zeros(x.shape, dtype=x.dtype) for x in tensors[:3]))
    out, lse = torch.zeros(2, 10, 4, 64).half(), torch.zeros(2, 4, 10)
    flat = torch.randn(out.numel() + 8).half()
    found = plan(tensors, hopper(backward=recorder))
    for dout, copied in (
        (torch.randn(2, 4, 10, 64).half().transpose(1, 2), False),  # heads first
        (torch.randn(2, 10, 4, 128).half()[..., 64:], False),
        (torch.randn(1, 10, 4, 64).half().expand(2, -1, -1, -1), True),
        (torch.ones(1, 1, 1, 64).half().expand(2, 10, 4, 64), True),
        (torch.ones(()).half().expand(2, 10, 4, 64), True),
        (torch.randn(2, 10, 4, 68).half()[..., :64], True),
        (flat[1:-7].view(2, 10, 4, 64), True),
    ):
        found.launch.backward(dout, None, out, lse, tensors)
        passed = recorder.given[0]
        assert (passed is not dout) == copied
        assert torch.equal(passed, dout) and passed.stride(-1) == 1
        assert all(stride and stride % 8 == 0 for stride in passed.stride()[:-1])


def test_both_passes_of_varlen_get_the_edges_and_the_longest_lengths():
    recorder, gradients = Recorder(), GradientRecorder()
    tensors = Tensors(*(torch.randn(9, 4, 64).half() for _ in range(3)))
    edges, used = (torch.tensor(x, dtype=torch.int32) for x in ((0, 4, 6), (1, 2)))
    tensors = tensors._replace(cu_seqlens_q=edges, cu_seqlens_k=edges, seqused_k=used)
    launch = plan(tensors, hopper(forward=recorder, backward=gradients), max_seqlen_q=4).launch
    out, lse = launch.forward(tensors)
    assert out.shape == (9, 4, 64) and lse.shape == (4, 9)
    found = launch.backward(out, None, out, torch.randn(9, 4).T, tensors)
    assert [x.shape for x in found] == [(9, 4, 64)] * 3
    for of_pass in (recorder, gradients):
        record = of_pass.launch.record
        assert of_pass.indices == (edges, edges, None, used)
        assert (record.batch, record.varlen, record.seqlen_q, record.seqlen_k) == (2, True, 4, 9)
    assert gradients.given[1] is None and gradients.given[3].is_contiguous()


def test_a_gradient_without_a_row_runs_on_tritons_launch(monkeypatch):
    seen, prepared = [], []

    def prepare(self, problem, device):
        prepared.append((problem, device))
        return SimpleNamespace(backward=lambda *arguments: seen.append(arguments))

    monkeypatch.setattr(TritonBackend, "prepare", prepare)
    without = hopper(ALL_CONFIGS - {kernel_config.name for kernel_config in BACKWARD_CONFIGS})
    found = plan(qkv(256), without, causal=True)
    tensors = qkv(256)
    for _ in range(2):
        found.launch.backward(None, None, None, None, tensors)
    assert seen == [(None, None, None, None, tensors)] * 2
    assert prepared == [(found.problem, H100)]  # once


@pytest.fixture
def fresh_library(monkeypatch):
    """The two caches as at the start of a process, here and for the tests that follow."""
    cached = (hopper_library.find_library, hopper_library.library_for_gpu)
    for function in cached:
        function.cache_clear()
    yield monkeypatch
    for function in cached:
        function.cache_clear()


def test_a_hopper_gpu_without_the_library_is_warned_of_once(fresh_library):
    missing = Library(error="the Hopper kernels were not built")
    fresh_library.setattr(hopper_library, "find_library", lambda: missing)
    with pytest.warns(RuntimeWarning, match="not built.*FLASHATTN3_BUILD=cuda pip install"):
        hopper_library.library_for_gpu()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert hopper_library.library_for_gpu() is missing


def test_a_library_of_another_table_is_refused(fresh_library):
    if not (hopper_library.PACKAGE / hopper_library.OPS_LIBRARY).is_file():
        pytest.skip("the Hopper kernels are not built here")
    fresh_library.setattr(hopper_library, "configs_hash", lambda: "another")
    error = hopper_library.find_library().error
    assert error == "the Hopper kernels were built from other kernel configs"


def test_a_library_that_does_not_load_says_why(fresh_library, tmp_path):
    fresh_library.setattr(hopper_library, "PACKAGE", tmp_path)
    assert hopper_library.find_library.__wrapped__().error == "the Hopper kernels were not built"
    library = tmp_path / hopper_library.OPS_LIBRARY
    library.parent.mkdir()
    library.write_text("no ELF file")
    error = hopper_library.find_library.__wrapped__().error
    assert error.startswith(f"the Hopper kernels do not load ({library}: ")


class UnevenWork:
    """Tiles that differ in length: a call with its gradients, which always have the same bits."""

    def __init__(self):
        of = {"device": "cuda", "dtype": torch.float16}
        self.tensors = [torch.randn(4, 2048, 8, 64, **of) for _ in range(3)]
        self.dout = torch.randn(4, 2048, 8, 64, **of)
        self.wanted = self()

    def __call__(self, **options):
        # New leaves: autograd ties a leaf to the stream on which it is first used.
        leaves = [tensor.detach().requires_grad_() for tensor in self.tensors]
        out = flash_attn_func(*leaves, causal=True, deterministic=True, backend="hopper", **options)
        return (out, *torch.autograd.grad(out, leaves, self.dout))

    def agrees(self, results) -> bool:
        return all(map(torch.equal, results, self.wanted))


@pytest.fixture
def uneven_work():
    return UnevenWork()


@on_hopper_gpu
def test_streams_side_by_side_count_their_own_tiles(uneven_work):
    streams = [torch.cuda.Stream() for _ in range(3)]
    found = []
    torch.cuda.synchronize()
    for _ in range(10):
        for stream in streams:
            with torch.cuda.stream(stream):
                found.append(uneven_work())
    torch.cuda.synchronize()
    assert all(map(uneven_work.agrees, found))


@on_hopper_gpu
def test_graphs_captured_on_one_stream_may_run_side_by_side(uneven_work):
    captured, side = [], torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        uneven_work()
    torch.cuda.synchronize()
    for _ in range(2):
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=side):
            results = uneven_work()
        captured.append((graph, results, torch.cuda.Stream()))
    for _ in range(10):
        for graph, _results, stream in captured:
            with torch.cuda.stream(stream):
                graph.replay()
    torch.cuda.synchronize()
    assert all(uneven_work.agrees(results) for _graph, results, _stream in captured)


@on_hopper_gpu
@pytest.mark.parametrize("sm_margin", [1, 60, 1000])
def test_fewer_ctas_give_the_same_bits(uneven_work, sm_margin):
    assert uneven_work.agrees(uneven_work(sm_margin=sm_margin))


@on_hopper_gpu
def test_a_training_step_beyond_128_columns_takes_sm_margin_for_a_hint():
    tensors = [
        torch.randn(2, 300, 4, 192, device="cuda", dtype=torch.bfloat16).requires_grad_()
        for _ in range(3)
    ]

    def gradients(**options):
        out = flash_attn_func(*tensors, deterministic=True, backend="hopper", **options)
        return torch.autograd.grad(out.float().square().sum(), tensors)

    assert all(map(torch.equal, gradients(sm_margin=8), gradients()))


@on_hopper_gpu
def test_a_stream_with_the_handle_of_a_destroyed_one_counts_its_own_tiles(uneven_work):
    runtime = torch.cuda.cudart()

    def new_stream() -> int:
        place = ctypes.c_void_p()
        torch.cuda.check_error(runtime.cudaStreamCreate(ctypes.addressof(place)))
        return place.value

    def attend(stream):
        with torch.cuda.stream(torch.cuda.ExternalStream(stream)), torch.no_grad():
            q, k, v = uneven_work.tensors
            options = {"causal": True, "return_lse": True, "backend": "hopper"}
            # Kept: torch gives memory that is free on a handle to whoever has that handle.
            found.extend(flash_attn_func(q, k, v, **options) for _ in range(20))

    found, first = [], new_stream()
    torch.cuda.synchronize()
    attend(first)
    torch.cuda.check_error(runtime.cudaStreamDestroy(first))
    second = next((s for s in (new_stream() for _ in range(100)) if s == first), None)
    if second is None:
        torch.cuda.synchronize()
        pytest.skip("this driver does not hand out the handle of a stream that is still running")
    attend(second)
    torch.cuda.synchronize()
    assert all(torch.equal(out, uneven_work.wanted[0]) for out, _lse in found)


@on_hopper_gpu
def test_every_kernel_is_resident():
    for info in hopper_library.kernel_info():
        assert info.blocks_per_sm >= 1, info.name
        assert info.max_threads >= info.num_threads
        assert info.num_registers > 0
