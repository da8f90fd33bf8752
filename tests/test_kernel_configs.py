"""The table of compiled kernels: names, budgets, and one row for every problem."""

from __future__ import annotations

import re
from functools import partial

import pytest
from helpers import ROOT

from flashattn3.backends.device import SHARED_MEMORY_KIB
from flashattn3.backends.hopper import kernel_configs
from flashattn3.backends.hopper.config_types import DTYPES, HEAD_DIMS, MAX_HEAD_DIM
from flashattn3.backends.hopper.kernel_configs import (
    BACKWARD_CONFIGS,
    BIAS,
    BYTE_DECODE_CONFIGS,
    CACHED_CONFIGS,
    CACHED_FORWARD_CONFIGS,
    DECODE_CONFIGS,
    EIGHT_BIT,
    FORWARD_CONFIGS,
    SIXTEEN_BIT,
    SLOPES,
    BackwardConfig,
    DecodeConfig,
    ForwardConfig,
    all_configs,
    compiled_fields,
    configs_hash,
    matching,
    select_backward_config,
    select_byte_decode_config,
    select_cached_forward_config,
    select_decode_config,
    select_forward_config,
)
from flashattn3.call.descales import BLOCKS
from flashattn3.masks.block_lists import BLOCK_COLUMNS, BLOCK_ROWS

REGISTERS_OF_AN_SM = 65536
ids = {"ids": lambda config: config.name}


def test_names_are_unique_and_c_identifiers():
    names = [config.name for config in all_configs()]
    assert len(set(names)) == len(names) <= 172
    assert all(name.isidentifier() for name in names)


@pytest.mark.parametrize("config", FORWARD_CONFIGS + CACHED_FORWARD_CONFIGS, **ids)
def test_rows_fit_the_budgets_of_an_sm(config):
    assert config.block_m == 64 * config.num_mma_warpgroups
    assert config.block_n % 16 == 0
    assert config.num_stages >= 2
    # Scores in float32, the weights made of them in the row's type, and out, for each thread.
    held = (
        config.block_n // 2
        + config.block_n * (1 if config.dtype in EIGHT_BIT else 2) // 8
        + config.head_dim_v // 2
    )
    assert held * 128 * config.num_mma_warpgroups < REGISTERS_OF_AN_SM


@pytest.mark.parametrize("config", BACKWARD_CONFIGS, **ids)
def test_backward_rows_fit_the_budgets_of_an_sm(config):
    assert config.dtype in SIXTEEN_BIT and config.num_stages >= 2
    # dK and dV of 64 keys in float32, for each warpgroup that multiplies; in pairs half of their
    # columns, at head dim 192 one of the two.
    columns = config.head_dim + config.head_dim_v
    assert 2 * 64 * columns // (1 + config.uses_cluster2) < REGISTERS_OF_AN_SM


def test_the_kernels_are_held_to_the_shared_memory_that_the_backend_asks_for():
    """Static asserts in C++; the backend declines a device with less."""
    traits = sorted((ROOT / "csrc").rglob("traits.cuh"))
    if not traits:
        pytest.skip("needs a source checkout")
    bytes_ = r"(?:smem_bytes\(kConfig\)|kSmemBytes)"
    limit = rf"static_assert\({bytes_} <= {SHARED_MEMORY_KIB[90] * 1024}, "
    assert len(traits) == 5
    assert all(re.search(limit, path.read_text()) for path in traits)


def test_rows_of_8_bits_take_every_block_of_the_interface():
    for config in FORWARD_CONFIGS:
        scaled = config.dtype in EIGHT_BIT
        assert (config.keys_per_descale > 0) == (config.promote_keys > 0) == scaled
        assert not scaled or all(block % config.keys_per_descale == 0 for block in BLOCKS)


def of_forward(dtype, head_dim, masked=False, **options):
    return select_forward_config(dtype, head_dim, head_dim, masked, 512, **options)


def of_gradient(dtype, head_dim, **options):
    return select_backward_config(dtype, head_dim, head_dim, **options)


WHOLE, HALF = (64, 128, 256), (64, 128)
# How a config is selected → the head dims of the configs of 16 bits, and of 8.
SELECTIONS = {
    of_forward: (HEAD_DIMS["bf16"], HEAD_DIMS["e4m3"]),
    partial(of_forward, masked=True): (HEAD_DIMS["bf16"], HEAD_DIMS["e4m3"]),
    partial(of_forward, listed=True): (WHOLE, HALF),
    partial(of_forward, term=SLOPES): (WHOLE, ()),
    partial(of_forward, term=BIAS): (HALF, ()),
    of_gradient: (HEAD_DIMS["bf16"], ()),
    partial(of_gradient, listed=True): (WHOLE, ()),
    partial(of_gradient, term=SLOPES): (WHOLE, ()),
    partial(of_gradient, term=BIAS): (HALF, ()),
    select_decode_config: (WHOLE, ()),
    partial(select_decode_config, spans=True): (WHOLE, ()),
    select_byte_decode_config: (WHOLE, ()),
    select_cached_forward_config: (WHOLE, ()),
    partial(select_cached_forward_config, spans=True): (WHOLE, ()),
}  # trees and prefixes: test_a_tree_and_a_prefix_have_the_tiles_of_a_call_without_one


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("select", SELECTIONS, ids=lambda x: str(getattr(x, "keywords", "")))
def test_every_problem_finds_the_smallest_row(select, dtype):
    head_dims = SELECTIONS[select][dtype in EIGHT_BIT]
    given = getattr(select, "keywords", {})
    for head_dim in range(1, MAX_HEAD_DIM + 2):
        config, wanted = select(dtype, head_dim), [d for d in head_dims if d >= head_dim]
        assert (config is not None) == bool(wanted), head_dim
        if wanted:
            assert (config.dtype, config.head_dim) == (dtype, wanted[0])
            assert all(getattr(config, name) == value for name, value in given.items())


def test_rows_differ_in_what_selects_them():
    """A row for short sequences has one for all beside it."""
    tile = "head_dim_v", "masked", "max_seqlen_k", "block_m", "block_n"
    for configs, names in (
        (FORWARD_CONFIGS, ("term", "listed", *tile)),
        (BACKWARD_CONFIGS, ("term", "listed", "head_dim_v")),
        (DECODE_CONFIGS, ("spans", "tree", "prefix")),
        (BYTE_DECODE_CONFIGS, ("prefix",)),
        (CACHED_FORWARD_CONFIGS, ("spans", "tree")),
    ):
        kin = [tuple(getattr(c, x) for x in ("dtype", "head_dim", *names)) for c in configs]
        assert len({*kin}) == len(kin)
    for config in FORWARD_CONFIGS:
        of = config.dtype, config.head_dim, config.head_dim_v, config.masked, 1 << 20
        found = select_forward_config(*of, term=config.term, listed=config.listed)
        assert found.max_seqlen_k is None


def test_work_tiles_of_lists_are_blocks_of_rows():
    for config in FORWARD_CONFIGS:
        if config.listed:
            assert config.block_m in (BLOCK_ROWS, 1.5 * BLOCK_ROWS)
            assert config.block_n % BLOCK_COLUMNS == 0
            assert config.dtype in SIXTEEN_BIT or BLOCK_COLUMNS % config.keys_per_descale == 0
    assert all(config.block_n == BLOCK_ROWS for config in BACKWARD_CONFIGS if config.listed)
    # Joined lists have a bit for each block of columns; beyond, another config serves.
    sizes = (ROOT / "csrc" / "attention" / "list_sizes.h").read_text()
    most = 32 * int(re.search(r"kJoinedWords = (\d+);", sizes)[1]) * BLOCK_COLUMNS
    for keys, rows in ((most, 1.5 * BLOCK_ROWS), (most + 1, BLOCK_ROWS)):
        config = select_forward_config("bf16", 64, 64, True, keys, listed=True)
        assert config.block_m == rows


def test_a_forward_of_spans_sums_the_keys_of_the_decode_kernel():
    forwards = [config for config in CACHED_FORWARD_CONFIGS if config.spans]
    assert {config.dtype for config in forwards} == set(SIXTEEN_BIT)
    for forward in forwards:
        of = forward.dtype, forward.head_dim, True
        decode = select_decode_config(*of)
        assert select_cached_forward_config(*of) is forward
        assert (decode.head_dim, decode.block_n) == (forward.head_dim, forward.block_n)
        assert decode.num_consumers == 1  # which takes every KV block


@pytest.mark.parametrize(
    ("select", "kind"),
    [
        (select_decode_config, "tree"),
        (select_cached_forward_config, "tree"),
        (select_decode_config, "prefix"),
        (select_byte_decode_config, "prefix"),
    ],
)
def test_a_tree_and_a_prefix_have_the_tiles_of_a_call_without_one(select, kind):
    having = {kind: True}
    for dtype in SIXTEEN_BIT:
        for head_dim in (1, 64, 65, 128):
            plain, config = select(dtype, head_dim), select(dtype, head_dim, **having)
            assert config == plain._replace(**having, measured=config.measured)
            assert config.name == f"{plain.name}_{kind}"
        assert select(dtype, 129, **having) is None
        if select is not select_byte_decode_config:
            assert select(dtype, 64, spans=True, **having) is None


def test_only_forward_rows_of_cached_calls_are_cached():
    assert all(config.cached and config.masked for config in CACHED_FORWARD_CONFIGS)
    assert not any(config.cached for config in FORWARD_CONFIGS)
    # The largest TMA box that divides the page and the tile is found by shifts.
    assert all(config.block_n.bit_count() == 1 for config in CACHED_FORWARD_CONFIGS)


def test_a_row_for_short_sequences_goes_before_one_for_all():
    short = next(config for config in FORWARD_CONFIGS if config.max_seqlen_k is not None)
    of = (short.dtype, short.head_dim, short.head_dim_v, short.masked)
    assert select_forward_config(*of, short.max_seqlen_k) is short
    assert select_forward_config(*of, short.max_seqlen_k + 1).max_seqlen_k is None


@pytest.mark.parametrize(
    ("seqlen_q", "num_batch_heads", "block_m"),
    [
        (512, 16, 64),  # 128 tiles of 64 rows on 132 SMs
        (768, 16, 128),  # 192 tiles of 64 rows, 96 of 128
        (197, 64 * 16, 128),  # two tiles of each sequence, with 128 rows as with 192
        (512, 32 * 16, 192),  # twelve rounds of 192 rows, sixteen of 128
        (16384, 32, 192),
        (1, 1, 64),
        (0, 16, 192),  # no tile
    ],
)
def test_few_work_tiles_are_small(seqlen_q, num_batch_heads, block_m):
    config = select_forward_config("bf16", 64, 64, False, 256, seqlen_q, num_batch_heads, 132)
    assert config.block_m == block_m


BLOCKS_OF_KEYS = {50: 96, 77: 96, 112: 112, 128: 128, 197: 112, 256: 128, 257: 96, 384: 128}
BLOCKS_OF_KEYS |= dict.fromkeys((0, 577, 729, 1024, 1500, 4096, 4097), 128)


@pytest.mark.parametrize(("seqlen_k", "block_n"), BLOCKS_OF_KEYS.items())
def test_few_keys_are_in_the_blocks_that_they_fill(seqlen_k, block_n):
    config = select_forward_config("bf16", 64, 64, False, seqlen_k)
    assert config.block_n == block_n


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("head_dim", [64, 96, 128, 256])
def test_keys_alone_decide_their_blocks(head_dim, masked, dtype):
    """A row's result depends on the blocks of keys alone, so the number of queries, heads, batches
    and SMs changes no bit of it."""
    for seqlen_k in (1, 77, 128, 197, 257, 300, 512, 1000, 1024, 1025, 5000):
        found = {
            select_forward_config(dtype, head_dim, head_dim, masked, seqlen_k, seqlen_q, heads, 132)
            for seqlen_q in (1, 64, 197, 768, 4096)
            for heads in (1, 16, 1024)
        }
        blocks = {(r.block_n, r.keys_per_descale, r.promote_keys) for r in found}
        assert len(blocks) == 1, (seqlen_k, blocks)


@pytest.mark.parametrize("kind", [ForwardConfig, BackwardConfig, DecodeConfig])
def test_rows_have_the_fields_of_the_struct_in_cpp(kind):
    header = ROOT / "csrc" / kind.kind / "config.h"
    if not header.is_file():
        pytest.skip("needs a source checkout")
    pattern = r"struct Config \{(.*?)\n\};"
    struct = re.search(pattern, header.read_text(), re.DOTALL)[1]
    members = re.findall(r"^  (?:\w+) (\w+)(?: = [\w:]+)?;", struct, re.MULTILINE)
    assert members == compiled_fields(kind)


def test_a_glob_names_rows():
    assert matching("*") == all_configs() == (*FORWARD_CONFIGS, *BACKWARD_CONFIGS, *CACHED_CONFIGS)
    assert {config.head_dim for config in matching("*_d64_*")} == {64}
    assert matching("backward_*") == BACKWARD_CONFIGS
    assert matching("decode_*") == (*DECODE_CONFIGS, *BYTE_DECODE_CONFIGS)
    # C++ knows the kernels of 8-bit caches by their names (launch/byte_decode_params.h).
    assert matching("*_bytes_*") == BYTE_DECODE_CONFIGS
    assert all(config.num_byte_tiles > 0 for config in BYTE_DECODE_CONFIGS)
    assert matching("forward_*_cached_*") == CACHED_FORWARD_CONFIGS
    with pytest.raises(
        ValueError, match="no kernel config matches 'fast'; the kernel configs are forward_fp16"
    ):
        matching("fast")


@pytest.mark.parametrize("table", ["FORWARD_CONFIGS", "BACKWARD_CONFIGS", "CACHED_CONFIGS"])
def test_the_hash_follows_what_is_compiled(table, monkeypatch):
    before, configs = configs_hash(), getattr(kernel_configs, table)
    measured = tuple(config._replace(measured="H100, full, 16k") for config in configs)
    monkeypatch.setattr(kernel_configs, table, measured)
    assert configs_hash() == before
    monkeypatch.setattr(kernel_configs, table, (*configs[:-1], configs[-1]._replace(num_stages=9)))
    assert configs_hash() != before
    monkeypatch.setattr(kernel_configs, table, configs[::-1])
    assert configs_hash() != before
