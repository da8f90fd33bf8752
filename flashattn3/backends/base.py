"""The interface of a backend, for the planner and the operators."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple, Protocol

if TYPE_CHECKING:
    from collections.abc import Callable

    import torch
    from torch import Tensor

    from ..call.cached import AppendTensors, DecodeTensors, Lengths
    from ..call.operands import Tensors
    from ..call.problem import AttentionProblem, CallProblem
    from .device import DeviceInfo


class PassOperators(NamedTuple):
    """Functions that find the launch of a call and run it.

    number: of a ``LaunchCache``. The tensors are FOUND_ROWS of call/tensor_fields.py, and FOUND of
    the functions for calls with one that changes scores; None at the end may be missing. q, k and v
    have a batch also with cu_seqlens.

    namespace: of torch.ops, with the operators of the autograd node in C++; None: there is none.
    forward: of (number, returns_lse, *tensors): out, lse, which is None unless returns_lse, and
        max_logit where the call asks for it. None in place of out if no launch is kept for such a
        call.
    backward: of (number, dout, out, lse, *tensors): dq, dk and dv, or None as above.
    forward_scores, backward_scores: the same of calls with a tensor that changes scores. The
        gradient has with_dbias as last argument and dsinks and dbias as in ``Launch``.
    forget: drops the launches of a number, and the mask that is kept with them. A mask is no
        argument: its calls have numbers of their own.
    """

    namespace: torch._ops._OpNamespace | None
    forward: Callable[..., tuple[Tensor | None, ...]]
    forward_scores: Callable[..., tuple[Tensor | None, ...]]
    backward: Callable[..., tuple[Tensor | None, ...]]
    backward_scores: Callable[..., tuple[Tensor | None, ...]]
    forget: Callable[[int], None] | None = None


class ScaledOperators(NamedTuple):
    """A function that finds the launch of a dense call of 8 bits and runs it.

    forward: of (number, q, k, v, q_descale, k_descale, v_descale): out and, where the call returns
        it, lse; None in place of them if no launch is kept for such a call. number: of a
        ``LaunchCache``.
    """

    namespace = None  # there is no gradient

    forward: Callable[..., tuple[Tensor | None, ...]]


class CachedOperators(NamedTuple):
    """Functions that find the launch of a call, run it and return out, or None if no launch is kept
    for such a call. RuntimeError for tensors that do not fit each other.

    decode: of (number, q, k_cache, v_cache, cache_seqlens, page_table, seqlen, lse). number: of a
        ``LaunchCache``. seqlen: -1: the capacity. lse: where it is written; None: it is not.
    decode_with: the same and the fields of ``Further`` in run/launches.py; of a call with keys in
        front of those of all sequences also what ``after_prefix`` of ``CachedLaunch`` takes.
    append: the same, between them the fields of ``NewTokens`` and whether all queries of a sequence
        have one position; writes the new tokens, then attends. None: appends run on another
        backend.
    """

    namespace = None  # there is no gradient

    decode: Callable[..., Tensor | None]
    decode_with: Callable[..., Tensor | None]
    append: Callable[..., Tensor | None] | None


class Launch(Protocol):
    """A problem prepared for a device: what a call runs, and what ``explain`` shows."""

    def describe(self) -> dict[str, object]:
        """Named values for people: tile sizes, grid, shared memory."""

    def forward(self, tensors: Tensors) -> tuple[Tensor, ...]:
        """out in ``problem.out_dtype`` and q's shape, with v's head dim, and lse: new tensors; of
        a problem with return_max_logit max_logit too.

        lse: (batch, heads, seqlen_q) or (heads, total_q), float32, float64 for float64 inputs. It
            has the sink, also in a row that sees no key, but not in rows of no sequence: -inf.
        max_logit: (heads,), in lse's dtype: the largest score of all rows, after the cap, slopes
            and bias, that the mask leaves visible. No sink counts; -inf where no key is seen.
        """

    def backward(
        self,
        dout: Tensor,
        dlse: Tensor | None,
        out: Tensor,
        lse: Tensor,
        tensors: Tensors,
        *with_dbias: bool,
    ) -> tuple[Tensor | None, ...]:
        """dq, dk and dv, contiguous, of q's, k's and v's shape and dtype; dlse None is zero.

        Calls with sinks, slopes or a bias pass with_dbias, whether the bias needs a gradient, and
        get two results more: dsinks (heads,) and dbias, each in the shape and dtype of its tensor,
        contiguous; None without sinks, and unless with_dbias. dsinks[h] is the sum over rows of
        -exp(sink - lse) * (delta - dlse), delta = rowsum(dout * out); rows whose lse is infinite
        add nothing. P = exp(score - lse) has the sink through lse.
        """

    @property
    def keep(self) -> Callable[..., PassOperators | ScaledOperators] | None:
        """Keeps the launches of both passes for calls like one, and returns the operators that find
        them: of (number, bhsd, *tensors), as those of ``PassOperators`` and the six of a mask. Of 8
        bits of (number, *tensors), as those of ``ScaledOperators``. None where Python looks for the
        launch of every call."""


class CachedLaunch(Protocol):
    """The same of a problem of cached calls: it has the functions of its kind of problem.

    needs_lse: whether ``decode`` needs the memory of lse where the call does not return it.
    rows_after_prefix: packed rows of all sequences, of a KV head, up to which ``after_prefix`` runs
        a call with keys in front of those of all sequences; 0: such a call is two, joined.
    """

    needs_lse: bool
    rows_after_prefix: int

    def describe(self) -> dict[str, object]:
        """Named values for people, as those of ``Launch``."""

    def describe_sizes(
        self, batch: int, total_q: int, seqlen_q: int, capacity: int, *prefix_pages: int
    ) -> dict[str, object]:
        """The grid and the workspace of a call of the problem, at any lengths of its cache.
        prefix_pages: of a call that ``after_prefix`` runs."""

    def decode(
        self,
        out: Tensor | None,
        lse: Tensor | None,
        tensors: DecodeTensors,
        lengths: Lengths,
        options_hash: int,
    ) -> Tensor:
        """Write out, new if None, and lse. Returns out."""

    @property
    def keep(self) -> Callable[[int, int, int], CachedOperators] | None:
        """The same of (number, seqlen_q, options_hash), for calls of seqlen_q queries, in a varlen
        batch of the longest sequence, whose metadata must hold options_hash."""

    @property
    def after_prefix(self) -> Callable[[Tensor, Tensor | None, int], Callable]:
        """Gives ``decode`` of calls with keys in front of those of all sequences, in pages of the
        cache: of (page_table, seqlen, length), (1, pages), and int32 (1,), or None and the number
        of these keys."""

    def append(self, tensors: AppendTensors, lengths: Lengths) -> None:
        """Write the new tokens into the caches, and the rotated q into q_out."""

    def combine(self, out: Tensor, lse: Tensor, out_partial: Tensor, lse_partial: Tensor) -> None:
        """Write the joined results into out and lse."""


class Backend(Protocol):
    name: str

    def unavailable_reason(self, device: DeviceInfo) -> str | None:
        """Why this backend can run nothing on the device, or None."""

    def decline_reason(self, problem: CallProblem, device: DeviceInfo) -> str | None:
        """Why this backend does not take the problem on a device where it is available, or None."""

    def unused_hints(self, problem: CallProblem, device: DeviceInfo) -> dict[str, str]:
        """Names of the hints that this backend ignores, each with the reason."""

    def prepare(self, problem: CallProblem, device: DeviceInfo) -> Launch | CachedLaunch:
        """Choose the tiles. Touches no GPU: kernels are loaded when the launch first runs. Called
        once per plan, which is cached."""


def head_dim_reason(problem: CallProblem, largest: int) -> str | None:
    """Why kernels for head dims up to the largest do not take the problem, or None."""
    for name in ("head_dim", "head_dim_v"):
        if getattr(problem, name) > largest:
            return f"takes head dims up to {largest}, {name} is {getattr(problem, name)}"
    return None


def score_factor_reason(problem: AttentionProblem, exponent: int, dtype: torch.dtype) -> str | None:
    """Why scores computed in dtype would overflow or vanish by the factors of a call, or None.

    exponent: a factor must be 0 or between 2**-exponent and 2**exponent, as the cap itself is.
    """
    for name, value in problem.score_scale.factors.items():
        if value != 0 and not 2.0**-exponent <= abs(value) <= 2.0**exponent:
            limits = f"0 or between 2**-{exponent} and 2**{exponent}"
            return f"computes scores in {dtype}: {name} must be {limits}, got {value:g}"
    return None
