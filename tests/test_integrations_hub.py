"""The layout of Hugging Face's kernels package: what is written, and that it runs."""

from __future__ import annotations

import importlib.util
import json
import platform
import re
from importlib.metadata import PackageNotFoundError, version

import pytest
from helpers import run_python

from build_support import hub
from build_support.hub import LEFT_OUT, OPS_LIBRARY, PACKAGE, write
from flashattn3.backends.hopper.library import find_library

LIBRARY = find_library()
if (PACKAGE / OPS_LIBRARY).is_file() and LIBRARY.error is not None:
    pytest.skip(LIBRARY.error, allow_module_level=True)  # `write` refuses it too
NEEDS_LIBRARY = pytest.mark.skipif(LIBRARY.error is not None, reason=str(LIBRARY.error))

COPY = """
import importlib.util, json, sys
from pathlib import Path
import torch
def load(folder):
    name = json.loads((Path(folder) / "metadata.json").read_text())["id"]
    spec = importlib.util.spec_from_file_location(name, Path(folder) / "__init__.py")
    sys.modules[name] = module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
"""


def test_what_is_written(tmp_path):
    folders = write(tmp_path)
    assert [folder.name for folder in folders[:2]] == ["torch-cpu", "torch-cuda"]
    assert len(folders) == 2 + (PACKAGE / OPS_LIBRARY).is_file()
    write(tmp_path)  # a second time, over the first
    for folder in folders:
        assert (folder / OPS_LIBRARY).is_file() == folder.name.startswith("torch-stable-abi")
        metadata = json.loads((folder / "metadata.json").read_text())
        assert metadata["name"] == "flashattn3"
        assert metadata["backend"] == {"type": "cpu" if folder.name == "torch-cpu" else "cuda"}
        assert not any((folder / name).exists() for name in LEFT_OUT)
        for path in folder.rglob("*.py"):
            text = path.read_text()
            own_name = re.search(r"^\s*(from|import) flashattn3\b|\bflashattn3::", text, re.M)
            assert own_name is None, f"{path}: {own_name.group()}"


@pytest.mark.slow
def test_two_copies_beside_the_package(tmp_path):
    first, second = (write(tmp_path / name)[0] for name in ("first", "second"))
    code = f"""{COPY}
import flashattn3
first, second = load({str(first)!r}), load({str(second)!r})
q = torch.randn(2, 7, 2, 16, requires_grad=True)
found = []
for module in (flashattn3, first, second):
    run = torch.compile(module.flash_attn_func, fullgraph=True, backend="aot_eager")
    for function in (module.flash_attn_func, run):
        out = function(q, q, q, causal=True)
        found.append((out, torch.autograd.grad(out.square().sum(), q)[0]))
for pair in found[1:]:
    for x, y in zip(pair, found[0]):
        torch.testing.assert_close(x, y)
print(sorted(name for name in dir(torch.ops) if name.startswith("flashattn3")))
"""
    printed = run_python(code)
    assert printed.count("flashattn3_") == 2 and "'flashattn3'" in printed


@NEEDS_LIBRARY
def test_hopper_libraries_of_two_copies_beside_the_package(tmp_path):
    """Each loads its own, from wherever the copy lies."""
    for name in ("first", "second"):
        write(tmp_path / name)[2].rename(tmp_path / f"{name} moved")
    code = f"""{COPY}
import importlib
import flashattn3
copies = [load({str(tmp_path)!r} + f"/{{name}} moved") for name in ("first", "second")]
found = set()
for module in (flashattn3, *copies):
    library = importlib.import_module(module.__name__ + ".backends.hopper.library").find_library()
    assert library.error is None, library.error
    assert library.configs == frozenset({sorted(LIBRARY.configs)!r})
    loaded = library.namespace
    namespace = loaded.name
    assert loaded is getattr(torch.ops, namespace)
    for name in ("prepare_forward", "forward", "backward", "permute_v"):
        assert getattr(library, name) is getattr(loaded, name).default._op
    quantize = getattr(torch.ops, namespace).quantize.default
    assert len(quantize._schema.arguments) > 3
    found.add(namespace)
assert "flashattn3_hopper" in found
print(len(found), {{len(name) for name in found}})
"""
    assert run_python(code).strip() == "3 {17}"


@NEEDS_LIBRARY
def test_the_loader_takes_the_hopper_library_where_cuda_is_as_new(tmp_path):
    pytest.importorskip("kernels")
    from kernels.backends import CUDA
    from kernels.variants import Version, _resolve_variant_for_system, get_variants_local

    compiled = write(tmp_path)[2].name
    major, minor = map(int, LIBRARY.cuda_version.split("."))

    def taken(cuda, torch="2.13", machine=None):
        variants, _ = _resolve_variant_for_system(
            variants=get_variants_local(tmp_path / "build"),
            selected_backend=CUDA(version=Version(cuda)),
            cpu=machine or platform.machine(),
            os="linux",
            torch_version=Version(torch),
            torch_cxx11_abi=True,
            tvm_ffi_version=None,
            macos_version=None,
        )
        return variants[0].variant_str

    assert taken(f"{major}.{minor}") == taken(f"{major}.{minor + 1}") == compiled
    assert taken(f"{major - 1}.9") == taken(f"{major + 1}.9") == "torch-cuda"
    assert taken(f"{major}.{minor}", torch="2.8") == "torch-cuda"
    assert taken(f"{major}.{minor}", machine="s390x") == "torch-cuda"


def test_a_library_of_other_sources_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(hub, "PACKAGE", tmp_path)
    (tmp_path / "_lib").mkdir()
    (tmp_path / OPS_LIBRARY).write_bytes(b"another library")
    monkeypatch.setattr(hub, "_cuda_version", lambda: "13.0")
    (tmp_path / "__init__.py").write_text('__version__ = "0.1.0"')
    with pytest.raises(ValueError, match="flashattn3_hopper must be there once, got 0"):
        write(tmp_path / "out")


LLAMA = """
import copy, torch
from transformers import AutoModelForCausalLM, GenerationConfig, LlamaConfig
from transformers.generation.configuration_utils import ContinuousBatchingConfig
config = LlamaConfig(
    vocab_size=97, hidden_size=32, intermediate_size=48, num_hidden_layers=2,
    num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=128, pad_token_id=0,
    bos_token_id=1, eos_token_id=None,
)
def made(attention):
    torch.manual_seed(0)
    made = AutoModelForCausalLM.from_config(copy.deepcopy(config), attn_implementation=attention)
    return made.eval()
model, eager = made("flashattn3/flashattn3"), made("eager")
ids = torch.randint(2, 97, (2, 21))
mask = torch.ones_like(ids)
mask[0, :6] = 0
with torch.no_grad():
    found, wanted = (m(ids, attention_mask=mask).logits[mask.bool()] for m in (model, eager))
assert (found - wanted).abs().max() <= 1e-5 * wanted.abs().max()
options = GenerationConfig(max_new_tokens=8, do_sample=False, eos_token_id=-1, pad_token_id=0)
prompts = [x.tolist() for x in torch.randint(2, 97, (3, 9))]
results = model.generate_batch(
    inputs=prompts,
    generation_config=options,
    continuous_batching_config=ContinuousBatchingConfig(num_blocks=32, max_batch_tokens=64),
)
found = [result.generated_tokens for result in results.values()]
wanted = [
    eager.generate(torch.tensor([x]), max_new_tokens=8, do_sample=False)[0, 9:].tolist()
    for x in prompts
]
assert found == wanted, (found, wanted)
"""


def _missing() -> str | None:
    for name in ("kernels", "transformers", "psutil"):
        if importlib.util.find_spec(name) is None:
            return f"{name} is not installed"
    try:
        old = tuple(map(int, version("kernels").split(".")[:2])) < (0, 18)
        new = tuple(map(int, version("transformers").split(".")[:2]))
    except PackageNotFoundError as error:
        return str(error)
    if new < (5, 18):
        return f"transformers {new} loads kernels in another way"
    return "transformers 5.19 and newer need kernels 0.18.2" if old and new > (5, 18) else None


@pytest.mark.skipif(_missing() is not None, reason=str(_missing()))
def test_llama_and_continuous_batching(tmp_path):
    write(tmp_path)
    run_python(LLAMA, LOCAL_KERNELS=f"flashattn3/flashattn3={tmp_path}")
