"""The tensors of a call, once: their names, and what of each a plan depends on.

fields.py has the other arguments; a plan depends on all of them. The operators' schemas follow from
this table, and so do the tensors of a call in C++ and the search for its launch there: the build
writes them into a header (build_support/units.py), so this module imports nothing of the package.
"""

from __future__ import annotations

from typing import NamedTuple


class Kind(NamedTuple):
    """A kind of tensor.

    type: in the operators' schemas.
    plan: the properties on which a plan depends. "sizes", "dtype" and "device" are the tensor's;
        "readable": whether kernels read it where it lies; "given": whether it is there; "count":
        the number of its elements; "rank" of its axes. Strides, addresses and values are in no
        plan of a readable tensor.
    """

    type: str
    plan: tuple[str, ...]


ROWS = Kind("Tensor", ("device", "dtype", "sizes", "readable"))
EDGES = Kind("Tensor?", ("given", "count"))
LENGTHS = Kind("Tensor?", ("given",))
SINKS = Kind("Tensor?", ("given", "dtype", "readable"))
SLOPES = Kind("Tensor?", ("given", "rank", "readable"))
BIAS = Kind("Tensor?", ("given", "dtype", "sizes", "readable"))
MASK = Kind("Tensor?", ("given", "sizes"))


class TensorField(NamedTuple):
    """One tensor of a call.

    found: whether the backend's operators find the launch of a call that has it from its tensors;
        Python plans other calls.
    learned: whether it may need a gradient, as q, k and v may.
    """

    name: str
    kind: Kind
    found: bool = True
    learned: bool = False

    @property
    def is_optional(self) -> bool:
        return self.kind.type.endswith("?")


TENSORS = (
    TensorField("q", ROWS),
    TensorField("k", ROWS),
    TensorField("v", ROWS),
    TensorField("cu_seqlens_q", EDGES),
    TensorField("cu_seqlens_k", EDGES),
    TensorField("seqused_q", LENGTHS, found=False),
    TensorField("seqused_k", LENGTHS, found=False),
)
# The tensors that change scores, the last six those of a ``masks.Mask``. Operators have an overload
# for calls with one of them.
SCORE_TENSORS = (
    TensorField("sinks", SINKS, learned=True),
    TensorField("alibi_slopes", SLOPES),
    TensorField("bias", BIAS, learned=True),
    *(
        TensorField(f"mask_{name}_{side}", MASK, found=False)
        for side in ("q", "k")
        for name in ("entries", "work", "tiles")
    ),
)
# Those that are arguments of the public functions; the mask's come in one object.
SCORE_ARGUMENTS = tuple(field.name for field in SCORE_TENSORS if field.kind is not MASK)
# Arguments that a form of call/public.py takes as one tuple.
GROUPS = {
    "lengths": tuple(field.name for field in TENSORS if field.is_optional),
    "descales": tuple(f"{field.name}_descale" for field in TENSORS if field.kind is ROWS),
    "scores": SCORE_ARGUMENTS,
}
# The tensors of a cached call and of an append; CACHED_PLAN says what of them a plan depends on. A
# letter says that an append writes the tensor.
REQUIRED, OPTIONAL = Kind("Tensor", ()), Kind("Tensor?", ())
DECODE_TENSORS = (
    TensorField("q", REQUIRED),
    TensorField("k_cache", REQUIRED),
    TensorField("v_cache", REQUIRED),
    TensorField("cache_seqlens", OPTIONAL),
    TensorField("page_table", OPTIONAL),
    TensorField("cache_batch_idx", OPTIONAL),
    TensorField("cache_leftpad", OPTIONAL),
    TensorField("cu_seqlens_q", OPTIONAL),
    TensorField("cu_seqlens_k_new", OPTIONAL),
    TensorField("q_descale", OPTIONAL),
    TensorField("k_descale", OPTIONAL),
    TensorField("v_descale", OPTIONAL),
    TensorField("sinks", OPTIONAL),
    TensorField("scheduler_metadata", OPTIONAL),
    TensorField("tree_mask", OPTIONAL),
)
APPEND_TENSORS = (
    TensorField("k", REQUIRED),
    TensorField("v", REQUIRED),
    TensorField("k_cache", Kind("Tensor(a!)", ())),
    TensorField("v_cache", Kind("Tensor(b!)", ())),
    TensorField("q", OPTIONAL),
    TensorField("q_out", Kind("Tensor(c!)?", ())),
    TensorField("cache_seqlens", OPTIONAL),
    TensorField("page_table", OPTIONAL),
    TensorField("cache_batch_idx", OPTIONAL),
    TensorField("cu_seqlens_q", OPTIONAL),
    TensorField("cu_seqlens_k_new", OPTIONAL),
    TensorField("rotary_cos", OPTIONAL),
    TensorField("rotary_sin", OPTIONAL),
    TensorField("rotary_seqlens", OPTIONAL),
    TensorField("k_descale", OPTIONAL),
    TensorField("v_descale", OPTIONAL),
)
# ALiBi's slopes. The compiled kernels of cached calls take none.
CACHED_SLOPES = TensorField("alibi_slopes", OPTIONAL)
# Descales of each token of a cache, which an append computes and writes. The compiled append kernel
# takes none.
WRITTEN_DESCALES = (
    TensorField("k_descale_out", Kind("Tensor(d!)?", ())),
    TensorField("v_descale_out", Kind("Tensor(e!)?", ())),
)
# The properties of a cached call that a plan depends on, besides its options: no size that grows
# from step to step. seqlen_q: queries of a sequence, or of the longest. page_size: 0 without a page
# table.
# byte_cache: whether the cache has 8 bits; both dtypes have one plan, and so have all descales.
CACHED_PLAN = (
    "device",
    "dtype",
    "seqlen_q",
    "num_heads_q",
    "num_heads_kv",
    "head_dim",
    "head_dim_v",
    "page_size",
    "byte_cache",
)


def schema(fields: tuple[TensorField, ...] = TENSORS, missing: str = "") -> str:
    """The tensors as arguments of an operator. missing: follows the name of an optional one."""
    return ", ".join(
        f"{field.kind.type} {field.name}{missing if field.is_optional else ''}" for field in fields
    )


FOUND_SCORES = tuple(field for field in SCORE_TENSORS if field.found)
FOUND_ROWS = tuple(field for field in TENSORS if field.found)
FOUND = FOUND_ROWS + FOUND_SCORES
