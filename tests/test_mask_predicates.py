"""mask_mods as code of kernels: the scores of torch.vmap, or left to it."""

from __future__ import annotations

import math
from itertools import cycle

import pytest
import torch
from helpers import GPU
from torch.nn.attention.flex_attention import (
    BlockMask,
    and_masks,
    create_block_mask,
    create_mask,
    noop_mask,
    or_masks,
)

from flashattn3 import masks
from flashattn3.masks import conversions, known_code, triton_lists
from flashattn3.masks.known_code import known_code_of
from flashattn3.masks.predicates import code_of

triton = pytest.importorskip("triton")
DEVICE = torch.device("cuda:0" if GPU else "cpu")
IDS = (torch.arange(60) // 7 % 5).to(DEVICE)
OF_BATCH = torch.stack([IDS, IDS + 1])
STRIDED = torch.arange(180, device=DEVICE).view(60, 3)[:, 1] % 11
SHIFT = torch.tensor([3, 250, 7], dtype=torch.uint8, device=DEVICE)
LIMIT = torch.tensor(260, device=DEVICE)
WORDS = torch.arange(60 * 4, device=DEVICE).view(60, 4) % 9
KNOWN = torch.arange(60, device=DEVICE) % 3 == 0
HEIGHT = torch.arange(60, device=DEVICE) / 7
SMALL = torch.arange(-30, 30, dtype=torch.int8, device=DEVICE)


def causal(b, h, q, k):
    return q >= k


def of_class(b, h, q, k):
    return q >= k if isinstance(q, torch.Tensor) else q < k


# name: mask_mod, whether it has code
MODS = {
    "causal": (causal, True),
    "documents": (lambda b, h, q, k: (IDS[q] == IDS[k]) & (q >= k), True),
    "of batch and head": (lambda b, h, q, k: (OF_BATCH[b, q] != 2) | (k < SHIFT[h]), True),
    "joined": (and_masks(causal, or_masks(causal, lambda b, h, q, k: k % 3 == 0)), True),
    "promotion": (lambda b, h, q, k: SHIFT[h] + LIMIT > 10 * k, True),
    "bytes that overflow": (lambda b, h, q, k: SHIFT[h] + 9 > k, True),
    "functions": (lambda b, h, q, k: torch.where(q > 9, (q - k).abs() <= 5, k < 4), True),
    "choices of two dtypes": (lambda b, h, q, k: torch.where(q > k, SHIFT[h], LIMIT) > k, False),
    "extremes": (lambda b, h, q, k: torch.minimum(q, k + LIMIT) < k.clamp(5, 30), True),
    "nothing": (noop_mask, True),
    "an int beside an index": (lambda b, h, q, k: WORDS[q, 1] <= WORDS[k, -1], True),
    "a column": (lambda b, h, q, k: WORDS[:, 1][q] <= STRIDED[k], True),
    "negative indices": (lambda b, h, q, k: IDS[q - 60] == IDS[-k - 1], True),
    "bools": (lambda b, h, q, k: (KNOWN[q] > KNOWN[k]) | ~KNOWN[k] ^ (q < 3), True),
    "quotients": (lambda b, h, q, k: (q - k) // 7 == (k - 25) % -4 - SMALL[q] // 5, True),
    "floats": (lambda b, h, q, k: HEIGHT[q] * 0.3 + HEIGHT[k] > 0.1 * k - 1, True),
    "infinity": (lambda b, h, q, k: (HEIGHT[q] > -math.inf) & (HEIGHT[k] - q < math.inf), True),
    "wide ints": (lambda b, h, q, k: (q * 2**40) % (2**35 + 1) > k * 2**29, True),
    "a length": (lambda b, h, q, k: q + k < len(IDS) + IDS.shape[0] // 3, True),
    "dtypes": (lambda b, h, q, k: (q.to(torch.uint8) * 9).int() > (k > 2).long() * 70, True),
    "logical": (lambda b, h, q, k: torch.logical_or(q % 5, k) & torch.logical_not(k % 4), True),
    "rows of a table": (lambda b, h, q, k: (WORDS[q] == WORDS[k]).any(), False),
    "a vector": (lambda b, h, q, k: ((IDS[:4] == q % 5) & (IDS[:4] <= k)).any(), False),
    "the number of axes": (lambda b, h, q, k: (q >= k) if q.ndim == 0 else (q < k), False),
    "a shape": (lambda b, h, q, k: q >= k + len(q.shape), False),
    "a sum": (lambda b, h, q, k: q.sum() >= k, False),
    "a stack": (lambda b, h, q, k: torch.stack([q >= k, k < 2]).any(0), False),
    "a class": (of_class, False),
    "a quotient of floats": (lambda b, h, q, k: q / (k + 1) < 0.7, False),
    "a word": (lambda b, h, q, k: (k.float() < 3) & torch.isfinite(q.float()), False),
}
# The same for the vmap of torch 2.9, which takes no int beside an index.
FIRST, LAST = WORDS[:, 1], WORDS[:, -1]
OF_VMAP = {"an int beside an index": lambda b, h, q, k: FIRST[q] <= LAST[k]}


@pytest.mark.parametrize("name", MODS)
def test_a_mask_mod_sees_the_scores_that_vmap_sees(name, monkeypatch):
    monkeypatch.setattr(triton_lists, "serve", lambda device: True)
    mask_mod, has_code = MODS[name]
    assert (code_of(mask_mod, DEVICE) is not None) == has_code
    sizes = 2, 3, 60, 50
    of_vmap = OF_VMAP.get(name, mask_mod)
    block_size = 128 if name in ("causal", "documents", "floats") else 16
    block_mask = create_block_mask(of_vmap, *sizes, device=DEVICE, BLOCK_SIZE=block_size)
    block_mask.mask_mod = mask_mod
    wanted = create_mask(of_vmap, *sizes, device=DEVICE)
    assert torch.equal(masks.from_block_mask(block_mask).to_bool(), wanted)


def test_functions_that_differ_in_values_have_one_code():
    def of(ids, limit):
        return code_of(lambda b, h, q, k: (ids[q] == ids[k]) & (k < limit), DEVICE)

    one, other = of(IDS, 5), of(IDS[:50].contiguous(), 1)
    assert one[:2] == other[:2]
    assert one.numbers != other.numbers


def windows_of(*variables):
    """mask_mods with one body that read some variables, each in a way of its own."""
    ids, others, limit = variables

    def of_closure(b, h, q, k):
        return (ids[q] == others[k]) & (k < limit)

    def of_a_default(b, h, q, k, limit=limit):
        return k < limit

    def of_a_call(b, h, q, k):
        return of_closure(b, h, q, k) | (q.abs() < 3)

    def of_a_function(b, h, q, k):
        return (lambda x: x < limit)(q)

    return of_closure, of_a_default, of_a_call, of_a_function, lambda b, h, q, k: k < HIDDEN[0]


HIDDEN = [5]


def test_a_code_is_that_of_the_function_whatever_came_before():
    longer = torch.arange(2, 64, device=DEVICE)
    given = (
        *((IDS, IDS, 5), (IDS + 1, IDS + 1, 5), (IDS, IDS + 1, 5), (IDS, IDS, 6), (IDS, IDS, 1)),
        *((IDS, IDS, True), (IDS.int(), IDS, 5), (STRIDED, IDS, 5), (longer, IDS, 5)),
        *((IDS, IDS, LIMIT), (IDS, IDS, LIMIT - 1), (IDS, IDS, 2.5), (IDS, IDS, 3.5)),
    )
    for variables in (*given, *given):
        HIDDEN[0] += 1
        for mask_mod in windows_of(*variables):
            wanted, got = code_of(mask_mod, DEVICE), known_code_of(mask_mod, DEVICE)
            assert got.lines == wanted.lines and got.seen == wanted.seen
            assert got.numbers == wanted.numbers
            for x, y in zip(got.tensors, wanted.tensors, strict=True):
                assert x.is_contiguous() and torch.equal(x, y)


@pytest.mark.parametrize(
    "mask_mod", [lambda b, h, q, k: IDS[q] == IDS[k], windows_of(IDS, IDS, 5)[0]]
)
def test_a_function_like_an_earlier_one_is_not_traced(mask_mod, monkeypatch):
    wanted = known_code_of(mask_mod, DEVICE)
    monkeypatch.setattr(known_code, "code_of", None)
    assert known_code_of(mask_mod, DEVICE) == wanted
    assert wanted.tensors == (IDS,)


def test_an_error_of_a_mask_mod_is_its_own(monkeypatch):
    monkeypatch.setattr(triton_lists, "serve", lambda device: True)
    block_mask = create_block_mask(causal, 1, 1, 5, 5, device=DEVICE)
    block_mask.mask_mod = lambda b, h, q, k: q if q > 3 else k
    with pytest.raises(RuntimeError, match="data-dependent"):
        masks.from_block_mask(block_mask)


def test_an_index_out_of_bounds_reads_nothing(monkeypatch):
    monkeypatch.setattr(triton_lists, "serve", lambda device: True)
    block_mask = create_block_mask(causal, 1, 1, 60, 60, device=DEVICE)
    block_mask.mask_mod = lambda b, h, q, k: KNOWN[q + k] & KNOWN[k]
    token = torch.arange(60, device=DEVICE)
    wanted = (token[:, None] + token < 60) & ((token[:, None] + token) % 3 == 0) & KNOWN
    assert torch.equal(masks.from_block_mask(block_mask).to_bool()[0, 0], wanted)


TYPES = {torch.bool: "i1", torch.uint8: "u8", torch.int8: "i8", torch.int64: "i64"}
TYPES[torch.float32] = "fp32"


def stack_bytes(capability):
    """Of the kernel of every mask_mod, compiled in a process of its own; of every other one, which
    reads kinds of small blocks and has 64-bit quotients, without regard to spills: -1."""
    from flashattn3_bench.ahead_of_time import compile_kernel, resources

    found = {}
    of_blocks = ("i32",) * 4, (None, "i32", None, None)
    coded = [(name, mask_mod) for name, (mask_mod, has_code) in MODS.items() if has_code]
    for (name, mask_mod), lists in zip(coded, cycle(of_blocks)):
        code = code_of(mask_mod, DEVICE)
        dtypes = tuple(x.dtype for x in code.tensors)
        num_numbers = len(code.numbers)
        launch = triton_lists._launch_of_code(
            code.lines, code.seen, dtypes, num_numbers, lists, None
        )
        types = (*(TYPES[x] for x in dtypes), *lists, "i64")
        numbers = 1, 8192, 8192, 128, 128, 64, 64, *code.numbers
        compiled = compile_kernel(launch.sample(types, (), numbers), capability)
        found[name] = resources(compiled).stack_bytes if lists[0] else -1
    return found


@pytest.mark.slow
@pytest.mark.parametrize("capability", (80, 90, 100))
def test_kernels_of_mask_mods_compile_for_every_chip(capability, compilers):
    spilled = compilers.submit(stack_bytes, capability).result()
    assert len(spilled) == sum(has_code for _, has_code in MODS.values())
    assert max(spilled.values()) <= 8, spilled


def test_tensors_of_another_device_are_left_to_torch():
    """A kernel has no access to a CPU's tensors, which are numbers for torch."""
    elsewhere = torch.device("meta")
    assert code_of(lambda b, h, q, k: (IDS[q] == IDS[k]) & (k < LIMIT), elsewhere) is None
    assert code_of(lambda b, h, q, k: k < LIMIT, elsewhere) is None
    assert code_of(causal, elsewhere) is not None


def test_a_float_beside_an_integer_has_code_where_it_is_float32():
    def mask_mod(b, h, q, k):
        return q * 0.1 <= k

    assert known_code_of(mask_mod, DEVICE) is not None
    torch.set_default_dtype(torch.float64)
    try:
        assert known_code_of(mask_mod, DEVICE) is None
        assert known_code_of(lambda b, h, q, k: q <= k, DEVICE) is not None
    finally:
        torch.set_default_dtype(torch.float32)


@pytest.mark.parametrize("block_size", [128, 16])
def test_numbers_of_blocks_reach_the_kernels_as_int32(block_size, monkeypatch):
    """A kernel that is compiled for one type of them is launched without a look at others."""
    received, listed = [], triton_lists.of_code

    def of_code(grid, code, block_mask, most_partial):
        received.extend(x.dtype for x in block_mask[:4])
        return listed(grid, code, block_mask, most_partial)

    monkeypatch.setattr(triton_lists, "serve", lambda device: True)
    monkeypatch.setattr(triton_lists, "of_code", of_code)
    given = create_block_mask(causal, 1, 2, 300, 200, device=DEVICE, BLOCK_SIZE=block_size)
    lists = given.kv_num_blocks, given.kv_indices, given.full_kv_num_blocks, given.full_kv_indices
    options = {"BLOCK_SIZE": block_size, "mask_mod": causal, "seq_lengths": (300, 200)}
    block_mask = BlockMask.from_kv_blocks(*(x.long() for x in lists), **options)
    assert block_mask.kv_indices.dtype == torch.int64
    found = masks.from_block_mask(block_mask)
    assert received == [torch.int32] * 4
    assert torch.equal(found.to_bool(), masks.from_block_mask(given).to_bool())


def documents_of(ids, limit):
    return lambda b, h, q, k: (ids[q] == ids[k]) & (k < limit)


# Block masks that differ in one property: changes of what is passed, or of the lists, to ``alike``.
ALIKE = {
    "the same": {},
    "other values": {"ids": IDS.flip(0).contiguous()},
    "more elements": {"ids": torch.arange(90, device=DEVICE) // 9},
    "another dtype": {"ids": IDS.int()},
    "strided": {"ids": torch.stack([IDS, IDS], 1)[:, 0]},
    "another number": {"limit": 20},
    "a bool": {"limit": True},
    "another body": {"body": lambda ids, limit: lambda b, h, q, k: ids[q] == limit},
    "another batch": {"sizes": (2, 2, 60, 50)},
    "other heads": {"sizes": (1, 3, 60, 50)},
    "fewer queries": {"sizes": (1, 2, 59, 50)},
    "fewer keys": {"sizes": (1, 2, 60, 49)},
    "larger blocks": {"block_size": (256, 128)},
    "smaller blocks": {"block_size": 16},
    "no full blocks": {"lists": lambda counts, indices, *_: (counts, indices, None, None)},
    "int64": {"lists": lambda *lists: [x.long() for x in lists]},
    "strided lists": {"lists": lambda *lists: [torch.stack([x, x], -1)[..., 0] for x in lists]},
}
NEW = "strided", "smaller blocks", "int64", "strided lists"  # in every call


def alike(ids=IDS, limit=40, sizes=(1, 2, 60, 50), block_size=128, body=documents_of, lists=None):
    mask_mod = body(ids, limit)
    given = create_block_mask(mask_mod, *sizes, device=DEVICE, BLOCK_SIZE=block_size)
    names = "kv_num_blocks", "kv_indices", "full_kv_num_blocks", "full_kv_indices"
    of = [getattr(given, name) for name in names]
    if lists is not None:
        of = lists(*of)
    options = {"BLOCK_SIZE": block_size, "mask_mod": mask_mod, "seq_lengths": sizes[2:]}
    return BlockMask.from_kv_blocks(*of, **options)


def test_a_block_mask_is_its_own_whatever_came_before(monkeypatch):
    """One like an earlier one takes its launches, of others nothing is taken, and each has the
    kernel, its tensors and its numbers as if there had been no other."""
    launched, built, build = [], [], conversions._lists_by_kernels

    def passed(block_mask):
        """What the kernel of mask_mod gets, and the shapes of the mask."""
        launched.clear()
        found = masks.from_block_mask(block_mask)
        (about, (grid, tensors, strides, numbers)) = launched[0]
        *tensors, words = tensors
        values = [x if x is None else (x.tolist(), x.dtype) for x in tensors]
        shapes = found.shape, [x.shape for x in (words, *found.tensors)]
        return about, grid, values, strides, numbers, shapes

    def launch_of_code(*about):
        return lambda *of: launched.append((about, of))

    monkeypatch.setattr(triton_lists, "serve", lambda device: True)
    monkeypatch.setattr(triton_lists, "_launch", lambda *_, **about: lambda *of: of[1][-1].zero_())
    monkeypatch.setattr(triton_lists, "_launch_of_code", launch_of_code)
    monkeypatch.setattr(triton_lists, "_list_launches", lambda *_: (lambda *of: None,) * 2)
    monkeypatch.setattr(
        conversions, "_lists_by_kernels", lambda *of: (built.append(of), build(*of))[1]
    )
    block_masks, wanted = {name: alike(**about) for name, about in ALIKE.items()}, {}
    for name, block_mask in block_masks.items():
        conversions._known.clear()
        wanted[name] = passed(block_mask)
    assert len({str(x) for x in wanted.values()}) == len(ALIKE) - 2  # lists become the same
    conversions._known.clear()
    for known, names in ((False, [*ALIKE]), (True, [*reversed(ALIKE)])):
        for name in names:
            built.clear()
            assert passed(block_masks[name]) == wanted[name], name
            assert len(built) == (name in NEW or not (known or name == "other values")), name


def test_a_known_block_mask_depends_on_the_default_dtype(monkeypatch):
    """An integer beside a float is computed in it."""
    monkeypatch.setattr(triton_lists, "serve", lambda device: True)
    block_mask = alike(body=lambda ids, limit: lambda b, h, q, k: HEIGHT[q] > k * 0.1)
    masks.from_block_mask(block_mask)
    assert conversions._lists_like_before(block_mask) is not None
    torch.set_default_dtype(torch.float64)
    try:
        assert conversions._lists_like_before(block_mask) is None
    finally:
        torch.set_default_dtype(torch.float32)
