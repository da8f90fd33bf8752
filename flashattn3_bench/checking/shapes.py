"""Named problems of benchmarks: the grid of the FlashAttention-3 paper, and shapes of models."""

from __future__ import annotations

from dataclasses import replace

from .cases import Case, dense, varlen


def _paper(head_dim: int, causal: bool, seqlen: int) -> Case:
    heads, dims = (2048 // head_dim,) * 2, (head_dim,) * 2
    name = f"d{head_dim}-{'causal' if causal else 'full'}-{seqlen}"
    return dense(name, (seqlen, seqlen), heads, dims, batch=16384 // seqlen, causal=causal)


# The grid of the FlashAttention-3 paper (§4.1): batch x seqlen = 16384 tokens, heads x head_dim =
# 2048.
PAPER_GRID: tuple[Case, ...] = tuple(
    _paper(head_dim, causal, seqlen)
    for head_dim in (64, 128, 256)
    for causal in (False, True)
    for seqlen in (512, 1024, 2048, 4096, 8192, 16384)
)


def _trained(
    seqlen: int, heads: tuple[int, int], dims: tuple[int, int], batch: int, causal: bool = True
) -> Case:
    mask = "causal" if causal else "full"
    name = f"d{dims[0]}-{dims[1]}-{mask}-{batch}x{seqlen}-h{heads[0]}-{heads[1]}"
    return dense(name, (seqlen, seqlen), heads, dims, batch, causal=causal)


# The same for head dims between those of the paper, with as many heads as fit into 2048; then a
# head dim of 160, and a head dim of V below that of Q and K beside an equal one.
OTHER_DIMS: tuple[Case, ...] = (
    *(
        _paper(head_dim, causal, seqlen)
        for head_dim in (96, 192)
        for causal in (False, True)
        for seqlen in (1024, 4096, 16384)
    ),
    _trained(4096, (8, 8), (160, 160), batch=4, causal=False),
    _trained(4096, (16, 16), (192, 128), batch=2),
    _trained(4096, (16, 16), (192, 192), batch=2),
)

# Of the grid, with 8 query heads to each of k and v; then shapes of language models.
GROUPED_GRID: tuple[Case, ...] = (
    *(
        replace(case, name=f"{case.name}-gqa8", num_heads_kv=case.num_heads_q // 8)
        for case in PAPER_GRID
        if case.head_dim <= 128 and case.seqlen_k in (1024, 4096, 16384)
    ),
    _trained(8192, (64, 8), (128, 128), batch=1),
    _trained(4096, (32, 4), (128, 128), batch=4),
    _trained(2048, (32, 8), (128, 128), batch=1),
    _trained(512, (32, 8), (128, 128), batch=1),
    _trained(4096, (12, 4), (128, 128), batch=2),
    _trained(4096, (16, 4), (192, 192), batch=4),
    _trained(4096, (16, 4), (256, 256), batch=4),
)

# Head dims that are multiples of 8 and not of 16, each beside the next multiple of 16, with 16
# heads: diffusion models have 40, SigLIP and other vision towers 72.
ODD_DIMS: tuple[Case, ...] = tuple(
    replace(_paper(head_dim, causal, seqlen), num_heads_q=16, num_heads_kv=16)
    for odd in (40, 56, 72, 88, 104, 120)
    for head_dim in (odd, odd + 8)
    for causal in (False, True)
    for seqlen in (1024, 4096)
)

# Robot policies: an action chunk that attends to its observation, and two sizes of a joint context.
ROBOT_SHAPES: tuple[Case, ...] = (
    dense("cross-512x256", (512, 256), heads=(16, 16), batch=1),
    dense("self-768", (768, 768), heads=(16, 16), batch=1),
    dense("self-800", (800, 800), heads=(8, 1), dims=(256, 256), batch=1),
)

# Few queries of many keys: a decoded token, a drafted block, actions over a long context.
FEW_QUERIES: tuple[Case, ...] = tuple(
    dense(
        f"{batch}x{queries}x{keys}-{heads[0]}/{heads[1]}-d{dims[0]}", (queries, keys), heads, dims,
        batch,
    )
    for batch, queries, keys, heads, dims in (
        *((1, 1, keys, (32, 8), (128, 128)) for keys in (128, 512, 1024, 16384, 65536, 131072)),
        *((1, 1, 65536, (8, 1), (128, 128)), (1, 1, 4096, (32, 32), (128, 128))),
        *((4, 1, 32768, (32, 8), (128, 128)), (16, 1, 8192, (8, 8), (128, 128))),
        *((1, queries, 16384, (32, 8), (128, 128)) for queries in (4, 16, 64, 128, 300)),
        *((1, queries, 16384, (8, 8), (128, 128)) for queries in (64, 128, 300)),
        *((1, 1, 16384, (16, 16), (64, 64)), (1, 64, 16384, (16, 16), (192, 128))),
        *((1, 16, 16384, (8, 1), (256, 256)), (1, 16, 1024, (32, 8), (128, 128))),
    )
)  # fmt: skip

# Attention of models that people train and serve: encoders, vision, diffusion, speech, language.
MODEL_SHAPES: tuple[Case, ...] = (
    dense("bert-128", (128, 128), heads=(16, 16), batch=128),
    dense("bert-512", (512, 512), heads=(16, 16), batch=32),
    dense("vit-197", (197, 197), heads=(16, 16), batch=64),
    dense("dinov2-257", (257, 257), heads=(24, 24), batch=64),
    dense("clip-577", (577, 577), heads=(16, 16), batch=1),
    dense("siglip-729", (729, 729), heads=(16, 16), dims=(72, 72), batch=16),
    dense("dit-256", (256, 256), heads=(16, 16), dims=(72, 72), batch=64),
    dense("unet-4096", (4096, 4096), heads=(8, 8), dims=(40, 40), batch=8),
    dense("unet-text", (4096, 77), heads=(8, 8), dims=(40, 40), batch=8),
    dense("flux-4608", (4608, 4608), heads=(24, 24), dims=(128, 128), batch=1),
    dense("wan-32k", (32760, 32760), heads=(12, 12), dims=(128, 128), batch=1),
    dense("wan-text", (32760, 512), heads=(12, 12), dims=(128, 128), batch=1),
    dense("whisper-1500", (1500, 1500), heads=(20, 20), batch=16),
    dense("gpt2-1k", (1024, 1024), heads=(12, 12), batch=8, causal=True),
    dense("llama1b-2k", (2048, 2048), heads=(32, 8), batch=1, causal=True),
    dense("llama8b-512", (512, 512), heads=(32, 8), dims=(128, 128), batch=1, causal=True),
    dense("llama8b-4k", (4096, 4096), heads=(32, 8), dims=(128, 128), batch=1, causal=True),
    dense("llama70b-8k-tp8", (8192, 8192), heads=(8, 1), dims=(128, 128), batch=1, causal=True),
    dense("gemma2-4k", (4096, 4096), heads=(8, 4), dims=(256, 256), batch=1, causal=True),
    dense("phi3-4k", (4096, 4096), heads=(32, 32), dims=(96, 96), batch=1, causal=True),
    dense("deepseek-4k", (4096, 4096), heads=(16, 16), dims=(192, 128), batch=1, causal=True),
)

NAMED_SHAPES: tuple[Case, ...] = (
    *ROBOT_SHAPES[:2],
    dense("long-32k", (32768, 32768), heads=(64, 8), dims=(128, 128), batch=1, causal=True),
    *MODEL_SHAPES,
)

# Tokens of the sequences of a varlen batch: from some hundred to some thousand, none a multiple of
# a tile.
LENGTHS = (131, 262, 389, 517, 701, 907, 1163, 1429, 1741, 2111, 2693, 4339)
# Calls whose scores change: of the grid, a bias that sequences share, windows of grouped heads, in
# sequences of unequal lengths too, and the pairs of a protein model, whose rows share a bias.
SCORE_SHAPES: tuple[Case, ...] = (
    *(
        case
        for case in PAPER_GRID
        if case.head_dim <= 128 and case.seqlen_k in (512, 2048, 8192)
    ),
    *(
        dense(f"d{d}-full-2x4096-bias", (4096, 4096), (n, n), (d, d), bias="rows")
        for d, n in ((64, 32), (128, 16))
    ),
    *(
        dense(
            f"d64-window{window}-{n}-h64-8", (n, n), (64, 8), (64, 64), batch=1, causal=True,
            window=(window - 1, -1),
        )
        for window in (128, 1024)
        for n in (4096, 32768)
    ),
    *(
        varlen(
            f"d64-window{window}-varlen-h64-8", LENGTHS, LENGTHS, (64, 8), causal=True,
            window=(window - 1, -1),
        )
        for window in (128, 1024)
    ),
    *(
        dense(f"d32-pairs-{n}-bias", (n, n), (4, 4), (32, 32), batch=n, bias="rows")
        for n in (256, 384, 768)
    ),
)  # fmt: skip
