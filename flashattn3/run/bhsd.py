"""Attention of q, k and v whose heads come before their tokens, as models have them.

A compiled graph calls the operators ``flashattn3::forward_bhsd`` and ``flashattn3::backward_bhsd``:
they take and return the tensors that the graph has, so that inductor writes each where the kernels
read it. With operators of rows it would copy the views of q and k that it saves for the backward.
They have no argument that this call does not have, because torch spends 0.1 us on each.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

import torch
from torch import Tensor

from ..call.batch_invariance import span_of_all_calls
from ..call.fields import CALL, OF_MODELS, Options
from ..call.operands import NO_SCORES, Tensors
from ..call.public import once_for_plain_values
from ..call.selection import ANY, named_backend, traced_backends
from ..call.tensor_fields import FOUND_ROWS, schema
from ..call.value_checks import is_checked
from ..errors import value_error
from ..modes import (
    are_deterministic,
    has_autocast,
    is_batched,
    is_plain,
    is_plain_if_eager,
)
from .derivative import differentiable, differentiable_gradient, or_zeros
from .doors import attend, launch_cache
from .launches import LaunchCache
from .operator_rules import register_fake, under_autocast
from .operators import backward_of, fake_backward_of, fake_forward_of, have_data, launch_of

FUNCTION = "flash_attn_bhsd_func"
_SCHEMA = ", ".join((schema(FOUND_ROWS), *(f"{CALL.types[name]} {name}" for name in OF_MODELS)))
torch.library.define("flashattn3::forward_bhsd", f"({_SCHEMA}) -> (Tensor out, Tensor lse)")
torch.library.define(
    "flashattn3::backward_bhsd",
    f"(Tensor dout, Tensor? dlse, Tensor out, Tensor lse, {_SCHEMA}) -> "
    "(Tensor dq, Tensor dk, Tensor dv)",
)
NUM_TENSORS = len(FOUND_ROWS)  # among the operator's arguments, before the options


def attend_bhsd(
    options: Options,
    q,
    k,
    v,
    cu_seqlens_q=None,
    cu_seqlens_k=None,
    scores=None,
) -> Tensor | tuple[Tensor, ...]:
    """Compute out (batch, seqlen_q, heads, head_dim_v), lse (batch, heads, seqlen_q) and max_logit,
    of these what the call asks for.

    cu_seqlens_q, cu_seqlens_k: int32, of sequences in the rows of the batch, one after the other.
    """
    if (cu_seqlens_q is None) != (cu_seqlens_k is None):
        missing = "cu_seqlens_q" if cu_seqlens_q is None else "cu_seqlens_k"
        wanted = "a tensor: cu_seqlens_q and cu_seqlens_k belong together"
        raise value_error(options.function, missing, wanted, None)
    if scores is None and not options.return_max_logit and is_compiled(q, k, v):
        values = tuple([getattr(options, name) for name in OF_MODELS])
        return call_operator(q, k, v, cu_seqlens_q, cu_seqlens_k, values, options.return_lse)
    if cu_seqlens_q is None:
        tensors = Tensors(q, k, v, None, None, None, None, *(scores or NO_SCORES))
        return attend(tensors, options, bhsd=True)
    options = options._replace(max_seqlen_q=q.shape[2], max_seqlen_k=k.shape[2])
    rows = _in_rows(q, k, v, cu_seqlens_q, cu_seqlens_k)
    result = attend(Tensors(*rows[:5], None, None, *(scores or NO_SCORES)), options)
    if isinstance(result, Tensor):
        return _of_batch(result, q)
    out, *others = result
    if options.return_lse:
        others[0] = _lse_of_batch(others[0], q)
    return (_of_batch(out, q), *others)


def attend_like_before(q: Tensor, k: Tensor, v: Tensor, *values) -> Tensor | None:
    """Compute out of an eager call like an earlier one, as each layer of a model is like the layer
    before. None if ``attend_bhsd`` has to, because there was none or torch watches the call.

    values: of OF_MODELS.
    """
    if has_autocast() or not (is_plain_if_eager() and have_data(q, k, v)):
        return None
    try:
        cache = _launch_cache(*_in_force(), *values)
    except TypeError:  # a value of a type without hash, or of one that equals no other
        return None
    if cache.operators is None:
        return None
    needs_gradient = q.requires_grad or k.requires_grad or v.requires_grad
    differentiably = needs_gradient and torch.is_grad_enabled()
    if differentiably:
        results = cache.attend(q, k, v)
    else:
        results = cache.run(cache.operators.forward, False, q, k, v)
    return None if results is None else results[0]


def is_compiled(q: Tensor, k: Tensor, v: Tensor) -> bool:
    """Return whether a call is being compiled to an operator. Within a ``use_backend`` that is
    compiled too it is not, because the operators run on the backend in force when they run."""
    plain = type(q) is type(k) is type(v) is Tensor
    return torch.compiler.is_compiling() and plain and not traced_backends


def call_operator(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor | None,
    cu_seqlens_k: Tensor | None,
    values: tuple,
    return_lse: bool,
) -> Tensor | tuple[Tensor, Tensor]:
    """Call the operator from code that is being compiled. Such code calls it at once: the compiled
    function checks in each call whatever Python read while it was traced.

    values: of OF_MODELS.
    """
    if has_autocast():
        q, k, v = under_autocast(Tensors(q, k, v))[:3]
    operator = torch.ops.flashattn3.forward_bhsd.default
    out, lse = operator(q, k, v, cu_seqlens_q, cu_seqlens_k, *values)
    return (out, lse) if return_lse else out


def _in_rows(q: Tensor, k: Tensor, v: Tensor, edges_q: Tensor | None, edges_k: Tensor | None):
    """The tensors of a call with tokens before heads, varlen if there are cu_seqlens."""
    if edges_q is None:
        return Tensors(q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2))
    return Tensors(*(x.transpose(1, 2).flatten(0, 1) for x in (q, k, v)), edges_q, edges_k)


def _of_batch(rows: Tensor, like: Tensor) -> Tensor:
    """(batch, seqlen, heads, ·) of rows. like: (batch, heads, seqlen, ·)."""
    batch, heads, seqlen, _ = like.shape
    return rows.view(batch, seqlen, heads, rows.shape[2])


def _lse_of_batch(lse: Tensor, q: Tensor) -> Tensor:
    """(batch, heads, seqlen) of (heads, rows)."""
    batch, heads, seqlen, _ = q.shape
    return lse.view(heads, batch, seqlen).transpose(0, 1)


class _InForce(NamedTuple):
    """The options in force for all calls."""

    backend: str
    deterministic: bool
    split_tokens: int | None


def _in_force() -> _InForce:
    return _InForce(named_backend.get() or ANY, are_deterministic(), span_of_all_calls.get())


def _options(in_force: _InForce, longest_q, longest_k, *values) -> Options:
    """The options of a running operator. values: of OF_MODELS."""
    given = dict(zip(OF_MODELS, values, strict=True)) | in_force._asdict()
    return Options(longest_q, longest_k, **given, function=FUNCTION)


_known_options = lru_cache(maxsize=4096)(_options)  # symbolic sizes have no hash


def _call_of(arguments: tuple, options: Callable, in_force: _InForce) -> tuple[Tensors, Options]:
    """The call of an operator's arguments, in rows."""
    q, k, v, edges_q, edges_k, *values = arguments
    lengths = (None, None) if edges_q is None else (q.shape[2], k.shape[2])
    return _in_rows(q, k, v, edges_q, edges_k), options(in_force, *lengths, *values)


def _forward(forward_of: Callable, options: Callable, *arguments) -> tuple[Tensor, Tensor]:
    """forward_of: computes the call in rows."""
    out, lse = forward_of(*_call_of(arguments, options, _in_force()))
    q, varlen = arguments[0], arguments[3] is not None
    return (_of_batch(out, q), _lse_of_batch(lse, q)) if varlen else (out, lse)


def _backward(
    backward_of: Callable,
    options: Callable,
    in_force: _InForce,
    dout: Tensor,
    dlse: Tensor | None,
    out: Tensor,
    lse: Tensor,
    *arguments,
) -> tuple[Tensor, Tensor, Tensor]:
    """backward_of: computes the gradient of the call in rows. in_force: in its forward."""
    sides, varlen = arguments[:3], arguments[3] is not None
    if varlen:
        dout, out = dout.flatten(0, 1), out.flatten(0, 1)
        dlse, lse = (None if x is None else x.transpose(0, 1).flatten(1) for x in (dlse, lse))
    gradients = backward_of(dout, dlse, out, lse, *_call_of(arguments, options, in_force))
    if varlen:
        gradients = map(_of_batch, gradients, sides)
    dq, dk, dv = (x.transpose(1, 2) for x in gradients)
    return dq, dk, dv


@once_for_plain_values
def _launch_cache(backend: str, deterministic: bool, span: int | None, *values) -> LaunchCache:
    """That of calls with these options, also eager ones. values: of OF_MODELS."""
    in_force = _InForce(backend, deterministic, span)
    return launch_cache(_options(in_force, None, None, *values), True)


def _run_forward(*arguments):
    cache = _launch_cache(*_in_force(), *arguments[NUM_TENSORS:])
    if cache.operators is not None:
        results = cache.operators.forward(cache.number, True, *arguments[:NUM_TENSORS])
        if results[0] is not None:
            return results

    def forward_and_plan(tensors: Tensors, options: Options) -> tuple[Tensor, Tensor]:
        """Compute the call, and let the backend's operators find its launch for further ones."""
        launch = launch_of(tensors, options)
        results = launch.forward(tensors)
        if launch.keep is not None and not is_checked(tensors.q.device):
            cache.keep(launch.keep, True, *arguments[:NUM_TENSORS])
        return results

    return _forward(forward_and_plan, _known_options, *arguments)


def _run_backward(dout, dlse, out, lse, *arguments):
    """A compiled graph has no place for what was in force in the forward."""
    return _run_backward_of(_in_force(), dout, dlse, out, lse, *arguments)


def _run_backward_of(in_force: _InForce, dout, dlse, out, lse, *arguments):
    cache = _launch_cache(*in_force, *arguments[NUM_TENSORS:])
    if dlse is None and cache.operators is not None:
        given = dout, out, lse, *arguments[:NUM_TENSORS]
        results = cache.operators.backward(cache.number, *given)
        if results[0] is not None:
            return results
    return _backward(backward_of, _known_options, in_force, dout, dlse, out, lse, *arguments)


def _forward_fake(*arguments):
    return _forward(fake_forward_of, _options, *arguments)


def _backward_fake(*arguments):
    return _backward(fake_backward_of, _options, _in_force(), *arguments)


register_fake(["flashattn3::forward_bhsd"], _forward_fake)
register_fake(["flashattn3::backward_bhsd"], _backward_fake)
torch.library.impl("flashattn3::forward_bhsd", "CompositeExplicitAutograd", _run_forward)
torch.library.impl("flashattn3::backward_bhsd", "CompositeExplicitAutograd", _run_backward)


def _runs_at_once(dout: Tensor | None, q: Tensor, k: Tensor, v: Tensor) -> bool:
    """Whether nothing watches this gradient of an operator's call."""
    plain = type(dout) is Tensor and not is_batched(dout) and have_data(q, k, v)
    return plain and is_plain() and not torch.is_grad_enabled()


@dataclass(frozen=True)
class _Call:
    """See ``derivative.Call``. values: of OF_MODELS. in_force: in the forward."""

    values: tuple
    in_force: _InForce
    num_tensors, function, merges = NUM_TENSORS, FUNCTION, True

    def forward(self, *tensors) -> tuple[Tensor, Tensor]:
        return _forward_operator(*tensors, *self.values)

    def backward(self, *tensors) -> tuple[Tensor, Tensor, Tensor]:
        return _backward_operator(*tensors, *self.values)

    def gradient(self, dout, dlse, out, lse, *tensors) -> tuple[Tensor, Tensor, Tensor]:
        given = or_zeros(dout, out), dlse, out, lse, *tensors
        if _runs_at_once(dout, *tensors[:3]):
            return _run_backward_of(self.in_force, *given, *self.values)
        return self.backward(*given)


def _split(arguments: tuple, runs: bool) -> tuple[tuple, _Call]:
    return arguments[:NUM_TENSORS], _Call(arguments[NUM_TENSORS:], _in_force())


_forward_operator = torch.ops.flashattn3.forward_bhsd.default
_backward_operator = torch.ops.flashattn3.backward_bhsd.default
differentiable("flashattn3::forward_bhsd", _forward_operator, _run_forward, _split)
differentiable_gradient("flashattn3::backward_bhsd", _backward_operator, _run_backward, _split)
