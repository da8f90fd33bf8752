"""The Triton kernels that build masks: the lists of torch operations, bit for bit, and machine code
for every chip."""

from __future__ import annotations

import pytest
import torch
from helpers import GPU, run_python
from torch.nn.attention.flex_attention import create_block_mask

from flashattn3 import flash_attn_func, masks
from flashattn3.masks import triton_lists

triton = pytest.importorskip("triton")
DEVICE = "cuda" if GPU else "cpu"


def randoms(seed, *shape, high):
    return torch.randint(0, high, shape, generator=torch.manual_seed(seed))


def runs(seed, batch, seqlen, most):
    """ids of documents of up to most tokens, of which each fourth is padding."""
    lengths = randoms(seed, batch, seqlen, high=most) + 1
    ids = [torch.arange(seqlen).repeat_interleave(row)[:seqlen] for row in lengths]
    return torch.stack([torch.where(row % 4 == 3, -row, row) for row in ids])


def spans(seed, *shape, keys):
    return (randoms(seed + i, *shape, high=keys + 1).int().to(DEVICE) for i in range(2))


def given(x):
    return x.to(DEVICE)


# name: builds a mask from tensors on the device
CASES = {
    "lengths": lambda: masks.documents(given(randoms(1, 2, 70, high=9)), seqlen=300, causal=True),
    "lengths-few": lambda: masks.documents(given(torch.tensor([[100, 29], [0, 65]])), seqlen=129),
    "lengths-beyond": lambda: masks.documents(
        given(torch.tensor([64, -5, 1000])), seqlen=200, causal=True
    ),
    "ids": lambda: masks.documents(ids=given(runs(2, 2, 333, 90)), causal=True),
    "lengths-long": lambda: masks.documents(given(torch.tensor([3000, 70, 900])), seqlen=4100),
    "ids-bytes": lambda: masks.documents(ids=given(runs(3, 1, 70, 5)).to(torch.uint8)),
    "ids-negative": lambda: masks.documents(ids=given(runs(2, 2, 333, 90) - 2)),
    "ids-one-run": lambda: masks.documents(ids=given(torch.zeros(1, 600, dtype=torch.int32))),
    "ids-strided": lambda: masks.documents(ids=given(runs(4, 130, 2, 50)).T),
    "prefix_lm": lambda: masks.prefix_lm(given(torch.tensor([0, 65, 200])), 257),
    "window": lambda: masks.window(200, 40, 30, sinks=70, seqlen_k=330, device=DEVICE),
    "window-few-keys": lambda: masks.window(300, 40, 0, seqlen_k=70, device=DEVICE),
    "window-all": lambda: masks.window(200, -1, -1, seqlen_k=130, device=DEVICE),
    "window-behind": lambda: masks.window(300, 0, 70, sinks=500, seqlen_k=90, device=DEVICE),
    "window-of-none": lambda: masks.window(150, 2**40, 0, seqlen_k=0, device=DEVICE),
    "intervals": lambda: masks.intervals(*spans(5, 2, 2, 150, 3, keys=310), 310),
    "intervals-many-blocks": lambda: masks.intervals(*spans(6, 1, 1, 40, 1, keys=9000), 9000),
    "bools": lambda: masks.from_bool(given(randoms(7, 2, 2, 130, 200, high=2).bool())),
    "bools-of-blocks": lambda: masks.from_bool(
        given(randoms(8, 3, 4, high=2).bool().repeat_interleave(128, 0).repeat_interleave(64, 1))
    ),
    "blocks": lambda: masks.blocks(
        given(randoms(10, 2, 1, 2, 3, high=2).bool()), 128, 128, seqlen_q=200, seqlen_k=384
    ),
    "blocks-of-words": lambda: masks.blocks(
        given(randoms(12, 1, 2, 9, 7, high=2).bool()), 30, 24, seqlen_k=163
    ),
    "bools-odd": lambda: masks.from_bool(given(randoms(13, 2, 150, 133, high=2).bool())),
    "blocks-small": lambda: masks.blocks(given(randoms(11, 1, 2, 9, 7, high=2).bool()), 30, 20),
    "tree": lambda: masks.tree(given(torch.tensor([[-1, 0, 0, 2, 1] * 30, [*range(-1, 149)]]))),
    "tree-deep": lambda: masks.tree(given(torch.stack(deep_trees()))),
    "tree-whole-blocks": lambda: masks.tree(given(torch.arange(-1, 255).short())),
    "tree-strided": lambda: masks.tree(given(torch.stack(deep_trees(), 1)).T),
    "tree-beyond": lambda: masks.tree(given(randoms(14, 300, high=900) - 300)),
    "block-mask": lambda: masks.from_block_mask(
        create_block_mask(of_heads, 2, 3, 200, 300, DEVICE)
    ),
    "bools-strided": lambda: masks.from_bool(given(randoms(9, 300, 65, 2, high=2).bool().mT.mT.T)),
}


def deep_trees():
    """Answers to a prompt of more than two blocks, and parents near and far."""
    answers = torch.arange(-1, 449)
    answers[300::41] = 290
    far = (torch.rand(450, generator=torch.manual_seed(15)) * torch.arange(450)).long() - 1
    return answers, torch.where(torch.arange(450) % 7 == 0, far, torch.arange(-1, 449))


def of_heads(b, h, q, k):
    return (q >= k - 40 * h) & (k % 7 > b)


@pytest.fixture
def no_check(monkeypatch):
    """Values out of bounds are clamped, as on a GPU without FLASHATTN3_CHECK."""
    monkeypatch.setattr("flashattn3.masks.arguments.is_checked", lambda device: False)


@pytest.mark.parametrize("name", CASES)
def test_kernels_write_the_lists_of_torch_operations(name, monkeypatch, no_check):
    found = []
    for by_kernels in (False, True):
        monkeypatch.setattr(triton_lists, "serve", lambda device, by=by_kernels: by)
        found.append(CASES[name]().tensors)
    fields = [
        f"{side}.{x}" for side in ("of_queries", "of_keys") for x in ("entries", "work", "tiles")
    ]
    for field, wanted, got in zip(fields, *found, strict=True):
        assert got.dtype == wanted.dtype, field
        assert torch.equal(got, wanted), field


def test_a_mask_of_the_kernels_is_one_allocation(monkeypatch):
    monkeypatch.setattr(triton_lists, "serve", lambda device: True)
    mask = masks.prefix_lm(given(torch.tensor([65])), 200)
    assert len({x.untyped_storage().data_ptr() for x in mask.tensors}) == 1


# kernel: types of its tensors, constants, numbers
ABOUT = 2, 8192, 8192, 12, 8, 8, 8
BITS = {"FULL": 1, "WHOLE": True}
OF_BLOCKS = 1, 8192, 8192, 64, 64, 128, 128
SOURCES = {  # types of the source and of ends
    "lengths": ("i64", None),
    "documents": ("i32", None),
    "prefix": ("i32", None),
    "window": (None, None),
    "intervals": ("i64", "i64"),
    "bits": ("i64", None),
}
SAMPLES = {
    "bits": ("bits_kernel", ("i64", None, "i64"), BITS, OF_BLOCKS, (8192, 8192, 1024)),
    "bits-of-blocks": (
        "bits_kernel",
        ("i64", "i32", "i64"),
        {"FULL": 2, "WHOLE": False},
        *(OF_BLOCKS, (8192, 8192, 1024)),
    ),
    "bits-of-kinds": ("bits_kernel", (None, "i1", "i64"), BITS, OF_BLOCKS, (0, 0, 0)),
    "ids": ("documents_of_ids_kernel", ("i32", "i32"), {}, (8192,)),
    "ancestors": ("ancestors_kernel", ("i64", "i64"), {}, (8192,)),
    "tree": ("tree_kernel", ("i64", "i64"), {}, (1, 8192, 8192)),
    "block-kinds": ("block_kinds_kernel", ("i32",) * 5, {}, (64,)),
}
for source, types in SOURCES.items():
    about = {"SOURCE": source, "CAUSAL": True}
    kinds = "i8" if source == "intervals" else None
    SAMPLES[f"lists of {source}"] = ("lists_kernel", (*types, kinds, "i32"), about, ABOUT)
    SAMPLES[f"tiles of {source}"] = (
        "tiles_kernel",
        (*types, "i32", "i64"),
        *(about, (*ABOUT, 500, 500)),
    )


def stack_bytes(capability):
    """Of every kernel, compiled in a process of its own."""
    from flashattn3_bench.ahead_of_time import compile_kernel, resources

    found = {}
    for name, (kernel, types, constants, numbers, *strides) in SAMPLES.items():
        launch = triton_lists._launch(kernel, name, None, **constants)
        compiled = compile_kernel(launch.sample(types, *(strides or [()]), numbers), capability)
        found[name] = resources(compiled).stack_bytes
    return found


@pytest.mark.slow
@pytest.mark.parametrize(
    "capability", (80, 90, 100, *(pytest.param(x, marks=pytest.mark.sweep) for x in (87, 89, 120)))
)
def test_kernels_compile_for_every_chip(capability, compilers):
    spilled = compilers.submit(stack_bytes, capability).result()
    assert spilled.keys() == SAMPLES.keys()
    assert max(spilled.values()) <= 8, spilled


@pytest.mark.gpu
@pytest.mark.parametrize("name", ("lengths", "ids", "tree"))
def test_a_graph_of_a_builder_follows_its_values_and_waits_for_nothing(name):
    if not GPU:
        pytest.skip("needs a GPU")
    values = [given(randoms(seed, 1, 40, high=9)) for seed in (1, 2)]
    if name == "ids":
        values = [given(runs(seed, 1, 300, 50)) for seed in (1, 2)]
    if name == "tree":
        values = [given(x[:300].clone()) for x in deep_trees()]

    def build(x):
        if name == "tree":
            return masks.tree(x)
        return masks.documents(**{name: x}, seqlen=300 if name == "lengths" else None, causal=True)

    given_later = values[0].clone()
    build(given_later)  # compiles
    torch.cuda.synchronize()
    before = torch.cuda.get_sync_debug_mode()
    torch.cuda.set_sync_debug_mode("error")
    try:
        build(given_later)
    finally:
        torch.cuda.set_sync_debug_mode(before)
    q, k, v = torch.randn(3, 1, 300, 2, 64, device=DEVICE, dtype=torch.bfloat16).unbind()
    flash_attn_func(q, k, v, mask=build(given_later))
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        mask = build(given_later)
        out = flash_attn_func(q, k, v, mask=mask)
    given_later.copy_(values[1])
    graph.replay()
    other = build(values[1])
    for got, wanted in zip(mask.tensors, other.tensors, strict=True):
        assert torch.equal(got, wanted)
    assert torch.equal(out, flash_attn_func(q, k, v, mask=other))


@pytest.mark.gpu
def test_values_on_a_gpu_are_checked_where_that_is_asked():
    if not GPU:
        pytest.skip("needs a GPU")
    code = (
        "import torch\nfrom flashattn3 import masks\n"
        "lengths = torch.tensor([5, 4], device='cuda')\n"
        "try:\n    print(masks.documents(lengths, seqlen=8).seqlen_q)\n"
        "except ValueError as error:\n    print(error)"
    )
    assert run_python(code, FLASHATTN3_CHECK="0").strip() == "8"
    found = run_python(code, FLASHATTN3_CHECK="1")
    assert "lengths.sum(-1) must be between 0 and 8, got 9" in found
