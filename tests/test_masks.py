"""Masks: builders and algebra against a bool tensor, the lists' contract, tracing, errors."""

from __future__ import annotations

import random

import pytest
import torch
from torch.nn.attention.flex_attention import create_block_mask
from torch.utils._pytree import tree_flatten, tree_unflatten

from flashattn3 import masks
from flashattn3.masks.block_lists import BLOCK_COLUMNS, BLOCK_ROWS, kinds_of, turns_of


def visible(query, key, predicate):
    """bool of a predicate of positions."""
    i, j = torch.arange(query)[:, None], torch.arange(key)
    return torch.broadcast_to(predicate(i, j), (query, key))


def of_documents(ids, causal=False):
    """(batch, seqlen) → bool (batch, 1, seqlen, seqlen), where ids do not come back."""
    seen = (ids[:, :, None] == ids[:, None]) & (ids[:, :, None] >= 0)
    if causal:
        seen = seen.tril()
    return seen[:, None]


def ids_of(lengths, seqlen):
    ids = torch.full((seqlen,), -1)
    ids[: sum(lengths)] = torch.arange(len(lengths)).repeat_interleave(
        torch.tensor(lengths, dtype=torch.long)
    )
    return ids[None]


def of_windows(query, key, left, right, sinks=0):
    def seen(i, j):
        own = i + key - query
        first = (j >= own - left) | (j < sinks) if left >= 0 else torch.ones_like(j + own).bool()
        return first & (j <= own + right) if right >= 0 else first & (j >= 0)

    return visible(query, key, seen)[None, None]


def of_spans(starts, ends, keys):
    j = torch.arange(keys)
    return ((starts[..., None] <= j) & (j < ends[..., None])).any(-2)


def of_blocks(selected, block_q, block_k, query, key):
    whole = selected.repeat_interleave(block_q, -2).repeat_interleave(block_k, -1)
    return whole[..., :query, :key]


def of_tree(parents):
    seqlen = len(parents)
    seen = torch.eye(seqlen, dtype=torch.bool)
    for token, parent in enumerate(parents):
        if parent >= 0:
            seen[token] |= seen[parent]
    return seen[None, None]


def randoms(seed, *shape, high):
    return torch.randint(0, high, shape, generator=torch.Generator().manual_seed(seed))


def documents():
    for lengths, seqlen in (
        ([300], 300),
        ([100, 28, 1, 0, 127, 64], 320),
        ([64, 64, 128, 256], 512),
        ([10, 400], 500),
        ([3] * 90, 270),
        ([], 70),
        ([0], 0),
    ):
        for causal in (False, True):
            wanted = of_documents(ids_of(lengths, seqlen), causal)
            yield masks.documents(lengths, seqlen=seqlen, causal=causal), wanted
    batched = torch.tensor([[100, 50, 30], [0, 180, 0], [1, 1, 1]], dtype=torch.int32)
    ids = torch.cat([ids_of(row.tolist(), 200) for row in batched])
    yield masks.documents(batched, seqlen=200, causal=True), of_documents(ids, True)
    ids[0, 40:90] = -2  # padding with holes
    ids[0, 90:] += 10
    yield masks.documents(ids=ids), of_documents(ids)
    yield masks.documents(ids=ids.int(), causal=True), of_documents(ids, True)


def prefixes():
    prefix = [0, 1, 63, 64, 200, 333]
    wanted = torch.stack([visible(333, 333, lambda i, j, n=n: (j <= i) | (j < n)) for n in prefix])
    yield masks.prefix_lm(prefix, 333), wanted[:, None]


def windows():
    for query, key, left, right, sinks in (
        (333, 333, 100, 0, 0),
        (333, 333, 100, 0, 4),
        (200, 450, 0, 0, 130),
        (450, 200, 64, 0, 2),
        (300, 300, 70, 33, 100),
        (256, 256, -1, 0, 0),
        (256, 320, -1, -1, 0),
        (130, 70, 5, -1, 3),
        (1, 1, 0, 0, 9),
    ):
        mask = masks.window(query, left, right, sinks=sinks, seqlen_k=key)
        yield mask, of_windows(query, key, left, right, sinks)


def intervals():
    for shape, keys in (((1, 1, 200, 2), 200), ((2, 3, 150, 3), 310), ((1, 2, 5, 0), 64)):
        starts, ends = (randoms(seed, *shape, high=keys + 1) for seed in (1, 2))
        yield masks.intervals(starts.int(), ends.int(), keys), of_spans(starts, ends, keys)


def blocks():
    for block_q, block_k, query, key in (
        (128, 64, 384, 192),
        (128, 64, 300, 350),
        (128, 128, 256, 384),
        (256, 192, 512, 192),
        (64, 64, 256, 128),
        (16, 48, 200, 200),
        (300, 100, 450, 450),
    ):
        shape = 2, 2, -(-query // block_q), -(-key // block_k)
        selected = randoms(3, *shape, high=2).bool()
        mask = masks.blocks(selected, block_q, block_k, seqlen_q=query, seqlen_k=key)
        yield mask, of_blocks(selected, block_q, block_k, query, key)
    selected = randoms(3, 1, 1, 2, 3, high=2).bool()
    yield masks.blocks(selected.expand(2, 4, 2, 3)), of_blocks(selected, 128, 64, 256, 192)


def trees():
    chain = [token - 1 for token in range(150)]
    answers = [*chain, *(149 if i % 40 == 0 else 149 + i for i in range(200))]
    scattered = [-1, *(int(randoms(i, 1, high=i)) for i in range(1, 200))]
    forest = [-1, -1, 0, 1, 2, -1, 4, 3]
    for parents in (answers, scattered, forest):
        yield masks.tree(torch.tensor(parents)), of_tree(parents)
    pair = [scattered[:150], chain]
    yield masks.tree(torch.tensor(pair)), torch.cat([of_tree(parents) for parents in pair])


def bools():
    for shape in ((100, 77), (3, 129, 65), (2, 2, 300, 200), (1, 3, 64, 64), (0, 5), (5, 0)):
        seen = randoms(4, *shape, high=2).bool()
        seen[..., :1, :] = False
        yield masks.from_bool(seen), {2: seen[None, None], 3: seen[:, None]}.get(len(shape), seen)
    for value in (False, True):
        seen = torch.full((200, 200), value)
        yield masks.from_bool(seen.expand(2, 4, 200, 200)), seen[None, None]


def block_masks():
    bias = randoms(7, 2, 300, high=2).bool()
    shift = torch.tensor([0, 50, -30])

    def mask_mod(b, h, q, k):
        return (q >= k + shift[h]) & (bias[b][k] | (q // 100 == k // 100))

    for batch, heads, query, key, size in (
        (2, 3, 300, 290, 128),
        (None, None, 200, 300, (64, 128)),
    ):
        block_mask = create_block_mask(mask_mod, batch, heads, query, key, "cpu", BLOCK_SIZE=size)
        place = torch.meshgrid(
            *(torch.arange(size or 1) for size in (batch, heads, query, key)), indexing="ij"
        )
        b, h, q, k = place
        wanted = (q >= k + shift[h]) & (bias[b, k] | (q // 100 == k // 100))
        yield masks.from_block_mask(block_mask), wanted


BUILDERS = documents, prefixes, windows, intervals, blocks, trees, bools, block_masks


def check_lists(lists, seen):
    """The contract of ``BlockLists``. seen: (batch, heads, rows, columns)."""
    entries, work, tiles = lists.entries.long(), lists.work.long(), lists.tiles
    assert lists.entries.dtype == lists.work.dtype == torch.int32
    sizes = zip(seen.shape[-2:], (BLOCK_ROWS, BLOCK_COLUMNS), strict=True)
    padded = seen.new_zeros(*seen.shape[:2], *(-(-n // block) * block for n, block in sizes))
    padded[..., : seen.shape[-2], : seen.shape[-1]] = seen  # torch 2.9 pads no empty tensor
    blocks = padded.unflatten(-1, (-1, BLOCK_COLUMNS)).unflatten(-3, (-1, BLOCK_ROWS))
    blocks = blocks.transpose(-2, -3)  # (batch, heads, row blocks, column blocks, 128, 64)
    counts = blocks.sum((-1, -2))
    rows = (seen.shape[-2] - torch.arange(counts.shape[2]) * BLOCK_ROWS).clamp(max=BLOCK_ROWS)
    full, partial = counts == rows[:, None] * BLOCK_COLUMNS, counts > 0
    partial &= ~full
    kinds = full * 2 + partial * 1
    assert torch.equal(kinds_of(lists).long(), kinds)
    assert torch.equal(entries.sort(-1).values, torch.arange(kinds.shape[-1]).expand(kinds.shape))
    order = entries - kinds.gather(-1, entries) * kinds.shape[-1]
    assert (order.diff(dim=-1) > 0).all(), "full blocks, partial ones, hidden ones, each ascending"
    num_full, num_partial = full.sum(-1), partial.sum(-1)
    before = num_partial.flatten().cumsum(0).view(num_partial.shape) - num_partial
    wanted = torch.stack([num_full, num_full + num_partial, before], -1)
    assert torch.equal(work[..., :3], wanted)
    order = work[..., 3]
    assert torch.equal(order.sort(-1).values, torch.arange(kinds.shape[2]).expand(order.shape))
    longest = work[..., 1].gather(-1, order)
    assert (longest.diff(dim=-1) <= 0).all(), "the longest lists first"
    bits = (tiles.unsqueeze(-1) >> torch.arange(64)) & 1
    number = int(num_partial.sum())
    assert number <= tiles.shape[0]
    assert torch.equal(bits[:number].bool(), blocks[partial])
    assert not tiles[number:].any()


def check_mask(mask, seen):
    assert mask.shape == tuple(seen.shape)
    assert torch.equal(mask.to_bool(), seen)
    check_lists(mask.of_queries, seen)
    check_lists(mask.of_keys, seen.mT)
    if seen.numel():
        assert mask.density.item() == pytest.approx(seen.float().mean().item(), abs=1e-6)


@pytest.mark.parametrize("builder", BUILDERS, ids=lambda builder: builder.__name__)
def test_a_builder_gives_its_lists(builder):
    for mask, seen in builder():
        check_mask(mask, seen)
        check_mask(~mask, ~seen)


def random_pair(seed, sizes):
    """A random mask of at most these sizes (batch, heads, seqlen_q, seqlen_k), by a random builder,
    and its bool tensor."""
    generator = random.Random(seed)
    batch, heads = (generator.choice((1, size)) for size in sizes[:2])
    query, key = sizes[2:]
    choice = generator.choice(("bits", "blocks", "intervals", "window", "documents", "tree"))
    if choice == "bits":
        density = generator.choice((0.001, 0.5, 0.999))
        bits = torch.rand(batch, heads, query, key, generator=torch.manual_seed(seed)) < density
        return masks.from_bool(bits), bits
    if choice == "blocks":
        block_q, block_k = generator.choice(((128, 64), (64, 32), (128, 128), (50, 300)))
        selected = randoms(seed, batch, heads, -(-query // block_q), -(-key // block_k), high=2)
        mask = masks.blocks(selected.bool(), block_q, block_k, seqlen_q=query, seqlen_k=key)
        return mask, of_blocks(selected.bool(), block_q, block_k, query, key)
    if choice == "intervals" or (query != key and choice != "window"):
        shape = batch, heads, query, generator.randrange(1, 4)
        starts, ends = (randoms(seed + i, *shape, high=key + 1) for i in range(2))
        return masks.intervals(starts, ends, key), of_spans(starts, ends, key)
    if choice == "window":
        left, right = (generator.choice((-1, 0, 1, 60, 128)) for _ in range(2))
        sinks = generator.choice((0, 1, 64, 100))
        mask = masks.window(query, left, right, sinks=sinks, seqlen_k=key)
        return mask, of_windows(query, key, left, right, sinks)
    if choice == "tree":
        parents = [[generator.randrange(-1, i) for i in range(query)] for _ in range(batch)]
        wanted = [of_tree(row) for row in parents]
        return masks.tree(torch.tensor(parents, dtype=torch.long)), torch.cat(wanted)
    causal, most = generator.random() < 0.5, generator.choice((3, 100, 300))
    lengths, left = [], query
    while left > 0 and generator.random() < 0.95:
        lengths.append(generator.randrange(min(left, most) + 1))
        left -= lengths[-1]
    wanted = of_documents(ids_of(lengths, query), causal)
    return masks.documents(lengths, seqlen=query, causal=causal), wanted


def random_case(seed):
    """A random mask of algebra, and its bool tensor."""
    generator = random.Random(-seed)
    length = generator.choice((1, 63, 64, 128, 129, 200, 256, 300))
    sizes = 2, 2, length, generator.choice((length, 1, 64, 190))
    mask, seen = random_pair(seed, sizes)
    for step in range(generator.randrange(3)):
        other, of_other = random_pair(1000 * seed + step, sizes)
        if generator.random() < 0.3:
            other, of_other = ~other, ~of_other
        mask, seen = (
            (mask & other, seen & of_other)
            if generator.random() < 0.5
            else (mask | other, seen | of_other)
        )
    return mask, seen


@pytest.mark.parametrize(
    "seeds", [range(40), pytest.param(range(40, 600), marks=pytest.mark.slow)], ids=("few", "many")
)
def test_random_masks_equal_bool_tensors(seeds):
    for seed in seeds:
        mask, seen = random_case(seed)
        try:
            check_mask(mask, seen)
        except AssertionError as error:
            raise AssertionError(f"seed {seed}") from error


@pytest.mark.parametrize("seed", range(3))
def test_algebra_of_broadcast_masks(seed):
    """One side has a batch, the other heads; the result has both, and no side is expanded."""
    of_batch, of_heads = (
        (masks.from_bool(bits), bits)
        for bits in (randoms(seed, *sizes, 200, 150, high=2).bool() for sizes in ((3, 1), (1, 2)))
    )
    check_mask(of_batch[0] & of_heads[0], of_batch[1] & of_heads[1])
    check_mask(of_heads[0] | of_batch[0], of_heads[1] | of_batch[1])


BUILDS = {  # at 128k tokens: the function of a device, and the most MiB of its mask
    "documents": (lambda d: masks.documents(torch.ones(99, device=d).int(), seqlen=2**17), 64),
    "ids": (lambda d: masks.documents(ids=torch.ones(1, 2**17, device=d).int(), causal=True), 64),
    "prefix_lm": (lambda d: masks.prefix_lm(torch.ones(1, device=d).int(), 2**17), 64),
    "window": (lambda d: masks.window(2**17, 1024, 0, sinks=4, device=d), 64),
    "blocks": (lambda d: masks.blocks(torch.ones(1, 1, 64, 64, device=d).bool(), 2048, 2048), 64),
    "algebra": (lambda d: ~BUILDS["ids"][0](d) & BUILDS["window"][0](d), 64),
    "bool": (lambda d: masks.from_bool(torch.ones(2048, 2048, device=d).bool()), 2),
    "tree": (lambda d: masks.tree(torch.ones(2048, device=d).int()), 2),
}


@pytest.mark.parametrize("name", BUILDS)
def test_builders_read_no_value_and_say_their_memory(name):
    """Meta tensors have no values, so a builder that waits for a device fails here."""
    build, most_mib = BUILDS[name]
    mask = build("meta")
    assert mask.device.type == "meta"
    assert mask.nbytes == sum(x.nbytes for x in mask.tensors) <= most_mib * 2**20


MAPPED = {  # builders, and two of their tensors
    "documents": (lambda x: masks.documents(x, seqlen=150), torch.tensor([[50, 100], [120, 3]])),
    "blocks": (lambda x: masks.blocks(x, 50, 50), torch.eye(6).view(2, 1, 1, 3, 6).bool()),
    "bool": (masks.from_bool, torch.arange(2 * 150 * 150).view(2, 150, 150) % 7 < 3),
    "tree": (masks.tree, torch.stack([torch.arange(150) - 1, torch.arange(150) // 2 - 1])),
}


@pytest.mark.filterwarnings("ignore:(There is a perf|torch.searchsorted)")  # in vmap
@pytest.mark.parametrize("name", MAPPED)
def test_vmap_maps_builders(name):
    build, tensors = MAPPED[name]
    found = torch.vmap(lambda x: (~build(x)).to_bool())(tensors)
    assert torch.equal(found, torch.stack([(~build(x)).to_bool() for x in tensors]))


def test_a_mask_is_a_frozen_pytree_of_tensors():
    mask = masks.documents([100, 50])
    leaves, spec = tree_flatten(mask)
    assert leaves == [*mask.tensors]
    assert torch.equal(tree_unflatten(leaves, spec).to_bool(), mask.to_bool())
    assert mask.to("meta").device.type == "meta"
    with pytest.raises(AttributeError):
        mask.seqlen_q = 3


def test_lists_of_a_wave_add_to_a_block_in_the_order_of_their_steps():
    selected = torch.rand(2, 3, 9, 80, generator=torch.manual_seed(0)) < 0.4
    selected[0, 0, 2] = selected[0, 0, :, 4] = False
    mask = masks.blocks(selected, seqlen_q=1100) & masks.window(1100, -1, 2000, seqlen_k=5120)
    lists = mask.of_keys
    turns = turns_of(lists)
    assert turns.shape == lists.entries.shape and turns.dtype == torch.int32
    for entries, work, found in zip(
        *(x.flatten(0, 1).tolist() for x in (lists.entries, lists.work, turns)), strict=True
    ):
        additions = {}
        for drawn, row in enumerate(reversed([numbers[3] for numbers in work])):
            full, listed, *_ = work[row]
            steps = [*range(full, listed), *range(full)]
            for step, place in enumerate(steps):
                of_block = additions.setdefault(entries[row][place], [])
                of_block.append((drawn // 8, step, drawn, found[row][place]))
        for of_block in additions.values():
            assert [turn for *_, turn in sorted(of_block)] == list(range(len(of_block)))


def test_a_density_does_not_follow_the_default_dtype():
    torch.set_default_dtype(torch.float16)  # which holds no number of so many scores
    try:
        density = masks.window(512, -1).density
    finally:
        torch.set_default_dtype(torch.float32)
    assert density.dtype == torch.float32 and density == 513 / 1024


def test_a_drawing_shows_blocks():
    assert str(masks.documents([200, 56], causal=True)).split("\n") == [
        "Mask: 256 queries x 256 keys, 1 batch, 1 heads, 0.02 MiB, cpu; 33.1 % visible",
        "blocks of 128 queries x 64 keys: █ full, ▒ partial, · hidden",
        "▒▒··",
        "▒▒▒▒",
    ]
    large = str(masks.window(20000, 100, 0))
    assert "one of 3 x 5" in large
    assert len(large.split("\n")) == 2 + 53
    assert str(masks.window(0, 0)).startswith("Mask: 0 queries x 0 keys")


def test_a_figure_shows_scores_or_blocks(tmp_path):
    pytest.importorskip("matplotlib")
    for seqlen in (100, 3000):
        masks.figure(masks.window(seqlen, 30, 0)).savefig(tmp_path / "mask.png")


def reading_elsewhere():
    """A block mask whose mask_mod reads a tensor on another device."""
    elsewhere = torch.zeros(9, device="meta")
    block_mask = create_block_mask(lambda b, h, q, k: q >= k, None, None, 200, 200, "cpu")
    block_mask.mask_mod = lambda b, h, q, k: elsewhere[q] > k
    return block_mask


ONES = torch.ones(1, 1, 2, 2)
ERRORS = (
    (lambda: masks.documents([3, -1]), "masks.documents: lengths must be between 0 and 2, got -1"),
    (lambda: masks.documents([3, 5], seqlen=7), r"lengths.sum\(-1\) must be between 0 and 7"),
    (lambda: masks.documents(), "lengths must be None beside ids, and given without, got None"),
    (lambda: masks.documents(torch.ones(2).int()), "seqlen must be an int where lengths is"),
    (lambda: masks.documents(torch.ones(2), seqlen=2), "lengths.dtype must be one of"),
    (lambda: masks.documents(ids=torch.ones(2).int()), r"ids.shape must be \(batch, seqlen\), got"),
    (lambda: masks.documents(ids=torch.ones(1, 2).int(), seqlen=2), "seqlen must be None beside"),
    (lambda: masks.documents(8), "lengths must be a sequence of ints or a torch.Tensor, got 8"),
    (lambda: masks.documents([8], causal="no"), "masks.documents: causal must be a bool, got 'no'"),
    (lambda: masks.prefix_lm([2.5], 8), r"prefix_lengths\[...\] must be an int, got 2.5"),
    (lambda: masks.window(8, 1) and masks.window(8, 2), "neither true nor false; combine masks by"),
    (lambda: masks.prefix_lm([9], 8), "prefix_lengths must be between 0 and 8, got 9"),
    (lambda: masks.window(8, 1, sinks=-1), "masks.window: sinks must be at least 0, got -1"),
    (lambda: masks.window(8.0, 1), "masks.window: seqlen must be an int, got 8.0"),
    (lambda: masks.intervals(ONES.int(), ONES.int() * 9), "ends must be between 0 and 2, got 9"),
    (lambda: masks.intervals(ONES.int(), ONES[0].int()), r"ends.shape must be \(batch \| 1, heads"),
    (lambda: masks.intervals(ONES.int(), ONES.int()[..., :1]), r"ends.shape must be .* as starts'"),
    (lambda: masks.blocks(ONES), "selected.dtype must be torch.bool, got torch.float32"),
    (lambda: masks.blocks(ONES.bool(), 0), "block_q must be at least 1, got 0"),
    (lambda: masks.blocks(ONES.bool(), seqlen_k=9), r"selected.shape\[3\] must be 1 blocks of 64"),
    (lambda: masks.tree(torch.tensor([-1, 1])), "each token minus its parent must be between 1"),
    (lambda: masks.tree([-1, 0]), r"parents must be a torch.Tensor \(batch, seqlen\), got"),
    (lambda: masks.from_bool(ONES), "visible.dtype must be torch.bool"),
    (lambda: masks.from_block_mask(ONES), "block_mask must be a BlockMask of torch.nn.attention"),
    (
        lambda: masks.from_block_mask(reading_elsewhere()),
        "masks.from_block_mask: elsewhere, which mask_mod reads, must be on cpu",
    ),
    (lambda: masks.figure(masks.window(8, 1), head=3), "masks.figure: head must be .* below 1, as"),
    (lambda: masks.figure(masks.window(8, 1), -1), "masks.figure: batch_idx must be at least 0"),
    (lambda: masks.figure(masks.window(8, 1), "x"), "masks.figure: batch_idx must be an int, got"),
    (lambda: masks.figure(ONES), "masks.figure: mask must be a flashattn3.masks.Mask, got Tensor"),
    (lambda: masks.window(8, 1) & ONES, "the right side of & must be a Mask"),
    (lambda: masks.window(8, 1) | masks.window(9, 1), r"\(seqlen_q, seqlen_k\) must be \(8, 8\)"),
    (lambda: masks.window(8, 1) & masks.window(8, 1, device="meta"), "device must be cpu as the"),
    (
        lambda: masks.prefix_lm([1, 2], 8) & masks.prefix_lm([1, 2, 3], 8),
        "mask & mask: the right side's batch must be 2 as the left side's, got 3",
    ),
)


@pytest.mark.parametrize(("build", "message"), ERRORS, ids=[text[:30] for _, text in ERRORS])
def test_errors_name_the_argument(build, message):
    with pytest.raises((TypeError, ValueError), match=message):
        build()
