"""Eager calls of q, k and v of 8 bits that nothing watches: the operators of the backend find the
launch of a dense one."""

from __future__ import annotations

from functools import lru_cache

import torch
from torch import Tensor
from torch.autograd import profiler

from ..call.block_scaled import BlockScaled
from ..call.fields import Options
from ..call.operands import Scaled, Tensors
from ..modes import is_plain
from .launches import LaunchCache
from .operators import forward_of, launch_of, returned


def attend_8_bits_at_once(
    options: Options, q: BlockScaled, k: object, v: object
) -> Tensor | tuple[Tensor, Tensor] | None:
    """Compute what a dense call without scores returns, if the operators of the backend find its
    launch and nothing watches it: Python checks nothing of it. None: it is no such call."""
    if not (type(k) is type(v) is BlockScaled and is_plain()) or profiler._is_profiler_enabled:
        return None
    of_call = q.data, k.data, v.data, q.descale, k.descale, v.descale
    q_data, k_data, v_data, of_q, of_k, of_v = of_call
    if not type(q_data) is type(k_data) is type(v_data) is Tensor:
        return None
    if not type(of_q) is type(of_k) is type(of_v) is Tensor:
        return None
    if not q.cu_seqlens is k.cu_seqlens is v.cu_seqlens is q.mean is k.mean is v.mean is None:
        return None
    if torch.is_grad_enabled():
        if not q.gradient is k.gradient is v.gradient is None:
            return None
        for x in of_call:
            if x.requires_grad:
                return None
    cache = launch_cache_of_8_bits(options, q.form, k.form, v.form)
    if cache.operators is None:
        return None
    results = cache.run(cache.operators.forward, *of_call)
    return results and returned(results, options)


def forward_8_bits(tensors: Tensors, options: Options) -> tuple[Tensor, ...]:
    """out and lse, which may be None where the call returns none, of an eager call that nothing
    watches, without scores. The operators of the backend find the launch of a dense one."""
    q, k, v = tensors.q, tensors.k, tensors.v
    if tensors.cu_seqlens_q is not None or profiler._is_profiler_enabled:
        return forward_of(tensors, options)
    cache = launch_cache_of_8_bits(options, q[2:6], k[2:6], v[2:6])
    of_call = q.data, k.data, v.data, q.descale, k.descale, v.descale
    if cache.operators is not None:
        results = cache.run(cache.operators.forward, *of_call)
        if results is not None:
            return results
    launch = launch_of(tensors, options)
    results = launch.forward(tensors)
    if launch.keep is not None:
        cache.keep(launch.keep, options.return_lse, *of_call)
    return results


@lru_cache(maxsize=4096)
def launch_cache_of_8_bits(options: Options, *sides: tuple) -> LaunchCache:
    """That of calls with these options and with what ``Scaled`` of q, k and v have besides
    tensors."""
    return LaunchCache(options)


def is_plain_8_bits(*sides: Tensor | Scaled) -> bool:
    """Return whether q, k and v have 8 bits, need no gradient and nothing watches them."""
    for x in sides:
        if not (type(x) is Scaled and type(x.data) is type(x.descale) is Tensor):
            return False
        if x.data.requires_grad or x.descale.requires_grad or x.mean is not None or x.data.is_meta:
            return False
    return is_plain()
