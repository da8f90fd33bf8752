"""vLLM and SGLang: the calls of their forks of FlashAttention, our backends in their registries.

Neither library is installed where these tests run; stand-ins have the names, the abstract methods
and the signatures that the integrations use, of vLLM 0.33 and SGLang 0.5.23. Where vLLM is
installed its own classes take their place.
"""

from __future__ import annotations

import importlib.util
import sys
from abc import ABCMeta, abstractmethod
from functools import partial
from types import ModuleType, SimpleNamespace

import pytest
import torch
from helpers import ints

from flashattn3 import UnsupportedError, flash_attn_func, get_scheduler_metadata
from flashattn3.integrations import flash_attn_2, flash_attn_3, sglang, vllm

PAGE, HEADS, HEADS_KV, DIM = 16, 4, 2, 32
LENGTHS, QUERIES = (20, 33), (1, 5)


@pytest.fixture
def batch():
    """Two sequences in pages, and what each row of them is to be."""
    generator = torch.Generator().manual_seed(0)
    table = ints(3, 1, 0, 5, 2, 4).view(2, 3)
    pages = torch.randn(2, 6, PAGE, HEADS_KV, DIM, generator=generator)
    q = torch.randn(sum(QUERIES), HEADS, DIM, generator=generator)
    wanted = []
    for row, length, some in zip(table, LENGTHS, q.split(QUERIES), strict=True):
        k, v = (x[row.long()].flatten(0, 1)[None, :length] for x in pages)
        wanted.append(flash_attn_func(some[None], k, v, causal=True)[0])
    return SimpleNamespace(
        q=q, k=pages[0], v=pages[1], table=table, lengths=ints(*LENGTHS), edges=ints(0, 1, 6),
        wanted=torch.cat(wanted),
    )  # fmt: skip


def test_varlen_as_vllm_calls_its_fork(batch):
    out = torch.empty_like(batch.q)
    metadata = get_scheduler_metadata(
        2, 5, 33, HEADS, HEADS_KV, DIM, batch.lengths, torch.float32, page_size=PAGE,
        cu_seqlens_q=batch.edges, causal=True,
    )  # fmt: skip
    found, lse = flash_attn_3.flash_attn_varlen_func(
        q=batch.q, k=batch.k, v=batch.v, out=out, cu_seqlens_q=batch.edges, max_seqlen_q=5,
        seqused_k=batch.lengths, max_seqlen_k=33, softmax_scale=DIM**-0.5, causal=True,
        alibi_slopes=None, window_size=None, block_table=batch.table, softcap=0.0,
        scheduler_metadata=metadata, fa_version=3, q_descale=None, k_descale=torch.ones(2, 2),
        v_descale=torch.ones(2, 2), num_splits=0, s_aux=None, dropout_p=0.0, q_v=None,
        return_softmax_lse=True, cp_world_size=1,
    )  # fmt: skip
    assert found is out and lse.shape == (HEADS, 6)
    torch.testing.assert_close(out, batch.wanted)
    sinks = torch.full((HEADS,), -torch.inf)
    dense = torch.empty_like(batch.q)
    found = flash_attn_3.flash_attn_varlen_func(
        q=batch.q, k=batch.q[:, ::2], v=batch.q[:, ::2], out=dense, cu_seqlens_q=batch.edges,
        cu_seqlens_k=batch.edges, max_seqlen_q=5, max_seqlen_k=5, causal=True, fa_version=2,
        s_aux=sinks, window_size=[-1, -1], return_softmax_lse=False,
    )  # fmt: skip
    assert found is dense and not dense.isnan().any()


def test_a_cached_call_as_sglang_makes_it(batch):
    call = partial(
        flash_attn_3.flash_attn_with_kvcache, q=batch.q, k_cache=batch.k, v_cache=batch.v,
        page_table=batch.table, cache_seqlens=batch.lengths, cu_seqlens_q=batch.edges,
        cu_seqlens_k_new=batch.edges, max_seqlen_q=5, softmax_scale=DIM**-0.5, causal=True,
        window_size=(-1, -1), softcap=0.0,
        k_descale=None, v_descale=None, num_splits=0, ver=3, sinks=None,
        max_seqlen_k=48, score_mod=None, attention_chunk=None,
    )  # fmt: skip
    out, lse, *rest = call(return_softmax_lse=True)
    torch.testing.assert_close(out, batch.wanted)
    assert lse.shape == (HEADS, 6) and len(rest) == 2
    torch.testing.assert_close(call(return_softmax_lse=False), batch.wanted)


REFUSED = [
    ({"fa_version": 7}, "fa_version must be one of (2, 3, 4), got 7"),
    ({"cp_world_size": 2}, "cp_world_size must be 1"),
    ({"q_v": torch.ones(1)}, "q_v must be None"),
    ({"cp_world_size": torch.ones(2)}, "cp_world_size must be 1"),
    ({"dropout_p": 0.5}, "flash_attn_varlen_func: dropout_p must be 0, got 0.5"),
    ({"mask": torch.ones(1)}, "flash_attn_varlen_func: mask must be None"),
    ({"page_table": ints(0)}, "block_table must be None with page_table: both name one argument"),
    ({"s_aux": torch.ones(4), "sinks": torch.ones(4)}, "s_aux must be None with sinks"),
]


@pytest.mark.parametrize(("changed", "text"), REFUSED, ids=lambda x: next(iter(x)))
def test_what_only_a_fork_has_is_refused_by_name(changed, text, batch):
    with pytest.raises(ValueError) as raised:
        flash_attn_3.flash_attn_varlen_func(
            q=batch.q, k=batch.k, v=batch.v, cu_seqlens_q=batch.edges, max_seqlen_q=5,
            seqused_k=batch.lengths, block_table=batch.table, **changed,
        )  # fmt: skip
    assert text in str(raised.value)


VARLEN, PASS = "flash_attn_varlen_func: ", "_flash_attn_forward: "
OTHERS_NAMES = [
    (flash_attn_3.flash_attn_varlen_func, {"block_table": ints(0)}, VARLEN + "block_table.shape"),
    (flash_attn_3.flash_attn_varlen_func, {"page_table": ints(0)}, VARLEN + "page_table.shape"),
    (flash_attn_3.flash_attn_varlen_func, {"seqused_k": ints(1)}, VARLEN + "seqused_k.shape[0]"),
    (flash_attn_2.flash_attn_varlen_func, {"k": torch.ones(1)}, VARLEN + "k.shape must be (num"),
    (
        flash_attn_2.flash_attn_varlen_func,
        {"cu_seqlens_k": ints(0, 9, 3)},
        VARLEN + "cu_seqlens_k.diff()[1] must be between 0 and the capacity, 48, got -6",
    ),
    (
        flash_attn_2.flash_attn_varlen_func,
        {"cu_seqlens_k": [0, 20, 53]},
        VARLEN + "cu_seqlens_k must be a torch.Tensor, got [0, 20, 53] (list)",
    ),
    (flash_attn_3._flash_attn_forward, {"seqused_k": ints(1)}, PASS + "seqused_k.shape[0]"),
    (
        flash_attn_3._flash_attn_forward,
        {"k_new": torch.ones(1, 1, 1, 1), "v_new": None},
        PASS + "v_new must be a tensor: k_new and v_new are",
    ),
    (flash_attn_3._flash_attn_forward, {"out": 1, "out_": 1}, PASS + "out_ must be None with out"),
    (
        flash_attn_2.flash_attn_with_kvcache,
        {"block_table": ints(0)},
        "flash_attn_with_kvcache: block_table.shape must be two-dimensional",
    ),
]


@pytest.mark.parametrize(
    ("function", "changed", "text"), OTHERS_NAMES, ids=[text[:60] for *_, text in OTHERS_NAMES]
)
def test_errors_name_the_function_that_was_called_and_its_arguments(function, changed, text, batch):
    given = {"q": batch.q, "k": batch.k, "v": batch.v, "cu_seqlens_q": batch.edges}
    given["max_seqlen_q"] = 5
    if function is flash_attn_2.flash_attn_with_kvcache:
        given = {"q": batch.q[:2, None], "k_cache": batch.k, "v_cache": batch.v}
    elif function is flash_attn_2.flash_attn_varlen_func:
        edges = {"cu_seqlens_k": ints(0, 20, 53), "max_seqlen_k": 33}
        given |= {"block_table": batch.table, **edges}
    elif "page_table" not in changed:
        table = "page_table" if function is flash_attn_3._flash_attn_forward else "block_table"
        given |= {"seqused_k": batch.lengths, table: batch.table}
    else:
        given["seqused_k"] = batch.lengths
    with pytest.raises((TypeError, ValueError)) as raised:
        function(**given | changed)
    assert str(raised.value).startswith(text)


def abstract(name: str, *methods: str, init=lambda *_: None) -> type:
    """A class whose methods must be overridden. init: its __init__, which a subclass may call."""
    bodies = {method: abstractmethod(lambda *_: None) for method in methods}
    return ABCMeta(name, (), {"__init__": abstractmethod(init), **bodies})


def init_of_builder(self, kv_cache_spec, layer_names, vllm_config, device):
    """Takes exactly these arguments, as vLLM's."""


CLASSES = {
    "AttentionBackend": abstract("Backend", "get_name", "get_impl_cls", "get_builder_cls"),
    "AttentionMetadataBuilder": abstract("Builder", "build", init=init_of_builder),
    "AttentionImpl": abstract("Impl", "forward"),
}


def put(monkeypatch, **modules: dict) -> None:
    """Stand-ins under the names of modules; two underscores stand for a dot."""
    for name, contents in modules.items():
        full = name.replace("__", ".")
        module = ModuleType(full)
        module.__dict__.update(contents)
        monkeypatch.setitem(sys.modules, full, module)
        parent, _, last = full.rpartition(".")
        if parent:
            monkeypatch.setattr(sys.modules[parent], last, module, raising=False)


@pytest.fixture
def vllm_registry(monkeypatch):
    if importlib.util.find_spec("vllm") is not None:
        from vllm.v1.attention.backends import registry

        yield registry
        registry.AttentionBackendEnum.CUSTOM.clear_override()
        return
    paths = {}
    custom = SimpleNamespace(
        get_class=lambda: getattr(sys.modules[paths["CUSTOM"].rpartition(".")[0]],
                                  paths["CUSTOM"].rpartition(".")[2])
    )  # fmt: skip
    registry = {
        "AttentionBackendEnum": SimpleNamespace(CUSTOM=custom),
        "register_backend": lambda backend, path: paths.update(CUSTOM=path),
    }
    put(
        monkeypatch,
        vllm={"__version__": "0.33.0", "envs": SimpleNamespace(VLLM_BATCH_INVARIANT=False)},
        vllm__v1={}, vllm__v1__attention={}, vllm__v1__attention__backend=CLASSES,
        vllm__v1__attention__backends={}, vllm__v1__attention__backends__registry=registry,
    )  # fmt: skip
    vllm.backend_class.cache_clear()
    yield sys.modules["vllm.v1.attention.backends.registry"]
    vllm.backend_class.cache_clear()


@pytest.mark.parametrize("writes", [True, False], ids=["new-keys", "shared-cache"])
def test_a_layer_of_vllm(writes, vllm_registry, batch):
    vllm.register()
    backend = vllm_registry.AttentionBackendEnum.CUSTOM.get_class()
    assert backend.get_name() == "CUSTOM" and backend.supports_head_size(256)
    assert not backend.supports_head_size(512)
    builder = backend.get_builder_cls()(None, ["layer"], None, torch.device("cpu"))
    sharing = {"kv_sharing_target_layer_name": None if writes else "other"}
    impl = backend.get_impl_cls()(HEADS, DIM, DIM**-0.5, HEADS_KV, **sharing)
    # vLLM's cache: heads before tokens, K beside V.
    kv = torch.cat((batch.k, batch.v), -1).transpose(1, 2).contiguous()
    new = [torch.zeros(6, HEADS_KV, DIM) for _ in range(2)]
    if writes:  # the new keys are not in the cache yet
        first = 0
        for row, length, queries in zip(batch.table, LENGTHS, QUERIES, strict=True):
            for token in range(queries):
                position = length - queries + token
                page, slot = row[position // PAGE], position % PAGE
                for x, cache, side in zip(new, (batch.k, batch.v), (0, DIM), strict=True):
                    x[first + token] = cache[page, slot]
                    kv[page, :, slot, side : side + DIM] = torch.nan
            first += queries
    common = SimpleNamespace(
        num_actual_tokens=6, max_query_len=5, query_start_loc=batch.edges, seq_lens=batch.lengths,
        block_table_tensor=batch.table, causal=True,
    )  # fmt: skip
    metadata = builder.build(0, common)
    padded = torch.cat((batch.q, torch.zeros(2, HEADS, DIM)))  # rows of no token
    output = torch.full_like(padded, 7.0)
    found = impl.forward(None, padded, *new, kv, metadata, output)
    assert found is output
    torch.testing.assert_close(output[:6], batch.wanted)
    assert (output[6:] == 7).all() and not kv[batch.table[0, :1].long()].isnan().any()
    assert (impl.forward(None, padded, *new, kv, None, output) == 0).all()
    for refused, text in (
        ({"alibi_slopes": [1.0] * HEADS}, "alibi_slopes must be None"),
        ({"kv_cache_dtype": "fp8"}, "kv_cache_dtype must be one of auto"),
        ({"attn_type": "encoder"}, "attn_type must be 'decoder'"),
    ):
        with pytest.raises(UnsupportedError, match=text):
            backend.get_impl_cls()(HEADS, DIM, 1.0, **refused)


def test_sglang_gets_our_functions(monkeypatch, batch):
    class FlashAttentionBackend:
        def __init__(self, runner):
            self.flash_attn_with_kvcache = self._get_scheduler_metadata = "SGLang's"
            self.num_splits = int(runner.server_args.enable_deterministic_inference)

    def runner(mla=False, deterministic=False):
        args = SimpleNamespace(enable_deterministic_inference=deterministic)
        return SimpleNamespace(use_mla_backend=mla, server_args=args)

    choices, backends = ["fa3"], {}
    args = {"ATTENTION_BACKEND_CHOICES": choices, "add_attention_backend_choices": choices.extend}
    add = {"register_attention_backend": lambda name: lambda fn: backends.update({name: fn})}
    root = "sglang__srt__layers__attention"
    put(
        monkeypatch, sglang={"__version__": "0.5.23"}, sglang__srt={},
        sglang__srt__server_args=args, sglang__srt__layers={}, **{
            root: {}, f"{root}__attention_registry": add,
            f"{root}__flashattention_backend": {"FlashAttentionBackend": FlashAttentionBackend},
        },
    )  # fmt: skip
    sglang.register()
    sglang.register()
    assert choices == ["fa3", "flashattn3"]
    backend = backends["flashattn3"](runner())
    module = sys.modules["sglang.srt.layers.attention.flashattention_backend"]
    for of in (backend, module):
        assert of.flash_attn_with_kvcache is flash_attn_3.flash_attn_with_kvcache
        assert of.flash_attn_varlen_func is flash_attn_3.flash_attn_varlen_func
    assert backend._get_scheduler_metadata is None
    with pytest.raises(UnsupportedError, match="use_mla_backend must be False"):
        backends["flashattn3"](runner(mla=True))
    backend = backends["flashattn3"](runner(deterministic=True))
    call = {"page_table": batch.table, "cu_seqlens_q": batch.edges, "max_seqlen_q": 5}
    call |= {"cache_seqlens": batch.lengths, "causal": True}
    caches = batch.q, batch.k, batch.v
    found = backend.flash_attn_with_kvcache(*caches, **call, num_splits=backend.num_splits)
    wanted = flash_attn_3.flash_attn_with_kvcache(*caches, **call, split_tokens=1024)
    assert torch.equal(found, wanted)
    assert module.flash_attn_varlen_func.keywords == {"split_tokens": 1024}


@pytest.mark.parametrize(("module", "name"), [(vllm, "vllm"), (sglang, "sglang")])
def test_a_missing_library_is_named(module, name):
    if importlib.util.find_spec(name) is not None:
        return
    with pytest.raises(UnsupportedError, match=f"register: {name} is not installed"):
        module.register()
