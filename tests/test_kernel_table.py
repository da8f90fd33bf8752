"""The table of compiled kernels: names, budgets, and one row for every problem."""

from __future__ import annotations

import re
from dataclasses import FrozenInstanceError, replace

import pytest
from helpers import ROOT

from flashattn3 import kernel_table
from flashattn3.kernel_table import (
    BACKWARD_ROWS,
    DTYPES,
    EIGHT_BIT,
    ELEMENT_BYTES,
    HEAD_DIMS,
    MAX_HEAD_DIM,
    ROWS,
    SHARED_MEMORY_BYTES,
    SIXTEEN_BIT,
    BackwardRow,
    ForwardRow,
    all_rows,
    compiled_fields,
    matching,
    select_backward_row,
    select_row,
    table_hash,
)
from flashattn3.scales import BLOCKS

REGISTERS_OF_AN_SM = 65536
ids = {"ids": lambda row: row.name}


def test_names_are_unique_and_c_identifiers():
    names = [row.name for row in all_rows()]
    assert len(set(names)) == len(names) <= 64
    assert all(name.isidentifier() for name in names)


@pytest.mark.parametrize("row", ROWS, **ids)
def test_rows_fit_the_budgets_of_an_sm(row):
    assert row.shared_memory_bytes <= SHARED_MEMORY_BYTES
    assert row.block_m == 64 * row.num_mma_warpgroups
    assert row.block_n % 16 == 0
    assert row.num_stages >= 2
    # Scores in float32, the weights made of them in the row's type, and out, for each thread.
    held = row.block_n // 2 + row.block_n * ELEMENT_BYTES[row.dtype] // 8 + row.head_dim // 2
    assert held * 128 * row.num_mma_warpgroups < REGISTERS_OF_AN_SM


@pytest.mark.parametrize("row", BACKWARD_ROWS, **ids)
def test_backward_rows_fit_the_budgets_of_an_sm(row):
    assert row.shared_memory_bytes <= SHARED_MEMORY_BYTES
    assert row.dtype in SIXTEEN_BIT and row.num_stages >= 2
    # dK and dV of 64 keys in float32, for each warpgroup that multiplies; in pairs half of their
    # columns.
    assert 2 * 64 * 2 * row.head_dim // (1 + row.in_pairs) < REGISTERS_OF_AN_SM


def test_shared_memory_of_a_known_row():
    row = replace(ROWS[0], head_dim=128, block_m=128, block_n=128, num_stages=2, num_q_buffers=1)
    assert row.shared_memory_bytes == 1024 + 2 * 128 * (128 + 4 * 128) + 2 * 128 * 128
    # TMA's swizzle makes 128 columns of 96.
    assert replace(row, head_dim=96).shared_memory_bytes == row.shared_memory_bytes
    # A second buffer for Q takes as much as the first, and out goes over one of them.
    doubled = replace(row, num_q_buffers=2)
    assert doubled.shared_memory_bytes == 1024 + 2 * 128 * (2 * 128 + 4 * 128)


def test_shared_memory_of_a_known_backward_row():
    row = BackwardRow("bf16", head_dim=128, num_stages=2, num_mma_warpgroups=2)
    inputs, scores, sums = 2 * 256 * (128 + 2 * 64), 2 * 128 * 64 * 2, 2 * 64 * 128 * 4
    assert row.shared_memory_bytes == 3072 + inputs + scores + sums
    # TMA's swizzle makes 128 columns of 96; the sums have their own.
    narrow = replace(row, head_dim=96)
    assert narrow.shared_memory_bytes == row.shared_memory_bytes - 2 * 64 * 32 * 4
    # Three warpgroups have 192 keys.
    narrow = replace(row, head_dim=64, num_stages=4, num_mma_warpgroups=3)
    inputs, scores, sums = 2 * 128 * (192 + 4 * 64), 2 * 192 * 64 * 2, 3 * 64 * 64 * 4
    assert narrow.shared_memory_bytes == 3072 + inputs + scores + sums
    # In pairs: 64 keys of K and V, half of another K; two Q and a dO; P, dS and another dS, twice.
    wide = replace(row, head_dim=256)
    assert wide.shared_memory_bytes == 3072 + 512 * (2 * 64 + 32 + 3 * 64) + 6 * 64 * 64 * 2


def test_rows_of_8_bits_take_every_block_of_the_interface():
    for row in ROWS:
        scaled = row.dtype in EIGHT_BIT
        assert (row.scale_keys > 0) == (row.promote_keys > 0) == scaled
        assert not scaled or all(block % row.scale_keys == 0 for block in BLOCKS)


@pytest.mark.parametrize("dtype", EIGHT_BIT)
def test_shared_memory_of_a_row_of_8_bits(dtype):
    row = next(row for row in ROWS if row.dtype == dtype)
    row = replace(row, head_dim=64, block_m=192, block_n=128, num_stages=4, num_q_buffers=2)
    # A row of Q or K takes a chunk of 128 bytes, a key of V 64 and 8 for the sums of P, and a row
    # of out, 16 bits, 128. The references of sums take 1024 more.
    assert row.shared_memory_bytes == 2048 + 2 * 192 * 128 + 4 * 128 * (128 + 72) + 192 * 128


@pytest.mark.parametrize("windowed", [False, True])
@pytest.mark.parametrize("dtype", DTYPES)
def test_every_problem_finds_exactly_one_row(dtype, windowed):
    for head_dim in range(1, MAX_HEAD_DIM + 1):
        for seqlen_k in (1, 1024, 1025, 1 << 20):
            row = select_row(dtype, head_dim, windowed, seqlen_k)
            assert (row.dtype, row.windowed) == (dtype, windowed)
            assert row.head_dim == min(d for d in HEAD_DIMS[dtype] if d >= head_dim)
            assert row.max_seqlen_k is None or seqlen_k <= row.max_seqlen_k
        kin = [(r.dtype, r.head_dim, r.windowed, r.max_seqlen_k) for r in ROWS]
        assert kin.count((dtype, row.head_dim, windowed, None)) == 1
    assert select_row(dtype, MAX_HEAD_DIM + 1, windowed, 1) is None


@pytest.mark.parametrize("dtype", DTYPES)
def test_gradients_of_16_bits_find_the_smallest_row(dtype):
    largest = max(row.head_dim for row in BACKWARD_ROWS)
    for head_dim in range(1, largest + 1):
        row = select_backward_row(dtype, head_dim)
        if dtype in EIGHT_BIT:
            assert row is None
            continue
        kin = [r.head_dim for r in BACKWARD_ROWS if r.dtype == dtype]
        assert (row.dtype, row.head_dim) == (dtype, min(d for d in kin if d >= head_dim))
        assert kin.count(row.head_dim) == 1
    assert select_backward_row(dtype, largest + 1) is None


def test_a_row_for_short_sequences_goes_before_one_for_all():
    short = next(row for row in ROWS if row.max_seqlen_k is not None)
    of = (short.dtype, short.head_dim, short.windowed)
    assert select_row(*of, short.max_seqlen_k) is short
    assert select_row(*of, short.max_seqlen_k + 1).max_seqlen_k is None


@pytest.mark.parametrize("kind", [ForwardRow, BackwardRow])
def test_rows_have_the_fields_of_the_struct_in_cpp(kind):
    header = ROOT / "csrc" / "kernels" / kind.kind / "row.h"
    if not header.is_file():
        pytest.skip("needs a source checkout")
    pattern = rf"struct {kind.__name__} \{{(.*?)\n\}};"
    struct = re.search(pattern, header.read_text(), re.DOTALL)[1]
    members = re.findall(r"^  (?:\w+) (\w+)(?: = \w+)?;", struct, re.MULTILINE)
    assert members == compiled_fields(kind)


def test_a_glob_names_rows():
    assert matching("*") == all_rows() == (*ROWS, *BACKWARD_ROWS)
    assert {row.head_dim for row in matching("*_d64_*")} == {64}
    assert matching("backward_*") == BACKWARD_ROWS
    with pytest.raises(ValueError, match="no kernel row matches 'fast'; the rows are forward_fp16"):
        matching("fast")


@pytest.mark.parametrize("table", ["ROWS", "BACKWARD_ROWS"])
def test_the_hash_follows_what_is_compiled(table, monkeypatch):
    before, rows = table_hash(), getattr(kernel_table, table)
    measured = tuple(replace(row, measured="H100, full, 16k") for row in rows)
    monkeypatch.setattr(kernel_table, table, measured)
    assert table_hash() == before
    monkeypatch.setattr(kernel_table, table, (*rows[:-1], replace(rows[-1], num_stages=9)))
    assert table_hash() != before
    monkeypatch.setattr(kernel_table, table, rows[::-1])
    assert table_hash() != before


def test_rows_are_frozen():
    with pytest.raises(FrozenInstanceError):
        ROWS[0].block_m = 1
