"""Converts the accepted forms of 8-bit inputs to plain tensors and descales.

q, k and v are all ``BlockScaled``, or all plain tensors (q and k float8_e4m3fn or int8, v
float8_e4m3fn) with separate descales: (batch, heads) as in FlashAttention-3, or (batch, heads,
blocks).
"""

from __future__ import annotations

import torch
from torch import Tensor

from ..errors import expect, shown, type_error
from ..modes import is_traced, refuse_gradients
from ..quantization import BlockScaled
from ..quantization.torch_operations import of_sequences
from .descales import BLOCKS, EIGHT_BIT, check_mean, num_blocks
from .problem import Options, Tensors, check_tensor_types
from .value_checks import check_same_values, is_checked

SIDES = ("q", "k", "v")


def resolved(tensors: Tensors, options: Options, varlen: bool) -> tuple[Tensors, Options]:
    """Normalise the inputs of a call; inputs of 16 bits or more are only checked.

    tensors: as the caller passed them; q, k and v may be BlockScaled.
    """
    function = options.function
    block_scaled = type(tensors.q) is BlockScaled  # faster than isinstance when false
    if block_scaled:
        tensors, options = _taken_apart(function, tensors, options)
    elif varlen and tensors.cu_seqlens_k is None:
        tensors, options = _with_keys_in_rows(function, tensors, options)
    if not block_scaled and (type(tensors.k) is BlockScaled or type(tensors.v) is BlockScaled):
        raise type_error(function, "q", "BlockScaled as k or v is", shown(tensors.q))
    check_tensor_types(function, tensors, varlen)
    if tensors.q.dtype not in EIGHT_BIT:
        return tensors, options
    if not block_scaled:
        tensors, options = _with_blocks(function, tensors, options, varlen)
    refuse_gradients(function, **tensors._asdict())
    return tensors, options


def _with_keys_in_rows(
    function: str, tensors: Tensors, options: Options
) -> tuple[Tensors, Options]:
    """Flatten k and v (batch, seqlen_k, heads, ·) to varlen form and build cu_seqlens_k."""
    k, v, edges = tensors.k, tensors.v, tensors.cu_seqlens_q
    if not all(isinstance(x, Tensor) for x in (k, v, edges)):
        return tensors, options  # check_tensor_types raises
    axes = "(batch, seqlen_k, heads, head_dim) where cu_seqlens_k is None"
    for name, x in (("k", k), ("v", v)):
        expect(x.ndim == 4, function, f"{name}.shape", axes, tuple(x.shape))
    expect(edges.ndim == 1, function, "cu_seqlens_q.shape", "one-dimensional", tuple(edges.shape))
    (batch, seqlen), entries = k.shape[:2], edges.shape[0] - 1
    expect(batch == entries, function, "k.shape[0]", f"{entries} (batch)", batch)
    wanted = f"{(batch, seqlen)} as k's"
    expect(v.shape[:2] == k.shape[:2], function, "v.shape[:2]", wanted, tuple(v.shape[:2]))
    longest = seqlen if options.max_seqlen_k is None else min(seqlen, options.max_seqlen_k)
    edges = torch.arange(batch + 1, dtype=torch.int32, device=k.device) * seqlen
    rows = {"k": k.flatten(0, 1), "v": v.flatten(0, 1), "cu_seqlens_k": edges}
    return tensors._replace(**rows), options._replace(max_seqlen_k=longest)


def _taken_apart(function: str, tensors: Tensors, options: Options) -> tuple[Tensors, Options]:
    """Split BlockScaled q, k and v into data, descales and block sizes."""
    changes, blocks = {}, {}
    for side in SIDES:
        x, descale = getattr(tensors, side), getattr(tensors, f"{side}_descale")
        if not isinstance(x, BlockScaled):
            raise type_error(function, side, "BlockScaled as q is", shown(x))
        what, wanted = f"{side}_descale", f"None where {side} is BlockScaled"
        expect(descale is None, function, what, wanted, shown(descale))
        edges = tensors.cu_seqlens_q if side == "q" else tensors.cu_seqlens_k
        _check_edges(function, f"{side}.cu_seqlens", x.cu_seqlens, edges)
        layouts = ("rows", "permuted") if side == "v" else ("rows",)
        expect(x.layout in layouts, function, f"{side}.layout", f"one of {layouts}", x.layout)
        scaled = x.descale.numel() > 0  # False: there are no tokens
        changes[side] = x.data
        changes[f"{side}_descale"] = x.descale if scaled else None
        blocks[f"{side}_block"] = x.block if scaled else 0
    q, k, v = tensors[:3]
    expect(k.hadamard == q.hadamard, function, "k.hadamard", f"{q.hadamard} as q's", k.hadamard)
    expect(not v.hadamard, function, "v.hadamard", "False: out would stay rotated", v.hadamard)
    _check_means(function, tensors, options.softcap)
    permuted = v.shape[-1] if v.layout == "permuted" else 0
    return tensors._replace(**changes), options._replace(**blocks, v_permuted=permuted)


def _check_means(function: str, tensors: Tensors, softcap: float) -> None:
    """Check the mean of BlockScaled inputs: only k may have one."""
    q, k, v = tensors[:3]
    expect(q.mean is None, function, "q.mean", "None: it would change weights", "a tensor")
    expect(v.mean is None, function, "v.mean", "None: out would lack it", "a tensor")
    if k.mean is None:
        return
    wanted = "0 where k has a mean: capped scores do not all move alike"
    expect(softcap == 0, function, "softcap", wanted, softcap)
    batch = k.shape[0] if k.cu_seqlens is None else k.cu_seqlens.numel() - 1
    check_mean(function, "k.mean", k.mean, (batch, *k.shape[-2:]), q.data)


def with_mean_of_keys(
    lse: Tensor, q: Tensor | BlockScaled, k: Tensor | BlockScaled, softmax_scale: float | None
) -> Tensor:
    """Correct lse for k's mean, which the kernels leave out.

    The mean adds softmax_scale * (q . mean of the KV head) to every score of a row, so P does not
    change.

    lse: (batch, num_heads_q, seqlen_q) or (num_heads_q, total_q), -inf where a row sees no key.
    q, k, softmax_scale: those of the call.
    """
    if type(k) is not BlockScaled or k.mean is None:
        return lse
    heads, head_dim = k.shape[-2:]
    values = q.dequantize().unflatten(-2, (heads, -1))
    # Elementwise instead of a matmul, which autocast or TF32 would round.
    mean = of_sequences(k.mean, q.token_positions()).unsqueeze(-2)  # one per row of q
    products = (values * mean).sum(-1)
    scale = head_dim**-0.5 if softmax_scale is None else softmax_scale
    moved = lse + scale * products.flatten(-2).transpose(-1, -2)
    return torch.where(lse == float("-inf"), lse, moved)


def _check_edges(function: str, what: str, own: Tensor | None, given: object) -> None:
    """Raise if the cu_seqlens of a BlockScaled tensor differ from the call's."""
    if own is given or not isinstance(given, (Tensor, type(None))):  # a non-tensor raises later
        return
    if own is None or given is None:
        wanted, got = ("None", "a tensor") if given is None else ("the call's", None)
        expect(False, function, what, wanted, got)
    wanted, got = tuple(given.shape), tuple(own.shape)
    expect(got == wanted, function, f"{what}.shape", f"{wanted} as the call's", got)
    wanted = f"{given.device} as the call's"
    expect(own.device == given.device, function, f"{what}.device", wanted, own.device)
    if is_checked(given.device) and not is_traced():
        check_same_values(function, what, own, given)


def _with_blocks(
    function: str, tensors: Tensors, options: Options, varlen: bool
) -> tuple[Tensors, Options]:
    """Give plain 8-bit inputs three-axis descales and the block sizes that their shapes imply."""
    changes, blocks = {}, {}
    for side in SIDES:
        name = f"{side}_descale"
        x, descale = getattr(tensors, side), getattr(tensors, name)
        if descale is None:
            continue
        if descale.ndim == 2:
            descale = descale.unsqueeze(-1)
        wanted = "(batch, heads) or (batch, heads, blocks)"
        expect(descale.ndim == 3, function, f"{name}.shape", wanted, tuple(descale.shape))
        longest = f"max_seqlen_{'q' if side == 'q' else 'k'}"
        rows = x.shape[-3] if x.ndim > 2 else 0  # other ranks raise later
        seqlen = getattr(options, longest) if varlen else rows
        if descale.shape[2] != 1:
            expect(seqlen is not None, function, longest, f"an int where {name} is per block", None)
        block = _implied_block(function, name, descale.shape[2], rows if seqlen is None else seqlen)
        changes[name] = descale if block else None
        blocks[f"{side}_block"] = block
    return tensors._replace(**changes), options._replace(**blocks)


def _implied_block(function: str, name: str, found: int, seqlen: int) -> int:
    """Block size in tokens with which seqlen takes ``found`` blocks; 0 if there are no tokens."""
    if found == 1:
        return max(1, seqlen)
    if found == 0 and seqlen == 0:
        return 0
    for block in BLOCKS:
        if num_blocks(seqlen, block) == found:
            return block
    counts = sorted({1, *(num_blocks(seqlen, block) for block in BLOCKS)})
    wanted = f"one of {counts} (1, or blocks of one of {BLOCKS} for {seqlen} tokens)"
    expect(False, function, f"{name}.shape[2]", wanted, found)
