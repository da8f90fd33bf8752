"""The provider of torch's flash attention operators, on the CPU's dispatch key."""

from __future__ import annotations

import inspect
import math
import warnings
from functools import partial
from importlib.util import find_spec

import pytest
import torch
import torch.nn.attention
from torch.nn.functional import scaled_dot_product_attention

from flashattn3 import UnsupportedError, flash_attn_varlen_func, use_backend
from flashattn3.integrations import torch as provider
from flashattn3.integrations import torch_operators

if not hasattr(torch.nn.attention, "restore_flash_attention_impl"):
    pytest.skip("torch 2.11 has the first registry that restores", allow_module_level=True)

from torch.nn.attention import (
    activate_flash_attention_impl,
    current_flash_attention_impl,
    list_flash_attention_impls,
    register_flash_attention_impl,
    restore_flash_attention_impl,
)

LENGTHS = ((33, 33), (1, 40), (20, 47))
VARLEN = pytest.mark.skipif(
    find_spec("torch.nn.attention.varlen") is None, reason="this torch has no varlen_attn"
)


@pytest.fixture
def calls(monkeypatch):
    """Names of the functions of flashattn3 that the active provider called."""
    found = []

    def spied(name):
        function = getattr(torch_operators, name)

        def spy(*arguments, **options):
            found.append(name)
            return function(*arguments, **options)

        monkeypatch.setattr(torch_operators, name, spy)

    for name in ("flash_attn_func", "flash_attn_varlen_func", "attend_to_pages", "backward_of"):
        spied(name)
    activate_flash_attention_impl(provider.register(device="cpu"))
    yield found
    if current_flash_attention_impl():
        restore_flash_attention_impl()


def leaves(*lead, heads=(4, 4, 4), lengths=(33, 33), dim=32):
    rows = lengths[0], lengths[1], lengths[1]
    return [
        torch.randn(*lead, h, n, dim, requires_grad=True) for h, n in zip(heads, rows, strict=True)
    ]


def with_gradients(tensors, **options):
    out = scaled_dot_product_attention(*tensors, **options)
    return out, *torch.autograd.grad(out.square().sum(), tensors)


def exact(q, k, v, visible=None):
    """Attention over (batch, heads, seqlen, head_dim); visible: (seqlen_q, seqlen_k) bool."""
    k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], 1) for x in (k, v))
    scores = q @ k.mT / math.sqrt(q.shape[-1])
    if visible is not None:
        scores = scores.masked_fill(~visible, -math.inf)
    return scores.softmax(-1) @ v


def assert_same_function(found, wanted, tensors):
    torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-5)
    weights = torch.randn_like(wanted)
    pairs = (torch.autograd.grad((x * weights).sum(), tensors) for x in (found, wanted))
    for gradient, expected in zip(*pairs, strict=True):
        torch.testing.assert_close(gradient, expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("heads", [(4, 4, 4), (4, 2, 2), (4, 1, 1)])
@pytest.mark.parametrize("causal", [False, True])
def test_scaled_dot_product_attention(heads, causal, calls):
    tensors = leaves(2, heads=heads)
    visible = torch.ones(33, 33).tril().bool() if causal else None
    out = scaled_dot_product_attention(*tensors, is_causal=causal, enable_gqa=heads[1] != heads[0])
    assert_same_function(out, exact(*tensors, visible), tensors)
    assert calls == ["flash_attn_func", "backward_of"]


@pytest.mark.parametrize("lengths", LENGTHS)
def test_causal_is_aligned_as_torch_documents_it(lengths, calls):
    """To the top left in scaled_dot_product_attention, to the bottom right in the operator, which
    torch.nn.attention.bias.causal_lower_right calls."""
    tensors, (rows, keys) = leaves(2, lengths=lengths), lengths
    found = scaled_dot_product_attention(*tensors)
    assert_same_function(found, exact(*tensors), tensors)
    found = scaled_dot_product_attention(*tensors, is_causal=True)
    assert_same_function(found, exact(*tensors, torch.ones(lengths).tril().bool()), tensors)
    calls.clear()
    found = torch.ops.aten._scaled_dot_product_flash_attention(*tensors, 0.0, True)[0]
    visible = torch.ones(lengths).tril(keys - rows).bool()
    assert_same_function(found, exact(*tensors, visible), tensors)
    assert calls == ["flash_attn_func", "backward_of"]


@pytest.mark.parametrize("layout", ["heads first", "rows first", "packed"])
def test_layout_is_that_of_empty_like(layout, calls):
    """Compiled code asserts it."""
    if layout == "heads first":
        q, k, v = (torch.randn(2, 4, 33, 32) for _ in range(3))
    elif layout == "rows first":
        q, k, v = (torch.randn(2, 33, 4, 32).transpose(1, 2) for _ in range(3))
    else:
        q, k, v = torch.randn(2, 33, 3, 4, 32).transpose(1, 3).unbind(2)
    operator = torch.ops.aten._scaled_dot_product_flash_attention
    out, lse, _, _, rows, keys, seed, offset, mask = operator(q, k, v)
    assert out.stride() == torch.empty_like(q).stride()
    assert (lse.shape, lse.dtype) == ((2, 4, 33), torch.float32)
    assert (rows, keys, seed.shape, offset.shape, mask.numel()) == (33, 33, (2,), (), 0)
    assert seed.dtype == offset.dtype == torch.uint64
    assert not seed.any() and not offset.any()
    gradients = torch.ops.aten._scaled_dot_product_flash_attention_backward(
        torch.randn_like(out), q, k, v, out, lse, None, None, rows, keys, 0.0, False, seed, offset
    )
    for gradient, x in zip(gradients, (q, k, v), strict=True):
        assert gradient.stride() == torch.empty_like(x).stride()


@pytest.mark.parametrize("training", [False, True])
def test_modules(training, calls):
    layer = torch.nn.TransformerEncoderLayer(64, 4, 96, dropout=0.0, batch_first=True)
    attention = torch.nn.MultiheadAttention(64, 4, batch_first=True)
    x = torch.randn(2, 17, 64, requires_grad=training)
    restore_flash_attention_impl()
    wanted = attention.train(training)(x, x, x, need_weights=False)[0], layer.train(training)(x)
    activate_flash_attention_impl("FLASHATTN3")
    found = attention(x, x, x, need_weights=False)[0], layer(x)
    torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-5)
    if training:
        assert calls == ["flash_attn_func"] * 2
        found[1].sum().backward()
        assert calls[-1] == "backward_of"


@pytest.mark.parametrize(
    "compiler", ["aot_eager", pytest.param("inductor", marks=pytest.mark.slow)]
)
def test_compiled(compiler, calls):
    if compiler == "inductor":
        pytest.importorskip("torch._inductor")
        from test_torch_integration import COMPILER

        if COMPILER != "inductor":
            pytest.skip("inductor needs a C++ compiler on a CPU")
    torch._dynamo.reset()
    run = torch.compile(
        lambda q, k, v: scaled_dot_product_attention(q, k, v, is_causal=True),
        fullgraph=True,
        backend=compiler,
    )
    tensors = leaves(2)
    visible = torch.ones(33, 33).tril().bool()
    assert_same_function(run(*tensors), exact(*tensors, visible), tensors)
    assert calls == ["flash_attn_func", "backward_of"]


def test_what_flashattn3_does_not_have_goes_to_the_former_kernel(calls):
    tensors = leaves(2, lengths=(20, 47))
    masks = torch.rand(20, 47) > 0.3, torch.randn(20, 47)
    cases = {"is_causal": True}, {"dropout_p": 0.5}, *({"attn_mask": mask} for mask in masks)

    def results():
        for options in cases:
            torch.manual_seed(1)
            yield from with_gradients(tensors, **options)

    active = list(results())
    assert calls == []
    restore_flash_attention_impl()
    assert all(map(torch.equal, active, results()))


def test_an_argument_that_torch_has_no_kernel_for_either(calls):
    q, k, v = leaves(2)
    with pytest.raises(UnsupportedError, match="aten::_scaled_dot_product_flash_attention"):
        torch.ops.aten._scaled_dot_product_flash_attention(q, k, v, 0.1)


def test_a_scale_that_no_backend_takes_goes_to_the_former_kernel(calls):
    tensors, scales = leaves(2), (1e35, 1e-35)
    active = [with_gradients(tensors, scale=scale) for scale in scales]
    with use_backend("hopper"), pytest.raises(UnsupportedError, match="got 'hopper'"):
        with_gradients(tensors, scale=0.1)
    restore_flash_attention_impl()
    for found, scale in zip(active, scales, strict=True):
        wanted = with_gradients(tensors, scale=scale)
        torch.testing.assert_close(found, wanted, rtol=0, atol=0, equal_nan=True)


def test_operators_below_autocast_keep_their_dtype(calls):
    tensors = [x.detach() for x in leaves(2)]
    operator = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert operator(*tensors)[0].dtype == torch.float32
        assert scaled_dot_product_attention(*tensors).dtype == torch.bfloat16
    assert calls == ["flash_attn_func"] * 2


def test_restore_brings_the_former_kernels_back_bit_for_bit(calls):
    results = partial(with_gradients, leaves(2), is_causal=True)
    restore_flash_attention_impl()
    before = results()
    for _ in range(2):
        activate_flash_attention_impl("FLASHATTN3")
        assert not torch.equal(results()[0], before[0])
        restore_flash_attention_impl()
        assert all(map(torch.equal, results(), before))
    assert calls == ["flash_attn_func", "backward_of"] * 2


def test_another_provider_replaces_this_one(calls):
    register_flash_attention_impl("other", register_fn=lambda: None)
    activate_flash_attention_impl("other")
    scaled_dot_product_attention(*leaves(2))
    assert calls == []


def test_deterministic_algorithms(monkeypatch, calls):
    found = []
    forward = torch_operators.backward_of
    monkeypatch.setattr(
        torch_operators,
        "backward_of",
        lambda *a: (found.append(a[-1].deterministic), forward(*a))[1],
    )
    for flag in (True, False):
        torch.use_deterministic_algorithms(flag)
        scaled_dot_product_attention(*leaves(2)).sum().backward()
    assert found == [True, False]


def takes(function, argument):
    """Whether the installed torch's function has the argument."""
    return argument in inspect.signature(function).parameters


def edges(*lengths):
    return torch.tensor([0, *lengths]).cumsum(0).to(torch.int32)


def exact_of_sequences(queries, keys, values, window=(-1, -1)):
    """Compute lists of (seqlen, heads, head_dim), with a window aligned to the bottom right."""
    results = []
    for of in zip(queries, keys, values, strict=True):
        rows, columns = len(of[0]), len(of[1])
        offset = torch.arange(columns) - (torch.arange(rows)[:, None] + columns - rows)
        visible = torch.ones(rows, columns, dtype=torch.bool)
        visible &= offset >= -window[0] if window[0] >= 0 else visible
        visible &= offset <= window[1] if window[1] >= 0 else visible
        results.append(exact(*(x.transpose(0, 1)[None] for x in of), visible)[0].transpose(0, 1))
    return torch.cat(results)


@VARLEN
@pytest.mark.parametrize("window", [(-1, -1), (-1, 0), (4, 0), (3, 2)])
@pytest.mark.parametrize("compiled", [False, True])
def test_varlen_attn(window, compiled, calls):
    from torch.nn.attention.varlen import AuxRequest, varlen_attn

    groups = {"enable_gqa": True} if takes(varlen_attn, "enable_gqa") else {}
    q = torch.randn(33, 4, 32, requires_grad=True)
    k, v = (torch.randn(40, 2 if groups else 4, 32, requires_grad=True) for _ in range(2))
    cu_q, cu_k = edges(7, 13, 13), edges(9, 13, 18)
    run = varlen_attn
    if compiled:
        torch._dynamo.reset()
        run = torch.compile(varlen_attn, fullgraph=True, backend="aot_eager")
    out, lse = run(
        *(q, k, v, cu_q, cu_k, 13, 18),
        window_size=window,
        return_aux=AuxRequest(lse=True),
        **groups,
    )
    sequences = (x.split(n) for x, n in ((q, (7, 13, 13)), (k, (9, 13, 18)), (v, (9, 13, 18))))
    assert_same_function(out, exact_of_sequences(*sequences, window), (q, k, v))
    assert lse.shape == (4, 33)
    assert calls == ["flash_attn_varlen_func", "backward_of"]


@VARLEN
def test_varlen_attn_with_keys_that_do_not_count_and_into_a_given_tensor(calls):
    from torch.nn.attention import varlen

    q, k, v = torch.randn(6, 2, 32), torch.randn(40, 2, 32), torch.randn(40, 2, 32)
    used = torch.tensor([5, 20], dtype=torch.int32)
    if not takes(varlen.varlen_attn, "seqused_k"):
        pytest.skip("this torch's varlen_attn has no seqused_k")
    arguments = q, k, v, edges(3, 3), edges(15, 25), 3, 25
    wanted = flash_attn_varlen_func(*arguments, seqused_k=used)
    found = varlen.varlen_attn(*arguments, seqused_k=used)
    torch.testing.assert_close(found, wanted, rtol=0, atol=0)
    assert calls == ["flash_attn_varlen_func"]
    if hasattr(varlen, "varlen_attn_out"):
        out = torch.full_like(q, math.nan)
        varlen.varlen_attn_out(out, *arguments, seqused_k=used)
        torch.testing.assert_close(out, wanted, rtol=0, atol=0)
        assert calls == ["flash_attn_varlen_func"] * 2


@VARLEN
@pytest.mark.parametrize("num_splits", [None, 1, 3])
def test_varlen_attn_with_a_block_table(num_splits, calls):
    from torch.nn.attention import varlen

    if not takes(varlen.varlen_attn, "block_table"):
        pytest.skip("this torch's varlen_attn has no block_table")
    q, (k, v) = torch.randn(7, 4, 32), torch.randn(2, 12, 8, 2, 32)
    table = torch.tensor([[3, 1, 7], [0, 11, 2]], dtype=torch.int32)
    used = torch.tensor([19, 10], dtype=torch.int32)
    options = {"seqused_k": used, "block_table": table, "num_splits": num_splits}
    options |= {"window_size": (-1, 0), "enable_gqa": True}
    arguments = q, k, v, edges(3, 4), None, 4, 24
    found = varlen.varlen_attn(*arguments, **options)
    pages = list(zip(table, used, strict=True))
    keys, values = ([x[own].flatten(0, 1)[:n] for own, n in pages] for x in (k, v))
    wanted = exact_of_sequences(q.split((3, 4)), keys, values, (-1, 0))
    torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-5)
    out = torch.full_like(q, math.nan)
    varlen.varlen_attn_out(out, *arguments, **options)
    assert torch.equal(out, found)
    assert calls == ["attend_to_pages"] * 2
    for other, said in (
        (out.half(), "dtype must be torch.float32"),
        (out.expand(2, 7, 4, 32), "shape"),
    ):
        with pytest.raises(ValueError, match=f"^varlen_attn_out: out.{said}"):
            varlen.varlen_attn_out(other, *arguments, **options)


def test_registering_twice_has_no_effect(monkeypatch):
    assert provider.register("twice", device="cpu") == "twice"
    monkeypatch.setattr(
        torch.nn.attention, "register_flash_attention_impl", lambda *_, **__: pytest.fail("again")
    )
    assert provider.register("twice", device="cpu") == "twice"
    assert "twice" in list_flash_attention_impls()


def test_code_that_names_fa3_finds_this_provider(monkeypatch):
    from torch.nn.attention import _registry

    monkeypatch.setattr(_registry, "_FLASH_ATTENTION_IMPLS", dict(_registry._FLASH_ATTENTION_IMPLS))
    monkeypatch.setattr(provider, "_registered", {})
    provider.register("FA3", device="cpu")
    activate_flash_attention_impl("FA3")
    try:
        assert current_flash_attention_impl() == "FA3"
        assert isinstance(_registry._FLASH_ATTENTION_ACTIVE[1], provider.Provider)
    finally:
        restore_flash_attention_impl()


def test_prefer_moves_flash_attention_ahead_until_it_is_restored():
    former = torch._C._get_sdp_priority_order()
    torch._C._set_sdp_priority_order([3, 1, 2, 0, 4])  # as torch has it on Hopper
    try:
        activate_flash_attention_impl(provider.register("preferred", prefer=True, device="cpu"))
        assert torch._C._get_sdp_priority_order() == [1, 3, 2, 0, 4]
        restore_flash_attention_impl()
        assert torch._C._get_sdp_priority_order() == [3, 1, 2, 0, 4]
    finally:
        torch._C._set_sdp_priority_order(former)


def test_without_prefer_register_says_that_cudnn_comes_first(monkeypatch):
    monkeypatch.setattr(provider, "_registered", {})
    monkeypatch.setattr(provider, "_tries_cudnn_first", lambda: True)
    with pytest.warns(UserWarning, match=r"cuDNN before flash.*prefer=True"):
        provider.register("warned")
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message=".*cuDNN")
        provider.register("warned")
        provider.register("preferring", prefer=True)


def test_errors(monkeypatch):
    with pytest.raises(ValueError, match="device must be 'cuda' or 'cpu', got 'xpu'"):
        provider.register(device="xpu")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(UnsupportedError, match="registered for a CUDA GPU, and none is visible"):
        activate_flash_attention_impl(provider.register("no GPU"))
    assert current_flash_attention_impl() is None
    monkeypatch.setattr(torch, "__version__", "2.9.1+cu130")
    with pytest.raises(UnsupportedError, match=r"torch must be 2\.10 or newer, got 2\.9\.1"):
        provider.register("old")
    monkeypatch.setattr(torch, "__version__", "2.77.0")
    with pytest.warns(UserWarning, match="not tested"):
        provider.register("new", device="cpu")
