"""On a GPU: no synchronisation, CUDA graphs, the current stream, the tensors' own device."""

from __future__ import annotations

from contextlib import contextmanager, nullcontext
from functools import partial

import pytest
import torch
from helpers import EVERY_BACKEND, case_named, run_python
from support.cases import call
from support.inputs import make_inputs, make_output_gradients

from flashattn3 import flash_attn_fp8_func, flash_attn_func, flash_attn_varlen_func
from flashattn3.call.hadamard import _kept
from flashattn3_bench.checking import Case
from flashattn3_bench.checking.cases import dense, varlen

pytestmark = pytest.mark.gpu
CASES = {
    case.name: case
    for case in (
        dense("plain", (256, 256), dims=(64, 64)),
        dense("splits", (33, 1024), num_splits=4, causal=True),
        varlen(
            "ragged", (100, 28, 65), (100, 90, 3), heads=(4, 2), causal=True, seqused_k=(90, 90, 3)
        ),
    )
}
every_backend = pytest.mark.parametrize("backend", EVERY_BACKEND)
each_case = pytest.mark.parametrize("case", CASES.values(), ids=CASES)


def prepared(case: Case, device="cuda"):
    tensors = make_inputs(case, device, torch.bfloat16, requires_grad=True)
    return tensors, *make_output_gradients(case, tensors)


def run(case, tensors, backend, dout=None, dlse=None, deterministic=True):
    """out and lse, and with gradients given also dq, dk and dv."""
    outputs = call(case, tensors, backend=backend, return_lse=True, deterministic=deterministic)
    if dout is None:
        return outputs
    return (*outputs, *torch.autograd.grad(outputs, tensors[:3], (dout, dlse)))


def reads_lengths(backend, case) -> bool:
    """Return whether the backend reads the lengths of the sequences, and so waits for the GPU: the
    reference backend computes sequences of one length together."""
    return backend == "reference" and case.varlen


@contextmanager
def waits_refused(must_wait: bool):
    """Let a call that waits for the GPU fail; with must_wait, one that does not wait."""
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    waits = pytest.raises(RuntimeError, match="synchronizing") if must_wait else nullcontext()
    try:
        with waits:
            yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize("deterministic", [True, False])
@every_backend
@each_case
def test_nothing_waits_for_the_gpu(case, backend, deterministic):
    tensors, dout, dlse = prepared(case)
    both_passes = partial(run, case, tensors, backend, dout, dlse, deterministic)
    both_passes()  # compiles, and loads the kernels
    with waits_refused(reads_lengths(backend, case)):
        both_passes()


@every_backend
@each_case
def test_the_forward_gives_the_same_bits_in_20_runs(case, backend):
    tensors, _, _ = prepared(case)
    first, *others = (run(case, tensors, backend) for _ in range(20))
    for other in others:
        assert all(map(torch.equal, first, other))


# With tiles of keys enough for their sums to meet in another order in every run.
LONG = {
    case.name: case
    for case in (
        *(
            dense(f"d{d}-{mask}", (1500, 1900), (4, 2), (d, d), causal=mask == "causal")
            for d in (64, 96, 128, 192, 256)
            for mask in ("full", "causal")
        ),
        dense("window", (2000, 2000), (4, 1), window=(300, 100)),
        dense("softcap", (1500, 1500), (2, 2), (128, 128), softcap=20.0),
        dense("d192-128", (1500, 1900), (4, 2), (192, 128), causal=True),
        dense("narrow", (1300, 1300), (2, 2), (72, 40), causal=True),
        varlen("ragged", (1900, 700, 33), (1500, 900, 700), heads=(4, 2), dims=(128, 128)),
        varlen("ragged-causal", (900, 1, 700), (1500, 900, 700), heads=(4, 2), causal=True),
    )
}


@every_backend
@pytest.mark.parametrize("case", LONG.values(), ids=LONG)
def test_deterministic_gradients_give_the_same_bits_in_20_runs(case, backend):
    given = prepared(case)
    first, *others = (run(case, given[0], backend, *given[1:]) for _ in range(20))
    for other in others:
        assert all(map(torch.equal, first, other))


@every_backend
def test_max_seqlen_on_the_gpu_is_not_read(backend):
    case = case_named("varlen")
    tensors = make_inputs(case, "cuda", torch.bfloat16)
    longest = torch.tensor(case.seqlen_q, device="cuda")
    lengths = (*tensors[3:5], longest, longest)

    def attend():
        return flash_attn_varlen_func(*tensors[:3], *lengths, causal=True, backend=backend)

    found = wanted = attend()
    with waits_refused(backend == "reference"):
        found = attend()
    assert torch.equal(found, wanted)
    torch.testing.assert_close(found, call(case, tensors, backend=backend))


@every_backend
@each_case
def test_forward_in_a_cuda_graph(case, backend):
    tensors, _, _ = prepared(case)
    with torch.no_grad():
        run(case, tensors, backend)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            captured = run(case, tensors, backend)
        for seed in (1, 2):
            fill(tensors[:3], make_inputs(case, "cuda", torch.bfloat16, seed=seed)[:3])
            graph.replay()
            assert all(map(torch.equal, captured, run(case, tensors, backend)))


@every_backend
@each_case
def test_forward_and_backward_in_a_cuda_graph(case, backend):
    tensors, dout, dlse = prepared(case)
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        run(case, tensors, backend, dout, dlse)
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = run(case, tensors, backend, dout, dlse)
    for seed in (1, 2):
        fill(tensors[:3], make_inputs(case, "cuda", torch.bfloat16, seed=seed)[:3])
        graph.replay()
        assert all(map(torch.equal, captured, run(case, tensors, backend, dout, dlse)))


def fill(old, new):
    with torch.no_grad():
        for place, values in zip(old, new, strict=True):
            place.copy_(values)


@every_backend
@each_case
def test_work_goes_to_the_current_stream(case, backend):
    """On a stream that is held up, nothing has happened when a call returns that need not wait."""
    tensors, dout, dlse = prepared(case)
    wanted = run(case, tensors, backend, dout, dlse)
    fresh, _, _ = prepared(case)
    values = [x.detach().clone() for x in tensors[:3]]
    torch.cuda.synchronize()
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        fill(fresh[:3], [torch.zeros_like(x) for x in values])
        torch.cuda._sleep(1_000_000_000)  # about 0.6 s: the reference takes over 0.1 on a busy host
        held = side.record_event()
        fill(fresh[:3], values)
        found = run(case, fresh, backend, dout, dlse)
        assert held.query() == reads_lengths(backend, case), "was the stream waited for?"
    side.synchronize()
    assert all(map(torch.equal, found, wanted))


@every_backend
@each_case
def test_the_tensors_device_is_used(case, backend):
    if torch.cuda.device_count() < 2:
        pytest.skip("needs a second CUDA device")
    tensors, dout, dlse = prepared(case, "cuda:0")
    wanted = run(case, tensors, backend, dout, dlse)
    other, dout, dlse = prepared(case, "cuda:1")
    assert torch.cuda.current_device() == 0
    found = run(case, other, backend, dout, dlse)
    assert torch.cuda.current_device() == 0
    assert all(x.device == torch.device("cuda", 1) for x in found)
    assert all(torch.equal(x.to("cuda:0"), y) for x, y in zip(found, wanted, strict=True))


@every_backend
def test_a_compiled_training_step(backend):
    """With the CUDA graphs that torch.compile makes of the forward and of the backward."""

    def loss(q, k, v, gate):
        out = flash_attn_func(2 * q, k, v, causal=True, deterministic=True, backend=backend)
        return (out * gate.sigmoid()).float().square().sum()

    torch._dynamo.reset()
    compiled = torch.compile(loss, mode="reduce-overhead", fullgraph=True)
    shapes = (4, 2, 2, 4)
    tensors = [
        torch.randn(2, 300, heads, 64, device="cuda", dtype=torch.bfloat16).requires_grad_()
        for heads in shapes
    ]
    wanted = torch.autograd.grad(loss(*tensors), tensors)
    for _ in range(3):
        torch.compiler.cudagraph_mark_step_begin()
        found = [x.clone() for x in torch.autograd.grad(compiled(*tensors), tensors)]
        for gradient, exact in zip(found, wanted, strict=True):
            # The compiled gate is not rounded to 16 bits on its way.
            assert (gradient - exact).float().norm() < 0.02 * exact.float().norm()
    torch._dynamo.reset()


@every_backend
def test_the_first_fp8_call_may_be_inside_a_cuda_graph(backend):
    """It makes the signs of the rotation, which must not stay in the memory of the graph."""
    x = torch.randn(1, 256, 2, 64, device="cuda", dtype=torch.float16)
    wanted = flash_attn_fp8_func(x, x, x, backend=backend)  # compiles, and loads the kernels
    torch.cuda.synchronize()
    _kept.clear()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = flash_attn_fp8_func(x, x, x, backend=backend)
    graph.replay()
    assert torch.equal(found, wanted)
    del graph
    with torch.device("cuda"):  # as torch.set_default_device does
        assert torch.equal(flash_attn_fp8_func(x, x, x, backend=backend), wanted)


def test_an_fp8_length_that_is_too_small_keeps_the_cuda_context():
    """Nobody reads it; in a process of its own, which an assertion on the device would end."""
    code = """
import torch
from flashattn3 import flash_attn_varlen_fp8_func
edges = torch.tensor([0, 70, 400], dtype=torch.int32, device="cuda")
def run(head_dim, longest, **options):
    x = torch.ones(400, 2, head_dim, device="cuda", dtype=torch.float16)
    longest = longest, longest
    found = flash_attn_varlen_fp8_func(x, x, x, edges, edges, *longest, block=64, **options)
    torch.cuda.synchronize()
    return found
for longest in (3, 0):
    run(64, longest, smooth_k=True, return_lse=True)
    run(320, longest, hadamard=False)
print(run(64, 330).float().sub(1).abs().max().item() < 0.1)"""
    assert run_python(code).splitlines()[-1] == "True"


@pytest.mark.parametrize("backend", EVERY_BACKEND)
def test_the_first_gradient_of_a_process_may_allocate_no_memory(backend):
    """No call of the CUDA runtime has then bound a context in autograd's thread."""
    code = f"""
import torch
from flashattn3 import flash_attn_func
q, k, v, gradient = torch.ones(4, 4, 1024, 8, 64, device="cuda", dtype=torch.float16)
for x in (q, k, v):
    x.requires_grad_()
out = flash_attn_func(q, k, v, causal=True, backend={backend!r})
torch.empty(2**30, device="cuda", dtype=torch.uint8)
torch.autograd.backward(out, gradient)
print(v.grad.float().sum(1).sub(1024).abs().max().item() < 4)"""
    assert run_python(code).splitlines()[-1] == "True"
