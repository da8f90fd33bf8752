"""The numbers of one call for the compiled launches, as in csrc/launch/params.h."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple, get_type_hints

import torch

from ...call.dtypes import EIGHT_BIT
from ...call.fields import ScoreScale
from ...call.tensor_fields import DECODE_TENSORS, FOUND, FOUND_SCORES, TENSORS

if TYPE_CHECKING:
    from ...call.cached import DecodeProblem
    from ...call.problem import Problem
    from ..device import DeviceInfo


# The arguments of prepare_forward and prepare_backward after the index of the kernel config.
# FLASHATTN3_PROBLEM_FIELDS in csrc/launch/params.h has the same fields and says what they mean.
LaunchRecord = NamedTuple(
    "LaunchRecord",
    [
        ("batch", int),
        ("seqlen_q", int),
        ("seqlen_k", int),
        ("total_q", int),
        ("total_k", int),
        ("num_heads_q", int),
        ("num_heads_kv", int),
        ("head_dim", int),
        ("head_dim_v", int),
        ("varlen", bool),
        *get_type_hints(ScoreScale).items(),
        ("window_left", int),
        ("window_right", int),
        ("num_sms", int),
        ("sm_margin", int),
        ("q_block", int),
        ("k_block", int),
        ("v_block", int),
        ("out_is_fp16", bool),
        ("use_fast_accum", bool),
        ("deterministic", bool),
    ],
)

# The arguments of prepare_decode after the index of the kernel config: FLASHATTN3_CACHED_FIELDS in
# csrc/launch/decode_params.h.
DecodeRecord = NamedTuple(
    "DecodeRecord",
    [
        ("num_heads_q", int),
        ("num_heads_kv", int),
        ("head_dim", int),
        ("head_dim_v", int),
        ("page_size", int),
        ("byte_cache", bool),
        *get_type_hints(ScoreScale).items(),
        ("window_left", int),
        ("window_right", int),
        ("split_tokens", int),
        ("whole_tiles", bool),
        ("leaves_sms", bool),
        ("num_sms", int),
        ("short_config", int),
        ("short_queries", int),
    ],
)
# The arguments of decode after the prepared launch (csrc/torch_binding/decode_op.cpp).
DECODE_ARGUMENTS = (
    *("lse", "seqlen", "seqlen_new", "max_seqlen_q", "options_hash"),
    *(field.name for field in DECODE_TENSORS),
)
# Those of decode_after_prefix after out and before the launch.
PREFIX_ARGUMENTS = "prefix_page_table", "prefix_seqlen", "prefix_len"
# Those of keep_decode after the number of the options (csrc/torch_binding/decode_kept_op.cpp).
KEEP_ARGUMENTS = "launch", "device", "seqlen_q", "options_hash", "after_prefix", "prefix_rows"
# The arguments of forward_kept after the number of the options (csrc/torch_binding/kept_op.cpp).
FOUND_ARGUMENTS = ("returns_lse", *(field.name for field in FOUND), "max_logit")
# Those of the backward with scores after the prepared launch (csrc/torch_binding/backward_op.cpp).
BACKWARD_ARGUMENTS = (
    *("dout", "dlse", "out", "lse"),
    *(field.name for field in (*TENSORS, *FOUND_SCORES)),
    *("with_dbias", "mask_entries", "mask_work", "mask_tiles", "turns"),
)
LARGEST_WINDOW = 2**30  # no distance of two positions is larger


def decode_record_of(
    problem: DecodeProblem, device: DeviceInfo, short_config: int = -1, short_queries: int = 0
) -> DecodeRecord:
    own = {
        "byte_cache": problem.cache_dtype in EIGHT_BIT,
        "short_config": short_config,
        "short_queries": short_queries,
        **problem.score_scale._asdict(),
        "window_left": min(problem.window_left, LARGEST_WINDOW),
        "window_right": min(problem.window_right, LARGEST_WINDOW),
        "split_tokens": problem.split_tokens or 0,
        "whole_tiles": problem.num_splits == 1,
        "leaves_sms": problem.sm_margin > 0,
        "num_sms": max(1, device.num_sms - problem.sm_margin),
    }
    names = (name for name in DecodeRecord._fields if name not in own)
    return DecodeRecord(**own, **{name: getattr(problem, name) for name in names})


def record_of(problem: Problem, device: DeviceInfo) -> LaunchRecord:
    own = {
        **problem.score_scale._asdict(),
        "num_sms": device.num_sms,
        "sm_margin": min(problem.sm_margin, device.num_sms),
        "q_block": _block(problem.q.descales),
        "k_block": _block(problem.k.descales),
        "v_block": _block(problem.v.descales),
        "out_is_fp16": problem.out_dtype == torch.float16,
    }
    names = (name for name in LaunchRecord._fields if name not in own)
    return LaunchRecord(**own, **{name: getattr(problem, name) for name in names})


def _block(descales) -> int:
    return 0 if descales is None else descales.block
