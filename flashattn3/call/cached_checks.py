"""Every error that the metadata of a cached call shows. Nothing here waits for a device.

The checks read shapes, strides, dtypes and devices, so they also run on fake tensors.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ..errors import UnsupportedError, complaint, expect
from ..modes import refuse_jit_trace, refuse_tangents, refuse_transforms
from .arguments import expect_local
from .cache_descales import check_descales, check_q_descale, check_written_descales
from .cached import (
    DECODE,
    MAX_HEAD_DIM,
    AppendOptions,
    AppendTensors,
    DecodeOptions,
    DecodeTensors,
    Lengths,
)
from .descales import check_out_dtype
from .dtypes import EIGHT_BIT, FP8, FULL_PRECISION, SIXTEEN_BIT
from .metadata import Metadata
from .scheduler_metadata import metadata_size
from .scores import check_sinks, check_slopes
from .tensor_checks import check_dense, check_device, check_equal, check_given, check_int32

DTYPES = (*SIXTEEN_BIT, *FULL_PRECISION)
MAX_TREE_TOKENS = 64  # new tokens of a sequence with a tree_mask
MAX_CAPACITY = 2**30  # keys of one sequence
Found = Metadata | None


def unsupported(function: str, what: str, wanted: object, got: object) -> UnsupportedError:
    sentence = complaint(function, what, wanted, got)
    return UnsupportedError(f"{sentence}: it is not supported yet by any backend")


def check_tensors(function: str, required: int, **tensors: object) -> None:
    """All are local, strided tensors without a gradient; the first ``required`` are given."""
    given = [x for x in tensors.values() if isinstance(x, Tensor)]
    refuse_tangents(function, *given)
    wants_gradient = torch.is_grad_enabled()
    for index, (name, x) in enumerate(tensors.items()):
        if x is None and index >= required:
            continue
        if type(x) is not Tensor or x.layout is not torch.strided or x.is_nested:
            expect_local(function, name, x)
        if wants_gradient and x.requires_grad:
            sentence = complaint(function, f"{name}.requires_grad", False, True)
            raise UnsupportedError(
                f"{sentence}: {function} has no gradient; call it under torch.no_grad()"
            )
    refuse_transforms(function, *given)


def check_decode(found: tuple[Found, ...], options: DecodeOptions, lengths: Lengths) -> None:
    """Raise for an invalid cached call. found: in the order of DecodeTensors."""
    tensors, function = DecodeTensors(*found), options.function
    refuse_jit_trace(function)
    q, k, v = tensors[:3]
    varlen = tensors.cu_seqlens_q is not None
    batch = check_queries(function, q, tensors.cu_seqlens_q)
    _check_dtypes(function, q, k, v)
    _check_cache(function, tensors, batch)
    heads_q, heads_kv = q.shape[-2], k.shape[-2]
    wanted = f"a multiple of k_cache's {heads_kv} heads"
    expect(heads_q % heads_kv == 0 and heads_q > 0, function, "q.shape[-2]", wanted, heads_q)
    wanted = f"{q.shape[-1]} (q's head_dim)"
    expect(k.shape[-1] == q.shape[-1], function, "k_cache.shape[-1]", wanted, k.shape[-1])
    _check_indices(function, tensors, batch, ("cache_seqlens", "cache_batch_idx", "cache_leftpad"))
    check_edges(function, "cu_seqlens_k_new", tensors.cu_seqlens_k_new, batch, q.device)
    check_q_descale(function, tensors.q_descale, (batch, heads_kv), q.device)
    check_descales(function, tensors, batch, "q")
    check_sinks(function, q, tensors.sinks)
    _check_slopes(function, tensors, batch)
    _check_metadata(function, tensors.scheduler_metadata, batch, q.device)
    given = lengths.max_seqlen_q
    if given is not None:
        expect(varlen, function, "max_seqlen_q", "None without cu_seqlens_q", given)
        expect(given >= 0, function, "max_seqlen_q", ">= 0", given)
    check_seqlen(function, tensors.cache_seqlens, lengths)
    check_options(options)
    _check_tree(function, tensors, options, given)
    check_out_dtype(function, q.dtype, options.out_dtype)


def check_queries(function: str, q: Metadata, cu_seqlens_q: Found) -> int:
    """The batch of q. Its last stride may be anything: q is copied."""
    varlen = cu_seqlens_q is not None
    axes = "(total_q, heads, head_dim)" if varlen else "(batch, seqlen_q, heads, head_dim)"
    expect(len(q.shape) == 4 - varlen, function, "q.shape", axes, tuple(q.shape))
    expect(q.shape[-1] >= 1, function, "q.shape[-1]", "at least 1", q.shape[-1])
    if not varlen:
        return q.shape[0]
    check_edges(function, "cu_seqlens_q", cu_seqlens_q, None, q.device)
    return cu_seqlens_q.shape[0] - 1


def check_edges(
    function: str, name: str, edges: Found, batch: int | None, device, of: str = "q"
) -> None:
    """cu_seqlens: int32 (batch + 1,). batch: None where these edges determine it. of: name of the
    tensor whose device it is."""
    if edges is None:
        return
    check_int32(function, name, edges, 1, device, of)
    entries = edges.shape[0]
    expect(entries >= 1, function, f"{name}.shape[0]", "batch + 1 >= 1", entries)
    check_dense(function, name, edges)
    if batch is not None:
        wanted = f"{batch + 1} (batch + 1)"
        expect(entries == batch + 1, function, f"{name}.shape[0]", wanted, entries)


def check_seqlen(function: str, cache_seqlens: Found, lengths: Lengths) -> None:
    expect(lengths.seqlen_new >= 0, function, "k.shape[1]", ">= 0", lengths.seqlen_new)
    if lengths.seqlen is None:
        return
    expect(cache_seqlens is None, function, "cache_seqlens", "one int or one tensor", "both")
    expect(lengths.seqlen >= 0, function, "cache_seqlens", ">= 0", lengths.seqlen)


def _check_dtypes(function: str, q: Metadata, k: Metadata, v: Metadata) -> None:
    """The caches have q's dtype, or 8 bits under q of 16."""
    legal, dtype = (*DTYPES, FP8), q.dtype
    expect(dtype in legal, function, "q.dtype", f"one of {legal}", dtype)
    eight = EIGHT_BIT if dtype in SIXTEEN_BIT else ()
    wanted = f"{dtype} as q's" + (f", or one of {eight}" if eight else "")
    expect(k.dtype in (dtype, *eight), function, "k_cache.dtype", wanted, k.dtype)
    check_equal(function, "v_cache.dtype", v.dtype, k.dtype, "k_cache")


def _check_new_dtypes(function: str, tensors: AppendTensors) -> None:
    """New keys and values have the dtype of their cache, or 16 bits for one of 8."""
    k, v, k_cache, v_cache = tensors[:4]
    dtype, legal = k_cache.dtype, (*DTYPES, *EIGHT_BIT)
    expect(dtype in legal, function, "k_cache.dtype", f"one of {legal}", dtype)
    check_equal(function, "v_cache.dtype", v_cache.dtype, dtype, "k_cache")
    legal, wanted = (dtype,), f"{dtype} as k_cache's"
    if dtype in EIGHT_BIT:
        legal, wanted = SIXTEEN_BIT, f"one of {SIXTEEN_BIT} for a cache of {dtype}"
    for name, x in (("k", k), ("v", v)):
        expect(x.dtype in legal, function, f"{name}.dtype", wanted, x.dtype)
    check_equal(function, "v.dtype", v.dtype, k.dtype, "k")


def _check_cache(function: str, tensors: DecodeTensors | AppendTensors, batch: int) -> None:
    """The caches, the page table, and that every sequence has a row of them."""
    k, v, table = tensors.k_cache, tensors.v_cache, tensors.page_table
    lead = "num_caches, capacity" if table is None else "num_pages, page_size"
    of = "q" if isinstance(tensors, DecodeTensors) else "k"
    device = getattr(tensors, of).device
    for name, cache in (("k_cache", k), ("v_cache", v)):
        axes = f"({lead}, num_heads_kv, head_dim)"
        expect(len(cache.shape) == 4, function, f"{name}.shape", axes, tuple(cache.shape))
        check_device(function, name, cache, device, of)
        check_dense(function, name, cache, "1: a cache is not copied")
        size = cache.shape[-1]
        if size > MAX_HEAD_DIM:
            raise unsupported(function, f"{name}.shape[-1]", f"at most {MAX_HEAD_DIM}", size)
        expect(size >= 1, function, f"{name}.shape[-1]", "at least 1", size)
    sizes = tuple(v.shape[:3]), tuple(k.shape[:3])
    check_equal(function, "v_cache.shape[:3]", *sizes, "k_cache")
    expect(k.shape[2] >= 1, function, "k_cache.shape[2]", "at least 1 head", k.shape[2])
    rows, holder, capacity = k.shape[0], "k_cache", k.shape[1]
    if table is not None:
        check_int32(function, "page_table", table, 2, device, of)
        check_dense(function, "page_table", table, "1: any row stride, dense rows")
        expect(k.shape[1] >= 1, function, "k_cache.shape[1]", "a page_size >= 1", k.shape[1])
        rows, holder, capacity = table.shape[0], "page_table", table.shape[1] * k.shape[1]
    wanted = f"at most {MAX_CAPACITY}: keys are counted in 32 bits"
    expect(capacity <= MAX_CAPACITY, function, "the capacity of a cache", wanted, capacity)
    if tensors.cache_batch_idx is None:
        wanted = f"{batch} (batch) without cache_batch_idx"
        expect(rows == batch, function, f"{holder}.shape[0]", wanted, rows)


def _check_indices(function: str, tensors, batch: int, names: tuple[str, ...]) -> None:
    device = tensors.k_cache.device
    for name in names:
        index = getattr(tensors, name)
        if index is None:
            continue
        check_int32(function, name, index, 1, device, "k_cache")
        found, wanted = index.shape[0], f"{batch} (batch)"
        expect(found == batch, function, f"{name}.shape[0]", wanted, found)
        check_dense(function, name, index)


def _check_slopes(function: str, tensors: DecodeTensors, batch: int) -> None:
    slopes = tensors.alibi_slopes
    check_slopes(function, tensors.q, batch, slopes)
    if slopes is not None:
        wanted = "None beside tree_mask, whose new tokens have no distance in a line"
        expect(tensors.tree_mask is None, function, "alibi_slopes", wanted, "a tensor")


def _check_tree(
    function: str, tensors: DecodeTensors, options: DecodeOptions, longest: int | None
) -> None:
    """longest: max_seqlen_q where it is known on the host."""
    tree, q = tensors.tree_mask, tensors.q
    if tree is None:
        return
    wanted = "True with tree_mask, whose queries see all older keys"
    expect(options.causal, function, "causal", wanted, options.causal)
    lead = tuple(q.shape[:-2])
    expect(tree.dtype == torch.int32, function, "tree_mask.dtype", torch.int32, tree.dtype)
    check_device(function, "tree_mask", tree, q.device, "q")
    seqlen = q.shape[1] if tensors.cu_seqlens_q is None else longest
    if seqlen is not None and seqlen > MAX_TREE_TOKENS:
        of = "q.shape[1]" if tensors.cu_seqlens_q is None else "max_seqlen_q"
        raise unsupported(function, of, f"at most {MAX_TREE_TOKENS} with tree_mask", seqlen)
    if seqlen is None:
        words = min(MAX_TREE_TOKENS // 32, max(1, *tree.shape[-1:]))
    else:
        words = -(-seqlen // 32)
    wanted = f"{(*lead, words)}, a bit for each new token in words of 32"
    found = tuple(tree.shape)
    expect(found == (*lead, words), function, "tree_mask.shape", wanted, found)
    check_dense(function, "tree_mask", tree)


def _check_metadata(function: str, metadata: Found, batch: int, device) -> None:
    if metadata is None:
        return
    name = "scheduler_metadata"
    check_int32(function, name, metadata, 1, device, "q")
    size, found = metadata_size(batch), metadata.shape[0]
    wanted = f"{size}, from get_scheduler_metadata with batch_size={batch}"
    expect(found == size, function, f"{name}.shape[0]", wanted, found)
    check_dense(function, name, metadata)


def check_options(options: DecodeOptions) -> None:
    """Raise for a value that no cached call may have."""
    DECODE.check(options)
    if options.pack_gqa is False:
        raise unsupported(options.function, "pack_gqa", "None or True", False)


def check_out(
    function: str, name: str, out: Metadata, shape: tuple, dtype, device, of: str
) -> None:
    """A tensor that the caller allocated for a result. of: the name of what has the device."""
    check_given(function, name, out, shape, dtype, device, of)
    check_dense(function, name, out)
    wanted = "without a stride of 0: every row is written"
    expect(not out.is_expanded, function, f"{name}.stride", wanted, tuple(out.stride))


def check_append(found: tuple[Found, ...], options: AppendOptions, lengths: Lengths) -> None:
    """Raise for an invalid append. found: in the order of AppendTensors."""
    tensors, function = AppendTensors(*found), options.function
    refuse_jit_trace(function)
    k, v, k_cache, v_cache = tensors[:4]
    varlen = tensors.cu_seqlens_k_new is not None
    axes = "(total_new, heads, head_dim)" if varlen else "(batch, seqlen_new, heads, head_dim)"
    for name, x in (("k", k), ("v", v)):
        expect(len(x.shape) == 4 - varlen, function, f"{name}.shape", axes, tuple(x.shape))
        check_device(function, name, x, k_cache.device, "k_cache")
    check_edges(function, "cu_seqlens_k_new", tensors.cu_seqlens_k_new, None, k.device, "k")
    batch = tensors.cu_seqlens_k_new.shape[0] - 1 if varlen else k.shape[0]
    _check_new_dtypes(function, tensors)
    for name, x, cache in (("k", k, k_cache), ("v", v, v_cache)):
        wanted = "without a stride of 0: new tokens are written to it"
        expect(not cache.is_expanded, function, f"{name}_cache.stride", wanted, cache.stride)
        sizes = tuple(x.shape[-2:]), tuple(cache.shape[2:])
        check_equal(function, f"{name}.shape[-2:]", *sizes, f"{name}_cache")
    check_equal(function, "v.shape[:-1]", tuple(v.shape[:-1]), tuple(k.shape[:-1]), "k")
    _check_cache(function, tensors, batch)
    _check_indices(function, tensors, batch, ("cache_seqlens", "cache_batch_idx", "rotary_seqlens"))
    check_descales(function, tensors, batch, "k")
    check_written_descales(function, tensors)
    check_seqlen(function, tensors.cache_seqlens, lengths)
    _check_rotary(function, tensors)
    _check_rotated_q(function, tensors, batch)
    missing = lengths.seqlen is None and tensors.cache_seqlens is None
    wanted = "an int or an int32 tensor where new tokens are written"
    expect(not missing, function, "cache_seqlens", wanted, None)


def _check_rotated_q(function: str, tensors: AppendTensors, batch: int) -> None:
    q, k = tensors.q, tensors.k
    if q is None:
        edges = tensors.cu_seqlens_q
        expect(edges is None, function, "cu_seqlens_q", "None without q", "a tensor")
        return
    wanted = "None without rotary_cos: there is nothing to do with it"
    expect(tensors.rotary_cos is not None, function, "q", wanted, "a tensor")
    found = check_queries(function, q, tensors.cu_seqlens_q)
    check_equal(function, "q's batch", found, batch, "k")
    check_equal(function, "q.dtype", q.dtype, k.dtype, "k")
    check_device(function, "q", q, k.device, "k")
    wanted = f"{k.shape[-1]} (k's head_dim)"
    expect(q.shape[-1] == k.shape[-1], function, "q.shape[-1]", wanted, q.shape[-1])
    expect(q.shape[-2] >= 1, function, "q.shape[-2]", "at least 1 head", q.shape[-2])


def _check_rotary(function: str, tensors: AppendTensors) -> None:
    cos, sin, k = tensors.rotary_cos, tensors.rotary_sin, tensors.k
    for name, given, other in (("rotary_sin", sin, cos), ("rotary_cos", cos, sin)):
        both = given is not None or other is None
        expect(both, function, name, "a tensor: rotary takes both tables", None)
    if cos is None:
        given = tensors.rotary_seqlens
        expect(given is None, function, "rotary_seqlens", "None without rotary_cos", "a tensor")
        return
    legal = tuple(dict.fromkeys((torch.float32, k.dtype)))
    for name, table in (("rotary_cos", cos), ("rotary_sin", sin)):
        shape = tuple(table.shape)
        axes = "(positions, rotary_dim / 2)"
        expect(len(shape) == 2, function, f"{name}.shape", axes, shape)
        expect(table.dtype in legal, function, f"{name}.dtype", f"one of {legal}", table.dtype)
        check_device(function, name, table, k.device, "k")
        check_dense(function, name, table)
    check_equal(function, "rotary_sin.shape", tuple(sin.shape), tuple(cos.shape), "rotary_cos")
    check_equal(function, "rotary_sin.dtype", sin.dtype, cos.dtype, "rotary_cos")
    half, head_dim = cos.shape[1], k.shape[-1]
    wanted = f"between 1 and {head_dim // 2} (half of k's head_dim)"
    expect(1 <= half <= head_dim // 2, function, "rotary_cos.shape[1]", wanted, half)


def check_combine(
    function: str, out_partial: Metadata, lse_partial: Metadata, what: str, out_dtype: torch.dtype
) -> None:
    """what: the argument that has out's dtype."""
    refuse_jit_trace(function)
    shape = tuple(out_partial.shape)
    axes = "(num_splits, batch, seqlen_q, heads, head_dim) or (num_splits, total_q, heads, ·)"
    expect(len(shape) in (4, 5), function, "out_partial.shape", axes, shape)
    dtype = out_partial.dtype
    expect(dtype in DTYPES, function, "out_partial.dtype", f"one of {DTYPES}", dtype)
    expect(shape[0] >= 1, function, "out_partial.shape[0]", "at least 1 part", shape[0])
    expect(shape[-1] >= 1, function, "out_partial.shape[-1]", "at least 1", shape[-1])
    found = tuple(lse_partial.shape)
    check_equal(function, "lse_partial.shape", found, shape[:-1], "out_partial")
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    expect(lse_partial.dtype == wide, function, "lse_partial.dtype", wide, lse_partial.dtype)
    check_device(function, "lse_partial", lse_partial, out_partial.device, "out_partial")
    expect(out_dtype in DTYPES, function, what, f"one of {DTYPES}", out_dtype)
