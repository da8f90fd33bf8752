"""Golden plans: which backend and which row of the tile table a problem gets on which chip.

Those of the Hopper backend, which may be compiled here or not, are in test_hopper_backend.py.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from math import ceil

import pytest
import torch
from helpers import (
    A100,
    B200,
    CPU,
    GPUS,
    H100,
    L4,
    LOWERED_H100,
    ORIN,
    RTX3090,
    RTX5090,
    T4,
    WITHOUT_HOPPER,
    described,
    meta_qkv,
)

import flashattn3
from flashattn3 import UnsupportedError
from flashattn3.backends.device import SHARED_MEMORY_KIB, describe_device
from flashattn3.backends.registry import BACKENDS
from flashattn3.backends.triton.tile_configs import MAX_HEAD_DIM, TILE_CONFIGS, select_tile_config
from flashattn3.run.planner import choose


def problem(d=64, dv=None, dtype=torch.bfloat16, batch=2, seqlen_q=1024, seqlen_k=1024, **options):
    return described(meta_qkv(batch, seqlen_q, seqlen_k, (8, 8), d, dv, dtype), **options)


def plan(device, *args, **kwargs):
    return choose(problem(*args, **kwargs), device, WITHOUT_HOPPER)


def tiles(*args, **kwargs):
    return plan(*args, **kwargs).launch.config.tile_config


# Chip → its rows by head dim: (shared memory in KiB, whether it is for wgmma).
HOPPER = dict.fromkeys((32, 56, 64, 80, 96, 120, 128, 192, 256), (227, True))
SMALL = dict.fromkeys((32, 64, 96, 128, 160, 192, 256), (99, False))
LARGE = {head_dim: (163 if head_dim in (128, 160, 256) else 99, False) for head_dim in SMALL}
GOLDEN_ROWS = {
    H100: HOPPER,
    A100: LARGE,
    RTX3090: SMALL,
    ORIN: LARGE,
    L4: SMALL,
    B200: LARGE,
    RTX5090: SMALL,
    LOWERED_H100: LARGE,
    H100._replace(shared_memory_bytes=163 * 1024): LARGE,
    H100._replace(shared_memory_bytes=99 * 1024): SMALL,
}
# Head dim → its row, with mma.sync and with WGMMA.
ROW_OF_HEAD_DIM = {
    8: (32, 32),
    32: (32, 32),
    33: (64, 56),
    64: (64, 64),
    72: (96, 80),
    81: (96, 96),
    96: (96, 96),
    97: (128, 120),
    121: (128, 128),
    128: (128, 128),
    129: (160, 192),
    161: (192, 192),
    193: (256, 256),
    256: (256, 256),
}


@pytest.mark.parametrize("head_dim", ROW_OF_HEAD_DIM)
@pytest.mark.parametrize(
    "device", GOLDEN_ROWS, ids=lambda d: f"{d.name}-{d.lowering}-{d.shared_memory_bytes // 1024}K"
)
def test_every_gpu_gets_its_row(device, head_dim):
    found = plan(device, head_dim)
    assert found.backend.name == "triton"
    assert found.declined == ()
    tile_config, rows = found.launch.config.tile_config, GOLDEN_ROWS[device]
    assert tile_config.head_dim == ROW_OF_HEAD_DIM[head_dim][rows is HOPPER]
    assert (tile_config.shared_memory_kib, tile_config.wgmma) == rows[tile_config.head_dim]
    assert found.launch.config.tiles == tile_config.full
    assert plan(device, head_dim, causal=True).launch.config.tiles == tile_config.masked
    assert plan(device, head_dim, window_left=9).launch.config.tiles == tile_config.masked
    assert found.launch.config.grid == (ceil(1024 / tile_config.full.forward.block_m) * 8 * 2, 1, 1)


def test_the_wider_head_dim_decides():
    assert tiles(A100, 64, dv=128) == tiles(A100, 128)
    assert tiles(A100, 64, dv=192).head_dim == 192


@pytest.mark.parametrize("device", [A100, L4])
@pytest.mark.parametrize("d", [136, 192, 256])
def test_few_columns_of_v_have_a_row(d, device):
    """With whole columns, as in 8 bits, the wider head dim decides."""
    for dv, largest_v in ((64, 128), (128, 128), (136, None)):
        assert tiles(device, d, dv=dv).head_dim_v == largest_v
    whole = tiles(device, d, dv=128, dtype=torch.float8_e4m3fn)
    assert (whole.head_dim, whole.head_dim_v) == (256, None)


def test_rows_fit_the_chips_that_choose_them():
    for device in GPUS:
        for tile_config in {tiles(device, d) for d in range(8, MAX_HEAD_DIM + 1)}:
            assert tile_config.shared_memory_kib * 1024 <= device.shared_memory_bytes
            assert tile_config.shared_memory_kib <= SHARED_MEMORY_KIB[device.capability]


def test_every_row_is_chosen_by_some_chip():
    dims = [*((d, d) for d in ROW_OF_HEAD_DIM), (256, 128)]
    chips = {(gpu.lowering, gpu.shared_memory_bytes) for gpu in GPUS}
    chosen = {select_tile_config(*of, *chip) for chip in chips for of in dims}
    assert chosen == set(TILE_CONFIGS)


@pytest.mark.parametrize("device", [CPU, T4])
@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
def test_without_a_gpu_from_8_0_the_reference_runs(device, dtype):
    found = plan(device, dtype=dtype)
    assert found.backend.name == "reference"
    reasons = {
        "cpu": "needs an NVIDIA GPU, the tensors are on 'cpu'",
        "T4": "needs compute capability 8.0 or newer, T4 has 7.5",
    }
    assert found.declined == (("triton", reasons[device.name]),)


DECLINED = [
    ({"dtype": torch.float32}, "computes in float16 and bfloat16, not in torch.float32"),
    ({"dtype": torch.float64}, "computes in float16 and bfloat16, not in torch.float64"),
    ({"d": 264}, "takes head dims up to 256, head_dim is 264"),
    ({"d": 64, "dv": 512}, "takes head dims up to 256, head_dim_v is 512"),
]


@pytest.mark.parametrize(("change", "reason"), DECLINED)
@pytest.mark.parametrize("device", GPUS)
def test_what_triton_declines_goes_to_the_reference_unless_triton_is_named(device, change, reason):
    found = plan(device, **change)
    assert found.backend.name == "reference"
    assert found.declined == (("triton", reason),)
    with pytest.raises(UnsupportedError) as caught:
        plan(device, backend="triton", **change)
    sentence = "flash_attn_func: backend must be one that takes this problem, got 'triton'"
    assert str(caught.value).startswith(f"{sentence} (triton: {reason}")


def test_a_named_backend_is_taken_although_another_comes_first():
    found = plan(H100, backend="reference")
    assert found.backend.name == "reference"
    assert found.declined == (("triton", "backend='reference' was asked for"),)
    assert plan(H100, backend="triton").launch.config == plan(H100).launch.config


def test_little_shared_memory_is_a_reason():
    small = A100._replace(name="small", shared_memory_bytes=64 * 1024)
    assert plan(small).declined == (
        ("triton", "needs 99 KiB of shared memory for a block, small has 64"),
    )


@pytest.mark.parametrize("options", [{"softmax_scale": 1e200}, {"softmax_scale": -1e-40}])
def test_when_nobody_takes_a_problem_every_reason_is_shown(options):
    with pytest.raises(UnsupportedError) as caught:
        plan(H100, **options)
    sentence = str(caught.value)
    assert sentence.startswith("flash_attn_func: no backend takes this problem (")
    reasons = sentence.partition("(")[2]
    for backend in WITHOUT_HOPPER:
        assert f"{backend.name}: " in reasons
    assert reasons.count(next(iter(options))) == len(WITHOUT_HOPPER)


@dataclass(frozen=True)
class Stub:
    """A backend that declines as it is told."""

    name: str
    unavailable: str | None = None
    declines: str | None = None
    seen: list = field(default_factory=list, compare=False)

    def unavailable_reason(self, device):
        return self.unavailable

    def decline_reason(self, problem, device):
        self.seen.append(problem)
        return self.declines

    def prepare(self, problem, device):
        return f"{self.name} prepared"


def test_the_first_that_does_not_decline_is_taken():
    absent, picky = Stub("absent", unavailable="not here"), Stub("picky", declines="too odd")
    taker, last = Stub("taker"), Stub("last")
    found = choose(problem(), H100, (absent, picky, taker, last))
    assert found.backend is taker and found.launch == "taker prepared"
    assert found.declined == (("absent", "not here"), ("picky", "too odd"))
    assert absent.seen == [] and last.seen == []  # never asked


def test_splits_are_chosen_unless_their_number_is_given():
    lonely = {"batch": 1, "seqlen_q": 1, "seqlen_k": 65536}
    assert plan(H100, num_splits=1, **lonely).launch.config.num_splits == 1
    assert plan(H100, num_splits=5, **lonely).launch.config.num_splits == 5
    chosen = plan(H100, pack_gqa=False, **lonely).launch.config
    assert chosen.num_splits == 132 // 8  # 8 heads of one work tile each on 132 SMs
    assert chosen.grid == (8 * chosen.num_splits, 1, 1)
    assert plan(H100, batch=64, num_splits=-1).launch.config.num_splits == 1  # every SM has work
    assert plan(H100, num_splits=9, seqlen_k=1).launch.config.num_splits == 1  # one key tile


def test_plans_do_not_depend_on_whether_a_gpu_is_here():
    """``choose`` reads nothing but its arguments: the same plan for a GPU that cannot exist."""
    moon = A100._replace(name="moon", capability=199, lowering=199, num_sms=1)
    assert tiles(moon) == tiles(A100)


def test_the_same_call_is_planned_once(monkeypatch):
    from flashattn3.run import operators

    q = torch.randn(1, 5, 2, 16)
    flashattn3.flash_attn_func(q, q, q)
    calls = []
    monkeypatch.setattr(operators, "choose", lambda *arguments: calls.append(arguments))
    flashattn3.flash_attn_func(torch.randn_like(q), q, q)
    assert calls == []


def test_amd_gpus_run_the_reference(monkeypatch):
    """torch for ROCm names them cuda, and their capabilities mean something else."""
    monkeypatch.setattr(torch.version, "hip", "6.4")
    info = describe_device.__wrapped__(torch.device("cuda", 0))._replace(interpreted=False)
    assert info.kind == "ROCm"
    available = [backend.name for backend in BACKENDS if backend.unavailable_reason(info) is None]
    assert available == ["reference"]
