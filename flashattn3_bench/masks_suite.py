"""Attention with mask objects beside FlexAttention, and beside our own calls of the same scores."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from itertools import product

import torch
from torch import Tensor

import flashattn3

from .checking import Case
from .gate import check_results, sample_results
from .inputs import Call, Inputs, make_inputs, prepare, quantized
from .mask_shapes import SHAPES, Shape, block_mask_of
from .providers import DETERMINISTIC, FLEX, FP8_E4M3, FP8_INT8, OURS, QUANTIZED
from .runner import Record, Settings, run_providers
from .suites import Cell
from .timing import make_clock

SUITE = "masks"
PLAIN = "without a mask object"
SIZES = (2, 8192), (1, 16384), (1, 32768)  # sequences, tokens
WIDTH = 2048  # heads x head dim
DIMS = (128, 128), (64, 64), (256, 256), (192, 128)  # of q and k, of v
EIGHT_BIT_DIMS = 64, 128  # head dims of forwards of 8 bits, beside those of 16
QUICK_TOKENS, QUICK_DIMS = 256, ((16, 16),)


@dataclass(frozen=True)
class MaskCell(Cell):
    """mask: of SHAPES. visible: the share of visible scores, which count."""

    mask: str = ""
    visible: float = 1.0

    @property
    def row(self) -> str:
        case = self.case
        dim = f"d{case.head_dim}" + f"/{case.head_dim_v}" * (case.head_dim != case.head_dim_v)
        return f"{self.direction} {dim} {self.mask}"

    @property
    def column(self) -> str:
        return f"{self.case.batch} x {self.case.seqlen_k}"

    @property
    def flops(self) -> float:
        return super().flops * self.visible


def mask_cells(
    directions: tuple[str, ...],
    head_dims: tuple[int, ...] | None,
    seqlens: tuple[int, ...] | None,
    quick: bool,
) -> list[MaskCell]:
    """The cells of the suite. quick: the same problems, cut down to a CPU's size."""
    sizes, all_dims = (((1, QUICK_TOKENS),), QUICK_DIMS) if quick else (SIZES, DIMS)
    found = []
    for direction, dims, (batch, n), mask in product(directions, all_dims, sizes, SHAPES):
        if head_dims is not None and dims[0] not in head_dims:
            continue
        if seqlens is None or n in seqlens:
            heads = 2 if quick else max(1, WIDTH // dims[0])
            name = f"{mask.replace(' ', '-')}-{batch}x{n}x{heads}x{dims[0]}"
            case = Case(name, batch, n, n, heads, heads, *dims)
            found.append(MaskCell(SUITE, case, direction, mask))
    return found


def run_masks(cell: MaskCell, settings: Settings) -> list[Record]:
    """A record for our call, FlexAttention if it is a baseline, our call without a mask object,
    where there is one, and our calls of 8 bits, or with deterministic gradients."""
    n, device = cell.case.seqlen_k, settings.device
    shape = SHAPES[cell.mask](n, device)
    mask = shape.build()
    cell = replace(cell, visible=float(mask.density))
    inputs = make_inputs(cell.case, device, settings.dtype)
    seen = mask.to_bool()[0, 0]
    dtypes = torch.float64, settings.dtype
    expected = [sample_results(cell, inputs, dtype, seen) for dtype in dtypes]
    attends = {
        OURS: partial(flashattn3.flash_attn_func, mask=mask),
        FLEX: _flex(shape, n, device) if FLEX in settings.baselines else None,
        PLAIN: shape.plain,
    }
    if cell.direction == "bwd":
        attends[DETERMINISTIC] = partial(attends[OURS], deterministic=True)
    elif cell.case.head_dim in EIGHT_BIT_DIMS:
        attends |= dict.fromkeys((FP8_E4M3, FP8_INT8), attends[OURS])

    def checked(name: str) -> tuple[Call, Record]:
        given = quantized(inputs, QUANTIZED[name]) if name in QUANTIZED else inputs
        call = _prepared(cell, given, attends[name], heads_first=name == FLEX)
        check_results(cell, name, [x[-1:, :, -1:] for x in call()], *expected)
        more = {"visible": cell.visible, "mask_bytes": mask.nbytes} if name == OURS else {}
        return call, more

    names = tuple(name for name, attend in attends.items() if attend is not None)
    clock = make_clock(device, inputs.num_bytes)
    return run_providers(cell, names, checked, settings, clock)


def _flex(shape: Shape, n: int, device: torch.device) -> Callable[..., Tensor]:
    """Compiled on a GPU; on a CPU as it is, which has no gradients."""
    from torch.nn.attention.flex_attention import flex_attention

    block_mask = block_mask_of(shape, n, device)
    if device.type == "cuda":
        torch.compiler.reset()  # after 8 mask_mods it would compile no more, and compute all scores
        flex_attention = torch.compile(flex_attention)
    return partial(flex_attention, block_mask=block_mask)


def _prepared(cell: Cell, inputs: Inputs, attend: Callable[..., Tensor], heads_first: bool) -> Call:
    """A call that gives results in the axes of the inputs. heads_first: attend has the heads before
    the tokens, in memory too."""

    def attention(q: Tensor, k: Tensor, v: Tensor, causal: bool) -> Tensor:
        return attend(q, k, v)

    if not heads_first:
        return prepare(attention, cell, inputs)
    turned = Inputs(*(x.transpose(1, 2).contiguous() for x in inputs))
    call = prepare(attention, cell, turned)
    return lambda: tuple(x.transpose(1, 2) for x in call())
