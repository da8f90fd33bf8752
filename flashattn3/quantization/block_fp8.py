"""8-bit tensors with a scale for each block of tokens of each head."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from ..call.arguments import boolean, expect_strided, integer, length
from ..call.descales import BLOCKS, EIGHT_BIT, FP8, INT8
from ..call.value_checks import check_edges, check_longest, is_checked
from ..errors import expect, shown, type_error, value_error
from ..modes import is_traced, refuse_gradients
from . import hadamard as rotation
from . import permuted_v
from .token_positions import TokenPositions, token_positions
from .torch_operations import of_sequences, of_tokens

KINDS = ("q", "k", "v")
LAYOUTS = ("rows", "permuted")
SOURCES = (torch.float16, torch.bfloat16, torch.float32)
_FUNCTION = "quantize_block_fp8"


@dataclass(frozen=True, eq=False)
class BlockScaled:
    """A quantized q, k or v: data * descale, rotated back if hadamard, + mean is the value.

    Equal to itself alone, as a tensor's identity: comparing values would wait for the device.

    data: float8_e4m3fn or, of q and k, int8. As rows (batch, seqlen, heads, head_dim), with
        cu_seqlens (total, heads, head_dim). As slots, which the Hopper kernels take V in, see
        permuted_v.py.
    descale: float32 (batch, heads, blocks), blocks of ``block`` tokens counted from the beginning
        of each sequence; where a sequence has none, 2**-126.
    cu_seqlens: int32 (batch + 1), where the sequences of a varlen batch begin; else None.
    layout: of data, "rows" or "slots".
    shape: of the tensor in rows, whatever the layout; must be given for slots.
    mean: of k, float32 (batch, heads, head_dim), what was subtracted from every token of a sequence
        before it was rotated and quantized; None: nothing.

    Raises: TypeError, ValueError.
    """

    data: Tensor
    descale: Tensor
    block: int
    hadamard: bool = False
    cu_seqlens: Tensor | None = None
    layout: str = "rows"
    shape: torch.Size = field(default=None)  # data's where none is given, so it is one to users
    mean: Tensor | None = None

    def __post_init__(self) -> None:
        for name in ("data", "descale", "cu_seqlens", "mean"):
            x, optional = getattr(self, name), name in ("cu_seqlens", "mean")
            if not (isinstance(x, Tensor) or (optional and x is None)):
                raise type_error("BlockScaled", name, "a torch.Tensor", shown(x))
        if self.layout not in LAYOUTS:
            raise value_error("BlockScaled", "layout", f"one of {LAYOUTS}", repr(self.layout))
        shape = self.data.shape if self.layout == "rows" else self.shape
        if shape is None:
            raise value_error("BlockScaled", "shape", "given with layout 'permuted'", None)
        object.__setattr__(self, "shape", torch.Size(shape))

    @property
    def device(self) -> torch.device:
        return self.data.device

    @property
    def dtype(self) -> torch.dtype:
        """Of data; ``dequantize`` gives others."""
        return self.data.dtype

    def to(self, device: torch.device | str | int, *, non_blocking: bool = False) -> BlockScaled:
        """The same numbers on another device, itself if it is there."""
        if isinstance(device, (torch.dtype, Tensor)):
            raise type_error("BlockScaled.to", "device", "a torch.device", shown(device))
        moved = {
            name: x.to(device, non_blocking=non_blocking)
            for name in ("data", "descale", "cu_seqlens", "mean")
            if (x := getattr(self, name)) is not None
        }
        here = all(x is getattr(self, name) for name, x in moved.items())
        return self if here else replace(self, **moved)

    def dequantize(self, dtype: torch.dtype = torch.float32) -> Tensor:
        """What the numbers stand for, (batch, seqlen, heads, head_dim), rotated back."""
        of = self.token_positions()
        x = self.in_rows().data.float() * of_tokens(self.descale, self.block, of)[..., None]
        x = rotation.rotate_back(x) if self.hadamard else x
        return (x if self.mean is None else x + of_sequences(self.mean, of)).to(dtype)

    def token_descale(self) -> Tensor:
        """descale of every token and head: shape without its last axis."""
        return of_tokens(self.descale, self.block, self.token_positions())

    def token_positions(self) -> TokenPositions:
        """Where each token is in its sequence."""
        return token_positions(self.shape[-3], self.data.device, self.cu_seqlens)

    def in_rows(self) -> BlockScaled:
        """The same numbers with layout "rows", itself if it is; tokens of no sequence are 0."""
        if self.layout == "rows":
            return self
        rows = permuted_v.unpermute_v(self.data, self.shape, self.cu_seqlens)
        return replace(self, data=rows, layout="rows")


def quantize_block_fp8(
    x: Tensor,
    *,
    block: int = 128,
    hadamard: bool = False,
    kind: str = "q",
    dtype: torch.dtype = FP8,
    cu_seqlens: Tensor | None = None,
    max_seqlen: int | Tensor | None = None,
    layout: str | None = None,
    smooth: bool = False,
) -> BlockScaled:
    """Quantize q, k or v for attention: amax of each block of each head becomes 448, of int8 127.

    With amax the largest finite magnitude of a block, descale = amax / 448 and data = x * (448 /
    amax), each rounded once in float32, then to e4m3. For int8 it is 127, and the last rounding to
    the nearest integer, ties to even. The bits are the same on every device.

    Args:
        x: (batch, seqlen, heads, head_dim) float16, bfloat16 or float32; with cu_seqlens
            (total, heads, head_dim).
        block: tokens that share a scale: 64, 128 or 256.
        hadamard: rotate the head dim first (hadamard.py); q and k must agree. Not for v, whose
            rotation would have to be undone in out.
        kind: "q", "k" or "v".
        dtype: of data, torch.float8_e4m3fn or, for q and k, which must agree, torch.int8. Its steps
            are even: finer than e4m3's where no element of a block is far larger than the others,
            as after the rotation.
        cu_seqlens, max_seqlen: of a varlen batch, as for ``flash_attn_varlen_func``. data of
            tokens of no sequence is undefined.
        layout: of data, "rows" or, for v with a head dim up to 256, "slots"; None: "slots" for v
            where the Hopper kernels run, else "rows".
        smooth: of k, subtract from every token, before all else, a vector near the mean of its
            sequence and head, which attention and dequantize take into account (smoothing.py); 0 in
            the columns where 128 tokens show none. Not with softcap.

    Blocks with amax below 448 * 2**-126 (in int8 127 * 2**-126), those of zeros too, have descale
    2**-126. In e4m3 NaN and infinite elements become NaN (with hadamard their whole row) and leave
    the scale to the finite ones. int8 has no NaN: of a block with such an element the descale is
    NaN and data 0, so all of the block is NaN.

    Raises: TypeError, ValueError; UnsupportedError where x requires a gradient, unless under
    ``torch.no_grad()``.
    """
    block = integer(_FUNCTION, "block", block)
    hadamard = boolean(_FUNCTION, "hadamard", hadamard)
    smooth = boolean(_FUNCTION, "smooth", smooth)
    _check(x, block, hadamard, kind, dtype, layout, smooth)
    max_seqlen = _checked_lengths(x, cu_seqlens, max_seqlen)
    refuse_gradients(_FUNCTION, x=x)
    # Not above: the backends know the problem of a call, which may be of a BlockScaled.
    from . import dispatch

    with torch.no_grad():
        if layout is None:
            layout = dispatch.layout_of_v(x) if kind == "v" else "rows"
        mean = dispatch.sample_mean(x, cu_seqlens, max_seqlen) if smooth else None
        how = (block, hadamard, cu_seqlens, max_seqlen, layout, dtype, mean)
        data, descale = dispatch.quantize(x, *how)
    return BlockScaled(data, descale, block, hadamard, cu_seqlens, layout, x.shape, mean)


def quantize_qkv(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    block: int,
    hadamard: bool,
    qk_dtype: torch.dtype,
    smooth_k: bool = False,
    cu_seqlens_q: Tensor | None = None,
    cu_seqlens_k: Tensor | None = None,
    max_seqlen_q: int | None = None,
    max_seqlen_k: int | None = None,
) -> tuple[BlockScaled, BlockScaled, BlockScaled]:
    """Quantize q, k and v of one attention as quantize_block_fp8 does. The caller has checked the
    16-bit tensors and the other arguments, which are those of quantize_block_fp8."""
    how = (block, hadamard, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, qk_dtype)
    with torch.no_grad():
        *scaled, k_mean = scaled_qkv(q, k, v, *how, smooth_k)
    q_data, q_descale, k_data, k_descale, v_data, v_descale = scaled
    layout = "permuted" if comes_in_slots(v) else "rows"
    return (
        BlockScaled(q_data, q_descale, block, hadamard, cu_seqlens_q, "rows", q.shape),
        BlockScaled(k_data, k_descale, block, hadamard, cu_seqlens_k, "rows", k.shape, k_mean),
        BlockScaled(v_data, v_descale, block, False, cu_seqlens_k, layout, v.shape),
    )


def comes_in_slots(v: Tensor) -> bool:
    """Return whether scaled_qkv stores v in slots, as it does where the Hopper kernels run."""
    from . import dispatch

    return dispatch.layout_of_v(v) == "permuted"


def scaled_qkv(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    block: int,
    hadamard: bool,
    cu_seqlens_q: Tensor | None,
    cu_seqlens_k: Tensor | None,
    max_seqlen_q: int | None,
    max_seqlen_k: int | None,
    qk_dtype: torch.dtype,
    smooth_k: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor | None]:
    """Quantize q, k and v; return data and descale of each, and k's mean, as plain tensors. The
    Hopper kernels do it in one launch, with smooth_k in two.
    """
    from . import dispatch

    mean = dispatch.sample_mean(k, cu_seqlens_k, max_seqlen_k) if smooth_k else None
    lengths = (cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k)
    return *dispatch.quantize_qkv(q, k, v, block, hadamard, *lengths, qk_dtype, mean), mean


def _check(x, block, hadamard, kind, dtype, layout, smooth) -> None:
    """Raise for what is wrong but for the lengths of a varlen batch."""
    if not isinstance(x, Tensor):
        raise type_error(_FUNCTION, "x", "a torch.Tensor", shown(x))
    expect_strided(_FUNCTION, "x", x)
    if x.dtype not in SOURCES:
        raise type_error(_FUNCTION, "x.dtype", f"one of {SOURCES}", x.dtype)
    expect(block in BLOCKS, _FUNCTION, "block", f"one of {BLOCKS}", block)
    _expect_one_of("kind", kind, KINDS)
    _expect_one_of("dtype", dtype, EIGHT_BIT)
    _expect_one_of("layout", layout, (*LAYOUTS, None))
    if dtype == INT8 and kind == "v":
        raise value_error(_FUNCTION, "dtype", f"{FP8} for kind 'v'", dtype)
    if hadamard and kind == "v":
        raise value_error(_FUNCTION, "hadamard", "False for kind 'v'", True)
    if layout == "permuted" and kind != "v":
        raise value_error(_FUNCTION, "layout", f"'rows' or None for kind {kind!r}", repr(layout))
    if smooth and kind != "k":
        raise value_error(_FUNCTION, "smooth", f"False for kind {kind!r}", smooth)
    head_dim = x.shape[-1] if x.ndim else 0
    expect(head_dim >= 1, _FUNCTION, "x.shape[-1]", "at least 1", head_dim)
    rotatable = not hadamard or rotation.is_rotatable(head_dim)
    expect(rotatable, _FUNCTION, "x.shape[-1]", "a power of two with hadamard", head_dim)
    largest = permuted_v.COLUMNS[-1]
    fits = layout != "permuted" or head_dim <= largest
    expect(fits, _FUNCTION, "x.shape[-1]", f"at most {largest} with layout 'permuted'", head_dim)


def _expect_one_of(name: str, value: object, legal: tuple) -> None:
    found = any(value is each or (type(value) is type(each) and value == each) for each in legal)
    expect(found, _FUNCTION, name, f"one of {legal}", repr(value))


def _checked_lengths(
    x: Tensor, cu_seqlens: Tensor | None, max_seqlen: int | Tensor | None
) -> int | None:
    """max_seqlen of a varlen batch, at most all tokens; None of a dense one."""
    varlen, name = cu_seqlens is not None, "cu_seqlens"
    if varlen and not isinstance(cu_seqlens, Tensor):
        raise type_error(_FUNCTION, name, "a torch.Tensor", shown(cu_seqlens))
    wanted = "3 with cu_seqlens" if varlen else "4 without cu_seqlens"
    expect(x.ndim == 4 - varlen, _FUNCTION, "x.ndim", wanted, x.ndim)
    if varlen != (max_seqlen is not None):
        wanted = "given with cu_seqlens and only then"
        raise value_error(_FUNCTION, "max_seqlen", wanted, shown(max_seqlen))
    if not varlen:
        return None
    if cu_seqlens.dtype != torch.int32:
        raise type_error(_FUNCTION, f"{name}.dtype", torch.int32, cu_seqlens.dtype)
    shape, wanted = tuple(cu_seqlens.shape), "(batch + 1,), at least (1,)"
    expect(len(shape) == 1 and shape[0] >= 1, _FUNCTION, f"{name}.shape", wanted, shape)
    found, wanted = cu_seqlens.device, f"{x.device} as x's"
    expect(found == x.device, _FUNCTION, f"{name}.device", wanted, found)
    longest = length(_FUNCTION, "max_seqlen", max_seqlen)
    if is_checked(x.device) and not is_traced():
        lengths = check_edges(_FUNCTION, name, cu_seqlens, x.shape[0])
        check_longest(_FUNCTION, "max_seqlen", longest, lengths)
    return x.shape[0] if longest is None else min(longest, x.shape[0])
