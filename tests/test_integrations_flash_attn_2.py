"""Code written for FlashAttention-2 and -3: the names, the arguments and the calls of libraries."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import inspect
import sys
from types import ModuleType

import flash_attn_callers
import pytest
import torch
from helpers import GPU, run_python

import flashattn3
from flashattn3 import UnsupportedError
from flashattn3 import flash_attn_func as own_func
from flashattn3.integrations.flash_attn_2 import install_as_flash_attn_2
from flashattn3.integrations.flash_attn_3 import install_as_flash_attn_3
from flashattn3.integrations.stand_in import StandIn

Q_K_V = "q k v"
EDGES = "cu_seqlens_q cu_seqlens_k max_seqlen_q max_seqlen_k"
OPTIONS = (
    "dropout_p softmax_scale causal window_size softcap alibi_slopes deterministic "
    "return_attn_probs"
)
OF_PASSES = "dropout_p softmax_scale causal window_size_left window_size_right softcap alibi_slopes"
OF_BACKWARD = f"dout {Q_K_V} out softmax_lse dq dk dv"
# The arguments of release 2.8.3 in their order.
SIGNATURES = {
    "flash_attn_func": f"{Q_K_V} {OPTIONS}",
    "flash_attn_qkvpacked_func": f"qkv {OPTIONS}",
    "flash_attn_kvpacked_func": f"q kv {OPTIONS}",
    "flash_attn_varlen_func": f"{Q_K_V} {EDGES} {OPTIONS} block_table",
    "flash_attn_varlen_qkvpacked_func": f"qkv cu_seqlens max_seqlen {OPTIONS}",
    "flash_attn_varlen_kvpacked_func": f"q kv {EDGES} {OPTIONS}",
    "flash_attn_with_kvcache": "q k_cache v_cache k v rotary_cos rotary_sin cache_seqlens "
    "cache_batch_idx cache_leftpad block_table softmax_scale causal window_size softcap "
    "rotary_interleaved alibi_slopes num_splits return_softmax_lse",
    "_flash_attn_forward": f"{Q_K_V} {OF_PASSES} return_softmax",
    "_flash_attn_varlen_forward": f"{Q_K_V} {EDGES} {OF_PASSES} return_softmax block_table "
    "leftpad_k seqused_k zero_tensors",
    "_flash_attn_backward": f"{OF_BACKWARD} {OF_PASSES} deterministic rng_state",
    "_flash_attn_varlen_backward": f"{OF_BACKWARD} {EDGES} {OF_PASSES} deterministic rng_state "
    "zero_tensors",
}


@pytest.fixture(autouse=True)
def _installed():
    install_as_flash_attn_2()
    install_as_flash_attn_3()
    yield
    _remove()


def _remove():
    for name in [name for name, module in sys.modules.items() if isinstance(module, StandIn)]:
        del sys.modules[name]


def test_the_names_are_this_package():
    install_as_flash_attn_2()  # a second time, as the fixture has done it
    install_as_flash_attn_3()
    import flash_attn_interface

    nested = importlib.import_module("flash_attn_3.flash_attn_interface")
    for name in (
        *("flash_attn_func", "flash_attn_qkvpacked_func", "flash_attn_combine"),
        "get_scheduler_metadata",
    ):
        assert getattr(flash_attn_interface, name) is getattr(nested, name)
        assert getattr(nested, name) is getattr(flashattn3, name)
    assert flash_attn_interface._flash_attn_forward is nested._flash_attn_forward
    assert importlib.util.find_spec("flash_attn_interface").origin == "flashattn3"
    q, cache = torch.randn(1, 5, 2, 8), torch.randn(1, 9, 2, 8)
    out, lse = nested.flash_attn_func(q, q, q, causal=True, return_attn_probs=True)
    assert out.shape == q.shape and lse.shape == (1, 2, 5)
    lengths = torch.tensor([7], dtype=torch.int32)
    given = {"cache_seqlens": lengths, "causal": True}
    out = nested.flash_attn_with_kvcache(q[:, -1:], cache, cache, **given)
    torch.testing.assert_close(out, own_func(q[:, -1:], cache[:, :7], cache[:, :7]))
    with pytest.raises(ModuleNotFoundError, match=r"flash_attn\.losses"):
        importlib.import_module("flash_attn.losses")
    for name in ("flash-attn-3", "flash_attn_3", "flash-attn", "flash_attn"):
        with pytest.raises(importlib.metadata.PackageNotFoundError):
            importlib.metadata.distribution(name)


@pytest.mark.parametrize("is_a_file", [True, False], ids=["a file", "a module without a spec"])
@pytest.mark.parametrize(
    ("name", "install"),
    [
        ("flash_attn_interface", install_as_flash_attn_3),
        ("flash_attn_3", install_as_flash_attn_3),
        ("flash_attn", install_as_flash_attn_2),
    ],
)
def test_refused_where_the_real_package_is(name, install, is_a_file, tmp_path, monkeypatch):
    _remove()
    found = name
    if is_a_file:
        (tmp_path / f"{name}.py").write_text("real = True\n")
        monkeypatch.syspath_prepend(tmp_path)
        found = f"{name} at {tmp_path}"
    else:
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    with pytest.raises(UnsupportedError, match=f"{name} must not be installed, got {found}"):
        install()
    if is_a_file:
        assert importlib.import_module(name).real
        del sys.modules[name]


@pytest.mark.parametrize("name", SIGNATURES)
def test_signatures(name):
    interface = importlib.import_module("flash_attn.flash_attn_interface")
    # ring-flash-attention reads the arguments from here, which follows no __wrapped__.
    assert inspect.getfullargspec(getattr(interface, name)).args == SIGNATURES[name].split()
    if name.startswith("_"):
        assert hasattr(interface, f"_wrapped{name}")
    else:
        assert getattr(importlib.import_module("flash_attn"), name) is getattr(interface, name)


@pytest.mark.parametrize("caller", flash_attn_callers.CALLERS, ids=lambda caller: caller.__name__)
def test_calls_of_libraries(caller, device):
    """In float32, on a GPU in bfloat16."""
    dtype, bound = (torch.bfloat16, 1e-2) if GPU else (torch.float32, 2e-6)
    for name, found, wanted in caller(torch.zeros(1, device=device, dtype=dtype)):
        assert found.shape == wanted.shape, name
        assert flash_attn_callers.error(found, wanted) < bound, name


def test_context_parallelism_of_diffusers():
    """The two lines of docs/integrations.md, then diffusers' own calls of both passes."""
    pytest.importorskip("diffusers", "0.36")
    code = """
from flashattn3.integrations.flash_attn_2 import VERSION, install_as_flash_attn_2
install_as_flash_attn_2()
from diffusers.utils import import_utils
import_utils._flash_attn_available, import_utils._flash_attn_version = True, "2.8.3"
assert VERSION == "2.8.3"
import torch
from diffusers.models import attention_dispatch
assert attention_dispatch._wrapped_flash_attn_forward.__module__.startswith("flashattn3")
class Context:
    def save_for_backward(self, *tensors):
        self.saved_tensors = tensors
leaves = [torch.randn(2, 33, 4, 16, requires_grad=True) for _ in range(3)]
wanted = torch.nn.functional.scaled_dot_product_attention(*(x.transpose(1, 2) for x in leaves))
dout = torch.randn(2, 33, 4, 16)
of = torch.autograd.grad(wanted, leaves, dout.transpose(1, 2))
context = Context()
with torch.no_grad():
    out, lse = attention_dispatch._flash_attention_forward_op(context, *leaves, return_lse=True)
    gradients = attention_dispatch._flash_attention_backward_op(context, dout)
torch.testing.assert_close(out, wanted.transpose(1, 2), rtol=1e-4, atol=1e-5)
torch.testing.assert_close(gradients, of, rtol=1e-4, atol=1e-5)
print("done")
"""
    assert run_python(code).strip().endswith("done")


def test_packed_calls_return_three_values_too():
    import flash_attn

    qkv, kv = torch.randn(2, 5, 3, 2, 8), torch.randn(2, 5, 2, 2, 8)
    q, k, v = qkv.unbind(2)
    edges, options = torch.tensor([0, 5, 10], dtype=torch.int32), (0.0, 0.3, True)
    for name, given, keys in (
        ("flash_attn_qkvpacked_func", (qkv,), (k, v)),
        ("flash_attn_kvpacked_func", (q, kv), kv.unbind(2)),
        ("flash_attn_varlen_qkvpacked_func", (qkv.flatten(0, 1), edges, 5), (k, v)),
    ):
        call = getattr(flash_attn, name)
        out, lse, probabilities = call(*given, *options, return_attn_probs=True)
        wanted, of = own_func(q, *keys, 0.3, True, return_lse=True)
        torch.testing.assert_close(out.view(q.shape), wanted)
        assert lse.numel() == of.numel() and probabilities is None


def test_slopes():
    """ALiBi, in a call with gradients and in its two passes."""
    from flash_attn import flash_attn_func
    from flash_attn.flash_attn_interface import _flash_attn_backward, _flash_attn_forward

    q, k, v = (torch.randn(2, 6, 2, 8, requires_grad=True) for _ in range(3))
    slopes, options = torch.tensor([0.5, 0.1]), (0.0, None, True, -1, -1, 0.0)
    out = flash_attn_func(q, k, v, causal=True, alibi_slopes=slopes)
    wanted = own_func(q, k, v, causal=True, alibi_slopes=slopes)
    assert torch.equal(out, wanted) and not torch.equal(out, own_func(q, k, v, causal=True))
    dout = torch.randn_like(out)
    gradients = torch.autograd.grad(out, (q, k, v), dout)
    with torch.no_grad():
        found, lse, *_ = _flash_attn_forward(q, k, v, *options, slopes, False)
        results = [torch.empty_like(x) for x in (q, k, v)]
        _flash_attn_backward(dout, q, k, v, found, lse, *results, *options, slopes, False)
    assert torch.equal(found, out) and all(map(torch.equal, results, gradients))


def test_what_is_refused():
    from flash_attn import flash_attn_func
    from flash_attn.flash_attn_interface import _flash_attn_varlen_forward

    q = torch.randn(1, 4, 2, 8)
    with pytest.raises(UnsupportedError, match=r"flash_attn_func: dropout_p must be 0, got 0\.1"):
        flash_attn_func(q, q, q, 0.1)
    options = 0.0, None, True, -1, -1, 0.0
    edges = torch.tensor([0, 4], dtype=torch.int32)
    with pytest.raises(ValueError, match="leftpad_k must be None without block_table"):
        _flash_attn_varlen_forward(*(q[0],) * 3, edges, edges, 4, 4, *options, leftpad_k=edges[:1])


# Tensors that a caller passes for a result and that do not fit it, made from q, and the message.
WRONG_RESULTS = {
    "broadcast": (lambda x: x.new_empty(3, *x.shape), r"\.shape must be"),
    "converted": (lambda x: torch.empty_like(x, dtype=torch.int32), r"\.dtype must be"),
    "moved": (lambda x: torch.empty_like(x, device="meta"), r"\.device must be"),
    "no tensor": (lambda x: 3, " must be a torch.Tensor or None, got 3"),
}


@pytest.mark.parametrize("wrong", WRONG_RESULTS)
def test_results_that_do_not_fit_are_errors_and_nothing_is_written(wrong):
    import flash_attn_interface
    from flash_attn.flash_attn_interface import _flash_attn_backward

    made, message = WRONG_RESULTS[wrong]
    q, edges = torch.randn(1, 4, 2, 8), torch.tensor([0, 4], dtype=torch.int32)
    with pytest.raises((ValueError, TypeError), match=f"flash_attn_varlen_func: out{message}"):
        flash_attn_interface.flash_attn_varlen_func(
            *(q[0],) * 3, edges, edges, 4, 4, out=made(q[0])
        )
    with pytest.raises((ValueError, TypeError), match=f"_flash_attn_forward: out{message}"):
        flash_attn_interface._flash_attn_forward(q, q, q, out=made(q))
    out, lse, *_ = flash_attn_interface._flash_attn_forward(q, q, q)
    tensors, dq = (out, q, q, q, out, lse), torch.zeros_like(q)
    with pytest.raises((ValueError, TypeError), match=f"_flash_attn_backward: dv{message}"):
        flash_attn_interface._flash_attn_backward(*tensors, dq=dq, dv=made(q))
    options = 0.0, None, False, -1, -1, 0.0, None, False
    with pytest.raises((ValueError, TypeError), match=f"_flash_attn_backward: dv{message}"):
        _flash_attn_backward(*tensors, dq, None, made(q), *options)
    assert not dq.any()


def test_flash_attention_3_takes_pages_by_either_name_and_returns_four_values():
    from flash_attn_interface import flash_attn_varlen_func, flash_attn_with_kvcache

    assert "block_table" in inspect.signature(flash_attn_varlen_func).parameters
    assert inspect.getfullargspec(flash_attn_with_kvcache).args[:3] == ["q", "k_cache", "v_cache"]
    pool = torch.randn(2, 5, 8, 2, 16)
    table, used = torch.tensor([[4, 1], [0, 2]]).int(), torch.tensor([11, 8]).int()
    q, edges = torch.randn(5, 4, 16), torch.tensor([0, 1, 5]).int()
    options = {"causal": True, "softmax_scale": 0.3}
    calls = [
        flash_attn_varlen_func(
            q, *pool, edges, None, 4, 16, seqused_k=used, return_attn_probs=True, **options, **names
        )
        for names in ({"block_table": table}, {"page_table": table, "deterministic": True})
    ]
    out, lse, *rest = flash_attn_with_kvcache(
        q, *pool, cache_seqlens=used, cu_seqlens_q=edges, max_seqlen_q=4, block_table=table,
        return_softmax_lse=True, **options,
    )  # fmt: skip
    assert [x.numel() for x in rest] == [0, 0]
    for found in calls:
        torch.testing.assert_close(found, (out, lse), rtol=0, atol=0)
    keys = [x[table[1]].flatten(0, 1)[None, :8] for x in pool]
    torch.testing.assert_close(out[1:][None], own_func(q[None, 1:], *keys, **options))


def test_bert_padding():
    from flash_attn.bert_padding import (
        index_put_first_axis,
        unpad_input,
        unpad_input_for_concatenated_sequences,
    )

    x = torch.randn(2, 4, 3, requires_grad=True)
    mask, unused = torch.tensor([[1, 1, 0, 0], [0, 1, 1, 1]]), torch.tensor([[0, 0, 1, 0]] * 2)
    unused[1] = 0
    rows, indices, edges, longest, tokens = unpad_input(x, mask, unused)
    assert indices.tolist() == [0, 1, 2, 5, 6, 7] and edges.tolist() == [0, 3, 6]
    assert (longest, tokens.tolist(), edges.dtype) == (3, [2, 3], torch.int32)
    rows.sum().backward()
    assert torch.equal(x.grad, (mask + unused)[..., None].expand(x.shape).float())
    back = index_put_first_axis(rows, indices, 8).view(x.shape)
    assert torch.equal(back, x * (mask + unused)[..., None])
    lengths = torch.tensor([[1, 2, 0, 0], [4, 0, 0, 0]])
    rows, indices, edges, longest = unpad_input_for_concatenated_sequences(x, lengths)
    assert indices.tolist() == [0, 1, 2, 4, 5, 6, 7] and edges.tolist() == [0, 1, 3, 7]
    assert longest == 4 and torch.equal(rows, x.flatten(0, 1)[indices])


def turned(x, positions, columns, base, interleaved):
    """x (seqlen, heads, head_dim), as complex numbers in float64."""
    x = x.double()
    half = columns // 2
    pairs = x[..., :columns].unflatten(-1, (half, 2) if interleaved else (2, half))
    first, second = pairs.unbind(-1 if interleaved else -2)
    angles = torch.outer(positions.double(), base ** -(torch.arange(half) / half).double())
    product = torch.complex(first, second) * torch.polar(torch.ones_like(angles), angles)[:, None]
    parts = torch.stack((product.real, product.imag), -1 if interleaved else -2).flatten(-2)
    return torch.cat((parts, x[..., columns:]), -1)


@pytest.mark.parametrize("interleaved", [False, True])
def test_rotary(interleaved):
    from flash_attn.layers.rotary import RotaryEmbedding, apply_rotary_emb_func
    from flash_attn.ops.triton.rotary import apply_rotary

    qkv, columns = torch.randn(2, 5, 3, 2, 16), 12
    leaf = qkv.clone().requires_grad_()
    layer = RotaryEmbedding(columns, base=100.0, interleaved=interleaved)
    found = layer(leaf * 1, seqlen_offset=torch.tensor([0, 3]), max_seqlen=8)
    steps = torch.arange(5)
    for i, offset in enumerate((0, 3)):
        for side in (0, 1):
            of = qkv[i, :, side], steps + offset, columns, 100.0, interleaved
            torch.testing.assert_close(found[i, :, side], turned(*of).float())
    assert torch.equal(found[:, :, 2], qkv[:, :, 2])
    weights = torch.randn_like(qkv)
    (gradient,) = torch.autograd.grad((found * weights).sum(), leaf)
    cos, sin = layer._cos_cached, layer._sin_cached  # as decoding code and subclasses read them
    back = apply_rotary(weights[:, :, 0], cos, sin, torch.tensor([0, 3]), None, None, interleaved,
                        conjugate=True)  # fmt: skip
    torch.testing.assert_close(gradient[:, :, 0], back)
    q, kv = layer(qkv[:, :, 0].clone(), qkv[:, :, 1:].clone(), seqlen_offset=2)
    torch.testing.assert_close(
        q, apply_rotary_emb_func(qkv[:, :, 0], cos, sin, interleaved, seqlen_offsets=2)
    )
    of = qkv[1, :, 1], steps + 2, columns, 100.0, interleaved
    torch.testing.assert_close(kv[1, :, 0], turned(*of).float())
    assert (
        apply_rotary(qkv[:, :, 0], cos[:3], sin[:3]).isnan().any(-1).any(-1).tolist()
        == [[False, False, False, True, True]] * 2
    )


def test_xpos_cancels_between_q_and_k():
    """Scores depend on the distance alone: the scales of q and k are inverse at one position."""
    from flash_attn.layers.rotary import RotaryEmbedding

    torch.manual_seed(0)
    layer = RotaryEmbedding(16, scale_base=512)
    row = torch.randn(1, 1, 3, 1, 16, dtype=torch.float64).expand(1, 6, 3, 1, 16)
    q, k, _ = layer(row.clone()).unbind(2)
    scores = q[0, :, 0] @ k[0, :, 0].T
    for distance in range(6):
        diagonal = scores.diagonal(-distance)
        torch.testing.assert_close(diagonal, diagonal[:1].expand(diagonal.shape))
