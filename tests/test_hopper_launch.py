"""Prepared launches of the Hopper library: what they hold, and what the operators refuse.

Nothing here needs a GPU: launches are prepared without one, and the operators check their tensors
before they look for one.
"""

from __future__ import annotations

import re
import threading
from typing import get_type_hints

import pytest
import torch
from helpers import H100, ROOT, built, described
from torch._subclasses.fake_tensor import FakeTensorMode

from flashattn3.backends.hopper.kernel_configs import (
    FORWARD_CONFIGS,
    select_backward_config,
    select_forward_config,
)
from flashattn3.backends.hopper.launch import Launch, backward_launch, forward_launch
from flashattn3.backends.hopper.launch_record import DecodeRecord, LaunchRecord
from flashattn3.backends.hopper.library import find_library
from flashattn3.call.dtypes import FP8
from flashattn3.call.operands import Tensors

LIBRARY = find_library()
DTYPES = {torch.float16: "fp16", torch.bfloat16: "bf16", FP8: "e4m3"}


def qkv(batch=2, seqlen_q=512, seqlen_k=512, heads=(8, 4), d=64, dv=None, dtype=torch.bfloat16):
    q = torch.zeros(batch, seqlen_q, heads[0], d, dtype=dtype)
    k, v = (torch.zeros(batch, seqlen_k, heads[1], n, dtype=dtype) for n in (d, dv or d))
    return Tensors(q, k, v)


def prepared(tensors, prepare=forward_launch, device=H100, **options):
    problem = described(tensors, **options)
    name, dims = DTYPES[problem.dtype], (problem.head_dim, problem.head_dim_v)
    if prepare is forward_launch:
        seqlen_k = problem.seqlen_k
        config = select_forward_config(name, *dims, problem.masked, seqlen_k)
    else:
        config = select_backward_config(name, *dims)
    return prepare(problem, device, built(config, LIBRARY), LIBRARY)


RECORDS = {"params.h": LaunchRecord, "decode_params.h": DecodeRecord}


@pytest.mark.parametrize("name", RECORDS)
def test_the_record_has_the_fields_of_the_struct_in_cpp(name):
    header = ROOT / "csrc" / "launch" / name
    if not header.is_file():
        pytest.skip("needs a source checkout")
    fields = re.findall(r"^  FIELD\((\w+), (\w+)\)", header.read_text(), re.MULTILINE)
    types = {name: kind.__name__ for name, kind in get_type_hints(RECORDS[name]).items()}
    assert [(name, kind) for kind, name in fields] == [*types.items()]


def test_the_grid_is_one_cta_for_each_sm_that_may_be_used():
    for tensors, options, num_ctas in (
        (qkv(), {}, 2 * 8 * 3),  # blocks of 192 rows
        (qkv(batch=64), {}, 132),
        (qkv(batch=64), {"sm_margin": 20}, 112),
        (qkv(batch=64), {"sm_margin": 10**12}, 1),
        (qkv(batch=1, seqlen_q=1), {}, 8),
        (qkv(batch=0), {}, 1),
    ):
        launch = prepared(tensors, **options)
        assert (launch.num_ctas, launch.num_threads) == (num_ctas, 512), options
        assert launch.workspace_bytes == 0


def test_varlen_counts_the_tiles_of_all_tokens():
    edges = torch.tensor([0, 1, 401], dtype=torch.int32)
    q = torch.zeros(401, 8, 64, dtype=torch.bfloat16)
    tensors = Tensors(q, q, q, cu_seqlens_q=edges, cu_seqlens_k=edges)
    # At most 401 / 192 tiles and one more for each of two sequences; 400 rows have three.
    assert prepared(tensors).num_ctas == 8 * 4
    assert prepared(tensors, max_seqlen_q=180).num_ctas == 8 * 2


def test_a_launch_tells_its_shared_memory():
    launch = prepared(qkv(), causal=True)
    # SharedStorage; four Q of 192 rows, later out; four stages of K and V of 64 keys, in 128 bytes
    assert launch.shared_memory_bytes == 1024 + 128 * (4 * 192 + 4 * 2 * 64)


def workspace_bytes(rows, columns, semaphores, part_heads, sums=0, warps=0, floats=0):
    """Return the size of a backward's workspace.

    rows: of dq_accum, lse and delta. part_heads: parts of the KV heads, of all sequences. sums:
    partial sums of dk and dv, one less than the parts of each tile and KV head, of so many warps
    with a state each, and so many floats.
    """
    # dq_semaphore, parts of dsinks, tile_semaphore, tiles_done, states of partial sums
    counters = (semaphores + 1) * rows // 64 + 1 + part_heads + sums * warps
    return -(-4 * (rows * (columns + 2) + counters) // 16) * 16 + sums * floats * 4


@pytest.mark.parametrize("heads_kv", [4, 8])
def test_a_gradient_tells_its_workspace(heads_kv):
    """With so few tiles, two query heads of a KV head have parts of dk and dv of their own."""
    launch = prepared(qkv(heads=(8, heads_kv)), backward_launch)
    sums = 2 * 3 * 4 if heads_kv == 4 else 0  # blocks of 192 keys
    sizes = sums, 12, 192 * (64 + 64)
    assert launch.workspace_bytes == workspace_bytes(2 * 8 * 512, 64, 1, 2 * 8, *sizes)
    assert launch.num_ctas == 2 * 8 * 3
    # SharedStorage; K and V of 192 keys, four Q and dO; two dS; dQ of three warpgroups
    inputs, scores, dq = 2 * 128 * (192 + 4 * 64), 2 * 192 * 64 * 2, 3 * 64 * 64 * 4
    assert launch.shared_memory_bytes == 3072 + inputs + scores + dq


@pytest.mark.parametrize(
    ("batch", "seqlen", "options", "left"),
    [
        (32, 512, {}, 8),
        (32, 512, {"causal": True}, 16),  # at most an eighth
        (64, 256, {"causal": True}, 16),
        (16, 1024, {}, 4),
        (8, 2048, {"causal": True}, 4),
        (4, 4096, {}, 0),  # one would gain nothing
        (4, 4096, {"causal": True}, 2),
        (4, 4096, {"causal": True, "window_left": 511}, 8),
        (32, 512, {"sm_margin": 28}, 8),
        (32, 512, {"sm_margin": 130}, 0),
        (2, 512, {}, 0),  # 128 tiles: two rounds on fewer SMs
    ],
)
def test_a_gradient_leaves_sms_to_postprocess(batch, seqlen, options, left):
    """So many as convert dq_accum in the time of the others: 4096 over the keys of a query."""
    q = torch.empty(batch, seqlen, 16, 128, dtype=torch.bfloat16, device="meta")
    launch = prepared(Tensors(q, q, q), backward_launch, **options)
    most = min(132 - options.get("sm_margin", 0), batch * 16 * seqlen // 128)
    assert launch.num_ctas == most - left


# Tokens of the sequences of the suite varlen.
PACKED = (131, 262, 389, 517, 701, 907, 1163, 1429, 1741, 2111, 2693, 4339)


@pytest.mark.parametrize(
    ("lengths", "heads", "options", "parts"),
    [
        ((8192,), (64, 8), {"causal": True}, 4),  # of two heads: many queries
        ((8192,), (64, 8), {}, 4),
        ((8192,), (64, 8), {"causal": True, "window_left": 255}, 1),  # few queries see a key
        ((4096,) * 2, (12, 4), {"causal": True}, 1),  # three heads are not divided into single ones
        ((2048,), (32, 8), {"causal": True}, 2),
        ((1024,) * 16, (16, 2), {"causal": True}, 4),  # two tiles for each SM: till there are four
        ((1024,) * 16, (16, 2), {}, 1),  # no tile is longer than another
        ((512,), (32, 8), {"causal": True}, 4),  # idle SMs: single heads
        ((512,), (32, 8), {}, 4),
        ((512,), (32, 32), {}, 1),
        # Twice the mean length is 2730 queries, then 254: the longest alone would be divided.
        (PACKED, (32, 4), {"causal": True}, 4),
        (PACKED, (32, 4), {}, 4),
        ((16384, *(64,) * 255), (32, 8), {"causal": True}, 1),
        ((300, 0, 20, 0), (8, 2), {"causal": True}, 4),  # idle SMs
        ((), (8, 2), {}, 1),
    ],
)
def test_parts_of_the_query_heads(lengths, heads, options, parts):
    """Sequences of one length have as many parts in a dense batch as in a varlen batch, also in one
    with tokens after the last sequence."""
    batch, longest = len(lengths), max(lengths, default=0)

    def expect(rows, tiles, *lead, edges=None, **lengths):
        """rows: of dq_accum. tiles: blocks of keys, of all sequences. lead: axes before heads."""
        q, k = (torch.empty(*lead, n, 128, dtype=torch.bfloat16, device="meta") for n in heads)
        tensors = Tensors(q, k, k, cu_seqlens_q=edges, cu_seqlens_k=edges)
        launch = prepared(tensors, backward_launch, **lengths, **options)
        sums = tiles * heads[1] * (parts - 1)
        sizes = batch * heads[1] * parts, sums, 8, 128 * (128 + 128)
        assert launch.workspace_bytes == workspace_bytes(rows * heads[0], 128, 1, *sizes)

    if len({*lengths}) == 1:
        expect(batch * longest, batch * -(-longest // 128), batch, longest)
    edges = torch.empty(batch + 1, dtype=torch.int32, device="meta")
    of_varlen = {"edges": edges, "max_seqlen_q": longest, "max_seqlen_k": longest}
    for gap in (0, 100):
        total = sum(lengths) + gap
        expect((total // 64 + batch) * 64, total // 128 + batch, total, **of_varlen)


@pytest.mark.parametrize("dv", [64, 128, 160, 192])
@pytest.mark.parametrize("d", [136, 192])
def test_a_gradient_of_192_columns_tells_its_workspace(d, dv):
    in_parts = dv <= 128  # one CTA for a block of 128 keys; else two, each with 64
    for options in ({}, {"deterministic": True}, {"causal": True, "sm_margin": 20}):
        launch = prepared(qkv(d=d, dv=dv), backward_launch, **options)
        semaphores, warps, columns = (3, 8, 192 + 128) if in_parts else (2, 16, 192 + 192)
        sizes = 2 * 8, 2 * 4 * 4, warps, 128 * columns  # heads, sums of blocks of 128 keys
        assert launch.workspace_bytes == workspace_bytes(2 * 8 * 512, 192, semaphores, *sizes)
        assert launch.num_ctas == (1 if in_parts else 2) * 2 * 8 * 4
        scores = 64 * 64 * 2
        if in_parts:  # SharedStorage; K and two Q; V and two dO; two dS; two parts of dQ
            rows = (128 + 2 * 64) * (384 + 256)
            scores = 4 * scores + 2 * 64 * 64 * 4
        else:  # SharedStorage; K and two Q; V and two dO; quarters of K; two P, dS and other dS
            rows = 2 * 3 * 64 * 384 + 4 * 8192
            scores = 6 * scores
        assert launch.shared_memory_bytes == 3072 + rows + scores


def test_8_bits_promote_in_a_workspace_only_where_they_promote():
    long, short = (qkv(seqlen_k=n, dtype=FP8) for n in (4096, 512))
    thread = 16 * (64 // 8 + 1 + 64 // 16)
    assert prepared(long, causal=True).workspace_bytes == 132 * 384 * thread
    assert prepared(long, causal=True, use_fast_accum=True).workspace_bytes == 0
    assert prepared(short, causal=True).workspace_bytes == 0


RECORD = LaunchRecord(2, *[512] * 4, 8, 4, 64, 64, False, 0.125, 0.0, -1, -1, 132, *[0] * 7)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"head_dim": 65}, "launch: head_dim must be at most 64 for forward_bf16_d64_full_"),
        ({"head_dim_v": 96}, "launch: head_dim_v must be at most 64 for forward_bf16_d64_full_"),
        ({"window_right": 0}, "launch: window_right must be -1 for forward_bf16_d64_full_"),
        ({"num_heads_q": 6}, "prepare_forward: num_heads_q must be a multiple of num_heads_kv"),
        ({"num_heads_kv": 0}, "prepare_forward: num_heads_kv must be at least 1, got 0"),
        ({"batch": -1}, "prepare_forward: batch must be at least 0, got -1"),
        ({"total_k": 2**31}, "prepare_forward: total_k must be a number of 32 bits, got 214748"),
        ({"batch": 2**28}, "launch: the number of work tiles must be at most 2^30 - 1, got"),
    ],
    ids=str,
)
def test_what_a_kernel_does_not_take_is_refused_once(changes, said):
    config = built(select_forward_config("bf16", 64, 64, False, 512), LIBRARY)
    with pytest.raises(RuntimeError, match=re.escape(said)):
        LIBRARY.prepare_forward(FORWARD_CONFIGS.index(config), *RECORD._replace(**changes))


def test_a_config_that_is_not_there_is_refused():
    built(select_forward_config("bf16", 64, 64, False, 512), LIBRARY)
    count = len(FORWARD_CONFIGS)
    with pytest.raises(RuntimeError, match=f"kernel: config must be below {count}, got {count}"):
        LIBRARY.prepare_forward(len(FORWARD_CONFIGS), *RECORD)
    absent = [c.name for c in FORWARD_CONFIGS if c.name not in LIBRARY.configs]
    if absent:
        index = [config.name for config in FORWARD_CONFIGS].index(absent[0])
        said = f"config must be in this build (FLASHATTN3_KERNELS), got {absent[0]}"
        with pytest.raises(RuntimeError, match=re.escape(said)):
            LIBRARY.prepare_forward(index, *RECORD)


NO_INDICES = (None,) * 4
NO_DESCALES = (None,) * 3
Q, K, V = qkv()[:3]
ONE = torch.zeros(1, dtype=torch.int32)
CALLS = [
    ((Q, K, V, *NO_INDICES), "q.device must be a GPU, got another device"),
    ((Q[:1], K, V, *NO_INDICES), "q.shape must be (2, 512, 8, 64), got (1, 512, 8, 64)"),
    ((Q[0], K, V, *NO_INDICES), "q.shape must be (2, 512, 8, 64), got (512, 8, 64)"),
    ((Q, K[:, 1:], V, *NO_INDICES), "k.shape must be (2, 512, 4, 64), got (2, 511, 4, 64)"),
    ((Q, K, V[..., :8], *NO_INDICES), "v.shape must be (2, 512, 4, 64), got (2, 512, 4, 8)"),
    ((Q, K, V, ONE, None, None, None), "cu_seqlens_q must be None unless the launch is varlen"),
    ((Q, K, V, None, None, None, ONE), "seqused_k.shape must be (2,), got (1,)"),
]


@pytest.mark.parametrize(("tensors", "said"), CALLS, ids=[said for _tensors, said in CALLS])
def test_tensors_of_another_call_are_named(tensors, said):
    handle = prepared(qkv()).handle
    with pytest.raises(RuntimeError, match=re.escape(f"forward: {said}")):
        LIBRARY.forward(handle, *tensors, *NO_DESCALES)
    gradient = prepared(qkv(), backward_launch).handle
    lse = torch.zeros(2, 8, 512)
    with pytest.raises(RuntimeError, match=re.escape(f"backward: {said}")):
        LIBRARY.backward(gradient, Q, None, Q, lse, *tensors)


def test_a_gradient_names_the_result_that_is_another_calls():
    handle, lse = prepared(qkv(), backward_launch).handle, torch.zeros(2, 8, 512)
    for given, said in (
        ((Q[..., :8], None, Q, lse), "dout.shape must be (2, 512, 8, 64), got (2, 512, 8, 8)"),
        ((Q.mT.contiguous().mT, None, Q, lse), "dout.stride(-1) must be 1, got 8"),
        ((Q, lse[0], Q, lse), "dlse.shape must be (2, 8, 512), got (8, 512)"),
        ((Q, None, Q[:, 1:], lse), "out.shape must be (2, 512, 8, 64), got (2, 511, 8, 64)"),
        ((Q, None, Q, lse.mT), "lse.shape must be (2, 8, 512), got (2, 512, 8)"),
    ):
        with pytest.raises(RuntimeError, match=re.escape(f"backward: {said}")):
            LIBRARY.backward(handle, *given, Q, K, V, *NO_INDICES)
    into = torch.ops.flashattn3_hopper.backward_into
    with pytest.raises(RuntimeError, match=r"backward_into: dk.shape must be \(2, 512, 4, 64\)"):
        into(handle, Q, None, Q, lse, Q, K, V, *NO_INDICES, Q, Q, V)


def test_varlen_needs_the_edges_of_its_batch():
    edges = torch.tensor([0, 1, 401], dtype=torch.int32)
    q = torch.zeros(401, 8, 64, dtype=torch.bfloat16)
    handle = prepared(Tensors(q, q, q, cu_seqlens_q=edges, cu_seqlens_k=edges)).handle
    for indices, said in (
        ((edges, edges, None, None), "q.device must be a GPU"),
        ((edges, None, None, None), "cu_seqlens_k must be a tensor of a varlen launch, got None"),
        ((edges[1:], edges, None, None), "cu_seqlens_q.shape must be (3,), got (2,)"),
    ):
        with pytest.raises(RuntimeError, match=re.escape(f"forward: {said}")):
            LIBRARY.forward(handle, q, q, q, *indices, *NO_DESCALES)


def test_8_bits_take_permuted_v_and_descales():
    q, k, _ = qkv(seqlen_k=40, dtype=FP8)[:3]
    handle = prepared(qkv(seqlen_k=40, dtype=FP8), causal=True).handle
    v = torch.zeros(2, 4, 4, 64, 16).to(FP8)
    scale = torch.ones(2, 4, 1)
    for tensors, descales, said in (
        ((q, k, v), (scale, scale, scale), "q.device must be a GPU"),
        ((q, k, v), NO_DESCALES, "q.device must be a GPU"),
        ((q, k, k), NO_DESCALES, "v.shape must be (2, 4, 4, 64, 16), got (2, 40, 4, 64)"),
        ((q, k, v.mT.contiguous().mT), NO_DESCALES, "v must be contiguous, got another layout"),
        ((q, k, v), (scale[0], None, None), "q_descale must be of shape (batch, heads, blocks)"),
        ((q, k, v), (None, None, scale[:, :3]), "v_descale must be of shape (batch, heads,"),
    ):
        with pytest.raises(RuntimeError, match=re.escape(f"forward: {said}")):
            LIBRARY.forward(handle, *tensors, *NO_INDICES, *descales)
    said = re.escape("forward: q_descale must be None for 16-bit inputs, got a tensor")
    with pytest.raises(RuntimeError, match=said):
        LIBRARY.forward(prepared(qkv()).handle, Q, K, V, *NO_INDICES, scale, None, None)


def test_only_a_prepared_launch_of_the_same_pass_is_taken():
    gradient = prepared(qkv(), backward_launch).handle
    for handle in (gradient, Q, gradient.int(), gradient[:3], torch.zeros_like(gradient)):
        said = "forward: launch must be a result of prepare_forward, got another tensor"
        with pytest.raises(RuntimeError, match=said):
            LIBRARY.forward(handle, Q, K, V, *NO_INDICES, *NO_DESCALES)


def test_threads_prepare_launches_side_by_side():
    problems = [qkv(batch=n) for n in range(1, 5)]
    wanted = [prepared(tensors) for tensors in problems]
    wrong = []

    def work(tensors: Tensors, one: Launch) -> None:
        for _ in range(200):
            launch = prepared(tensors)
            if not torch.equal(launch.handle, one.handle) or launch[1:] != one[1:]:
                wrong.append(launch)

    pairs = zip(problems, wanted, strict=True)
    threads = [threading.Thread(target=work, args=pair) for pair in pairs]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


def test_a_launch_prepared_under_fake_tensors_is_a_plain_one():
    tensors, wanted = qkv(), prepared(qkv())
    with FakeTensorMode():
        launch = prepared(tensors)
    assert type(launch.handle) is torch.Tensor
    assert torch.equal(launch.handle, wanted.handle)


def test_a_launch_prepared_in_inference_mode_serves_other_calls():
    with torch.inference_mode():
        launch = prepared(qkv())
    assert isinstance(launch, Launch)
    with pytest.raises(RuntimeError, match=r"q\.device must be a GPU"):
        LIBRARY.forward(launch.handle, Q.clone().requires_grad_(), K, V, *NO_INDICES, *NO_DESCALES)
