"""A quantized q, k or v as a caller passes it: 8-bit data with a descale per block of tokens."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from ..errors import shown, type_error, value_error
from . import hadamard as rotation
from . import permuted_v
from .arguments import expect_strided
from .token_positions import TokenPositions, of_sequences, of_tokens, token_positions

LAYOUTS = ("rows", "permuted")
_TENSORS = ("data", "descale", "cu_seqlens", "mean", "gradient")


@dataclass(frozen=True, eq=False)
class BlockScaled:
    """A quantized q, k or v. Its value is data * descale, rotated back if hadamard, plus mean.

    Equality is identity: comparing values would synchronize with the device.

    data: float8_e4m3fn or, for q and k, int8. With layout "rows" (batch, seqlen, heads, head_dim),
        with cu_seqlens (total, heads, head_dim). With layout "permuted", which the Hopper kernels
        read V in, see permuted_v.py.
    descale: float32 (batch, heads, blocks), one per ``block`` tokens counted from the beginning of
        each sequence; 2**-126 for blocks without tokens.
    block: tokens of a head that share a descale: 64, 128 or 256.
    hadamard: whether the head dim of data is rotated; q and k must agree, v is never rotated.
    cu_seqlens: int32 (batch + 1), the cumulative lengths of a varlen batch; else None.
    layout: layout of data, "rows" or "permuted".
    shape: shape of the tensor in layout "rows"; required with layout "permuted".
    mean: for k, float32 (batch, heads, head_dim), the vector subtracted from every token of a
        sequence before rotation and quantization; None: no subtraction.
    gradient: where attention leaves the gradient of the values, at the values that are stored: a
        tensor of this shape that requires one, of any strides, whose numbers are not read. None: a
        constant.

    Raises: TypeError, ValueError.
    """

    data: Tensor
    descale: Tensor
    block: int
    hadamard: bool = False
    cu_seqlens: Tensor | None = None
    layout: str = "rows"
    shape: torch.Size = field(default=None)  # default data.shape: never None after __init__
    mean: Tensor | None = None
    gradient: Tensor | None = None

    def __post_init__(self) -> None:
        for name in _TENSORS:
            x, optional = getattr(self, name), name not in ("data", "descale")
            if not (optional and x is None):
                expect_strided("BlockScaled", name, x)
        if self.layout not in LAYOUTS:
            raise value_error("BlockScaled", "layout", f"one of {LAYOUTS}", repr(self.layout))
        shape = self.data.shape if self.layout == "rows" else self.shape
        if shape is None:
            raise value_error("BlockScaled", "shape", "given with layout 'permuted'", None)
        object.__setattr__(self, "shape", torch.Size(shape))
        if self.gradient is not None and self.gradient.shape != self.shape:
            found = tuple(self.gradient.shape)
            raise value_error("BlockScaled", "gradient.shape", tuple(self.shape), found)

    @property
    def device(self) -> torch.device:
        return self.data.device

    @property
    def form(self) -> tuple[int, bool, str, int | None]:
        """block, hadamard, layout and, with layout "permuted", which pads it, the head dim: all but
        tensors that a plan depends on."""
        head_dim = self.shape[-1] if self.layout == "permuted" else None
        return self.block, self.hadamard, self.layout, head_dim

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of data; ``dequantize`` returns others."""
        return self.data.dtype

    def to(self, device: torch.device | str | int, *, non_blocking: bool = False) -> BlockScaled:
        """Copy to another device; return self if it is already there."""
        if isinstance(device, (torch.dtype, Tensor)):
            raise type_error("BlockScaled.to", "device", "a torch.device", shown(device))
        moved = {
            name: x.to(device, non_blocking=non_blocking)
            for name in _TENSORS
            if (x := getattr(self, name)) is not None
        }
        here = all(x is getattr(self, name) for name, x in moved.items())
        return self if here else replace(self, **moved)

    def dequantize(self, dtype: torch.dtype = torch.float32) -> Tensor:
        """Return the values in layout "rows", rotated back and with the mean added.

        A product that rounds beyond float32's range, as 127 * (amax / 127) may for the largest
        numbers, is the largest of float32.
        """
        of = self.token_positions()
        descale = of_tokens(self.descale, self.block, of)[..., None]
        x, largest = self.in_rows().data.float() * descale, torch.finfo(torch.float32).max
        x = torch.where(descale.isfinite(), x.clamp(-largest, largest), x)
        x = rotation.rotate_back(x) if self.hadamard else x
        return (x if self.mean is None else x + of_sequences(self.mean, of)).to(dtype)

    def token_descale(self) -> Tensor:
        """Return the descale of every token and head; shape without its last axis."""
        return of_tokens(self.descale, self.block, self.token_positions())

    def token_positions(self) -> TokenPositions:
        """Return the sequence and position of each token."""
        return token_positions(self.shape[-3], self.data.device, self.cu_seqlens)

    def in_rows(self) -> BlockScaled:
        """Convert to layout "rows"; return self if it has it. Tokens of no sequence are 0."""
        if self.layout == "rows":
            return self
        rows = permuted_v.unpermute_v(self.data, self.shape, self.cu_seqlens)
        return replace(self, data=rows, layout="rows")


def of_own_tensors(
    data: Tensor,
    descale: Tensor,
    block: int,
    hadamard: bool,
    cu_seqlens: Tensor | None,
    layout: str,
    shape: torch.Size,
    mean: Tensor | None,
    gradient: Tensor | None,
) -> BlockScaled:
    """A BlockScaled of tensors that this package has made: its checks take longer than a launch."""
    made = _new(BlockScaled)
    values = made.__dict__
    values["data"], values["descale"], values["cu_seqlens"] = data, descale, cu_seqlens
    values["block"], values["hadamard"], values["layout"] = block, hadamard, layout
    values["shape"], values["mean"], values["gradient"] = shape, mean, gradient
    return made


_new = object.__new__


def lse_with_mean(lse: Tensor, q: BlockScaled, k_mean: Tensor, softmax_scale: float) -> Tensor:
    """Correct lse for k's mean, which the kernels leave out.

    The mean adds softmax_scale * (q . mean of the KV head) to every score of a row, so P does not
    change.

    lse: (batch, num_heads_q, seqlen_q) or (num_heads_q, total_q), -inf where a row sees no key.
    q, k_mean, softmax_scale: those of the call.
    """
    heads = k_mean.shape[-2]
    values = q.dequantize().unflatten(-2, (heads, -1))
    # Elementwise instead of a matmul, which autocast or TF32 would round.
    mean = of_sequences(k_mean, q.token_positions()).unsqueeze(-2)  # one per row of q
    products = (values * mean).sum(-1)
    moved = lse + softmax_scale * products.flatten(-2).transpose(-1, -2)
    return torch.where(lse == float("-inf"), lse, moved)
