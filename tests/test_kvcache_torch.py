"""torch's own machinery around cached calls: operators, fake tensors, the compiler."""

from __future__ import annotations

import itertools

import pytest
import torch
from helpers import GPU, needs_hopper
from support.kvcache import CacheCase, call_cached, make_cache_inputs
from torch._dynamo.testing import CompileCounterWithBackend
from torch._subclasses.fake_tensor import FakeTensorMode

from flashattn3 import (
    UnsupportedError,
    append_kvcache,
    flash_attn_combine,
    flash_attn_func,
    flash_attn_varlen_func,
    flash_attn_with_kvcache,
)
from flashattn3.call.cached import (
    AppendOptions,
    AppendTensors,
    DecodeOptions,
    DecodeTensors,
    Lengths,
)

CASES = (
    CacheCase("opcheck", (9, 17), 2, page_size=8, options={"causal": True}),
    CacheCase("opcheck-ragged", (9, 17), (2, 1), sinks=True, descales="heads", leftpad=(1, 2)),
)
BACKENDS = (
    "reference",
    pytest.param("triton", marks=() if GPU else pytest.mark.slow),
    pytest.param("hopper", marks=needs_hopper),
)


def operands(case, device):
    inputs = make_cache_inputs(case, device, torch.float16)
    given = {name: x for name, x in inputs.arguments.items() if name in DecodeTensors._fields}
    given["k_cache"], given["v_cache"] = (given[x].nan_to_num() for x in ("k_cache", "v_cache"))
    return inputs, DecodeTensors(**given)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("case", CASES)
def test_opcheck_decode(case, backend, device):
    inputs, tensors = operands(case, device)
    options = DecodeOptions(causal=True, backend=backend)
    lengths = Lengths(None, 0, inputs.arguments.get("max_seqlen_q"))
    out, lse = (torch.zeros_like(x) for x in call_cached(inputs))
    arguments = (out, lse, *tensors, *lengths, *options)
    torch.library.opcheck(torch.ops.flashattn3.decode.default, arguments)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("rotary", [False, True])
def test_opcheck_append(rotary, backend, device):
    tensors = new_tokens(device)
    if rotary:
        cos, sin = (torch.randn(32, 8, device=device) for _ in range(2))
        q = torch.randn(2, 3, 4, 16, device=device).half()
        tensors = tensors._replace(q=q, q_out=torch.zeros_like(q), rotary_cos=cos, rotary_sin=sin)
    check_append(tensors, backend)


@pytest.mark.parametrize("backend", BACKENDS[:2])
def test_opcheck_of_caches_of_8_bits(backend, device):
    case = CacheCase("8-bits", (9, 17), page_size=8, stored=torch.int8, descales="tokens")
    test_opcheck_decode(case, backend, device)
    tensors = new_tokens(device)
    caches = [x.to(torch.int8) for x in tensors[2:4]]
    descales = [torch.zeros(6, 4, 2, device=device) for _ in caches]
    named = {"k_cache": caches[0], "v_cache": caches[1]}
    named |= {"k_descale_out": descales[0], "v_descale_out": descales[1]}
    check_append(tensors._replace(**named), backend)


def new_tokens(device) -> AppendTensors:
    """Three of each of two sequences, for pages of four."""
    k, v = torch.randn(2, 2, 3, 2, 16, device=device).half()
    k_cache, v_cache = (torch.randn(6, 4, 2, 16, device=device).half() for _ in "kv")
    seqlens = torch.tensor([0, 5], dtype=torch.int32, device=device)
    table = torch.arange(6, dtype=torch.int32, device=device).view(2, 3)
    return AppendTensors(k, v, k_cache, v_cache, cache_seqlens=seqlens, page_table=table)


def check_append(tensors: AppendTensors, backend: str) -> None:
    arguments = (*tensors, *Lengths(None, 3), *AppendOptions(backend=backend))
    torch.library.opcheck(torch.ops.flashattn3.append.default, arguments)


@pytest.mark.parametrize("backend", BACKENDS)
def test_opcheck_combine(backend, device):
    parts = torch.randn(3, 2, 4, 2, 16, device=device), torch.randn(3, 2, 4, 2, device=device)
    out, lse = torch.zeros_like(parts[0][0]), torch.zeros_like(parts[1][0])
    operator = torch.ops.flashattn3.combine.default
    torch.library.opcheck(operator, (out, lse, *parts, backend, "flash_attn_combine"))


def test_append_declares_what_it_writes():
    written = [x.name for x in torch.ops.flashattn3.append.default._schema.arguments if x.is_write]
    assert written == ["k_cache", "v_cache", "q_out", "k_descale_out", "v_descale_out"]


def test_a_write_counts_for_autograd(device):
    cache = torch.zeros(1, 4, 1, 16, device=device)
    other = torch.ones_like(cache).requires_grad_()
    product = (other * cache).sum()
    new = torch.ones(1, 1, 1, 16, device=device)
    append_kvcache(new, new, cache, cache.clone(), cache_seqlens=0)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        product.backward()


@pytest.mark.parametrize("kind", ["cpu", "cuda"])
def test_fake_tensors_need_no_gpu(kind):
    with FakeTensorMode():

        def fake(*shape, dtype=torch.bfloat16):
            return torch.empty(shape, dtype=dtype, device=kind)

        ints = torch.int32
        q, caches = fake(2, 3, 4, 64), (fake(9, 16, 2, 64), fake(9, 16, 2, 32))
        table, seqlens = fake(2, 4, dtype=ints), fake(2, dtype=ints)
        out, lse = flash_attn_with_kvcache(
            q, *caches, cache_seqlens=seqlens, page_table=table, return_lse=True
        )
        assert (out.shape, out.dtype, out.device.type) == ((2, 3, 4, 32), torch.bfloat16, kind)
        assert (lse.shape, lse.dtype) == ((2, 4, 3), torch.float32)
        rows, edges = fake(6, 4, 64), fake(3, dtype=ints)
        out, lse = flash_attn_with_kvcache(
            rows, *caches, cache_seqlens=seqlens, page_table=table, cu_seqlens_q=edges,
            max_seqlen_q=4, return_softmax_lse=True,
        )  # fmt: skip
        assert (out.shape, lse.shape) == ((6, 4, 32), (4, 6))
        new = fake(2, 1, 2, 64), fake(2, 1, 2, 32)
        tables = fake(32, 16), fake(32, 16)
        turned = append_kvcache(
            *new, *caches, cache_seqlens=seqlens, page_table=table, rotary_cos=tables[0],
            rotary_sin=tables[1], q=q,
        )  # fmt: skip
        assert turned.shape == q.shape
        with pytest.raises(ValueError, match=r"page_table\.shape\[0\] must be 2"):
            flash_attn_with_kvcache(q, *caches, page_table=fake(3, 4, dtype=ints))
        parts = fake(3, 2, 5, 4, 32, dtype=torch.float32), fake(3, 2, 5, 4, dtype=torch.float32)
        out, lse = flash_attn_combine(*parts, out_dtype=torch.bfloat16)
        assert (out.shape, lse.shape, out.dtype) == ((2, 5, 4, 32), (2, 5, 4), torch.bfloat16)


@pytest.mark.skipif(torch.__version__ < "2.9", reason="torch 2.8 compiles a second graph")
def test_a_compiled_step_has_one_graph_for_all_steps(device, fresh_dynamo):
    """Append with rotary and attention, without a break; the caches are written in place."""

    def step(q, k, v, k_cache, v_cache, seqlens, table, cos, sin):
        out, lse = flash_attn_with_kvcache(
            q * 1.5, k_cache, v_cache, k, v, None, cos, sin, seqlens, page_table=table,
            causal=True, return_lse=True,
        )  # fmt: skip
        return out * 2, lse

    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(step, fullgraph=True, dynamic=True, backend=counter)
    torch.manual_seed(0)
    for batch, pages, width in ((5, 19, 3), (6, 31, 4), (7, 45, 6)):

        def normal(*shape):
            return torch.randn(shape, device=device)

        caches = [normal(pages, 4, 2, 16) for _ in range(2)]
        copies = [x.clone() for x in caches]
        seqlens = torch.arange(batch, dtype=torch.int32, device=device) + 1
        table = torch.arange(batch * width, dtype=torch.int32, device=device).view(batch, width)
        rest = seqlens, table, normal(32, 8), normal(32, 8)
        given = normal(batch, 2, 4, 16), normal(batch, 2, 2, 16), normal(batch, 2, 2, 16)
        wanted = step(*given, *caches, *rest)
        found = compiled(*given, *copies, *rest)
        torch.testing.assert_close(found, wanted)
        torch.testing.assert_close(copies, caches)
    graphs = [graph for graph in counter.graphs if "flashattn3" in graph.code]
    assert len(graphs) == 1, f"{len(graphs)} graphs"


@pytest.mark.parametrize("given", ["out", "prefix"])
def test_a_compiled_call_takes_further_lengths(given, device, fresh_dynamo):
    """The checks of out and of a prefix read shapes that the second call makes symbolic."""

    def step(q, cache, seqlens, table, out):
        options = {"out": out} if given == "out" else {"prefix_page_table": table, "prefix_len": 3}
        lengths = {"cache_seqlens": seqlens, "page_table": table, "causal": True}
        return flash_attn_with_kvcache(q, cache, cache, **lengths, **options)

    compiled = torch.compile(step, fullgraph=True, backend="eager")
    table = torch.arange(3, dtype=torch.int32, device=device)[None]
    seqlens = torch.tensor([9], dtype=torch.int32, device=device)
    for seqlen_q, pages in ((5, 3), (6, 4)):
        q = torch.randn(1, seqlen_q, 4, 16, device=device)
        of_call = q, torch.randn(pages, 4, 2, 16, device=device), seqlens, table
        wanted = step(*of_call, torch.empty_like(q))
        torch.testing.assert_close(compiled(*of_call, torch.empty_like(q)), wanted)


X = torch.randint(-8, 9, (2, 4, 2, 16)) / 4  # the same in all dtypes
EDGES = torch.tensor([0, 4], dtype=torch.int32)
CALLS = {
    "flash_attn_with_kvcache": lambda x: flash_attn_with_kvcache(x, X, X, cache_seqlens=3),
    "flash_attn_with_kvcache, new": lambda x: flash_attn_with_kvcache(
        X, X.clone(), X.clone(), x[:, :1], x[:, :1], cache_seqlens=3
    ),
    "append_kvcache": lambda x: append_kvcache(x, x, X.clone(), X.clone(), cache_seqlens=0),
    "flash_attn_combine": lambda x: flash_attn_combine(x[None], X[None, ..., 0]),
}
DENSE = {
    "flash_attn_func": lambda x: flash_attn_func(x, x, x),
    "flash_attn_varlen_func": lambda x: flash_attn_varlen_func(*[x[0]] * 3, EDGES, EDGES, 4, 4),
}
TRANSFORMS = {
    "vmap": (lambda call: torch.func.vmap(call)(X[None]), "torch.func.vmap is not supported"),
    "functionalize": (
        lambda call: torch.func.functionalize(call)(X),
        "torch.func.functionalize is not supported",
    ),
    "trace": (
        lambda call: torch.jit.trace(call, (X,)),
        r"torch.jit.trace \(and torch.onnx.export with dynamo=False\) is not supported",
    ),
}


@pytest.mark.filterwarnings("ignore::torch.jit.TracerWarning", "ignore:.*torch.jit.trace")
@pytest.mark.parametrize(
    ("name", "transform"),
    [*itertools.product(DENSE, ("trace", "functionalize")), *itertools.product(CALLS, TRANSFORMS)],
)
def test_transforms_that_a_call_does_not_support_are_named(name, transform):
    apply, sentence = TRANSFORMS[transform]
    call = (CALLS | DENSE)[name]
    call(X)  # a trace is refused after a like call too
    with pytest.raises(UnsupportedError, match=f"^{name.partition(',')[0]}: {sentence}"):
        apply(call)


@pytest.mark.parametrize(
    ("dtype", "compiled"),
    [
        (torch.float16, False),
        (torch.bfloat16, False),
        (torch.float32, False),
        (torch.float16, True),
    ],
)
def test_autocast_casts_to_the_cache_s_dtype(dtype, compiled, fresh_dynamo):
    caches = [X.to(dtype, copy=True) for _ in range(2)]
    copies = [x.clone() for x in caches]
    q, new, cos = X[:, :1], X[:, 1:2] * 2, torch.randn(9, 8)

    def call(q, new, k_cache, v_cache):
        given = {"rotary_cos": cos, "rotary_sin": cos, "cache_seqlens": 2}
        return flash_attn_with_kvcache(q, k_cache, v_cache, new, new, **given)

    wanted = call(q.to(dtype), new.to(dtype), *caches)
    run = torch.compile(call, fullgraph=True, backend="aot_eager") if compiled else call
    with torch.autocast("cpu", torch.bfloat16):
        found = run(q, new.half(), *copies)
    assert found.dtype == dtype and torch.equal(found, wanted)
    assert all(map(torch.equal, copies, caches))
    with torch.autocast("cpu", torch.bfloat16):
        append_kvcache(new, new, *copies, cache_seqlens=1)
    assert torch.equal(copies[0][:, 1:2], new.to(dtype))


def test_tensors_of_inference_mode_are_written_outside_of_it():
    with torch.inference_mode():
        caches, out = [X.clone() for _ in range(2)], torch.empty_like(X[:, :1])
    copies, new = [x.clone() for x in caches], X[:, :1] * 3
    wanted = flash_attn_with_kvcache(new, *copies, new, new, cache_seqlens=2)
    found = flash_attn_with_kvcache(new, *caches, new, new, cache_seqlens=2, out=out)
    assert found is out and torch.equal(out, wanted)
    assert all(map(torch.equal, caches, copies))
    flash_attn_combine(X[None, :, :1], X[None, :, :1, :, 0], out=out)
    torch.testing.assert_close(out, X[:, :1])
