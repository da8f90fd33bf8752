"""Gradients through flash_attn_fp8_func and its varlen form: those of attention at the quantized
values, against float64."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from helpers import EVERY_BACKEND, TRITON_DTYPES
from saved_tensors import saved_by
from support.inputs import make_inputs, make_output_gradients
from torch.utils.checkpoint import checkpoint

from flashattn3 import UnsupportedError, flash_attn_fp8_func, flash_attn_varlen_fp8_func
from flashattn3.call.dtypes import FP8, INT8
from flashattn3.call.hadamard import rotate_back
from flashattn3.call.operands import Scaled
from flashattn3.quantization import dispatch, quantize_qkv, torch_operations, triton_launch
from flashattn3.run import quantized, quantized_gradient
from flashattn3_bench.checking import GRADIENT_FACTOR, check, gradients
from flashattn3_bench.checking.cases import dense, varlen

CASES = (
    (dense("gqa", (70, 90), (4, 2), (64, 64)), {}),
    (dense("causal", (33, 70), (2, 2), (64, 32), causal=True), {"qk_dtype": FP8, "block": 64}),
    (dense("window-cap", (70, 70), (2, 1), (40, 40), window=(9, 3), softcap=4.0), {"rotated": 0}),
    (dense("mean", (33, 150), (4, 2), (32, 32), distribution="shifted"), {"smooth_k": True}),
    (
        dense("mean-empty", (70, 33), (2, 2), (32, 32), causal=True, distribution="shifted"),
        {"smooth_k": True},
    ),
    (dense("sinks-bias", (33, 40), (4, 2), (32, 32), sinks="normal", bias="rows"), {}),
    (
        varlen(
            "varlen", (33, 0, 70), (40, 9, 90), (4, 2), (64, 64), seqused_k=(33, 9, 61),
            tail_rows=3, causal=True, sinks="mixed", slopes="heads",
        ),
        {},
    ),
    (varlen("varlen-mean", (33, 17), (40, 70), (2, 2), (32, 32)), {"smooth_k": True}),
)  # fmt: skip


def attend(case, tensors, hadamard: bool, **options):
    names = ("softmax_scale", "causal", "window_size", "softcap")
    options |= {name: value for name, value in case.options().items() if name in names}
    given = zip(tensors._fields[3:], tensors[3:], strict=True)
    options |= {name: x for name, x in given if x is not None}
    function = flash_attn_fp8_func
    if case.varlen:
        function = flash_attn_varlen_fp8_func
        options |= {"max_seqlen_q": case.seqlen_q, "max_seqlen_k": case.seqlen_k}
    return function(*tensors[:3], return_lse=True, hadamard=hadamard, **options)


def at_quantized_values(case, tensors, hadamard, qk_dtype=INT8, block=128, smooth_k=False):
    """The call in float64, of the values that q, k and v are quantized to."""
    lengths = {}
    if case.varlen:
        lengths = {"cu_seqlens_q": tensors.cu_seqlens_q, "cu_seqlens_k": tensors.cu_seqlens_k}
        lengths |= {"max_seqlen_q": case.seqlen_q, "max_seqlen_k": case.seqlen_k}
    how = {"block": block, "qk_dtype": qk_dtype, "smooth_k": smooth_k, "hadamard": hadamard}
    scaled = quantize_qkv(*(x.detach() for x in tensors[:3]), **how, **lengths)
    q, k, v = (x.dequantize().double() for x in scaled)
    return tensors._replace(q=q, k=k, v=v)


@pytest.mark.parametrize(("case", "how"), CASES, ids=lambda of: getattr(of, "name", ""))
@pytest.mark.parametrize("backend", EVERY_BACKEND)
def test_gradients_at_the_quantized_values(backend, case, how, device):
    dtype = TRITON_DTYPES[-1]  # kernels widen whatever the backend
    how = dict(how)
    how["hadamard"] = bool(how.pop("rotated", 1))
    how.setdefault("qk_dtype", INT8)
    tensors = make_inputs(case, device, dtype, requires_grad=True)
    if case.tail_rows or case.seqused_k:  # what does not count is in the blocks' largest values
        tensors = tensors._replace(
            **{x: getattr(tensors, x).detach().nan_to_num().requires_grad_() for x in "qkv"}
        )
    try:
        out, lse = attend(case, tensors, backend=backend, **how)
    except UnsupportedError as error:
        pytest.skip(str(error))
    leaves = [x for x in tensors if x is not None and x.requires_grad]
    dout, dlse = make_output_gradients(case, tensors)
    got = torch.autograd.grad((out, lse), leaves, (dout, dlse))
    at = at_quantized_values(case, tensors, **how)
    options = case.reference_options()
    reference = gradients(at, dout, dlse, **options)
    rounded = at._replace(**{x: getattr(at, x).to(dtype) for x in "qkv"})
    baseline = gradients(rounded, dout, dlse, **options, dtype=dtype)
    names = [x for x in ("q", "k", "v", "sinks", "bias") if getattr(tensors, x) is not None]
    for name, found in zip(names, got, strict=True):
        i = ("q", "k", "v", "sinks", "bias").index(name)
        assert (found.dtype, found.shape) == (getattr(tensors, name).dtype, reference[i].shape)
        check(f"d{name}", found, reference[i], baseline[i], GRADIENT_FACTOR, case, backend)


def leaves(seqlen=40, dtype=torch.float16, device="cpu"):
    shapes = (2, seqlen, 4, 32), (2, seqlen, 2, 32), (2, seqlen, 2, 32)
    return [torch.randn(shape, device=device).to(dtype).requires_grad_() for shape in shapes]


def test_every_way_gives_the_same_gradient(device):
    """Checkpointed, compiled, in a fixed order, under autocast; and hooks see 8 bits."""
    given = leaves(device=device)
    compiled = torch.compile(flash_attn_fp8_func, fullgraph=True, backend="aot_eager")
    ways = {
        "eager": flash_attn_fp8_func,
        "deterministic": lambda *x: flash_attn_fp8_func(*x, deterministic=True),
        "checkpoint": lambda *x: checkpoint(flash_attn_fp8_func, *x, use_reentrant=False),
        "compiled": compiled,
        "backward under autocast": flash_attn_fp8_func,
    }
    found = {}
    for name, run in ways.items():
        out = run(*given)
        dout = torch.linspace(-1, 1, out.numel(), device=device).view(out.shape).to(out.dtype)
        with torch.autocast(torch.device(device).type, torch.bfloat16, "autocast" in name):
            found[name] = out, *torch.autograd.grad(out, given, dout)
    for name, results in found.items():
        for one, other in zip(results, found["eager"], strict=True):
            assert torch.equal(one, other), name
    saved = saved_by(lambda: flash_attn_fp8_func(*given, qk_dtype=FP8))
    sides = [dtype for shape, dtype in saved if len(shape) >= 4]  # permuted v has five axes
    assert sides == [FP8, FP8, FP8, torch.float16]
    with torch.no_grad():
        assert torch.equal(flash_attn_fp8_func(*given), found["eager"][0])


@pytest.mark.parametrize("sees", ["all", "before", "before, lse", "sequence"])
def test_rows_of_few_keys_are_computed_again(sees, monkeypatch):
    """As where out and lse carry the rounding of probabilities, which here is a large one."""
    q, k, v = leaves(seqlen=32 if sees == "all" else 40)
    edges = torch.tensor([0, 38, 80], dtype=torch.int32)
    attend_exactly = quantized_gradient.attend

    def attend(tensors, options):
        found = attend_exactly(tensors, options)
        return (found[0] * 1.2, found[1] + 0.2) if type(tensors.q) is Scaled else found

    def gradients_of(rows, run=lambda attend: attend, several=False):
        if sees == "sequence":
            of = {"max_seqlen_q": 42, "max_seqlen_k": 42}
            flat = (x.flatten(0, 1) for x in (q, k, v))
            out = run(flash_attn_varlen_fp8_func)(*flat, edges, edges, **of).view(q.shape)
        else:
            options = {"causal": sees.startswith("before"), "return_lse": sees.endswith("lse")}
            out = run(flash_attn_fp8_func)(q, k, v, **options)
        out, *lse = out if type(out) is tuple else (out,)
        dout = torch.linspace(-1, 1, out.numel()).view(out.shape).to(out.dtype)
        dout[:, : rows.start], dout[:, rows.stop :] = 0, 0
        given = dout, *(dout.float().mean(-1).transpose(1, 2) for _ in lse)
        if several:
            given = [torch.stack((torch.zeros_like(x), x)) for x in given]
        found = torch.autograd.grad((out, *lse), (q, k, v), given, is_grads_batched=several)
        return [x[1] for x in found] if several else found

    few, many = slice(0, 32), slice(32, 40)
    wanted = {"few": gradients_of(few), "many": gradients_of(many)}
    monkeypatch.setattr(quantized_gradient, "attend", attend)
    monkeypatch.setattr(quantized_gradient, "FEW_KEYS", 32)
    monkeypatch.setattr(dispatch, "layout_of_v", lambda v: "permuted")
    monkeypatch.setattr(quantized, "_checked_once", quantized._checked_once.__wrapped__)
    found = gradients_of(few)
    for one, other in zip(found, wanted["few"], strict=True):
        assert (one - other).norm() < 0.01 * other.norm()
    compiled = partial(torch.compile, fullgraph=True, backend="aot_eager")
    assert all(map(torch.equal, found, gradients_of(few, compiled)))
    for one, other in zip(found, gradients_of(few, several=True), strict=True):
        assert (one - other).norm() < 0.001 * other.norm()
    if sees.startswith("before"):  # rows of many keys have what the forward gave
        pairs = zip(gradients_of(many), wanted["many"], strict=True)
        assert any((one - other).norm() > 0.05 * other.norm() for one, other in pairs)


@pytest.mark.parametrize(
    ("what", "change"),
    [
        ("shape", lambda x: x[:, :1]),
        ("dtype", torch.Tensor.double),
        ("device", lambda x: x.to("meta")),
    ],
)
@pytest.mark.parametrize("name", ["out", "lse"])
def test_saved_tensors_of_another_kind_are_named(name, what, change):
    """Hooks on saved tensors may exchange them, and a kernel would read behind a shorter one."""
    given, axes = leaves(), {"out": 4, "lse": 3}

    def unpack(x):
        is_named = x.ndim == axes[name] and x.dtype in (torch.float16, torch.float32)
        return change(x) if is_named and 40 in x.shape else x

    with torch.autograd.graph.saved_tensors_hooks(lambda x: x, unpack):
        out = flash_attn_fp8_func(*given, causal=True)
    if (name, what) == ("out", "dtype"):  # which is converted
        assert torch.autograd.grad(out.sum(), given)[0].any()
        return
    with pytest.raises(ValueError, match=rf"^flash_attn_fp8_func: saved {name}\.{what} must be"):
        torch.autograd.grad(out.sum(), given)


def test_what_has_no_gradient():
    q, k, v = leaves()
    with pytest.raises(UnsupportedError, match="there is no gradient through FP8; flash_attn_fp8"):
        torch.func.grad(lambda q: flash_attn_fp8_func(q, k, v).float().sum())(q)
    (dq,) = torch.autograd.grad(flash_attn_fp8_func(q, k, v).sum(), q, create_graph=True)
    with pytest.raises((NotImplementedError, RuntimeError)):
        torch.autograd.grad(dq.float().pow(2).sum(), q)


def registers_without_descales(given):
    """Of the kernel that widens, compiled in a process of its own: Triton's interpreter takes what
    its compiler refuses, such as a sum with None."""
    from flashattn3_bench.ahead_of_time import compile_kernel, resources

    of_problem = 0, FP8, FP8, FP8, torch.bfloat16, False, given, 64, 64, 64, 64, 64, 0
    launch = triton_launch._dequantize_launch(*of_problem)
    scales = ("fp32" if has_descales else None for has_descales in given)
    types = ("u8",) * 3 + ("bf16",) * 3 + (*scales, None, None)
    return resources(compile_kernel(launch.sample(types, (), (64,) * 10), 80)).registers


@pytest.mark.parametrize("given", [(True, True, True), (True, False, False), (False, True, True)])
def test_the_kernel_that_widens_compiles_without_descales(given, compilers):
    assert compilers.submit(registers_without_descales, given).result() > 0


@pytest.mark.parametrize("dtype", TRITON_DTYPES)
@pytest.mark.parametrize("layout", ["rows", "permuted"])
@pytest.mark.parametrize("edges", [None, (0, 33, 33, 110)])
def test_the_kernel_widens_as_torch(edges, layout, dtype, device):
    """q, k and v in one launch: of any strides, numbers of tokens, blocks and head dims."""
    lead = [(2, 130), (2, 90)] if edges is None else [(120,), (115,)]
    of_q, of_k = ((*x, heads, 64) for x, heads in zip(lead, (3, 2), strict=True))
    given = [torch.randn(shape, device=device) for shape in (of_q, of_k, (*of_k[:-1], 40))]
    edges = None if edges is None else torch.tensor(edges, dtype=torch.int32, device=device)
    for of, hadamard, blocks in ((FP8, False, (64,) * 3), (INT8, True, (128, 64, 256))):
        stored = []
        for x, block, kind in zip(given, blocks, "qkv", strict=True):
            is_v = kind == "v"
            how = block, hadamard and not is_v, edges, 100, layout if is_v else "rows"
            data, descale = dispatch.quantize(x, *how, FP8 if is_v else of, None)
            if edges is not None and data.ndim == x.ndim:
                data.view(torch.uint8)[110:] = 0  # rows of no sequence are not written
            if kind == "q":
                wide = torch.zeros(*x.shape[:-1], 80, dtype=of, device=device)
                wide.view(torch.uint8)[..., :64] = data.view(torch.uint8)
                data = wide[..., :64]
            stored.append(torch_operations.Stored(data, descale, block, edges, x.shape))
        of_torch = torch_operations.dequantize(stored, dtype)
        found = triton_launch.dequantize(stored, dtype)
        for x, values, wanted, kind in zip(given, found, of_torch, "qkv", strict=True):
            assert torch.equal(values, wanted)
            values = rotate_back(values) if hadamard and kind != "v" else values
            values, x = (y if edges is None else y[:110] for y in (values, x))
            assert (values - x).abs().max() < 0.3
        nothing = [x._replace(descale=None, block=None) for x in stored[1:]]
        found = triton_launch.dequantize([stored[0], *nothing], dtype)
        assert torch.equal(found[0], of_torch[0]) and not any(x.any() for x in found[1:])


EXACT_ROWS = {
    "plain": {},
    "one row": {"count": 1},
    "every row": {"count": 70},
    "odd head dim": {"columns": 40},
    "columns of no multiple of 8": {"columns": 33},
    "many columns": {"columns": 192},
    "no dlse": {"dlse": None},
    "dlse of a sum": {"dlse": "expanded"},
    "dout of a sum": {"dout": "expanded"},
    "dout of a transposed out": {"dout": "transposed"},
    "dout by columns": {"dout": "by columns"},
    "dout at an odd address": {"dout": "odd"},
    "padded rows": {"padding": 3},
}


@pytest.mark.parametrize("dtype", TRITON_DTYPES)
@pytest.mark.parametrize("name", EXACT_ROWS)
def test_exact_rows_are_taken_as_by_torch(name, dtype, device):
    """Both against float64: the kernel's sums have another order."""
    how = {"count": 40, "columns": 64, "dlse": "dense", "dout": "dense", "padding": 0}
    how |= EXACT_ROWS[name]
    shape, count = (2, 70, 3, how["columns"]), how["count"]
    ways = {
        "dense": lambda x: x,
        "expanded": lambda x: x[:1, :1, :1, :1].expand(x.shape),
        "transposed": lambda x: x.transpose(1, 2).contiguous().transpose(1, 2),
        "by columns": lambda x: x.transpose(1, 3).contiguous().transpose(1, 3),
        "odd": lambda x: torch.cat((x.flatten()[:1], x.flatten()))[1:].view(x.shape),
    }
    out, dout = (torch.randn(shape, device=device).to(dtype) for _ in range(2))
    dout = ways[how["dout"]](dout)
    exact = (out[:, :count] + 0.1 * torch.randn_like(out[:, :count])).to(dtype)
    lse, dlse = torch.randn(2, 2, 3, 70 + how["padding"], device=device)[..., :70]
    exact_lse = torch.randn(2, 3, count, device=device)
    exact_lse[0, 0, 0] = -torch.inf  # a row without keys
    dlse = None if how["dlse"] is None else dlse
    if how["dlse"] == "expanded":
        dlse = dlse[:1, :1, :1].expand(dlse.shape)
    given = out, exact, dout, lse, exact_lse, dlse
    moved = (out[:, :count].double() - exact.double()) * dout[:, :count].double()
    wanted = torch.zeros(lse.shape, dtype=torch.double, device=device) if dlse is None else dlse
    wanted = wanted.double().clone()
    wanted[..., :count] += moved.sum(-1).transpose(1, 2)
    for implementation in (torch_operations, triton_launch):
        new_lse, new_dlse = implementation.take_exact_rows(*given)
        assert torch.equal(new_lse[..., :count], exact_lse)
        assert torch.equal(new_lse[..., count:], lse[..., count:])
        largest = moved.abs().sum(-1).amax().item() + 4
        assert (new_dlse - wanted).abs().max() < 2**-22 * largest
        assert new_lse.is_contiguous() and new_dlse.is_contiguous()
        assert new_dlse[..., count:].equal(wanted[..., count:].float())
    opaque = torch.library.opcheck(torch.ops.flashattn3.take_exact_rows.default, given)
    assert set(opaque.values()) == {"SUCCESS"}


def resources_of_exact_rows(no_dlse, columns, stride):
    """What take_exact_rows takes on each chip, in a process of its own, for the reason that
    registers_without_descales gives."""
    from flashattn3_bench.ahead_of_time import compile_kernel, resources

    types = torch.bfloat16, torch.bfloat16, torch.bfloat16
    launch, _ = triton_launch._exact_rows_launch(0, *types, no_dlse, columns)
    of_tensors = ("bf16",) * 3 + ("fp32",) * 2 + (None if no_dlse else "fp32",) + ("fp32",) * 2
    strides = (stride,) * 9 + (70,) * 4 + (1,) * 3
    sample = launch.sample(of_tensors, strides, (3, 3, 70, 40))
    return [resources(compile_kernel(sample, capability)) for capability in (80, 90, 120)]


@pytest.mark.parametrize(
    ("no_dlse", "columns", "stride"), [(True, 64, 64), (False, 128, 128), (False, 40, 40)]
)
def test_the_kernel_of_exact_rows_compiles(no_dlse, columns, stride, compilers):
    found = compilers.submit(resources_of_exact_rows, no_dlse, columns, stride).result()
    assert all(0 < x.registers <= 128 and x.stack_bytes == 0 for x in found), found
