"""Registers the autograd node in C++ (csrc/torch_binding/autograd_node.cpp) where it can be used.

The node belongs to a private operator of torch, whose CUDA kernels are the library's from then on.
Nothing else relies on that operator: without the node, calls with gradients get one in Python.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from functools import cache

import torch

SWITCH = "FLASHATTN3_AUTOGRAD_NODE"
NAME = "_scaled_dot_product_flash_attention_for_cpu"
# As torch 2.13 and 2.14 have them. The kernels read arguments by their place.
_OPTIONS = "*, Tensor? attn_mask=None, float? scale=None"
SCHEMAS = {
    NAME: f"aten::{NAME}(Tensor query, Tensor key, Tensor value, float dropout_p=0., "
    f"bool is_causal=False, {_OPTIONS}) -> (Tensor output, Tensor logsumexp)",
    f"{NAME}_backward": f"aten::{NAME}_backward(Tensor grad_out, Tensor query, Tensor key, "
    "Tensor value, Tensor out, Tensor logsumexp, float dropout_p, bool is_causal, "
    f"{_OPTIONS}) -> (Tensor grad_query, Tensor grad_key, Tensor grad_value)",
}


@cache
def unusable_reason() -> str | None:
    """Why calls with gradients get a node in Python, or None."""
    switch = os.environ.get(SWITCH, "1")
    if switch != "1":
        return f"{SWITCH}={switch}"
    for name, wanted in SCHEMAS.items():
        found = schema_of(name)
        if found != wanted:
            return f"torch {torch.__version__} has another aten::{name}"
    if torch._C._dispatch_has_kernel_for_dispatch_key(f"aten::{NAME}", "CUDA"):
        return "another copy of the library, or of torch's kernels, has the operator"
    return None


def schema_of(name: str) -> str | None:
    packet = getattr(torch.ops.aten, name, None)
    return None if packet is None else str(packet.default._schema)


@cache
def registered_node(operators: object, *in_python: Callable) -> Callable | None:
    """The operator with the node, or None. operators: torch.ops.flashattn3_hopper. in_python: what
    computes the passes whose launch the library does not have, under the operators' names."""
    if unusable_reason() is not None:
        return None
    for run in in_python:
        torch.library.impl(f"{operators.name}::{run.__name__}", "CompositeExplicitAutograd", run)
    operators.register_autograd_node.default()
    return getattr(torch, NAME)
