"""flashattn3.flex_attention against torch's own."""

from __future__ import annotations

import gc
import weakref

import pytest
import torch
from torch.nn.attention.flex_attention import and_masks, create_block_mask
from torch.nn.attention.flex_attention import flex_attention as of_torch

from flashattn3 import UnsupportedError, flex, flex_attention, masks


def inputs(batch=2, heads=4, heads_kv=4, queries=150, keys=150, dim_v=16):
    generator = torch.Generator().manual_seed(0)
    shapes = (
        (batch, heads, queries, 16),
        (batch, heads_kv, keys, 16),
        (batch, heads_kv, keys, dim_v),
    )
    return [torch.randn(shape, generator=generator).requires_grad_() for shape in shapes]


def causal(b, h, q, k):
    return q >= k


def of_heads(b, h, q, k):
    return (q - k).abs() < 20 * (h + b)


# name: mask_mod, batch and heads of the block mask, inputs, options
CASES = {
    "causal": (causal, (None, None), {}, {}),
    "heads": (and_masks(causal, of_heads), (2, 4), {"dim_v": 24}, {"scale": 0.1}),
    "gqa": (of_heads, (2, 4), {"heads_kv": 2, "keys": 200}, {"enable_gqa": True}),
    "all": (None, None, {}, {}),
}


SLOW = ("heads", "gqa")  # torch traces its own attention for each


@pytest.mark.parametrize(
    "name", [pytest.param(x, marks=pytest.mark.slow) if x in SLOW else x for x in CASES]
)
def test_results_and_gradients_are_torchs(name):
    mask_mod, sizes, shapes, options = CASES[name]
    q, k, v = inputs(**shapes)
    mask = None
    if mask_mod is not None:
        mask = create_block_mask(mask_mod, *sizes, q.shape[2], k.shape[2], "cpu")
    found, lse = flex_attention(q, k, v, block_mask=mask, return_lse=True, **options)
    repeated = [x.detach().repeat_interleave(4 // x.shape[1], 1) for x in (q, k, v)]
    options.pop("enable_gqa", None)
    with torch.no_grad():  # torch has no gradients on a CPU
        wanted, of_lse = of_torch(*repeated, block_mask=mask, return_lse=True, **options)
    torch.testing.assert_close(found, wanted)
    torch.testing.assert_close(lse, of_lse)
    seen = None
    if mask is not None:
        seen = masks.from_block_mask(mask).to_bool()
    twin = [x.detach().requires_grad_() for x in (q, k, v)]
    group = q.shape[1] // k.shape[1]
    plain = torch.nn.functional.scaled_dot_product_attention(
        twin[0], *(x.repeat_interleave(group, 1) for x in twin[1:]), attn_mask=seen, **options
    )
    # sdpa makes NaN of rows without keys
    of_plain = torch.autograd.grad(torch.where(plain.isnan(), 0, plain).square().sum(), twin)
    for x, of in zip(torch.autograd.grad(found.square().sum(), (q, k, v)), of_plain, strict=True):
        torch.testing.assert_close(x, of.nan_to_num(), atol=1e-4, rtol=1e-4)


def test_a_block_mask_is_converted_once_and_again_after_a_write(monkeypatch):
    converted = []
    from_block_mask = flex.from_block_mask
    monkeypatch.setattr(
        flex, "from_block_mask", lambda *of: converted.append(of) or from_block_mask(*of)
    )
    first = torch.tensor([0, 70])

    def mask_mod(b, h, q, k):
        return k >= first[b]

    q, k, v = inputs()
    mask = create_block_mask(and_masks(causal, mask_mod), 2, None, 150, 150, "cpu")
    before = flex_attention(q, k, v, block_mask=mask)
    assert torch.equal(flex_attention(q, k, v, block_mask=mask), before)
    assert len(converted) == 1
    first[1] = 75
    assert not torch.equal(flex_attention(q, k, v, block_mask=mask), before)
    first = torch.tensor([0, 70])  # mask_mod sees the new one
    assert torch.equal(flex_attention(q, k, v, block_mask=mask), before)
    assert len(converted) == 3
    converted.clear()
    kept = weakref.ref(mask)
    del mask
    gc.collect()
    assert kept() is None, "the Mask keeps no BlockMask"


FIRST = torch.zeros(2, dtype=torch.int64)


class Holder(torch.nn.Module):
    """Has FIRST as a buffer, as an attribute of a class and behind a method."""

    of_class = FIRST

    def __init__(self):
        super().__init__()
        self.register_buffer("first", FIRST)
        self.held = {"first": [FIRST]}

    def of(self, b):
        return self.first[b]


HOLDER = Holder()


@pytest.mark.parametrize(
    "mask_mod",
    [
        pytest.param(lambda b, h, q, k: k >= FIRST[b], id="global"),
        pytest.param(lambda b, h, q, k, of=FIRST: k >= of[b], id="default"),
        pytest.param(lambda b, h, q, k, *, of=FIRST: k >= of[b], id="keyword"),
        pytest.param(lambda b, h, q, k: k >= HOLDER.first[b], id="buffer"),
        pytest.param(lambda b, h, q, k: k >= HOLDER.held["first"][0][b], id="dict"),
        pytest.param(lambda b, h, q, k: k >= Holder.of_class[b], id="class"),
        pytest.param(lambda b, h, q, k: k >= HOLDER.of(b), id="method"),
        pytest.param(and_masks(causal, lambda b, h, q, k: k >= FIRST[b]), id="and_masks"),
    ],
)
def test_writes_to_a_tensor_that_a_mask_mod_reads_by_a_name_are_seen(mask_mod):
    q, k, v = (x.detach() for x in inputs())
    FIRST.zero_()
    mask = create_block_mask(mask_mod, 2, None, 150, 150, "cpu")
    before = flex_attention(q, k, v, block_mask=mask)
    FIRST[1] = 75
    found = flex_attention(q, k, v, block_mask=mask)
    assert torch.equal(found[0], before[0])
    assert not torch.equal(found[1], before[1])


LIMIT = 0


def test_a_mask_mod_that_is_replaced_or_reads_another_number_is_seen():
    global LIMIT
    q, k, v = (x.detach() for x in inputs())
    lses = []
    mask = create_block_mask(causal, None, None, 150, 150, "cpu", BLOCK_SIZE=256)  # one block
    for mask_mod in (causal, lambda b, h, q, k: q - k <= LIMIT):
        mask.mask_mod = mask_mod
        lses.append(flex_attention(q, k, v, block_mask=mask, return_lse=True)[1])
    LIMIT = -75
    lses.append(flex_attention(q, k, v, block_mask=mask, return_lse=True)[1])
    for i, lse in enumerate(lses):
        assert not torch.equal(lse, lses[i - 1])


def test_a_mask_converted_under_inference_mode_or_a_transform_serves_later_calls():
    q, k, v = inputs()

    def out_of(q):
        return flex_attention(q, k.detach(), v.detach(), block_mask=mask).sum()

    for first in (torch.inference_mode()(out_of), torch.func.grad(out_of)):
        mask = create_block_mask(causal, None, None, 150, 150, "cpu")
        first(q.detach())
        (found,) = torch.autograd.grad(out_of(q), q)
        mask = masks.from_block_mask(mask)
        assert torch.equal(found, torch.autograd.grad(out_of(q), q)[0])


def test_writes_in_inference_mode_are_seen():
    q, k, v = (x.detach() for x in inputs())
    with torch.inference_mode():
        first = torch.zeros(2, dtype=torch.int64)
        mask = create_block_mask(lambda b, h, q, k: k >= first[b], 2, None, 150, 150, "cpu")
        before = flex_attention(q, k, v, block_mask=mask)
        first[1] = 75
        found = flex_attention(q, k, v, block_mask=mask)
    assert torch.equal(found[0], before[0])
    assert not torch.equal(found[1], before[1])


def test_keys_of_one_batch_serve_all_and_aux_holds_the_lse():
    from torch.nn.attention.flex_attention import AuxRequest

    q, k, v = (x.detach() for x in inputs())
    mask = masks.window(150, 30, 0)
    out, lse = flex_attention(q, k[:1], v[:1], block_mask=mask, return_lse=True)
    wanted = flex_attention(q, *(x[:1].expand_as(x) for x in (k, v)), block_mask=mask)
    assert torch.equal(out, wanted)
    of_aux, aux = flex_attention(q, k[:1], v[:1], block_mask=mask, return_aux=AuxRequest(lse=True))
    assert torch.equal(of_aux, out)
    assert torch.equal(aux.lse, lse)
    assert aux.max_scores is None
    assert flex_attention(q, k, v, return_aux=AuxRequest())[1].lse is None


def of_mask(q, k, v, mask):
    return flex_attention(q, k, v, block_mask=mask, scale=0.2)


@pytest.mark.slow
def test_compiled_code_takes_a_mask():
    q, k, v = inputs()
    run = torch.compile(of_mask, fullgraph=True, backend="aot_eager", dynamic=True)
    mask = masks.window(150, 30, 0)
    torch.testing.assert_close(run(q, k, v, mask), of_mask(q, k, v, mask))


def erring():
    from torch.nn.attention.flex_attention import AuxRequest

    window = masks.window(150, 3, 0)
    elsewhere = torch.zeros(9, device="meta")

    def reads(b, h, q, k):
        return elsewhere[q] > k

    block_mask = create_block_mask(causal, None, None, 150, 150, "cpu")
    block_mask.mask_mod = and_masks(causal, reads)
    part = create_block_mask(causal, None, None, 150, 150, "cpu")  # as torch 2.13 takes a part
    part.kv_indices = part.kv_indices[:, :, 1:]
    return (
        ({"score_mod": lambda s, *_: s}, "score_mod must be None, got"),
        ({"kernel_options": {"BLOCK_M": 64}}, "kernel_options must be None, got .*torch's own"),
        ({"return_aux": AuxRequest(max_scores=True)}, "return_aux.max_scores must be False"),
        ({"return_lse": True, "return_aux": AuxRequest()}, "return_lse must be False beside"),
        ({"return_lse": "no"}, r"return_lse must be a bool, got 'no' \(str\)"),
        ({"enable_gqa": 2}, r"enable_gqa must be a bool, got 2 \(int\)"),
        ({"return_aux": True}, r"return_aux must be None or an AuxRequest .*, got True \(bool\)"),
        ({"block_mask": torch.ones(150, 150).bool()}, "block_mask must be a BlockMask of torch"),
        ({"block_mask": masks.window(151, 3, 0)}, "mask.seqlen_q must be 150 as q's, got 151"),
        ({"block_mask": block_mask}, "elsewhere, which mask_mod reads, must be on cpu as the"),
        ({"block_mask": part}, r"block_mask.kv_indices.shape\[2\] must be at least 2, the blocks"),
        ({"block_mask": window, "key": torch.ones(2, 2, 150, 16)}, r"key.shape\[1\] must be 4 as"),
        ({"query": torch.ones(150, 16)}, r"query.shape must be \(batch, heads, seqlen, head_dim"),
        ({"value": None}, "value must be a torch.Tensor, got None"),
    )


@pytest.mark.parametrize(("options", "message"), erring())
def test_errors_name_the_argument(options, message):
    given = dict(zip(("query", "key", "value"), inputs(), strict=True))
    with pytest.raises(
        (UnsupportedError, TypeError, ValueError), match=f"flex_attention: {message}"
    ):
        flex_attention(**(given | options))
