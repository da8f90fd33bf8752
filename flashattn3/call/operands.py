"""The tensors of a call: their forms, normalised, and their metadata, which is the key of a plan.

q, k and v are tensors, or ``Scaled``, which has what belongs to a tensor of 8 bits. A caller passes
8 bits as ``BlockScaled`` or as plain tensors with separate descales: (batch, heads) as in
FlashAttention-3, or (batch, heads, blocks).
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from operator import itemgetter
from typing import NamedTuple

import torch
from torch import Tensor

from ..errors import expect, shown, type_error
from ..modes import is_traced
from .arguments import expect_local, is_distributed
from .block_scaled import BlockScaled
from .fields import Options
from .metadata import ALIGNMENT_BYTES, Metadata
from .tensor_checks import check_device, check_equal
from .tensor_fields import EDGES, FOUND, ROWS, SCORE_ARGUMENTS, SCORE_TENSORS, TENSORS, schema
from .value_checks import check_same_values, is_checked

SIDES = tuple(field.name for field in TENSORS if field.kind is ROWS)
NO_SCORES = (None,) * len(SCORE_ARGUMENTS)
NO_DESCALES = (None,) * len(SIDES)


class Scaled(NamedTuple):
    """q, k or v of 8 bits. A stored value times its descale is the real value.

    data: float8_e4m3fn or int8 (batch, seqlen, heads, head_dim), with varlen (total, heads,
        head_dim); v with layout "permuted" as in ``permuted_v.py``.
    descale: float32 (batch, heads, blocks); None: 1.
    block: tokens of a descale; None: what the number of blocks implies.
    hadamard: whether q and k are rotated.
    head_dim: with layout "permuted", which pads it.
    mean: of k, float32 (batch, heads, head_dim): what was subtracted from every token; lse has it.
    """

    data: Tensor
    descale: Tensor | None = None
    block: int | None = None
    hadamard: bool = False
    layout: str = "rows"
    head_dim: int | None = None
    mean: Tensor | None = None


class SequenceLengths(NamedTuple):
    """Of q, or of k and v, in a varlen call: the sequences' edges, int32 (batch + 1,), and, where
    not all rows count, how many do, int32 (batch,)."""

    cu_seqlens: Tensor | None
    seqused: Tensor | None


class Tensors(NamedTuple):
    """The tensors of one call. The last stride of q, k and v is 1 where a kernel receives them.

    Dense: q (batch, seqlen_q, num_heads_q, head_dim), k and v (batch, seqlen_k, num_heads_kv, ·).
    Varlen: q (total_q, num_heads_q, head_dim), k and v (total_k, num_heads_kv, ·) with cu_seqlens,
    int32 (batch + 1,); seqused, int32 (batch,), shortens each sequence and may be None.
    sinks (num_heads_q,); alibi_slopes, float32 (num_heads_q,) or (batch, num_heads_q); bias (batch
    or 1, num_heads_q or 1, seqlen_q, seqlen_k) of dense calls; mask_*: the tensors of a
    ``masks.Mask``, all or none.
    """

    q: Tensor | Scaled
    k: Tensor | Scaled
    v: Tensor | Scaled
    cu_seqlens_q: Tensor | None = None
    cu_seqlens_k: Tensor | None = None
    seqused_q: Tensor | None = None
    seqused_k: Tensor | None = None
    sinks: Tensor | None = None
    alibi_slopes: Tensor | None = None
    bias: Tensor | None = None
    mask_entries_q: Tensor | None = None
    mask_work_q: Tensor | None = None
    mask_tiles_q: Tensor | None = None
    mask_entries_k: Tensor | None = None
    mask_work_k: Tensor | None = None
    mask_tiles_k: Tensor | None = None


# Those from which the backend's operators find the launch of a call.
found_of = itemgetter(*(Tensors._fields.index(field.name) for field in FOUND))
# Those beside q, k and v that may need a gradient, in the order of the results of a backward.
LEARNED = tuple(Tensors._fields.index(field.name) for field in SCORE_TENSORS if field.learned)
learned_of = itemgetter(*LEARNED)


# Functions, because torch 2.9 traces no property of a NamedTuple.
def changes_scores(tensors: Tensors) -> bool:
    """Whether one of the tensors that change scores is given."""
    slopes, entries = tensors.alibi_slopes, tensors.mask_entries_q
    return not (tensors.sinks is slopes is tensors.bias is entries is None)


def scores_of(tensors: Tensors) -> tuple[Tensor | None, ...]:
    """Those of SCORE_ARGUMENTS; torch 2.8 traces no slice of a NamedTuple."""
    return tensors.sinks, tensors.alibi_slopes, tensors.bias


def tensors_of_mask(tensors: Tensors) -> tuple[Tensor | None, ...]:
    """The tensors of the mask; torch 2.8 traces no slice of a NamedTuple."""
    return (
        tensors.mask_entries_q, tensors.mask_work_q, tensors.mask_tiles_q,
        tensors.mask_entries_k, tensors.mask_work_k, tensors.mask_tiles_k,
    )  # fmt: skip


def lengths_of_q(tensors: Tensors) -> SequenceLengths:
    return SequenceLengths(tensors.cu_seqlens_q, tensors.seqused_q)


def lengths_of_k(tensors: Tensors) -> SequenceLengths:
    return SequenceLengths(tensors.cu_seqlens_k, tensors.seqused_k)


# Names and types of the tensors in the operators' schemas: ``flat`` has the values in this order.
_OF_8_BITS = (
    "Tensor? {0}_descale, SymInt? {0}_block, bool {0}_hadamard, str {0}_layout, "
    "SymInt? {0}_head_dim, Tensor? {0}_mean"
)
SCHEMA = schema()
SCHEMA_OF_SCORES = schema((*TENSORS, *SCORE_TENSORS))
SCHEMA_OF_8_BITS = ", ".join(map(_OF_8_BITS.format, SIDES))
NUM_TENSORS = len(TENSORS)  # of every operator
NUM_OF_SCORES = len(TENSORS) + len(SCORE_TENSORS)  # of those for calls with one of SCORE_TENSORS
NUM_OF_8_BITS = len(SIDES) * (len(Scaled._fields) - 1)
REQUIRED_OF_VARLEN = sum(field.kind in (ROWS, EDGES) for field in TENSORS)


def flat(tensors: Tensors, scores: bool | None = None) -> tuple:
    """The tensors of a call, and behind them what only 8-bit inputs have, if there are any.

    scores: whether those of SCORE_TENSORS are among them; None: where one is given.
    """
    q, k, v = tensors.q, tensors.k, tensors.v
    rest = tensors.cu_seqlens_q, tensors.cu_seqlens_k, tensors.seqused_q, tensors.seqused_k
    if changes_scores(tensors) if scores is None else scores:
        rest = (*rest, *scores_of(tensors), *tensors_of_mask(tensors))
    if not (type(q) is Scaled or type(k) is Scaled or type(v) is Scaled):
        return (q, k, v, *rest)
    q, k, v = as_scaled(q), as_scaled(k), as_scaled(v)
    return (q.data, k.data, v.data, *rest, *_of_8_bits(q), *_of_8_bits(k), *_of_8_bits(v))


def _of_8_bits(x: Scaled) -> tuple:
    """All but the data; torch 2.8 traces no slice of a NamedTuple."""
    return x.descale, x.block, x.hadamard, x.layout, x.head_dim, x.mean


def with_sides(tensors: Tensors, q, k, v) -> Tensors:
    """The call with other q, k and v."""
    return with_values(tensors, q, k, v, tensors.sinks, tensors.bias)


def with_values(tensors: Tensors, q, k, v, sinks, bias) -> Tensors:
    """The call with other tensors of values; torch 2.8 traces no _replace of a NamedTuple."""
    return Tensors(
        q, k, v, tensors.cu_seqlens_q, tensors.cu_seqlens_k, tensors.seqused_q, tensors.seqused_k,
        sinks, tensors.alibi_slopes, bias, *tensors_of_mask(tensors),
    )  # fmt: skip


def of_flat(values: tuple) -> Tensors:
    """The inverse of ``flat``; what has nothing but data is a plain tensor again."""
    end = len(values) % NUM_OF_8_BITS
    if end == len(values):
        return Tensors(*values)
    size, given = len(Scaled._fields) - 1, values[end:]
    sides = [Scaled(x, *given[i * size :][:size]) for i, x in enumerate(values[: len(SIDES)])]
    sides = (x.data if _has_only_data(x) else x for x in sides)
    return Tensors(*sides, *values[len(SIDES) : end])


def _has_only_data(x: Scaled) -> bool:
    given = any(of is not None for of in (x.descale, x.block, x.mean))
    return not (given or x.hadamard or x.layout != "rows")


def as_scaled(x: Tensor | Scaled) -> Scaled:
    return x if type(x) is Scaled else Scaled(x)


def data_of(x: Tensor | Scaled) -> Tensor:
    return x.data if type(x) is Scaled else x


def key_of(tensors: Tensors) -> tuple:
    """Read the metadata of the tensors as plain tuples: the key under which a plan is cached."""
    return tuple(
        [
            None
            if x is None
            else (x.shape, x.stride(), x.dtype, x.device, x.data_ptr() % ALIGNMENT_BYTES == 0)
            if type(x) is not Scaled
            else (*key_of((x.data, x.descale, x.mean)), *x[2:6])
            for x in tensors
        ]
    )


def checked_key_of(function: str, tensors: Tensors) -> tuple:
    """``key_of``; TypeError for an argument that is no tensor, or a tensor without strides."""
    try:
        return key_of(tensors)
    except (AttributeError, RuntimeError, TypeError):
        check_tensor_types(function, tensors, tensors.cu_seqlens_q is not None)
        raise


@lru_cache(maxsize=4096)
def key_of_transposed(key: tuple) -> tuple:
    """The key after the second and the third axis of q, k and v are exchanged."""
    axes = (0, 2, 1, 3)
    sides = (
        of
        if of is None or len(of[0]) != 4
        else (torch.Size(of[0][i] for i in axes), tuple(of[1][i] for i in axes), *of[2:])
        for of in key[: len(SIDES)]
    )
    return (*sides, *key[len(SIDES) :])


TENSORS_OF_8_BITS = ("data", "descale", "mean")


def metadata_under(key: tuple) -> tuple[Metadata | Scaled | None, ...]:
    """The metadata of the tensors with this key; a ``Scaled`` has that of its own tensors."""
    return tuple(map(_metadata_under, key))


def _metadata_under(key: tuple | None) -> Metadata | Scaled | None:
    if key is None or len(key) == len(Metadata._fields):
        return key and Metadata(*key)
    data, descale, mean = metadata_under(key[:3])
    return Scaled(data, descale, *key[3:], mean)


def metadata_of(tensor: Tensor | Scaled | None) -> Metadata | Scaled | None:
    return metadata_under(key_of((tensor,)))[0]


def normalised(
    function: str, tensors: Tensors, descales: tuple[Tensor | None, ...] = NO_DESCALES
) -> Tensors:
    """The tensors of a call whose q, k and v may be ``BlockScaled``, or plain with descales."""
    q, k, v = tensors.q, tensors.k, tensors.v
    if type(q) is not BlockScaled:  # faster than isinstance when false
        if type(k) is BlockScaled or type(v) is BlockScaled:
            raise type_error(function, "q", "BlockScaled as k or v is", shown(q))
        if descales[0] is None and descales[1] is None and descales[2] is None:
            return tensors
        sides = [_with_descale(x, of) for x, of in zip((q, k, v), descales, strict=True)]
        return with_sides(tensors, *sides)
    for side, x, descale in zip(SIDES, (q, k, v), descales, strict=True):
        if not isinstance(x, BlockScaled):
            raise type_error(function, side, "BlockScaled as q is", shown(x))
        if descale is not None:
            wanted = f"None where {side} is BlockScaled"
            expect(False, function, f"{side}_descale", wanted, shown(descale))
        of = "cu_seqlens_q" if side == "q" else "cu_seqlens_k"
        given = getattr(tensors, of)
        if x.cu_seqlens is not given:
            _check_edges(function, f"{side}.cu_seqlens", x.cu_seqlens, given, of)
    return with_sides(tensors, _scaled(q), _scaled(k), _scaled(v))


def _scaled(x: BlockScaled) -> Scaled:
    if x.descale.numel() == 0:  # there are no tokens
        return Scaled(x.data, None, None, *x.form[1:], x.mean)
    return Scaled(x.data, x.descale, *x.form, x.mean)


def _with_descale(x: Tensor, descale: Tensor | None) -> Tensor | Scaled:
    if descale is None:
        return x
    strided = isinstance(descale, Tensor) and descale.layout is torch.strided
    return Scaled(x, descale.unsqueeze(-1) if strided and descale.ndim == 2 else descale)


def with_keys_in_rows(tensors: Tensors, options: Options) -> tuple[Tensors, Options]:
    """Without cu_seqlens_k: flatten k and v (batch, seqlen_k, heads, ·) to varlen form, build
    cu_seqlens_k and bound max_seqlen_k."""
    k, v, edges, function = tensors.k, tensors.v, tensors.cu_seqlens_q, options.function
    if tensors.cu_seqlens_k is not None or not all(isinstance(x, Tensor) for x in (k, v, edges)):
        return tensors, options  # check_tensor_types raises for what is no tensor
    axes = "(batch, seqlen_k, heads, head_dim) where cu_seqlens_k is None"
    for name, x in (("k", k), ("v", v)):
        expect(x.ndim == 4, function, f"{name}.shape", axes, tuple(x.shape))
    expect(edges.ndim == 1, function, "cu_seqlens_q.shape", "one-dimensional", tuple(edges.shape))
    (batch, seqlen), entries = k.shape[:2], edges.shape[0] - 1
    expect(batch == entries, function, "k.shape[0]", f"{entries} (batch)", batch)
    check_equal(function, "v.shape[:2]", tuple(v.shape[:2]), (batch, seqlen), "k")
    longest = options.max_seqlen_k
    longest = seqlen if longest is None else min(seqlen, longest)
    edges = torch.arange(batch + 1, dtype=torch.int32, device=k.device) * seqlen
    rows = {"k": k.flatten(0, 1), "v": v.flatten(0, 1), "cu_seqlens_k": edges}
    return tensors._replace(**rows), options._replace(max_seqlen_k=longest)


def _check_edges(function: str, what: str, own: Tensor | None, given: object, of: str) -> None:
    """Raise if the cu_seqlens of a BlockScaled tensor differ from the call's, whose name is of."""
    if not isinstance(given, (Tensor, type(None))):  # a non-tensor raises later
        return
    if own is None or given is None:
        wanted, got = (f"None as {of}", "a tensor") if given is None else (f"{of}'s", None)
        expect(False, function, what, wanted, got)
    sizes = tuple(own.shape), tuple(given.shape)
    check_equal(function, f"{what}.shape", *sizes, of)
    check_device(function, what, own, given.device, of)
    if is_checked(given.device) and not is_traced():
        check_same_values(function, what, own, given, of)


def tensors_by_name(tensors: Tensors) -> dict[str, Tensor | None]:
    """Every tensor under the name that messages use, descales after the others."""
    named = {name: data_of(x) for name, x in zip(Tensors._fields, tensors, strict=True)}
    for side in SIDES:
        x = getattr(tensors, side)
        if type(x) is Scaled:
            named[f"{side}_descale"] = x.descale
            named[f"{side}.mean"] = x.mean
    return named


def check_tensor_types(function: str, tensors: Tensors, varlen: bool) -> None:
    """Raise TypeError for a tensor argument that is not a tensor or has no strides."""
    required = REQUIRED_OF_VARLEN if varlen else len(SIDES)
    check_distributed = check_dtensor if is_distributed(data_of(tensors.q)) else None
    for index, (name, value) in enumerate(tensors_by_name(tensors).items()):
        if value is None and index >= required:
            continue
        if type(value) is not Tensor or value.layout is not torch.strided or value.is_nested:
            _check_class(function, name, value, check_distributed)


def _check_class(
    function: str, name: str, value: object, check_distributed: Callable | None
) -> None:
    """check_distributed: of a call on DTensors, ``check_dtensor``."""
    if check_distributed is not None and is_distributed(value):
        return check_distributed(function, name, value)
    expect_local(function, name, value)


# Checks a DTensor where integrations.dtensor gave the operators sharding rules.
check_dtensor: Callable[[str, str, Tensor], None] | None = None
