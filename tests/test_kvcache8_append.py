"""What an append stores in a cache of 8 bits, and its descales."""

from __future__ import annotations

import pytest
import torch

import flashattn3

FP8, INT8 = torch.float8_e4m3fn, torch.int8
BACKENDS = ("reference", "triton")
# dtype of the cache, kind of descales, page size, rotated columns, whether new tokens are ragged.
APPENDS = [
    (FP8, "heads", 16, 24, True),
    (INT8, "heads", 0, 0, False),
    (FP8, "pages", 16, 0, True),
    (INT8, "pages", 0, 10, False),
    (FP8, "tokens", 16, 24, True),
    (INT8, "tokens", 3, 10, False),
    (INT8, "tokens", 0, 24, True),
    (FP8, "", 0, 24, False),
]
LARGEST = {FP8: 448.0, INT8: 127.0}


def new_tokens(page_size: int, rotary_dim: int, ragged: bool, device) -> tuple[list, dict]:
    """k and v of three sequences, float16, and the arguments of their append."""
    torch.manual_seed(0)
    shape = (7,) if ragged else (3, 2)
    new = [torch.randn(*shape, 2, 32, device=device).half() * by for by in (1, 3)]
    ints = {"dtype": torch.int32, "device": device}
    arguments = {"cache_seqlens": torch.tensor([0, 15, 7], **ints)}
    if ragged:
        arguments["cu_seqlens_k_new"] = torch.tensor([0, 2, 2, 7], **ints)
    if page_size:
        table = torch.randperm(3 * (48 // page_size))
        arguments["page_table"] = table.view(3, -1).to(**ints)
    if rotary_dim:
        angles = torch.rand(60, rotary_dim // 2, device=device) * 6
        arguments |= {"rotary_cos": angles.cos(), "rotary_sin": angles.sin()}
    return new, arguments


def caches_of(dtype, kind: str, page_size: int, device) -> tuple[list, dict]:
    """Two caches of random codes and their descales, NaN where an append computes them."""
    torch.manual_seed(1)
    lead = (3 * (48 // page_size), page_size) if page_size else (3, 48)
    caches = [torch.randint(0, 100, (*lead, 2, 32), device=device, dtype=torch.uint8)
              for _ in range(2)]  # fmt: skip
    sizes = {"heads": (3, 2), "pages": (lead[0], 1, 2), "tokens": (*lead, 2)}
    descales = {}
    if kind:
        descales = {f"{x}_descale": torch.rand(sizes[kind], device=device) / 30 for x in "kv"}
    if kind == "tokens":
        descales = {name: torch.full_like(x, float("nan")) for name, x in descales.items()}
    return [x.view(dtype) for x in caches], descales


def by_place(descale, kind: str, arguments, like):
    """The descale of each token and head of a cache: of sequences in the places of these."""
    if kind != "heads":
        return descale.expand(like.shape[:3])
    table = arguments.get("page_table")
    found = descale.new_ones(like.shape[:3])
    for index in range(3):
        found[index if table is None else table[index].long()] = descale[index]
    return found


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("case", APPENDS, ids=str)
def test_an_append_quantizes(case, backend, device):
    """Against the same append to a cache of float64: each number within half a step of its own, and
    nothing else is written."""
    dtype, kind, page_size, rotary_dim, ragged = case
    (k, v), arguments = new_tokens(page_size, rotary_dim, ragged, device)
    caches, descales = caches_of(dtype, kind, page_size, device)
    wide = [torch.full(x.shape, float("nan"), dtype=torch.float64, device=device) for x in caches]
    flashattn3.append_kvcache(k.double(), v.double(), *wide, **arguments, backend="reference")
    before = [x.clone() for x in caches]
    flashattn3.append_kvcache(k, v, *caches, **arguments, **descales, backend=backend)
    for name, cache, old, x in zip("kv", caches, before, wide, strict=True):
        written = ~x.isnan()
        codes, same = cache.view(torch.uint8), old.view(torch.uint8)
        assert torch.equal(codes[~written], same[~written]) and written.any()
        descale = descales.get(f"{name}_descale")
        factors = torch.ones(cache.shape[:3], device=device)
        if descale is not None:
            factors = by_place(descale, kind, arguments, cache)
        if kind == "tokens":
            new = written[..., 0]
            assert descale[~new].isnan().all()
            amax = x.abs().amax(-1)[new].float()
            torch.testing.assert_close(descale[new], amax / LARGEST[dtype], rtol=1e-6, atol=0)
        factors = factors.double().unsqueeze(-1).expand(x.shape)[written]
        x, found = x[written], cache.double()[written]
        wanted = (x / factors).clamp(-LARGEST[dtype], LARGEST[dtype])
        half_a_step = 0.5
        if dtype == FP8:  # three bits behind the first one, down to steps of 2**-9
            half_a_step = 2.0 ** (wanted.abs().clamp(min=2.0**-6).log2().floor() - 4)
        assert ((found - wanted).abs() <= half_a_step * (1 + 1e-4) + 1e-6).all()


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("dtype", [FP8, INT8])
def test_what_is_not_finite(dtype, backend, device):
    """A descale divides, what is over the range saturates, NaN stays; int8 has no NaN, so that a
    computed descale is NaN where a number is not finite."""
    k = torch.zeros(1, 3, 1, 16, device=device).half()
    k[0, 0, 0, :4] = torch.tensor([3e4, -3e4, float("inf"), float("nan")])
    k[0, 1, 0, :2] = torch.tensor([1.0, -2.0])
    caches = [torch.zeros(1, 3, 1, 16, device=device).to(dtype) for _ in range(2)]
    given = torch.full((1, 1), 0.5, device=device)
    flashattn3.append_kvcache(
        k, k, *caches, cache_seqlens=0, k_descale=given, v_descale=given, backend=backend
    )
    largest = LARGEST[dtype]
    found = caches[0][0, :, 0].float()
    assert found[0, :3].tolist() == [largest, -largest, largest]
    assert found[0, 3].isnan() if dtype == FP8 else found[0, 3] == 0
    assert found[1, :2].tolist() == [2, -4] and not found[2].any()
    own = [torch.zeros(1, 3, 1, device=device) for _ in range(2)]
    flashattn3.append_kvcache(
        k, k, *caches, cache_seqlens=0, k_descale=own[0], v_descale=own[1], backend=backend
    )
    real = caches[0][0, :, 0].float() * own[0][0]
    assert real[0, 2:4].isnan().all() and (dtype == FP8 or own[0][0, 0].isnan())
    assert real[1, :2].tolist() == pytest.approx([1.0, -2.0], rel=0.01) and not real[2].any()
    assert own[0][0, 2] == 2.0**-126


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("kind", ["heads", "tokens"])
def test_a_call_appends_and_attends(kind, backend, device):
    """Rotated, quantized and read in one call, as in two; a compiled call writes the descales."""
    (k, v), arguments = new_tokens(16, 24, False, device)
    q = torch.randn(3, 2, 4, 32, device=device).half()
    results = []
    for way in ("one", "two", "compiled"):
        caches, descales = caches_of(FP8, kind, 16, device)
        if kind == "tokens":
            descales = {name: torch.ones_like(x) for name, x in descales.items()}
        else:  # a number that a server keeps for a whole cache
            descales = {name: x[:1, :1].clone().expand(3, 2) for name, x in descales.items()}

        def call(q, k, v, k_cache, v_cache, k_descale, v_descale):
            return flashattn3.flash_attn_with_kvcache(
                q, k_cache, v_cache, k, v, **arguments, k_descale=k_descale, v_descale=v_descale,
                causal=True, backend=backend,
            )  # fmt: skip

        if way == "two":
            q_out = flashattn3.append_kvcache(
                k, v, *caches, **arguments, **descales, q=q, backend=backend
            )
            lengths = {name: arguments[name] for name in ("cache_seqlens", "page_table")}
            lengths["cache_seqlens"] = lengths["cache_seqlens"] + 2
            out = flashattn3.flash_attn_with_kvcache(
                q_out, *caches, **lengths, **descales, causal=True, backend=backend
            )
        else:
            run = call
            if way == "compiled":
                torch._dynamo.reset()
                run = torch.compile(call, fullgraph=True, backend="aot_eager")
            out = run(q, k, v, *caches, *descales.values())
        results.append([out, *(x.view(torch.uint8) for x in caches), *descales.values()])
    for other in results[1:]:
        assert all(map(torch.equal, results[0], other))
    assert results[0][0].isfinite().all()


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [FP8, INT8], ids=str)
def test_a_kernel_appends_what_torch_does(dtype, device):
    """Without rotation, which a kernel may fuse: the same bits, at every kind of descales."""
    for kind, page_size in (("heads", 0), ("pages", 16), ("tokens", 16), ("tokens", 3)):
        (k, v), arguments = new_tokens(page_size, 0, True, device)
        results = []
        for backend in ("triton", "reference"):
            caches, descales = caches_of(dtype, kind, page_size, device)
            flashattn3.append_kvcache(k, v, *caches, **arguments, **descales, backend=backend)
            held = [x.view(torch.uint8) for x in (*caches, *descales.values())]
            results.append(held)
        assert all(map(torch.equal, *results)), kind
