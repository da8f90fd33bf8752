"""Attention of a tile of packed rows to a run of cached keys: where they lie, and the online
softmax (Milakov & Gimelshein 2018, arXiv 1805.02867) over them.
"""

import triton
import triton.language as tl

from .cache_bits import in_units, of_keys, scale_of, widened
from .common import FULL, round_down, stage_range, tanh_exp2, visible


@triton.jit
def locate_keys(
    first_key,
    key_offsets,
    lowest,
    length,
    table_row,
    num_pages,
    PAGE_SIZE: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """Page and row in the page of keys (64-bit), which of them exist, and which are lost: a row may
    see them, and their page does not exist. Dense caches have page 0.
    """
    position = first_key + key_offsets
    exists = (position >= lowest) & (position < length)
    page = tl.zeros((), tl.int32)
    lost = tl.zeros((), tl.int32)
    row = position
    if PAGE_SIZE > 0:
        row = position % PAGE_SIZE
        if PAGE_SIZE % BLOCK_N == 0:
            page = tl.load(table_row + first_key // PAGE_SIZE)
            has_page = (page >= 0) & (page < num_pages)
            # A sequence that is all padding sees no page.
            lost = ((has_page == 0) & (lowest < length)).to(tl.int32)
            # Triton's interpreter has no "and" of a block and a scalar that stays a mask.
            exists = exists & (position < tl.where(has_page, length, 0))
        else:
            page = tl.load(table_row + position // PAGE_SIZE, mask=exists, other=0)
            has_page = (page >= 0) & (page < num_pages)
            lost = (exists & (has_page == 0)).to(tl.int32)
            exists = exists & has_page
        page = tl.where(has_page, page, 0)
    return page.to(tl.int64), row.to(tl.int64), exists, lost


@triton.jit
def load_rows(pointers, exists, columns, num_columns, MASKED: tl.constexpr, PADDED: tl.constexpr):
    """Rows of K or V; what does not exist is 0."""
    if MASKED and PADDED:
        tile = tl.load(pointers, mask=exists[:, None] & (columns < num_columns)[None, :], other=0.0)
    elif MASKED:
        tile = tl.load(pointers, mask=exists[:, None], other=0.0)
    elif PADDED:
        tile = tl.load(pointers, mask=(columns < num_columns)[None, :], other=0.0)
    else:
        tile = tl.load(pointers)
    return tile


@triton.jit
def load_words(
    rows,
    exists,
    columns,
    num_columns,
    MASKED: tl.constexpr,
    PADDED: tl.constexpr,
    WORDS: tl.constexpr,
):
    """Rows of K or V of 8 bits, two columns in each word. WORDS: rows begin at multiples of 2."""
    if WORDS:
        words = rows.to(tl.pointer_type(tl.uint16), bitcast=True)
        pointers = words[:, None] + columns[None, :]
        tile = load_rows(pointers, exists, columns, num_columns // 2, MASKED, PADDED)
    else:
        even = 2 * columns
        pointers = rows.to(tl.pointer_type(tl.uint8), bitcast=True)[:, None] + even[None, :]
        tile = load_rows(pointers, exists, even, num_columns, MASKED, PADDED).to(tl.uint16)
        odd = load_rows(pointers + 1, exists, even + 1, num_columns, MASKED, PADDED)
        tile |= odd.to(tl.uint16) << 8
    return tile


@triton.jit
def in_tree(low, high, tokens, WORDS: tl.constexpr):
    """Whether rows see keys by their words of tree_mask. tokens: of each key its number among the
    new tokens, negative for an older key, which all rows see."""
    word = low[:, None]
    if WORDS == 2:
        word = tl.where((tokens >= 32)[None, :], high[:, None], word)
    shown = ((word >> (tokens & 31)[None, :]) & 1) == 1
    return (tokens < 0)[None, :] | (shown & (tokens < 32 * WORDS)[None, :])


@triton.jit
def edges_within(edges, first_key, last_key, KEYS: tl.constexpr):
    """The edges of ``n_block_range``, cut to [first_key, last_key). KEYS divides
    first_key."""
    begin, full_begin, full_end, end = edges
    end = tl.minimum(last_key, end)
    begin = tl.maximum(first_key, begin)
    full_begin = tl.minimum(tl.maximum(full_begin, begin), tl.maximum(begin, end))
    full_end = tl.minimum(full_end, tl.maximum(begin, round_down(end, KEYS)))
    return begin, full_begin, tl.maximum(full_end, full_begin), end


@triton.jit
def attend_keys(
    q,
    k_head,
    v_head,
    k_strides,
    v_strides,
    k_descale,
    v_descale,
    k_descale_strides,
    v_descale_strides,
    table_row,
    num_pages,
    edges,
    lowest,
    readable,
    cache_leftpad,
    leftpad,
    tree_low,
    tree_high,
    slope,
    tokens,
    length_k,
    diagonal,
    window_left,
    window_right,
    factor,
    cap_log2,
    HEAD_DIM: tl.constexpr,
    HEAD_DIM_V: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_DV: tl.constexpr,
    ROWS: tl.constexpr,
    KEYS: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    LEFT: tl.constexpr,
    RIGHT: tl.constexpr,
    SOFTCAP: tl.constexpr,
    TREE_WORDS: tl.constexpr,
    K_OF_KEYS: tl.constexpr,
    V_OF_KEYS: tl.constexpr,
    NATIVE_FP8: tl.constexpr,
    WORDS: tl.constexpr,
):
    """Attend to the keys within the edges, KEYS at a time: the accumulator, sum and maximum (log2)
    of each row, and NaN if the page of a key does not exist, else 0.

    k_descale, v_descale: pointers to those of keys, with K_OF_KEYS and V_OF_KEYS. factor: of each
    row. slope: ALiBi's of each row (log2); None: there is none.
    """
    IN_UNITS: tl.constexpr = V_OF_KEYS and q.dtype == tl.float16
    STORED: tl.constexpr = k_head.dtype.element_ty
    WIDENS: tl.constexpr = STORED.primitive_bitwidth == 8
    PARTS: tl.constexpr = 2 if WIDENS else 1
    key_offsets = tl.arange(0, KEYS)
    columns = tl.arange(0, BLOCK_D // PARTS)
    columns_v = tl.arange(0, BLOCK_DV // PARTS)
    acc = tl.zeros((ROWS, BLOCK_DV // PARTS), dtype=tl.float32)
    if WIDENS:
        q_even, q_odd = tl.split(tl.reshape(q, (ROWS, BLOCK_D // 2, 2)))
        acc_odd = acc
    row_sum = tl.zeros((ROWS,), dtype=tl.float32)
    row_max = tl.full((ROWS,), float("-inf"), dtype=tl.float32)
    unit = tl.full((ROWS,), 1.0, dtype=tl.float32)  # of acc
    any_lost = tl.zeros((), tl.int32)
    if PAGE_SIZE % KEYS != 0:
        any_lost = tl.zeros((KEYS,), tl.int32)
    for stage in tl.static_range(3):
        MASKED = stage != FULL
        if stage != 0 or LEFT or cache_leftpad is not None:
            first, last = stage_range(edges, stage)
            for first_key in range(first, last, KEYS):
                page, row, exists, lost = locate_keys(
                    first_key, key_offsets, lowest, readable, table_row, num_pages,
                    PAGE_SIZE, KEYS,
                )  # fmt: skip
                any_lost |= lost
                k_rows = page * k_strides.b + row * k_strides.s
                if WIDENS:
                    k = load_words(
                        k_head + k_rows, exists, columns, HEAD_DIM, MASKED or PAGE_SIZE > 0,
                        HEAD_DIM < BLOCK_D, WORDS,
                    )  # fmt: skip
                    k = tl.trans(k)
                    scores = tl.dot(q_even, widened(k, False, STORED, NATIVE_FP8))
                    scores = tl.dot(q_odd, widened(k, True, STORED, NATIVE_FP8), scores)
                else:
                    k = load_rows(
                        k_head + k_rows[:, None] + columns[None, :],
                        exists, columns, HEAD_DIM, MASKED or PAGE_SIZE > 0, HEAD_DIM < BLOCK_D,
                    )  # fmt: skip
                    scores = tl.dot(q, tl.trans(k))
                if K_OF_KEYS:
                    scores *= of_keys(
                        k_descale, page, row, k_descale_strides, exists,
                        MASKED or PAGE_SIZE > 0,
                    )[None, :]  # fmt: skip
                step = factor
                if SOFTCAP:
                    scores = cap_log2 * tanh_exp2(scores * factor[:, None], SOFTCAP)
                    step = tl.full((ROWS,), 1.0, dtype=tl.float32)
                if slope is not None:
                    between = tl.abs(
                        tokens[:, None] + (diagonal - first_key) - key_offsets[None, :]
                    )
                    scores = scores * step[:, None] - slope[:, None] * between.to(tl.float32)
                    step = tl.full((ROWS,), 1.0, dtype=tl.float32)
                if MASKED:
                    seen = visible(
                        tokens[:, None], key_offsets[None, :], length_k - first_key,
                        diagonal - first_key, window_left, window_right, LEFT, RIGHT,
                    )  # fmt: skip
                    if cache_leftpad is not None:
                        seen = seen & (first_key + key_offsets >= leftpad)[None, :]
                    if TREE_WORDS > 0:
                        new = first_key + key_offsets - diagonal
                        seen = seen & in_tree(tree_low, tree_high, new, TREE_WORDS)
                    scores = tl.where(seen, scores, float("-inf"))
                new_max = tl.maximum(row_max, tl.max(scores, 1) * step)
                reference = new_max
                if MASKED:
                    # A row that has seen no key yet has maximum -inf, and -inf - -inf is NaN.
                    reference = tl.where(new_max == float("-inf"), 0.0, new_max)
                p = tl.math.exp2(scores * step[:, None] - reference[:, None])
                decay = tl.math.exp2(row_max - reference)
                row_sum = row_sum * decay + tl.sum(p, 1)
                v_rows = page * v_strides.b + row * v_strides.s
                if WIDENS:
                    v = load_words(
                        v_head + v_rows, exists, columns_v, HEAD_DIM_V, MASKED or PAGE_SIZE > 0,
                        HEAD_DIM_V < BLOCK_DV, WORDS,
                    )  # fmt: skip
                else:
                    v = load_rows(
                        v_head + v_rows[:, None] + columns_v[None, :], exists, columns_v,
                        HEAD_DIM_V, MASKED or PAGE_SIZE > 0, HEAD_DIM_V < BLOCK_DV,
                    )  # fmt: skip
                if V_OF_KEYS:
                    p *= of_keys(
                        v_descale, page, row, v_descale_strides, exists,
                        MASKED or PAGE_SIZE > 0,
                    )[None, :]  # fmt: skip
                    if IN_UNITS:
                        p, decay, unit = in_units(p, unit * decay)
                acc = acc * decay[:, None]
                p = p.to(q.dtype)
                if WIDENS:
                    acc = tl.dot(p, widened(v, False, STORED, NATIVE_FP8), acc)
                    acc_odd = acc_odd * decay[:, None]
                    acc_odd = tl.dot(p, widened(v, True, STORED, NATIVE_FP8), acc_odd)
                else:
                    acc = tl.dot(p, v, acc)
                row_max = new_max

    if PAGE_SIZE % KEYS != 0:
        any_lost = tl.max(any_lost, 0)
    if WIDENS:
        acc = tl.reshape(tl.join(acc, acc_odd), (ROWS, BLOCK_DV)) * scale_of(STORED, NATIVE_FP8)
    if IN_UNITS:
        acc = acc * unit[:, None]
    return acc, row_sum, row_max, tl.where(any_lost > 0, float("nan"), 0.0)
