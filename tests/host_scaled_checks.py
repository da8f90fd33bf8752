"""Checks of rotate_and_quantize and of calls of 8 bits that tests/host_checks.py runs: in whatever
way its launch is found, a call passes the same to the driver, returns and saves the same tensors,
and has the same errors."""

from __future__ import annotations

import contextlib
from functools import partial
from itertools import pairwise

import pytest
import torch
from helpers import H100, bf16
from host_cached_checks import events_of
from test_host_work import work_of
from test_rotate_and_quantize import COS, SIN, WRONG, K, Q, V

from flashattn3 import UnsupportedError, flash_attn_func, masks, rotate_and_quantize
from flashattn3.backends.triton.kernels import variable_launch
from flashattn3.call.block_scaled import BlockScaled
from flashattn3.call.dtypes import FP8, INT8
from flashattn3.quantization import (
    dispatch,
    embedding_checks,
    embedding_launch,
    hopper_launch,
    rotary_quantization,
    triton_launch,
)
from flashattn3.run import operators, quantized
from flashattn3.run.quantized_gradient import FEW_KEYS
from flashattn3.run.scaled import launch_cache_of_8_bits

ERRORS = TypeError, ValueError, UnsupportedError
LAUNCHES_OF_TRITON = (
    triton_launch._dequantization,
    triton_launch._dequantize_launch,
    triton_launch._exact_rows,
    triton_launch._exact_rows_launch,
    embedding_launch._rotation,
    embedding_launch._rotation_launch,
)


@contextlib.contextmanager
def quantization():
    """Tensors on the CPU are quantized as on an H100, without a look at values."""
    modules = hopper_launch, rotary_quantization, embedding_checks, operators, quantized
    known = dispatch._backend_runs_on, hopper_launch._known, *LAUNCHES_OF_TRITON
    with pytest.MonkeyPatch.context() as patch:
        for module in modules:
            patch.setattr(module, "is_checked", lambda device: False)
        patch.setattr(dispatch, "HOPPER", operators.BACKENDS[0])
        patch.setattr(dispatch, "describe_device", lambda device: H100)
        for module in (embedding_launch, triton_launch):
            patch.setattr(module, "VariableLaunch", counted_launch)
        forget(*known)
        yield patch
    forget(*known)


class _Starters(dict):
    """Those of a Triton kernel that counts its launches, as if it were compiled for each."""

    def __init__(self, name: str) -> None:
        self.name = name

    def get(self, key):
        return lambda *_: TRITON_LAUNCHES.append(self.name)


TRITON_LAUNCHES: list[str] = []


def counted_launch(kernel, *how, **named):
    launch = variable_launch.VariableLaunch(kernel, *how, **named)
    launch._starters = _Starters(kernel.__name__)
    return launch


def forget(*caches) -> None:
    for cache in caches:
        cache.cache_clear()
    launch_cache_of_8_bits.cache_clear()
    rotary_quantization._known.clear()


def layout(x):
    return None if x is None else (x.shape, x.stride(), x.dtype, x.requires_grad)


def fields(x: BlockScaled) -> tuple:
    tensors = x.data, x.descale, x.mean, x.gradient
    given = x.block, x.hadamard, x.layout, x.shape, x.cu_seqlens is None
    return *map(layout, tensors), *given


def outcome(host, call, arguments: list | None = None) -> tuple:
    """What the driver gets but descriptors, which are cached, and addresses; what the call returns;
    what it saves; its error. arguments: takes the words of the kernels' arguments, with the place
    of a result instead of its address."""
    kept, saved = [], []

    def run():
        kept.append(call())

    def pack(x):
        saved.append(layout(x))
        return x

    error = None
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
        try:
            events = events_of(host, run)
        except ERRORS as raised:
            error, events = (type(raised), str(raised)), []
    found = kept[0] if kept else ()
    found = found if isinstance(found, tuple) else (found,)
    if arguments is not None:
        tensors = [y for x in found for y in ((x.data, x.descale) if _is_scaled(x) else (x,))]
        places = {x.data_ptr(): f"result {i}" for i, x in enumerate(tensors)}
        words = [x[1:] for x in events if x[0] == "arguments"]
        arguments += [[places.get(word, word) for word in of_kernel] for of_kernel in words]
    ignored = "descriptor", "strides", "arguments", "memset"
    events = [x for x in events if x[0] not in ignored]
    results = [fields(x) if _is_scaled(x) else layout(x) for x in found]
    return events, results, saved, error


def _is_scaled(x) -> bool:
    return isinstance(x, BlockScaled)


def rotary_call(**changed):
    """A call of rotate_and_quantize."""
    rows = changed.pop("rows", (2, 40))
    heads, dims = changed.pop("heads", (4, 2)), changed.pop("dims", (64, 64))
    dtype, half = changed.pop("dtype", torch.bfloat16), changed.pop("half", 32)
    shapes = {"q": (heads[0], dims[0]), "k": (heads[1], dims[0]), "v": (heads[1], dims[1])}
    call = {name: torch.zeros(*rows, *shape, dtype=dtype) for name, shape in shapes.items()}
    tables = torch.zeros(2, 40, half)
    call |= {"rotary_cos": tables[0], "rotary_sin": tables[1]}
    return call | changed


def varlen(**changed):
    edges = torch.tensor([0, 9, 40], dtype=torch.int32)
    return rotary_call(rows=(40,), cu_seqlens=edges, max_seqlen=31) | changed


# Calls that differ from rotary_call() in one property, and whether the operator takes them as they
# are.
ROTATIONS = {
    "float16": (rotary_call(dtype=torch.float16), True),
    "batch": (rotary_call(rows=(3, 40)), True),
    "tokens": (rotary_call(rows=(2, 24)), True),
    "heads": (rotary_call(heads=(6, 2)), True),
    "head dim": (rotary_call(dims=(128, 128)), True),
    "head dim of v": (rotary_call(dims=(64, 32)), True),
    "transposed": (rotary_call(k=bf16(2, 2, 40, 64).transpose(1, 2)), True),
    "strides": (rotary_call(q=bf16(2, 40, 4, 72)[..., :64]), True),
    "columns of v": (rotary_call(v=bf16(2, 40, 64, 2).transpose(2, 3)), False),
    "packed": (
        rotary_call(q=bf16(2, 40, 8, 64), k=None, v=None, num_heads_q=4), True,
    ),
    "q": (rotary_call(k=None, v=None), True),
    "no rotation": (rotary_call(rotary_cos=None, rotary_sin=None), True),
    "interleaved": (rotary_call(half=4, rotary_interleaved=True), True),
    "tables of 16 bits": (rotary_call(rotary_cos=bf16(40, 32), rotary_sin=bf16(40, 32)), True),
    "strided tables": (
        rotary_call(rotary_cos=torch.zeros(40, 64)[:, ::2], rotary_sin=torch.zeros(40, 32)), False,
    ),
    "positions": (rotary_call(positions=torch.zeros(2, 40, dtype=torch.int32)), True),
    "wide positions": (rotary_call(positions=torch.zeros(2, 40, dtype=torch.int64)), True),
    "norm": (rotary_call(q_norm=torch.ones(64), k_norm=torch.ones(64)), True),
    "norm of 16 bits": (rotary_call(q_norm=torch.ones(64).bfloat16()), False),
    "eps": (rotary_call(norm_eps=1e-5), True),
    "block": (rotary_call(block=64), True),
    "hadamard": (rotary_call(hadamard=False), True),
    "e4m3": (rotary_call(qk_dtype=FP8), True),
    "option of another type": (rotary_call(block=torch.tensor(128)), False),
    "varlen": (varlen(), True),
    "longest": (varlen(max_seqlen=500), True),
    "gradient": (rotary_call(q=bf16(2, 40, 4, 64).requires_grad_()), True),
    "gradient of a norm": (rotary_call(q_norm=torch.ones(64).requires_grad_()), True),
    "packed gradient": (
        rotary_call(q=bf16(2, 40, 8, 64).requires_grad_(), k=None, v=None, num_heads_q=4), True,
    ),
}  # fmt: skip


def check_rotations_that_python_does_not_check(host):
    """The operator takes the tensors as they are, or leaves the call to Python: the driver, the
    caller and autograd get the same as from a call that Python has checked, and the kernels the
    same arguments."""
    with quantization() as patch:
        counts = []
        checked = rotary_quantization._checked
        patch.setattr(rotary_quantization, "_checked", lambda *x: counts.append(1) or checked(*x))
        rotate_and_quantize(**rotary_call())
        rotate_and_quantize(Q, K, V, COS, SIN)
        calls = [
            (name, partial(rotate_and_quantize, **call), taken, False)
            for name, (call, taken) in ROTATIONS.items()
        ]
        calls += [
            (name, partial(rotate_and_quantize, *given, **named), False, True)
            for name, (given, named, _) in WRONG.items()
        ]
        found = []
        for name, call, taken, _ in calls:
            counts.clear()
            words = []
            found.append((outcome(host, call, words), words))
            assert bool(counts) != taken, name
        patch.setattr(rotary_quantization, "_at_once", lambda: lambda *call: (None, None))
        for (name, call, taken, is_wrong), (result, words) in zip(calls, found, strict=True):
            given = []
            wanted = outcome(host, call, given)
            assert result == wanted, name
            assert len(words) == len(given) == (wanted[3] is None), name
            if taken:  # else of copies
                assert words == given, name
            assert (wanted[3] is not None) == is_wrong, name
            assert [x[0] for x in wanted[0]].count("launch") == (wanted[3] is None), name


def check_memory_of_rotations(host):
    """All results of a call that Python does not check are in one allocation, each in its own part.
    A custom operator returns none that share memory."""
    with quantization():
        for name, (call, taken) in ROTATIONS.items():
            if not taken:
                continue
            made = rotate_and_quantize(**call)
            made = made if isinstance(made, tuple) else (made,)
            tensors = [y for x in made for y in (x.data, x.descale)]
            (begin,) = {x.untyped_storage().data_ptr() for x in tensors}
            parts = sorted((x.data_ptr() - begin, x.data_ptr() - begin + x.nbytes) for x in tensors)
            assert parts[0][0] == 0 and parts[-1][1] <= tensors[0].untyped_storage().nbytes(), name
            assert all(end <= after for (_, end), (after, _) in pairwise(parts)), name
            assert all((x.data_ptr() - begin) % 256 == 0 for x in tensors[::2]), name
            assert all((x.data_ptr() - begin) % 16 == 0 for x in tensors[1::2]), name
        results = torch.ops.flashattn3.rotate_and_quantize(
            *(rotary_call()[name] for name in "qkv"),
            *(None,) * 5, False, 1e-6, None, None, 128, True, INT8, False,
        )  # fmt: skip
        memory = [x.untyped_storage().data_ptr() for x in results if x.numel()]
        assert len(memory) == len({*memory}) == 6


def scaled(dtype=INT8, block=128, rotated=True, **changed) -> dict[str, BlockScaled]:
    call = rotary_call(**changed)
    with torch.set_grad_enabled(True):
        found = rotate_and_quantize(**call, block=block, hadamard=rotated, qk_dtype=dtype)
    return dict(zip("qkv", found, strict=True))


def moved(x: BlockScaled, **changed) -> BlockScaled:
    names = "data", "descale", "block", "hadamard", "cu_seqlens", "layout", "shape", "mean"
    return BlockScaled(**{name: getattr(x, name) for name in names} | changed)


def check_calls_of_8_bits_like_an_earlier_one(host):
    """A call that finds its launch passes the same to the driver, returns and saves the same as one
    that is planned; another call is planned, or refused with the same words, whatever ran
    before."""
    with quantization():
        base = scaled()
        wide = torch.zeros(2, 40, 4, 80, dtype=INT8)
        of_v, number = base["v"].data.clone(), torch.zeros(2, 4, 1).requires_grad_()
        parameter = torch.nn.Parameter(base["k"].descale, requires_grad=False)
        off = torch.zeros(2 * 40 * 4 * 64 + 1, dtype=INT8)[1:].view(2, 40, 4, 64)
        loose = torch.zeros(2, 4, 2)[..., :1]
        # Calls that differ from the first in one property, and whether they share its launch; None:
        # no launch is kept for them.
        calls = {
            "address": (scaled(), {}, True),
            "strides": (base | {"q": moved(base["q"], data=wide[..., :64])}, {}, True),
            "strides of descales": (base | {"q": moved(base["q"], descale=loose)}, {}, True),
            "alignment": (base | {"q": moved(base["q"], data=off)}, {}, None),
            "batch": (scaled(rows=(3, 40)), {}, False),
            "tokens": (scaled(rows=(2, 24)), {}, False),
            "heads": (scaled(heads=(6, 2)), {}, False),
            "head dim": (scaled(dims=(128, 128)), {}, False),
            "head dim of v": (scaled(dims=(64, 32)), {}, False),
            "columns of v": (scaled(dims=(128, 64)), {}, None),  # the kernel reads more
            "dtype": (scaled(dtype=FP8), {}, False),
            "block": (scaled(block=64), {}, False),
            "rotation": (scaled(rotated=False), {}, False),
            "causal": (base, {"causal": True}, False),
            "window": (base, {"window_size": (9, 3)}, False),
            "scale": (base, {"softmax_scale": 0.3}, False),
            "softcap": (base, {"softcap": 7.0}, False),
            "out_dtype": (base, {"out_dtype": torch.float16}, False),
            "return_lse": (base, {"return_lse": True}, False),
            "use_fast_accum": (base, {"use_fast_accum": True}, False),
            "mean": (
                base | {"k": moved(base["k"], mean=torch.zeros(2, 2, 64))}, {}, None,
            ),
            "gradient": (scaled(q=bf16(2, 40, 4, 64).requires_grad_()), {}, False),
            "sinks": (base, {"sinks": torch.zeros(4)}, None),
            "mask": (base, {"mask": masks.window(40, 9, 0)}, None),
            "subclass": (base | {"k": moved(base["k"], descale=parameter)}, {}, None),
        }  # fmt: skip
        edges = torch.tensor([0, 40, 80], dtype=torch.int32)
        wrong = {
            "tokens of q": base | {"q": scaled(rows=(3, 40))["q"]},
            "tokens of v": base | {"v": scaled(rows=(2, 24))["v"]},
            "dtype of k": base | {"k": scaled(dtype=FP8)["k"]},
            "rotation of k": base | {"k": moved(base["k"], hadamard=False)},
            "descale": base | {"k": moved(base["k"], descale=torch.zeros(2, 2, 2))},
            "descale's dtype": base | {"k": moved(base["k"], descale=torch.zeros(2, 2, 1).half())},
            "head dim of v": base | {"v": moved(base["v"], shape=(2, 40, 2, 128))},
            "block": base | {"k": moved(base["k"], block=32)},
            "k": base | {"k": base["k"].data},
            "edges": base | {"k": moved(base["k"], cu_seqlens=edges)},
            "gradient of a descale": base | {"q": moved(base["q"], descale=number)},
            "gradient of data": base | {"v": moved(base["v"], data=of_v.requires_grad_())},
            "another descale": base | {"q_descale": base["q"].descale},
        }
        first = partial(flash_attn_func, **base)

        def planned(call):
            before = operators._plan.cache_info()[:2]
            return outcome(host, call), operators._plan.cache_info()[:2] != before

        for name, (sides, options, shares) in calls.items():
            call = partial(flash_attn_func, **sides, **options)
            launch_cache_of_8_bits.cache_clear()
            wanted, is_planned = planned(call)
            assert is_planned and wanted[3] is None, (name, wanted)
            again, is_planned = planned(call)
            gradient = name == "gradient"  # whose call of 16 bits is planned
            assert again == wanted and is_planned == (shares is None or gradient), name
            launch_cache_of_8_bits.cache_clear()
            assert planned(first)[1] and not planned(first)[1]
            after, is_planned = planned(call)
            assert after == wanted and is_planned != (shares is True), name
        for name, sides in wrong.items():
            call = partial(flash_attn_func, **sides)
            launch_cache_of_8_bits.cache_clear()
            wanted, _ = planned(call)
            assert wanted[3] is not None, name
            assert planned(first)[1]
            assert planned(call)[0] == wanted, name


def check_lse_of_8_bits(host):
    """The kernel writes lse where the call returns it alone."""
    with quantization():
        sides = scaled()
        for returns_lse in (False, True):
            for _ in range(2):  # the second call finds its launch
                words = []
                call = partial(flash_attn_func, **sides, return_lse=returns_lse)
                _, results, _, error = outcome(host, call, words)
                assert error is None and len(results) == 1 + returns_lse
            (of_kernel,) = words
            place = of_kernel.index("result 0")
            assert of_kernel[place + 1] == ("result 1" if returns_lse else 0)


def both_passes(causal: bool = False, **changed):
    """A call of the pair with gradients, and one of both passes."""
    call = rotary_call(**changed)
    leaves = [x.requires_grad_() for x in (call.pop("q"), call.pop("k"), call.pop("v"))]

    def forward():
        return flash_attn_func(*rotate_and_quantize(*leaves, **call), causal=causal)

    dout = torch.ones_like(forward())
    return forward, lambda: torch.autograd.grad(forward(), leaves, dout)


def check_launches_of_gradients_of_8_bits(host):
    """One launch widens q, k and v, and one rotates dq and dk back. Rows that see few keys are
    computed again, of a causal call of many keys the first ones, which one launch takes."""
    with quantization():
        for causal, tokens in ((False, 40), (True, 40), (True, 600), (False, 600)):
            cos, sin = torch.zeros(2, tokens, 32)
            tables = {"rotary_cos": cos, "rotary_sin": sin}
            _, both = both_passes(causal, rows=(2, tokens), **tables)
            found = [launches_of(host, both) for _ in range(3)]  # the first one plans
            assert found[0] == found[1] == found[2]
            of_triton, launches = found[0]
            takes = ["take_exact_rows"] * (causal and tokens > FEW_KEYS)
            assert of_triton == ["dequantize_blocks", *takes, "rotate_blocks"]
            # rotation, forward, rows again, statistics, gradients, conversion of dq
            assert len(launches) == 6 - (not causal and tokens > FEW_KEYS)
            shapes = [(2, tokens, heads, 64) for heads in (4, 2, 2)]
            assert [(x.shape, x.is_contiguous()) for x in both()] == [(x, True) for x in shapes]


def launches_of(host, call) -> tuple[list[str], list[list]]:
    """Those of Triton, and those of the library."""
    TRITON_LAUNCHES.clear()
    events = events_of(host, call)
    return [*TRITON_LAUNCHES], [x for x in events if x[0] == "launch"]


def check_python_work_of_8_bits(host):
    """Calls of Python are counted as in tests/test_host_work.py; bounds are a quarter above."""
    with quantization(), torch.no_grad():
        call = rotary_call()
        sides = rotate_and_quantize(**call)
        assert work_of(lambda: rotate_and_quantize(**call)) <= 22
        assert work_of(lambda: flash_attn_func(*sides)) <= 27
    with quantization():
        forward, both = both_passes()
        assert work_of(forward) <= 180
        assert work_of(both) <= 420
