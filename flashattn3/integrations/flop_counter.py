"""FLOP formulas of flashattn3's operators, for ``torch.utils.flop_counter.FlopCounterMode``."""

from __future__ import annotations

from functools import cache, partial

import torch
from torch._subclasses.fake_tensor import FakeTensor

from ..run import bhsd  # noqa: F401  (defines the operators)


def register_flop_formulas() -> None:
    """Make ``FlopCounterMode`` count flashattn3's calls as it counts torch's own attention: all
    scores, masked or not; two GEMMs forward and five backward.

    Call it before the mode is created. It is not part of ``import flashattn3`` because torch's
    counter imports Triton. Calling again has no effect.
    """
    from torch.utils.flop_counter import flop_registry, register_flop_formula

    for suffix in ("", "_bhsd"):
        for name, formula in (("forward", _forward_flop), ("backward", _backward_flop)):
            operator = getattr(torch.ops.flashattn3, name + suffix)
            if operator not in flop_registry:
                register_flop_formula(operator, get_raw=True)(partial(formula, operator.default))


@cache
def _names(operator: torch._ops.OpOverload) -> tuple[str, ...]:
    return tuple(argument.name for argument in operator._schema.arguments)


def _given(operator: torch._ops.OpOverload, arguments: tuple, named: dict) -> dict:
    """The arguments of a call by name; q and k with tokens before heads."""
    given = dict(zip(_names(operator), arguments, strict=False)) | named
    if operator._schema.name.endswith("_bhsd"):
        given |= {name: given[name].transpose(1, 2) for name in ("q", "k")}
    return given


def _scores(given: dict) -> int:
    """Scores of a call over all heads, without regard to masks, as torch counts its own attention.
    cu_seqlens are read, except from tensors without data: there every sequence has max_seqlen."""
    q, k = given["q"], given["k"]
    heads = q.shape[-2]
    edges_q, edges_k = given.get("cu_seqlens_q"), given.get("cu_seqlens_k")
    if edges_q is None:
        return q.shape[0] * heads * q.shape[1] * k.shape[1]
    if edges_q.is_meta or isinstance(edges_q, FakeTensor):
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
