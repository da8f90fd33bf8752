"""out, lse, dq, dk and dv of every case, backend and dtype against float64, the gradients from
those of out and of lse."""

from __future__ import annotations

import pytest
import torch
from helpers import (
    BACKEND_DTYPES,
    EVERY_BACKEND,
    FEATURE_CASES,
    GPU,
    SIXTEEN_BIT,
    case_named,
    forward_holds,
    gradients_hold,
    quick_case,
    swept_case,
)
from support.cases import FORWARD_CASES, call
from support.inputs import make_inputs, make_output_gradients

from flashattn3_bench.checking import gradients
from flashattn3_bench.checking.cases import dense, varlen

pytestmark = pytest.mark.usefixtures("poisoned_memory")


def run(case, tensors, backend, dout, dlse, **options):
    out, lse = call(case, tensors, return_lse=True, backend=backend, **options)
    pairs = [(value, given) for value, given in ((out, dout), (lse, dlse)) if given is not None]
    outputs, given = zip(*pairs, strict=True)
    return torch.autograd.grad(outputs, tensors[:3], given)


@pytest.mark.interpreted(quick=quick_case, sweep=swept_case)
@pytest.mark.parametrize(("backend", "dtype"), BACKEND_DTYPES)
@pytest.mark.parametrize("case", FORWARD_CASES)
def test_backward(case, backend, dtype, device):
    """Features without a gradient first, which a call finds another way to compute."""
    tensors = make_inputs(case, device, dtype, requires_grad=True)
    if case.name in FEATURE_CASES:
        with torch.no_grad():
            forward_holds(case, tensors, backend)
    if case.name == "large-scores" and dtype == torch.float32:
        pytest.skip(
            "P comes from an LSE of 1e4, which float32 knows to 6e-4; plain PyTorch keeps P"
        )
    if case.distribution == "huge" and dtype == torch.float16:
        pytest.skip("gradients of values up to 65504 leave float16's range")
    dout, dlse = make_output_gradients(case, tensors)
    results = forward_holds(case, tensors, backend)
    got = torch.autograd.grad(results, tensors[:3], (dout, dlse))
    gradients_hold(case, tensors, got, dout, dlse, backend)


SINGLE = ("causal", "gqa-2", "causal-empty-rows", "softcap-causal", "varlen-seqused")


@pytest.mark.parametrize("which", ["dout", "dlse"])
@pytest.mark.parametrize("backend", EVERY_BACKEND)
@pytest.mark.parametrize("name", SINGLE)
def test_gradient_of_one_output_alone(name, backend, which, device):
    case = case_named(name)
    tensors = make_inputs(case, device, torch.float16, requires_grad=True)
    dout, dlse = make_output_gradients(case, tensors)
    given = (dout, None) if which == "dout" else (None, dlse)
    got = run(case, tensors, backend, *given)
    if which == "dlse":
        assert not got[2].any(), "lse does not depend on v"
    gradients_hold(case, tensors, got, dout if which == "dout" else 0 * dout, given[1], backend)


@pytest.mark.interpreted(
    quick=lambda name, backend: backend != "triton" or not name.startswith(("dim-1", "varlen-dim"))
)
@pytest.mark.parametrize("backend", EVERY_BACKEND)
@pytest.mark.parametrize(
    "name",
    [
        *("gqa-2", "dim-72-40", "varlen-causal-cross", "layout-bhsd"),
        *("dim-192", "dim-192-64", "dim-136-128", "varlen-dim-192", "varlen-dim-192-128"),
        *("varlen-cross", "varlen-gqa-seqused", "varlen-gqa-dim-256"),
    ],
)
def test_deterministic_gradients_are_right_too(name, backend, device):
    case = case_named(name)
    tensors = make_inputs(case, device, torch.float16, requires_grad=True)
    dout, dlse = make_output_gradients(case, tensors)
    got = run(case, tensors, backend, dout, dlse, deterministic=True)
    gradients_hold(case, tensors, got, dout, dlse, backend)


@pytest.mark.parametrize("backend", EVERY_BACKEND)
@pytest.mark.parametrize("name", ["causal", "varlen"])
def test_any_strides_of_the_given_gradients(name, backend, device):
    """As autograd gives them: an expanded scalar, a transposed view, a last stride that is not
    1."""

    def gradients(dout, dlse):
        return run(case, tensors, backend, dout, dlse, deterministic=True)

    case = case_named(name)
    tensors = make_inputs(case, device, torch.float16, requires_grad=True)
    dout, dlse = make_output_gradients(case, tensors)
    dout, dlse = dout.nan_to_num(), dlse.nan_to_num()
    wanted = gradients(dout, dlse)
    padded_layout = dout.transpose(-3, -2).contiguous().transpose(-3, -2)
    spread = torch.stack([dout, dout], dim=-1)[..., 0]
    slow_rows = dlse.transpose(-1, -2).contiguous().transpose(-1, -2)
    for given in ((padded_layout, slow_rows), (spread, dlse)):
        assert all(map(torch.equal, gradients(*given), wanted))
    ones = torch.ones_like(dout)
    expanded = ones.flatten()[0].expand(dout.shape)
    wanted = gradients(ones, None)
    assert all(map(torch.equal, gradients(expanded, None), wanted))


@pytest.mark.parametrize("backend", EVERY_BACKEND)
@pytest.mark.parametrize("which", [0, 1, 2])
def test_gradient_of_one_input_alone(backend, which, device):
    case = case_named("gqa-2")
    tensors = make_inputs(case, device, torch.float16)
    dout, dlse = make_output_gradients(case, tensors)
    options = {"backend": backend, "deterministic": True}
    every = type(tensors)(*(x.requires_grad_() for x in tensors[:3]))
    wanted = run(case, every, dout=dout, dlse=dlse, **options)
    leaves = [x.detach().requires_grad_(i == which) for i, x in enumerate(tensors[:3])]
    out, lse = call(case, type(tensors)(*leaves), return_lse=True, **options)
    (got,) = torch.autograd.grad((out, lse), leaves[which], (dout, dlse))
    assert torch.equal(got, wanted[which])


def shared_keys(seqlens, group, dtype, device, dims=(64, 64)):
    """A case of one KV head, its tensors and a gradient of out."""
    case = dense("shared", seqlens, (group, 1), dims, batch=1, causal=seqlens[0] == seqlens[1])
    tensors = make_inputs(case, device, dtype, requires_grad=True)
    return case, tensors, make_output_gradients(case, tensors)[0]


# On Hopper query heads of a KV head have work tiles of their own, whose dk and dv are summed.
# Rounded to 16 bits before, they have 1.2 times these errors.
@pytest.mark.parametrize("backend", EVERY_BACKEND)
@pytest.mark.parametrize("group", [4, 8, 16] if GPU else [4])
@pytest.mark.parametrize("dtype", SIXTEEN_BIT if GPU else [torch.float16])
def test_dk_and_dv_of_query_heads_are_rounded_once(dtype, group, backend, device):
    seqlens = (512, 512) if GPU else (64, 64)
    case, tensors, dout = shared_keys(seqlens, group, dtype, device)
    _, dk, dv = run(case, tensors, backend, dout, None)
    _, wanted_dk, wanted_dv = gradients(tensors, dout, None, **case.reference_options())
    unit = torch.finfo(dtype).eps / torch.finfo(torch.bfloat16).eps
    for got, wanted, bound in ((dk, wanted_dk, 0.00265), (dv, wanted_dv, 0.0025)):
        assert (got - wanted).norm() < bound * unit * wanted.norm()


@pytest.mark.parametrize("backend", EVERY_BACKEND)
@pytest.mark.parametrize("head_dim", [64, 128, 192, 256] if GPU else [64])
def test_dk_and_dv_are_finite_where_those_of_a_query_head_are_not(head_dim, backend, device):
    """In float16 dv of each query head is about 8e4, and of all four below 2e4."""
    dims = (head_dim, head_dim)
    case, tensors, dout = shared_keys((64, 16), 4, torch.float16, device, dims)
    sizes = (0.1, 1.0, 1e-3)
    leaves = [(x.detach() * size).requires_grad_() for x, size in zip(tensors, sizes, strict=False)]
    tensors = type(tensors)(*leaves)
    dout = torch.full_like(dout, 2e4)
    dout[:, :, 2:] *= -1
    got = run(case, tensors, backend, dout, None)
    assert all(gradient.isfinite().all() for gradient in got)
    gradients_hold(case, tensors, got, dout, None, backend)


@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("head_dim", [64, 128, 192, 256])
@pytest.mark.parametrize("backend", EVERY_BACKEND)
def test_keys_that_no_sequence_owns_get_zeros(backend, head_dim, deterministic, device):
    """Rows past seqused_k, in sequences of no used key and behind the last one. On Hopper
    dk and dv of several query heads are added there, from memory that is NaN here."""
    heads, dims = (6, 1), (head_dim, head_dim)
    used = {"seqused_q": (17, 5, 0, 0), "seqused_k": (33, 0, 9, 0), "tail_rows": 13}
    case = varlen("rows", (17, 9, 0, 3), (40, 21, 9, 0), heads, dims, **used)
    tensors = make_inputs(case, device, torch.float16, requires_grad=True)
    dout, dlse = make_output_gradients(case, tensors)
    got = run(case, tensors, backend, dout, dlse, deterministic=deterministic)
    gradients_hold(case, tensors, got, dout, dlse, backend)
    for gradient in got[1:]:
        # The used keys of the third sequence are seen by no query.
        assert gradient[:33].any() and not gradient[33:].any()


@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize("backend", EVERY_BACKEND)
def test_keys_past_the_end_add_nothing_to_dq(backend, head_dim, device):
    """All scores are -32, so exp(0 - lse) of a key past the end is beyond float16."""
    case = dense("low", (130, 40), (1, 1), (head_dim, head_dim))
    tensors = make_inputs(case, device, torch.float16)
    size = (32 / head_dim**0.5) ** 0.5
    q, k = (torch.full_like(x, fill) for x, fill in zip(tensors, (size, -size), strict=False))
    tensors = type(tensors)(*(x.requires_grad_() for x in (q, k, tensors.v)))
    dout, _ = make_output_gradients(case, tensors)
    got = run(case, tensors, backend, dout, None)
    gradients_hold(case, tensors, got, dout, None, backend)
