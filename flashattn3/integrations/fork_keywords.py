"""Keywords that the forks of FlashAttention in vLLM and SGLang add to its functions."""

from __future__ import annotations

from torch import Tensor

from ..call.arguments import integer
from ..call.foreign import under_one_name
from ..errors import expect, shown, value_error

VERSIONS = 2, 3, 4
# Keywords of the forks for features that we lack: at these values they ask for nothing.
_NEUTRAL = {
    "q_v": None, "cp_world_size": 1, "cp_rank": 0, "cp_tot_seqused_k": None,
    "only_qv": False, "score_mod": None, "mask_mod": None, "aux_tensors": None, "sfq": None,
    "sfk": None, "sfv": None, "rel_bias": None, "rel_bias_prep_cache": None,
}  # fmt: skip


def without_fork_keywords(function: str, options: dict[str, object]) -> dict[str, object]:
    """The options of our own functions.

    fa_version and ver select a kernel in the forks, and no result; window_size None is open.
    ``s_aux`` and ``return_softmax_lse`` get our names.

    Raises: ValueError: a keyword asks for a feature that only the fork has.
    """
    found = dict(options)
    for name in ("fa_version", "ver"):
        version = found.pop(name, None)
        if version is not None:
            version = integer(function, name, version)
            expect(version in VERSIONS, function, name, f"one of {VERSIONS}", version)
    for name, neutral in _NEUTRAL.items():
        if name in found:
            value = found.pop(name)
            if value is not None and (isinstance(value, Tensor) or value != neutral):
                raise value_error(function, name, neutral, shown(value))
    for name in ("window_size", "attention_chunk"):
        if found.get(name, ()) is None:
            del found[name]
    with_lse = found.pop("return_softmax_lse", None)
    if with_lse is not None and (with_lse or "return_lse" not in found):
        found["return_lse"] = with_lse
    if "s_aux" in found:
        names = "s_aux", found.pop("s_aux"), "sinks", found.get("sinks")
        found["sinks"] = under_one_name(function, *names)
    return found
