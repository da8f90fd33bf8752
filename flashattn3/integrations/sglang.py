"""SGLang's attention layers on flashattn3.

    from flashattn3.integrations import sglang as fa3

    fa3.register()  # before the server reads its arguments, in every process: in a plugin
    # then --attention-backend flashattn3

SGLang's own backend of FlashAttention-3 plans the batches; only the functions that it calls are
replaced, for this process. Written against SGLang 0.5.23.
"""

from __future__ import annotations

from functools import partial

from ..call.batch_invariance import DEFAULT_SPAN
from ..errors import UnsupportedError, complaint, shown
from .flash_attn_3 import flash_attn_varlen_func, flash_attn_with_kvcache
from .libraries import import_library

TESTED = "sglang", "0.5", "0.5", "sglang==0.5.*"
NAME = "flashattn3"


def register() -> None:
    """Add the attention backend ``flashattn3`` to SGLang, in this process. Calling again has no
    effect.

    Raises: UnsupportedError: SGLang is not installed.
    """
    import_library("register", *TESTED)
    from sglang.srt import server_args
    from sglang.srt.layers.attention import attention_registry

    if NAME not in server_args.ATTENTION_BACKEND_CHOICES:
        server_args.add_attention_backend_choices([NAME])
    attention_registry.register_attention_backend(NAME)(make_backend)


def make_backend(runner):
    """SGLang's FlashAttentionBackend for a model runner, on our functions. It computes no scheduler
    metadata, which ours never need. With enable_deterministic_inference every call has split_tokens
    in place of SGLang's num_splits=1, with which bits depend on the batch.

    Raises: UnsupportedError: the model has latent attention (MLA), which needs qv.
    """
    if runner.use_mla_backend:
        sentence = complaint("flashattn3 in SGLang", "use_mla_backend", False, shown(True))
        raise UnsupportedError(sentence)
    from sglang.srt.layers.attention import flashattention_backend as module

    functions = {x.__name__: x for x in (flash_attn_with_kvcache, flash_attn_varlen_func)}
    is_deterministic = runner.server_args.enable_deterministic_inference
    if is_deterministic:
        functions = {name: partial(x, split_tokens=DEFAULT_SPAN) for name, x in functions.items()}
    vars(module).update(functions)
    backend = module.FlashAttentionBackend(runner)
    vars(backend).update(functions, _get_scheduler_metadata=None)
    if is_deterministic:
        backend.num_splits = 0
    return backend
