"""Nothing outside the tensors is touched, whatever the lengths say; all runs give the same bits."""

from __future__ import annotations

import math

import pytest
import torch
from helpers import EVERY_BACKEND, GPU, case_named, ints, needs_hopper
from support.cases import call
from support.inputs import make_inputs, make_output_gradients
from torch.utils._python_dispatch import TorchDispatchMode

from flashattn3 import flash_attn_func, flash_attn_varlen_func
from flashattn3.backends.hopper.backend import HopperBackend
from flashattn3.backends.hopper.library import find_library
from flashattn3.call.fields import Options
from flashattn3.call.operands import Tensors
from flashattn3.run.operators import plan_of

GUARD = 8192  # elements on each side of a tensor
CANARY = 77  # exact in every dtype


class Guarded(TorchDispatchMode):
    """Puts a guard on both sides of every tensor that is allocated."""

    FACTORIES = (
        "empty",
        "new_empty",
        "zeros",
        "new_zeros",
        "full",
        "new_full",
        "empty_like",
        "zeros_like",
    )

    def __init__(self):
        super().__init__()
        self.homes = []

    def __torch_dispatch__(self, function, types, arguments=(), keywords=None):
        result = function(*arguments, **(keywords or {}))
        if function._schema.name.removeprefix("aten::") not in self.FACTORIES:
            return result
        home = torch.full(
            (2 * GUARD + result.numel(),), CANARY, dtype=result.dtype, device=result.device
        )
        self.homes.append(home)
        inside = home[GUARD : GUARD + result.numel()].view(result.shape)
        return inside.copy_(result)

    def assert_untouched(self):
        assert self.homes, "nothing was allocated under guard"
        for home in self.homes:
            assert (home[:GUARD] == CANARY).all() and (home[-GUARD:] == CANARY).all()


def new_in_whole_rows(tensor, columns):
    return tensor.new_empty((*tensor.shape[:-1], math.ceil(columns / 8) * 8))


def forward_into_new(launch, q, k, v, *rest):
    """The Hopper operator on results that Python allocates, where a guard can see it."""
    out = new_in_whole_rows(q, v.shape[-1])
    lse = q.new_empty((*q.shape[:-3], q.shape[-2], q.shape[-3]), dtype=torch.float32)
    torch.ops.flashattn3_hopper.forward_into(launch, q, k, v, *rest, out, lse)
    return out, lse


def backward_into_new(launch, dout, dlse, out, lse, q, k, v, *indices):
    given = (launch, dout, dlse, out, lse, q, k, v, *indices)
    gradients = tuple(new_in_whole_rows(x, x.shape[-1]) for x in (q, k, v))
    torch.ops.flashattn3_hopper.backward_into(*given, *gradients)
    return gradients


def under_guard(plan):
    """The plan as it is, or, of the Hopper backend, with results that a guard sees."""
    if plan.backend.name != "hopper":
        return plan
    library = find_library()._replace(forward=forward_into_new, backward=backward_into_new)
    backend = HopperBackend(library=lambda: library)
    return plan._replace(launch=backend.prepare(plan.problem, plan.device))


def guarded_run(backend: str, tensors: Tensors, **options) -> list[torch.Tensor]:
    """out, lse and the gradients, straight from the backend, all of them allocated under guard."""
    plan = under_guard(plan_of(tensors, Options(backend=backend, **options)))
    guard = Guarded()
    with guard:
        out, lse = plan.launch.forward(tensors)
        dout = torch.ones_like(out)
        dlse = torch.ones_like(lse)
        gradients = plan.launch.backward(dout, dlse, out, lse, tensors)
    guard.assert_untouched()
    return [out, lse, *gradients]


CORRUPT = {
    "past the end": {"cu_seqlens_q": (0, 20, 61), "cu_seqlens_k": (0, 20, 61)},
    "far past the end": {"cu_seqlens_q": (0, 90, 2**31 - 1), "cu_seqlens_k": (70, 80, 2**31 - 1)},
    "falling": {"cu_seqlens_q": (0, 40, 10), "cu_seqlens_k": (0, 40, 10)},
    "negative": {"cu_seqlens_q": (-30, 10, 40), "cu_seqlens_k": (-(2**31), -5, 40)},
    "keys past the end": {"cu_seqlens_k": (0, 20, 75)},
    "used beyond": {"seqused_q": (50, 1000), "seqused_k": (2**31 - 1, 90)},
    "used negative": {"seqused_q": (-3, 5), "seqused_k": (5, -(2**31))},
}


@pytest.mark.parametrize(
    ("causal", "max_seqlen", "deterministic"),
    [(True, 64, False), (False, None, True), (True, 2**30, True)],
)
@pytest.mark.parametrize("name", CORRUPT)
@pytest.mark.parametrize("backend", EVERY_BACKEND)
def test_corrupt_lengths_stay_within_the_tensors(
    backend, name, causal, max_seqlen, deterministic, device
):
    total = 40
    lengths = {"cu_seqlens_q": (0, 20, total), "cu_seqlens_k": (0, 20, total), **CORRUPT[name]}
    rows = (torch.randn(total + 96, 4, 16, device=device, dtype=torch.float16) for _ in range(3))
    rows = [
        x.index_fill_(0, torch.arange(total, total + 96, device=device), math.nan) for x in rows
    ]
    q, k, v = (x[:total] for x in rows)
    tensors = Tensors(
        q, k[:, :2], v[:, :2], **{n: ints(*x, device=device) for n, x in lengths.items()}
    )
    results = guarded_run(
        backend,
        tensors,
        causal=causal,
        max_seqlen_q=max_seqlen,
        max_seqlen_k=max_seqlen,
        deterministic=deterministic,
    )
    # NaN lies behind the tensors: it is nowhere if nobody looked there.
    for result in results:
        assert not result.isnan().any()


@pytest.mark.parametrize("head_dim", [128, 192, 256])
@pytest.mark.parametrize("backend", EVERY_BACKEND)
def test_sequences_that_overlap_end(backend, head_dim, device):
    """On Hopper a cluster has one work tile beyond 128 columns, and wrong cu_seqlens may ask for
    more tiles than there are clusters. Their gradients mean nothing."""
    total = 1024 if GPU else 70
    rows = torch.randn(total, 2, head_dim, device=device, dtype=torch.float16)
    edges = ints(0, total, 0, total, device=device)
    guarded_run(backend, Tensors(rows, rows, rows, edges, edges), causal=True)


@pytest.mark.parametrize(
    "name", ["causal-empty-rows", "gqa-8", "dim-33", "dim-72-40", "varlen-seqused", "splits"]
)
@pytest.mark.parametrize("backend", EVERY_BACKEND)
def test_nothing_is_written_beside_the_results(backend, name, device):
    case = case_named(name)
    tensors = make_inputs(case, device, torch.float16)
    left, right = case.window
    lengths = {"max_seqlen_q": case.seqlen_q, "max_seqlen_k": case.seqlen_k} if case.varlen else {}
    results = guarded_run(
        backend,
        tensors,
        causal=case.causal,
        window_left=left,
        window_right=right,
        num_splits=case.num_splits,
        **lengths,
    )
    for result in results:
        assert not result.isnan().any()


def test_the_guard_sees_a_stray_write():
    guard = Guarded()
    with guard:
        tensor = torch.zeros(8)
    guard.assert_untouched()
    tensor.as_strided((1,), (1,), tensor.storage_offset() + 8).fill_(0.0)
    with pytest.raises(AssertionError):
        guard.assert_untouched()


@pytest.mark.parametrize("backend", EVERY_BACKEND)
@pytest.mark.parametrize(
    "name", ["gqa-2", "softcap-causal", "varlen-causal-cross", "layout-packed"]
)
def test_inputs_are_left_as_they_are(backend, name, device):
    case = case_named(name)
    tensors = make_inputs(case, device, torch.float16, requires_grad=True)
    before = [None if x is None else x.detach().clone() for x in tensors]
    out, lse = call(case, tensors, backend=backend, return_lse=True)
    saved = out.detach().clone(), lse.detach().clone()
    dout, dlse = make_output_gradients(case, tensors)
    given = dout.clone(), dlse.clone()
    torch.autograd.grad((out, lse), tensors[:3], (dout, dlse))
    pairs = [*zip(tensors, before, strict=True), (dout, given[0]), (dlse, given[1])]
    pairs += [(out, saved[0]), (lse, saved[1])]
    for now, then in pairs:
        assert now is None or torch.equal(now.nan_to_num(), then.nan_to_num())


@pytest.mark.parametrize("backend", EVERY_BACKEND)
def test_strides_beyond_31_bits(backend, device):
    """q, k and v are views of one buffer of more than 2**31 elements; few pages are touched."""
    if GPU and torch.cuda.mem_get_info()[0] < 6 * 2**30:
        pytest.skip("needs 6 GiB of free GPU memory")
    rows, heads, dim = 65, 2, 16
    stride = 2**31 // (rows - 1) // 16 * 16 + 16
    buffer = torch.empty(rows * stride, dtype=torch.float16, device=device)
    assert (rows - 1) * stride > 2**31
    strides = (0, stride, dim, 1)
    *views, far_dout = (
        buffer.as_strided((1, rows, heads, dim), strides, offset).normal_()
        for offset in range(0, 4096, 1024)
    )
    edges = (ints(0, 30, rows, device=device),) * 2

    def dense(q, k, v):
        return flash_attn_func(q, k, v, causal=True, backend=backend)

    def varlen(q, k, v):
        out = flash_attn_varlen_func(q[0], k[0], v[0], *edges, 35, 35, backend=backend)
        return out[None]

    for run in (dense, varlen):
        far = [x.detach().requires_grad_() for x in views]
        near = [x.detach().contiguous().requires_grad_() for x in views]
        out, wanted = run(*far), run(*near)
        assert torch.equal(out, wanted)
        got = torch.autograd.grad(out, far, far_dout)
        wanted = torch.autograd.grad(wanted, near, far_dout.contiguous())
        assert all(map(torch.equal, got, wanted))


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("backend", "num_splits"),
    [pytest.param("hopper", 1, marks=needs_hopper), ("triton", 1), ("triton", 2)],
)
def test_results_beyond_31_bits(backend, num_splits):
    """out and dQ hold more than 2**31 elements; a narrow window keeps the work small."""
    needed = (16 + 18 * (num_splits > 1) + 12 * (backend == "hopper")) * 2**30
    if torch.cuda.mem_get_info()[0] < needed:
        pytest.skip(f"needs {needed >> 30} GiB of free GPU memory")
    rows, heads, dim, window = 2**17 + 64, 256, 64, 33
    q = torch.randn(1, rows, heads, dim, device="cuda", dtype=torch.float16)
    k, v = (torch.randn(1, rows, 1, dim, device="cuda", dtype=torch.float16) for _ in range(2))
    q.requires_grad_()
    options = {"window_size": (window, 0), "backend": backend, "return_lse": True}
    out, lse = flash_attn_func(q, k, v, num_splits=num_splits, **options)
    assert out.numel() > 2**31
    dout = torch.randn(1, 1, heads, dim, device="cuda", dtype=torch.float16).expand(out.shape)
    (dq,) = torch.autograd.grad(out, q, dout) if num_splits == 1 else (None,)
    last = 100
    few = q.detach()[:, -last:].clone().requires_grad_()
    keys, values = k[:, -last - window :], v[:, -last - window :]
    wanted, wanted_lse = flash_attn_func(few, keys, values, **options)
    torch.testing.assert_close(out[:, -last:], wanted, rtol=2e-3, atol=2e-3)
    torch.testing.assert_close(lse[:, :, -last:], wanted_lse, rtol=1e-5, atol=1e-5)
    if dq is not None:
        (wanted,) = torch.autograd.grad(wanted, few, dout[:, -last:])
        torch.testing.assert_close(dq[:, -last:], wanted, rtol=5e-3, atol=5e-3)
