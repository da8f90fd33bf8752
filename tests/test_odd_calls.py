"""Odd calls of every public function, generated: each argument in turn is replaced by odd values.

A call has two legal outcomes: the right result, or an error that holds the function's name, the
argument's name, "must" or "expected", and the value. Signatures are read with inspect, so that an
argument that is added is tried too; ``LEGAL`` says what the values of an argument mean.
"""

from __future__ import annotations

import contextlib
import inspect
import math
import re
import warnings
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from torch import Tensor

import flashattn3
from flashattn3 import BlockScaled, Explanation, quantize_block_fp8
from flashattn3.backends.registry import BACKENDS
from flashattn3.call.dtypes import FP8, INT8
from flashattn3.call.operands import Tensors
from flashattn3.quantization import dispatch
from flashattn3_bench.checking import attention
from flashattn3_bench.checking.tolerance import FP8_OF_16_BIT

ILLEGAL, EITHER = object(), object()  # EITHER: an error or the right result of the value as it is
MAY_WARN = ".*softmax_scale is 0"
# Where two arguments contradict each other, a sentence may name the other one.
PARTNERS = {
    "cu_seqlens_q": "cu_seqlens_k|k",
    "cu_seqlens_k": "seqused_k",
    "cu_seqlens": "max_seqlen|cu_seqlens_q|max_seqlen_q",  # q, k and v share them
    "max_seqlen": "max_seqlen_q",
    "q": "cu_seqlens_q|k.requires_grad",
    "x": "cu_seqlens",
    "qkv": "q|k|v|cu_seqlens_q",  # its parts
    "kv": "k|v|cu_seqlens_k",
}
_ARGMAX = (
    "8 bits decide otherwise which of two keys scores highest, and no other key weighs anything"
)
# (call, argument, value) whose outcome is neither, with the reason.
EXCUSED = {
    ("fp8", "softmax_scale", repr(-(2**70))): _ARGMAX,
    ("fp8 varlen", "softmax_scale", repr(-(2**70))): _ARGMAX,
    ("explain varlen", "cu_seqlens_q", "None"): "flash_attn_func is explained then, of a wrong q",
}


class Value(NamedTuple):
    name: str
    value: object


class Meta(torch.Tensor):
    """A tensor class of someone else's."""


def _scalars() -> Iterator[Value]:
    plain = (None, True, False, 0, 1, 2, -1, -5, 7, 300, 2**31, 2**63, 2**70, 10**400, -(2**70))
    floats = (0.0, 0.25, 1.0, 1.5, -0.5, 1e300, 1e38, 1e39, 1e-40, math.nan, math.inf, -math.inf)
    texts = ("", "a", "1", "reference", "hopper", "bogus", b"1")
    others = (1j, [], [1.0], ["a", "b"], {}, {"a": 1}, (), object(), int, len, ...)
    others += (np.float32, Tensor)
    pairs = ((-1, -1), (3, 0), [2, 1], (-7, 2), (1.0, 2), (None, None), (1,), (1, 2, 3), (2**70, 0))
    pairs += ((None, 1), (np.int8(3), 1), [torch.tensor(-2), 1], ([1], [2]), (2**63, 0), (1, True))
    dtypes = (torch.float32, torch.float16, torch.float64, torch.int8, FP8, torch.int32)
    for value in (*plain, *floats, *texts, *others, *pairs, *dtypes):
        text = re.sub(r" at 0x\w+", "", repr(value))
        yield Value(text if len(text) < 40 else f"{text[:20]}...", value)
    for kind in (np.int32, np.int64, np.float32, np.float64, np.bool_):
        for number in (0, 1):
            yield Value(f"np.{kind.__name__}({number})", kind(number))
    for content in (0, 1, 0.5, True, 300, [1, 2], [[1, 2]], [], [1, 2, 3], [0.5, 2.0]):
        yield Value(f"np.array({content})", np.array(content))
        yield Value(f"tensor({content})", torch.tensor(content))
    yield Value("meta 0-d", torch.tensor(1, device="meta"))
    yield Value("meta 1-d", torch.zeros(2, device="meta"))


SCALARS = tuple(_scalars())


# What values of each argument mean.


def number(value: object) -> object:
    """numpy's scalars and 0-d arrays and tensors as Python's."""
    if isinstance(value, (np.generic, np.ndarray, Tensor)) and np.ndim(value) == 0:
        return value if getattr(value, "is_meta", False) else value.item()
    return value


def integer(low: int, high: int = 2**63 - 1) -> Callable:
    def meaning(value: object) -> object:
        value = number(value)
        return value if type(value) is int and low <= value <= high else ILLEGAL

    return meaning


def real(fits: Callable[[float], bool]) -> Callable:
    def meaning(value: object) -> object:
        value = number(value)
        legal = type(value) in (int, float) and abs(value) < 1e308 and fits(value)
        return float(value) if legal else ILLEGAL

    return meaning


def boolean(value: object) -> object:
    value = number(value)
    return bool(value) if type(value) in (bool, int) and value in (0, 1) else ILLEGAL


def no(value: object) -> object:
    return False if boolean(value) is False else ILLEGAL


def length(value: object, least: int = 7) -> object:
    if getattr(value, "is_meta", False):
        return EITHER
    return integer(least)(value)


def any_length(value: object) -> object:
    return None if value is None else length(value, 0)


def window(value: object) -> object:
    if getattr(value, "is_meta", False):
        return ILLEGAL
    if isinstance(value, (np.ndarray, Tensor)) and np.ndim(value) == 1:
        value = value.tolist()
    if not isinstance(value, (tuple, list)) or len(value) != 2:
        return ILLEGAL
    sides = [-1 if side is None else integer(-(2**63))(side) for side in value]
    return ILLEGAL if ILLEGAL in sides else tuple(max(-1, side) for side in sides)


def optional(meaning: Callable) -> Callable:
    return lambda value: None if value is None else meaning(value)


def one_of(*legal: object) -> Callable:
    def meaning(value: object) -> object:
        same = (x for x in legal if type(x) is type(value) and x == value)
        return next(same, ILLEGAL)

    return meaning


def backend(value: object) -> object:
    return EITHER if isinstance(value, str) and not value else one_of(None, "reference")(value)


def within_float32(value: float) -> bool:
    return value == 0 or 2.0**-100 <= abs(value) <= 2.0**100


def span(value: object) -> object:
    """A multiple of 128, which 8 bits refuse."""
    tokens = integer(1)(value)
    return EITHER if tokens is not ILLEGAL and tokens % 128 == 0 else ILLEGAL


LEGAL: dict[str, Callable[[object], object]] = {
    "softmax_scale": optional(real(within_float32)),
    "causal": boolean,
    "qv": one_of(None),
    "window_size": window,
    "attention_chunk": integer(0, 0),
    "softcap": real(lambda value: value >= 0),
    "num_splits": lambda value: 0 if value is None else integer(-(2**63), 256)(value),
    "split_tokens": optional(span),
    "pack_gqa": optional(boolean),
    "deterministic": boolean,
    "sm_margin": integer(0),
    "use_fast_accum": boolean,
    "return_attn_probs": boolean,
    "return_lse": boolean,
    "return_max_logit": boolean,
    "backend": backend,
    "out_dtype": lambda value: EITHER if isinstance(value, torch.dtype) else one_of(None)(value),
    "max_seqlen_q": optional(length),
    "max_seqlen_k": optional(length),
    "num_heads_q": one_of(None),
    "dropout_p": real(lambda value: value == 0),
    "block": one_of(64, 128, 256),
    "hadamard": boolean,
    "qk_dtype": one_of(None, FP8, INT8),
    "smooth_k": boolean,
    "smooth_v": boolean,
    "smooth": boolean,
    "kind": one_of("q", "k", "v"),
    "dtype": one_of(FP8, INT8),
    "layout": one_of(None, "rows", "permuted"),
    "max_seqlen": optional(length),
    "device": one_of(None, "cpu", torch.device("cpu")),
    "mask": one_of(None),
    "name": one_of("reference", "triton", "hopper"),
}
TENSORS = {"q", "k", "v", "kv", "qkv", "x"}
INDICES = {"cu_seqlens_q", "cu_seqlens_k", "cu_seqlens", "seqused_q", "seqused_k"}
DESCALES = {"q_descale", "k_descale", "v_descale"}
SCORES = {"sinks", "alibi_slopes", "bias"}


# The calls whose arguments are made odd.

EDGES = torch.tensor([0, 5, 12], dtype=torch.int32)
SEQUSED = torch.tensor([5, 4], dtype=torch.int32)


class Call(NamedTuple):
    """legal: what values of arguments mean in this call alone, see ``LEGAL``."""

    name: str
    function: Callable
    arguments: dict[str, Any]
    legal: dict[str, Callable[[object], object]] = {}  # noqa: RUF012

    def run(self, **changes: object) -> object:
        result = self.function(**(self.arguments | changes))
        if self.function is not flashattn3.use_backend:
            return result
        with result:
            return result

    def meaning(self, name: str, value: object) -> object:
        return (LEGAL | self.legal)[name](value) if name in LEGAL else EITHER


def random(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    generator = torch.Generator().manual_seed(sum(shape))
    return torch.randn(shape, generator=generator).to(dtype)


def calls() -> dict[str, Call]:
    half, bf16 = torch.float16, torch.bfloat16
    varlen = {"cu_seqlens_q": EDGES, "cu_seqlens_k": EDGES, "max_seqlen_q": 7, "max_seqlen_k": 7}

    def qkv(*rows: int, dtype: torch.dtype = torch.float32) -> dict[str, Tensor]:
        keys = (*rows[:-1], rows[-1] + 2 if len(rows) == 2 else rows[-1])
        shapes = {"q": (*rows, 4, 16), "k": (*keys, 2, 16), "v": (*keys, 2, 16)}
        return {name: random(*shape, dtype=dtype) for name, shape in shapes.items()}

    leaves = {name: x.requires_grad_() for name, x in qkv(2, 7).items()}
    eight_bit = qkv(2, 7, dtype=FP8)
    descales = {f"{side}_descale": random(2, 2).abs() + 0.5 for side in "qkv"}
    int8 = {side: x.to(FP8 if side == "v" else INT8) for side, x in qkv(2, 7).items()}
    scaled = {side: quantize_block_fp8(x, kind=side) for side, x in qkv(2, 130).items()}
    lengths = {"cu_seqlens": EDGES, "max_seqlen": 7}
    rows_of_8_bits = {
        side: quantize_block_fp8(random(12, heads, 16), kind=side, **lengths)
        for side, heads in (("q", 4), ("k", 2), ("v", 2))
    }
    packed, packed_kv = {"qkv": random(2, 7, 3, 2, 16)}, {"kv": random(2, 9, 2, 2, 16)}
    packed_heads = {"qkv": random(2, 7, 4, 16), "num_heads_q": 2}
    rows = {"qkv": random(12, 3, 2, 16), "cu_seqlens": EDGES, "max_seqlen": 7}
    rows_kv = {"q": random(12, 4, 16), "kv": random(12, 2, 2, 16)} | varlen
    block = {"x": random(2, 7, 4, 16), "kind": "k"}
    block_rows = {"x": random(12, 2, 16), "kind": "v", "cu_seqlens": EDGES, "max_seqlen": 7}
    longest = "max_seqlen_q", "max_seqlen_k"
    of_v = {"hadamard": no, "smooth": no, "dtype": one_of(FP8), "max_seqlen": length}
    table = {
        "dense": (flashattn3.flash_attn_func, leaves),
        "e4m3": (flashattn3.flash_attn_func, eight_bit | descales),
        "int8": (flashattn3.flash_attn_func, int8 | descales),
        "scaled": (flashattn3.flash_attn_func, scaled),
        "scaled varlen": (flashattn3.flash_attn_varlen_func, rows_of_8_bits | varlen),
        "varlen": (flashattn3.flash_attn_varlen_func, qkv(12) | varlen | {"seqused_k": SEQUSED}),
        "packed": (flashattn3.flash_attn_qkvpacked_func, packed),
        "kv packed": (flashattn3.flash_attn_kvpacked_func, {"q": random(2, 7, 4, 16)} | packed_kv),
        "varlen packed": (flashattn3.flash_attn_varlen_qkvpacked_func, rows),
        "varlen kv packed": (flashattn3.flash_attn_varlen_kvpacked_func, rows_kv),
        "packed heads": (
            flashattn3.flash_attn_qkvpacked_func, packed_heads, {"num_heads_q": integer(2, 2)}
        ),
        "fp8": (flashattn3.flash_attn_fp8_func, qkv(2, 7, dtype=half)),
        "fp8 varlen": (flashattn3.flash_attn_varlen_fp8_func, qkv(12, dtype=bf16) | varlen),
        "explain": (flashattn3.explain, qkv(2, 7), dict.fromkeys(longest, one_of(None))),
        # It reads no values of tensors.
        "explain varlen": (
            flashattn3.explain, qkv(12) | varlen, dict.fromkeys(longest, any_length)
        ),
        "quantize": (quantize_block_fp8, block, {"max_seqlen": one_of(None)}),
        "quantize varlen": (quantize_block_fp8, block_rows, of_v),
        "backends": (flashattn3.available_backends, {}),
        "use": (flashattn3.use_backend, {"name": "reference"}),
    }  # fmt: skip
    return {name: Call(name, *of) for name, of in table.items()}


CALLS = calls()


def parameters(call: Call) -> list[str]:
    return list(inspect.signature(call.function).parameters)


# Odd tensors.


def odd_tensors(name: str, given: object) -> Iterator[Value]:
    """What may come in the place of a tensor argument, or of one that is not given."""
    if isinstance(given, BlockScaled):
        yield from odd_scaled(given)
    if not isinstance(given, Tensor):
        odd = ("none", "text", "list", "np.array", "tensor(1)", "tensor(True)", "meta 1-d")
        yield from (x for x in SCALARS if x.name.startswith(odd) or x.name in ("'a'", "1", "{}"))
        yield Value("tensor 3-d", torch.full((2, 2, 1), 2.0))
        yield Value("tensor 4-d", torch.ones(2, 7, 2, 16))
        yield Value("int32 1-d", torch.tensor([1, 2], dtype=torch.int32))
        if name in SCORES:
            for axes in ((2,), (4,), (2, 2), (2, 4), (1, 4, 7, 7), (2, 1, 7, 9), (1, 1, 7, 1)):
                yield Value(f"{axes}", torch.full(axes, 0.5))
                yield Value(f"{axes} leaf", torch.full(axes, 0.5, requires_grad=True))
                yield Value(f"{axes} half", torch.full(axes, 0.5).half())
        return
    given = given.detach()
    yield from (Value(x.name, x.value) for x in SCALARS if not isinstance(x.value, torch.dtype))
    yield Value("list", given.tolist())
    if given.dtype not in (torch.bfloat16, FP8):
        yield Value("numpy", given.numpy())
    for dtype in (
        *(torch.bool, torch.uint8, torch.int8, torch.int32, torch.int64, torch.float16),
        *(torch.bfloat16, torch.float32, torch.float64, torch.complex64, FP8, torch.float8_e5m2),
    ):
        if dtype != given.dtype:
            yield Value(str(dtype), given.to(dtype))
    for axis, size in enumerate(given.shape):
        yield Value(f"empty {axis}", given.narrow(axis, 0, 0))
        yield Value(f"shorter {axis}", given.narrow(axis, 0, size - 1))
        yield Value(f"longer {axis}", torch.cat([given, given.narrow(axis, 0, 1)], axis))
        yield Value(f"dropped {axis}", given.select(axis, 0))
        yield Value(f"added {axis}", given.unsqueeze(axis))
        yield Value(f"expanded {axis}", given.narrow(axis, 0, 1).expand_as(given))
        yield Value(
            f"every second {axis}",
            given.repeat_interleave(2, axis)[(slice(None),) * axis + (slice(0, None, 2),)],
        )
    yield Value("scalar", given.flatten()[0])
    yield Value("flat", given.flatten())
    yield Value("meta", given.to("meta"))
    yield Value("subclass", given.clone().as_subclass(Meta))
    yield Value("transposed memory", given.transpose(0, -1).contiguous().transpose(0, -1))
    if given.dtype.is_floating_point and given.dtype.itemsize > 1:
        yield Value("sparse", given.to_sparse())
        yield Value("leaf", given.clone().requires_grad_())
        yield Value("parameter", torch.nn.Parameter(given.clone()))
        yield Value("nested", torch.nested.nested_tensor(list(given.unbind())))
        yield Value("jagged", torch.nested.nested_tensor(list(given.unbind()), layout=torch.jagged))
    if given.dtype == torch.float32:
        yield Value("mkldnn", given.to_mkldnn())
    if name in DESCALES:
        yield Value("query heads", given.repeat_interleave(2, 1))
        for blocks in (0, 3):
            yield Value(f"{blocks} blocks", given[..., None] * torch.arange(1.0, 1 + blocks))
    if given.dtype in (FP8, INT8):
        yield Value("BlockScaled", quantize_block_fp8(given.float()))
    if name in INDICES:
        for content in ([0, 12], [0, 5, 13], [1, 5, 12], [0, 9, 5], [0, 0, 0], [-1, 5, 12], [9, 9]):
            yield Value(f"{content}", torch.tensor(content, dtype=torch.int32))


def odd_scaled(given: BlockScaled) -> Iterator[Value]:
    """A quantized tensor of which one field is another's."""
    heads, columns = given.shape[-2:]
    mean, edges = torch.ones(given.descale.shape[0], heads, columns), EDGES.clone()
    fields = {
        "data": (given.data[1:], given.data[..., :8], given.data.float(), given.data.to(INT8)),
        "descale": (given.descale[:1], given.descale.half(), given.descale.repeat(1, 1, 3)),
        "block": (64, 100, 256),
        "hadamard": (True,),
        "layout": ("permuted",),
        "cu_seqlens": (None, edges, edges[:2], edges + 1, edges.to("meta")),
        "mean": (mean, mean[:, :1], mean[:1], mean.half(), mean.to("meta")),
    }
    for field, values in fields.items():
        for i, value in enumerate(values):
            shape = value.shape if field == "data" else given.shape
            yield Value(f"{field} {i}", replace(given, **{field: value, "shape": shape}))


def odd_values(call: Call, name: str) -> list[Value]:
    if name in LEGAL:
        return list(SCALARS)
    if name in TENSORS | INDICES | DESCALES | SCORES:
        return list(odd_tensors(name, call.arguments.get(name)))
    raise KeyError(f"{call.name}: nobody says what is legal of {name}")


# Calls whose other arguments are those of a call above.
TENSORS_ALONE = "int8", "scaled varlen"
CASES = [
    (call.name, name)
    for call in CALLS.values()
    for name in parameters(call)
    if call.name not in TENSORS_ALONE or name in TENSORS | INDICES | DESCALES | {"out_dtype"}
]


# The judge.


def reference(call: Call, given: dict[str, Any]) -> Tensor:
    """The attention of a call in float64, from its arguments as they are meant."""
    if "cu_seqlens" in given:
        given = given | dict.fromkeys(("cu_seqlens_q", "cu_seqlens_k"), given["cu_seqlens"])
    varlen = "cu_seqlens_q" in given
    if "kv" in given:
        q, (k, v) = given["q"], given["kv"].unbind(-3)
    elif "qkv" in given and varlen:
        q, k, v = given["qkv"].unbind(1)
    elif "qkv" in given:
        heads = given.get("num_heads_q")
        qkv = given["qkv"]
        rest = None if heads is None else (qkv.shape[2] - heads) // 2
        q, k, v = qkv.unbind(2) if heads is None else qkv.split((heads, rest, rest), 2)
    else:
        q, k, v = (given[side] for side in "qkv")
    q, k, v = (x.dequantize() if isinstance(x, BlockScaled) else x.double() for x in (q, k, v))
    for side, x in zip("qkv", (q, k, v), strict=True):
        descale = given.get(f"{side}_descale")
        if descale is not None:
            x *= descale.view(*descale.shape[:2], -1).repeat_interleave(
                x.shape[2] // descale.shape[1], 1
            )[:, None, :, :1]
    names = "cu_seqlens_q", "cu_seqlens_k", "seqused_q", "seqused_k"
    lengths = (given.get(name) for name in names) if varlen else ()
    left, right = given.get("window_size", (-1, -1))
    scale = given.get("softmax_scale")
    out, _ = attention(
        Tensors(q, k, v, *lengths)._replace(**{x: given[x] for x in SCORES if x in given}),
        softmax_scale=q.shape[-1] ** -0.5 if scale is None else scale,
        window_left=left,
        window_right=0 if given.get("causal") else right,
        softcap=given.get("softcap", 0.0),
    )
    return out


def wrong_result(call: Call, given: dict[str, Any], result: object) -> str | None:
    """Why a result is not right, or None."""
    if call.function is flashattn3.available_backends:
        return None if "reference" in result else f"found {result}"
    if call.function is flashattn3.use_backend:
        return None
    if isinstance(result, Explanation):
        return None if result.backend == "reference" else f"found {result.backend}"
    if isinstance(result, BlockScaled):
        x, close = given["x"], 0.05
        if x.is_meta:
            return None if result.data.is_meta and result.shape == x.shape else "no meta result"
        edges = given.get("cu_seqlens")
        rows = slice(None) if edges is None else slice(int(edges[-1]))
        error = (result.dequantize() - x)[rows].float().norm()
        size = x[rows].float().norm()
        return None if error <= close * size else f"off by {error / size:.3f}"
    with_lse = given.get("return_lse") or given.get("return_attn_probs")
    if isinstance(result, tuple) != bool(with_lse or given.get("return_max_logit")):
        return f"returned a {type(result).__name__}"
    out = result[0] if isinstance(result, tuple) else result
    if out.is_meta:
        first = next(iter(given.values()))
        return None if out.shape[0] == first.shape[0] else f"meta out of shape {out.shape}"
    if given.get("out_dtype") not in (None, out.dtype):
        return f"out of {out.dtype}"
    for name in SCORES & given.keys():
        if getattr(given[name], "requires_grad", False):
            torch.autograd.grad(out.sum(), given[name], retain_graph=True)
    wanted = reference(call, given)
    if out.shape != wanted.shape:
        return f"out of shape {tuple(out.shape)}, should be {tuple(wanted.shape)}"
    eight = "fp8" in call.function.__name__ or out.dtype in (torch.float16, torch.bfloat16)
    bound = FP8_OF_16_BIT.rmse if eight else 1e-5
    error, size = (out - wanted).norm(), wanted.norm()
    return None if error <= bound * size + 1e-12 else f"out is off by {error / size:.3g}"


def wrong_error(call: Call, name: str, value: object, error: Exception) -> str | None:
    """What is missing in an error, or None."""
    text = str(error)
    if not isinstance(error, (TypeError, ValueError)):
        return f"{type(error).__name__}: {text[:100]}"
    missing = []
    if not text.startswith(f"{call.function.__name__}: "):
        missing.append("function")
    names = f"{name}|{PARTNERS[name]}" if name in PARTNERS else name
    if isinstance(value, BlockScaled) or isinstance(call.arguments.get(name), BlockScaled):
        names = r"[qkv](_descale|_block)?|cu_seqlens_[qk]"
    if not re.search(rf"\b({names})\b", text.partition(":")[2]):
        missing.append("argument")
    if not re.search(r"\b(must|expected)\b", text):
        missing.append("must")
    # A tensor's property may be what the others are held to: "must be 3 (q's batch), got 2".
    everywhere = value is None or isinstance(value, (Tensor, BlockScaled))
    found = text.partition(": " if everywhere else "got ")[2]
    if not any(form in found for form in forms(value)):
        missing.append("value")
    return f"no {', '.join(missing)} in {text[:200]!r}" if missing else None


def forms(value: object) -> list[str]:
    """How a sentence may show a value: itself, its kind, or a property of a tensor."""
    if isinstance(value, BlockScaled):
        return [form for field in vars(value).values() for form in forms(field)]
    if value is None:
        return ["None", "without"]
    found = [type(value).__name__]
    if getattr(value, "is_nested", False) is True:
        return [*found, "nested"]
    if isinstance(value, Tensor):
        found += [value.device, value.layout, "requires_grad", "a tensor", "with "]
    if isinstance(value, (Tensor, np.ndarray)):
        found += [tuple(value.shape), value.dtype, *value.shape, value.ndim]
        readable = getattr(value, "layout", torch.strided) is torch.strided
        if readable and str(getattr(value, "device", "")) != "meta" and value.size != 0:
            found += [value.tolist(), *value.reshape(-1).tolist()[:9]]
    else:
        found += [text[:20] for text in (repr(value), str(value)) if text]
        found += value if isinstance(value, (tuple, list)) else ()
    with contextlib.suppress(TypeError, ValueError, OverflowError, RuntimeError):
        found += [f"{number(value):g}", float(number(value)), bool(number(value))]
    return [str(each) for each in found]


def error(call: Call, name: str, odd: Value) -> str | None:
    """Why the outcome of a call with an odd value is neither of the legal ones, or None."""
    meaning = call.meaning(name, odd.value)
    given = {**call.arguments, name: odd.value}
    reached.clear()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            warnings.filterwarnings("ignore", MAY_WARN)
            result = call.run(**{name: odd.value})
    except Exception as error:
        if meaning not in (ILLEGAL, EITHER):
            return f"refused what is legal: {type(error).__name__}: {str(error)[:200]}"
        # A plan comes before lengths are compared with the values of tensors.
        early = reached - ({"prepare"} if name.startswith("max_seqlen") else set())
        if meaning is ILLEGAL and early:
            return f"{early} reached before it was refused"
        return wrong_error(call, name, odd.value, error)
    if meaning is ILLEGAL:
        return "accepted"
    given[name] = odd.value if meaning is EITHER else meaning
    try:
        return wrong_result(call, given, result)
    except Exception as error:
        return f"accepted, and no truth: {type(error).__name__}: {str(error)[:100]}"


reached = set()  # by the call at hand: functions that quantize or make a launch


def noted(function: Callable, name: str) -> Callable:
    def run(*arguments):
        reached.add(name)
        return function(*arguments)

    return run


@pytest.fixture(autouse=True)
def no_interpreter(monkeypatch):
    """Where there is no GPU, Triton would take 16 and 8 bits in its interpreter, which is slow."""
    monkeypatch.setattr(dispatch, "runs_on", lambda *device: False)
    noteworthy = [(dispatch, "quantize"), (dispatch, "quantize_qkv")]
    noteworthy += [(type(backend), "prepare") for backend in BACKENDS]
    for owner, name in noteworthy:
        monkeypatch.setattr(owner, name, noted(getattr(owner, name), name))
    with flashattn3.use_backend("reference"):
        yield


@pytest.mark.parametrize(("call", "name"), CASES, ids=[f"{call}-{name}" for call, name in CASES])
def test_odd_argument(call, name):
    call = CALLS[call]
    errors = {
        odd.name: found
        for odd in odd_values(call, name)
        if (call.name, name, odd.name) not in EXCUSED
        and (found := error(call, name, odd)) is not None
    }
    assert not errors, "\n".join(f"{value}: {found}" for value, found in errors.items())


def test_there_are_many_odd_calls():
    assert sum(len(odd_values(CALLS[call], name)) for call, name in CASES) >= 500


def test_every_public_function_is_called():
    """But cached calls, whose odd arguments are those of tests/test_kvcache_arguments.py, and those
    of which other files have tables: test_passes.py, test_flex.py, test_rotate_and_quantize.py."""
    elsewhere = {"flash_attn_forward", "flash_attn_backward"}
    elsewhere |= {"flex_attention", "rotate_and_quantize"}
    functions = {
        name
        for name in flashattn3.__all__
        if inspect.isfunction(getattr(flashattn3, name))
        if not re.search("kvcache|cached", getattr(flashattn3, name).__module__)
    }
    assert functions - elsewhere == {call.function.__name__ for call in CALLS.values()}


@pytest.mark.parametrize("call", CALLS.values(), ids=CALLS)
def test_the_calls_themselves_are_right(call):
    assert wrong_result(call, call.arguments, call.run()) is None
