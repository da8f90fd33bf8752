"""FLOP formulas of flashattn3's operators, for ``torch.utils.flop_counter.FlopCounterMode``."""

from __future__ import annotations

from functools import cache, partial

import torch
from torch._subclasses.fake_tensor import FakeTensor

from ..call.cached_value_checks import capacity_of
from ..run import bhsd, cached_operators  # noqa: F401  (define the operators)


def register_flop_formulas() -> None:
    """Make ``FlopCounterMode`` count flashattn3's calls as it counts torch's own attention: all
    scores, masked or not; two GEMMs forward and five backward. Those of a cached call are of the
    keys that a sequence has, new ones among them.

    Call it before the mode is created. It is not part of ``import flashattn3`` because torch's
    counter imports Triton. Calling again has no effect.
    """
    from torch.utils.flop_counter import flop_registry, register_flop_formula

    for name, formula in _FORMULAS.items():
        operator = getattr(torch.ops.flashattn3, name)
        if operator not in flop_registry:
            register_flop_formula(operator, get_raw=True)(partial(formula, operator))


@cache
def _names(operator: torch._ops.OpOverloadPacket, count: int) -> tuple[str, ...]:
    """The names of so many arguments, by which overloads differ: no argument has a default."""
    overloads = (getattr(operator, name)._schema.arguments for name in operator.overloads())
    return next(tuple(x.name for x in of) for of in overloads if len(of) == count)


def _given(operator: torch._ops.OpOverloadPacket, arguments: tuple, named: dict) -> dict:
    """The arguments of a call by name; q and k with tokens before heads."""
    names = _names(operator, len(arguments) + len(named))
    given = dict(zip(names, arguments, strict=False)) | named
    if operator.__name__.endswith("_bhsd"):
        given |= {name: given[name].transpose(1, 2) for name in ("q", "k")}
    return given


def _has_no_data(x: torch.Tensor) -> bool:
    return x.is_meta or isinstance(x, FakeTensor)


def _scores(given: dict) -> int:
    """Scores of a call over all heads, without regard to masks, as torch counts its own attention.
    cu_seqlens are read, except from tensors without data: there every sequence has max_seqlen."""
    q, k = given["q"], given["k"]
    heads = q.shape[-2]
    edges_q, edges_k = given.get("cu_seqlens_q"), given.get("cu_seqlens_k")
    if edges_q is None:
        return q.shape[0] * heads * q.shape[1] * k.shape[1]
    if _has_no_data(edges_q):
        longest_q = given.get("max_seqlen_q") or q.shape[-3]
        longest_k = given.get("max_seqlen_k") or k.shape[-3]
        return (edges_q.shape[0] - 1) * heads * longest_q * longest_k
    lengths = edges_q.diff().long() * edges_k.diff().long()
    return heads * int(lengths.sum())


def _forward_flop(operator, *arguments, out_val=None, **named) -> int:
    """Two GEMMs: Q Kᵀ over head_dim and P V over head_dim_v."""
    given = _given(operator, arguments, named)
    return 2 * _scores(given) * (given["q"].shape[-1] + out_val[0].shape[-1])


def _backward_flop(operator, *arguments, out_val=None, **named) -> int:
    """Five GEMMs: Q Kᵀ, dQ and dK over head_dim; dP and dV over head_dim_v."""
    given = _given(operator, arguments, named)
    return 2 * _scores(given) * (3 * given["q"].shape[-1] + 2 * given["out"].shape[-1])


def _cached_scores(given: dict) -> int:
    """The same of a cached call. Without data every sequence has the capacity of its cache."""
    q, edges = given["q"], given["cu_seqlens_q"]
    keys, edges_new = given["cache_seqlens"], given["cu_seqlens_k_new"]
    capacity = capacity_of(given["k_cache"], given["page_table"])[1]
    batch, queries = q.shape[:2] if edges is None else (edges.shape[0] - 1, edges.diff())
    if _has_no_data(q):
        total_q = q.shape[0] if edges is not None else batch * queries
        return q.shape[-2] * total_q * capacity
    if keys is None:
        keys = capacity if given["seqlen"] is None else given["seqlen"]
    keys = keys + (given["seqlen_new"] if edges_new is None else edges_new.diff())
    prefix = given.get("prefix_seqlen")
    keys = keys + (given.get("prefix_len", 0) if prefix is None else prefix)
    scores = torch.ones(batch, dtype=torch.int64, device=q.device) * queries * keys
    return q.shape[-2] * int(scores.sum())


def _cached_flop(operator, *arguments, out_val=None, **named) -> int:
    """Two GEMMs, as of ``_forward_flop``."""
    given = _given(operator, arguments, named)
    return 2 * _cached_scores(given) * (given["q"].shape[-1] + given["v_cache"].shape[-1])


_FORMULAS = {
    "forward": _forward_flop,
    "forward_bhsd": _forward_flop,
    "backward": _backward_flop,
    "backward_bhsd": _backward_flop,
    "decode": _cached_flop,
    "decode_after_prefix": _cached_flop,
}
