"""Code written for FlashAttention-3, in processes of their own: they change sys.modules."""

from __future__ import annotations

import pytest
from helpers import run_python

INSTALL = """
from flashattn3.integrations.flash_attn_3 import install_as_flash_attn_3
install_as_flash_attn_3()
"""


def test_both_names_are_this_package():
    code = f"""{INSTALL}
install_as_flash_attn_3()
import importlib.util, torch, flashattn3
import flash_attn_interface
import flash_attn_3.flash_attn_interface as nested
from flash_attn_3.flash_attn_interface import flash_attn_func, flash_attn_varlen_func
assert flash_attn_interface.flash_attn_qkvpacked_func is flashattn3.flash_attn_qkvpacked_func
assert flash_attn_func is flashattn3.flash_attn_func is nested.flash_attn_func
assert importlib.util.find_spec("flash_attn_interface").origin == "flashattn3"
q = torch.randn(1, 5, 2, 8)
out, lse = flash_attn_func(q, q, q, causal=True, return_attn_probs=True)
assert out.shape == q.shape and lse.shape == (1, 2, 5)
cache = torch.randn(1, 9, 2, 8)
lengths = torch.tensor([7], dtype=torch.int32)
out = nested.flash_attn_with_kvcache(q[:, -1:], cache, cache, cache_seqlens=lengths, causal=True)
torch.testing.assert_close(out, flash_attn_func(q[:, -1:], cache[:, :7], cache[:, :7]))
assert nested.flash_attn_combine is flashattn3.flash_attn_combine
assert nested.get_scheduler_metadata is flashattn3.get_scheduler_metadata
from flash_attn_interface import _flash_attn_forward
assert _flash_attn_forward is nested._flash_attn_forward
from flashattn3.integrations.flash_attn_2 import install_as_flash_attn_2
install_as_flash_attn_2()
install_as_flash_attn_2()
import flash_attn.layers.rotary
try:
    import flash_attn.losses
except ModuleNotFoundError:
    print("done")
import importlib.metadata
for name in ("flash-attn-3", "flash_attn_3", "flash-attn", "flash_attn"):
    try:
        importlib.metadata.distribution(name)
        raise SystemExit(f"claims the distribution {{name}}")
    except importlib.metadata.PackageNotFoundError:
        pass
"""
    assert run_python(code).strip() == "done"


@pytest.mark.parametrize(
    ("name", "generation"), [("flash_attn_interface", 3), ("flash_attn_3", 3), ("flash_attn", 2)]
)
def test_refused_where_the_real_package_is(name, generation, tmp_path):
    (tmp_path / f"{name}.py").write_text("real = True\n")
    code = f"""
import sys
sys.path.insert(0, {str(tmp_path)!r})
from flashattn3 import UnsupportedError
from flashattn3.integrations.flash_attn_{generation} import install_as_flash_attn_{generation}
try:
    install_as_flash_attn_{generation}()
except UnsupportedError as error:
    print(error)
import {name}
assert {name}.real
"""
    told = run_python(code)
    assert f"{name} must not be installed, got {name} at {tmp_path}" in told


def test_refused_where_a_module_without_a_spec_has_the_name():
    code = """
import sys, types
sys.modules["flash_attn_interface"] = types.ModuleType("flash_attn_interface")
from flashattn3 import UnsupportedError
from flashattn3.integrations.flash_attn_3 import install_as_flash_attn_3
try:
    install_as_flash_attn_3()
except UnsupportedError as error:
    print(error)
"""
    assert "flash_attn_interface must not be installed, got flash_attn_inte" in run_python(code)
