"""Registers the autograd nodes in C++ (csrc/torch_binding/autograd_node.cpp) where they are usable.

A node belongs to a private operator of torch, whose CUDA kernels are the library's from then on.
Nothing else relies on these operators: without a node, calls with gradients get one in Python.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from functools import cache
from typing import NamedTuple

import torch

from ..call.value_checks import OFF

SWITCH = "FLASHATTN3_AUTOGRAD_NODE"


class AtenNode(NamedTuple):
    """A node, by the operator of torch that it belongs to.

    register: the library's operator that registers its kernels.
    arguments: of both schemas behind their names, forward and backward, as torch 2.9 (or
        ``oldest``) to 2.15 have them. The kernels read arguments by their place.
    oldest: release of torch.
    """

    name: str
    register: str
    arguments: tuple[str, str]
    oldest: tuple[int, int] = (2, 9)

    @property
    def schemas(self) -> dict[str, str]:
        """Both schemas, by the operators' names."""
        names = self.name, f"{self.name}_backward"
        return {
            name: f"aten::{name}({arguments}"
            for name, arguments in zip(names, self.arguments, strict=True)
        }


_SIDES = "Tensor query, Tensor key, Tensor value"
_OPTIONS = "*, Tensor? attn_mask=None, float? scale=None"
_LENGTHS = "Tensor cum_seq_q, Tensor cum_seq_k, SymInt max_q, SymInt max_k"
_SEED = "Tensor philox_seed, Tensor philox_offset"
OF_SIDES = AtenNode(
    "_scaled_dot_product_flash_attention_for_cpu",
    "register_autograd_node",
    (
        f"{_SIDES}, float dropout_p=0., bool is_causal=False, {_OPTIONS}) -> (Tensor output, "
        "Tensor logsumexp)",
        f"Tensor grad_out, {_SIDES}, Tensor out, Tensor logsumexp, float dropout_p, bool "
        f"is_causal, {_OPTIONS}) -> (Tensor grad_query, Tensor grad_key, Tensor grad_value)",
    ),
)
# The node of a call with one tensor that changes scores. Releases before 2.10 convert no list, such
# as grad_input_mask, for the stable ABI.
OF_SCORE = AtenNode(
    "_scaled_dot_product_fused_attention_overrideable",
    "register_score_node",
    (
        f"{_SIDES}, Tensor? attn_bias=None, float dropout_p=0., bool is_causal=False, bool "
        "return_debug_mask=False, *, float? scale=None) -> (Tensor output, Tensor logsumexp, "
        f"{_LENGTHS}, {_SEED}, Tensor debug_attn_mask)",
        f"Tensor grad_out, {_SIDES}, Tensor attn_bias, bool[4] grad_input_mask, Tensor out, "
        f"Tensor logsumexp, {_LENGTHS}, float dropout_p, bool is_causal, {_SEED}, *, float? "
        "scale=None) -> (Tensor grad_query, Tensor grad_key, Tensor grad_value, Tensor "
        "grad_attn_bias)",
    ),
    oldest=(2, 10),
)
NODES = OF_SIDES, OF_SCORE


@cache
def unusable_reason(node: AtenNode) -> str | None:
    """Why calls with gradients get a node in Python, or None."""
    switch = os.environ.get(SWITCH) or "1"
    if switch.lower() in OFF:
        return f"{SWITCH}={switch}"
    if torch.__version__ < node.oldest:
        return f"torch {torch.__version__} is older than {'.'.join(map(str, node.oldest))}"
    for name, wanted in node.schemas.items():
        found = schema_of(name)
        if found != wanted:
            return f"torch {torch.__version__} has another aten::{name}"
    if torch._C._dispatch_has_kernel_for_dispatch_key(f"aten::{node.name}", "CUDA"):
        return "another copy of the library, or of torch's kernels, has the operator"
    return None


def schema_of(name: str) -> str | None:
    packet = getattr(torch.ops.aten, name, None)
    return None if packet is None else str(packet.default._schema)


@cache
def registered_nodes(operators: object, *in_python: Callable) -> tuple[Callable | None, ...]:
    """The operators with the nodes of ``NODES``, or None. operators: torch.ops.flashattn3_hopper.
    in_python: what computes the passes whose launch the library does not have, under the operators'
    names."""
    usable = [unusable_reason(node) is None for node in NODES]
    if not any(usable):
        return (None,) * len(NODES)
    for run in in_python:
        torch.library.impl(f"{operators.name}::{run.__name__}", "CompositeExplicitAutograd", run)
    return tuple(
        _registered(operators, node) if is_usable else None
        for node, is_usable in zip(NODES, usable, strict=True)
    )


def _registered(operators: object, node: AtenNode) -> Callable:
    getattr(operators, node.register).default()
    # torch has builtins of some operators; both take less time than OpOverload.__call__.
    return getattr(torch, node.name, None) or getattr(torch.ops.aten, node.name).default._op
