"""Records of kernel configs, and the numbers that all kernels of a kind share.

Imports only the standard library, as kernel_configs.py does.
"""

from __future__ import annotations

from typing import NamedTuple

SIXTEEN_BIT = ("fp16", "bf16")
E4M3, INT8 = "e4m3", "int8"
EIGHT_BIT = (E4M3, INT8)
DTYPES = (*SIXTEEN_BIT, *EIGHT_BIT)
HEAD_DIMS = dict.fromkeys(SIXTEEN_BIT, (64, 96, 128, 192, 256))
HEAD_DIMS |= dict.fromkeys(EIGHT_BIT, (64, 128, 256))
MAX_HEAD_DIM = max(HEAD_DIMS["bf16"])
# Terms that a kernel adds to the scores: none, ALiBi's slopes or a bias. A forward kernel with the
# last one takes slopes and looks for the largest score. Kernels with a term have a mask, and calls
# without one take them too.
TERMS = NO_TERM, SLOPES, BIAS, LARGEST = "", "slopes", "bias", "largest"
# For every backward kernel: queries per step, and keys per MMA warpgroup.
BACKWARD_BLOCK_M, BACKWARD_WARPGROUP_KEYS = 64, 64
DECODE_TILE_ROWS = 64  # packed query rows of a tile, for every decode kernel


class ForwardConfig(NamedTuple):
    """Kernel config of a compiled forward kernel, as in csrc/forward/config.h.

    dtype: of q, k, v and out; with 8 bits v is e4m3 and out bf16 or fp16.
    head_dim, head_dim_v: largest supported of q and k, and of v; TMA fills smaller ones with zeros.
    masked: whether the kernel has a causal mask or window.
    block_m, block_n: query rows and keys of a tile.
    num_stages: K and V tiles in flight.
    num_mma_warpgroups: consumer warpgroups, 64 rows each; one producer warpgroup is added.
    num_q_buffers: Q tiles in flight, the current one among them.
    keys_per_descale: 8 bits: keys that must share a descale of K and one of V.
    promote_keys: 8 bits: keys between accumulator promotions (DeepSeek-V3, arXiv 2412.19437).
    cached: whether k and v are in a paged or dense cache; such a config is masked.
    term: of TERMS; with one the config is masked.
    listed: whether the mask is lists of blocks (flashattn3.masks); such a config is masked.
    spans: whether fixed spans of keys are joined in order (split_tokens), with the bits of the
        decode config with spans of its head dim; such a config is cached.
    tree: whether bits say which new tokens a query sees (tree_mask); such a config is cached.
    max_seqlen_k: for the planner: longest seqlen_k that selects this config; None: any.
    measured: "GPU, case, date" of the measurement that chose the tile; empty: not measured.
    """

    kind = "forward"

    dtype: str
    head_dim: int
    head_dim_v: int
    masked: bool
    block_m: int
    block_n: int
    num_stages: int
    num_mma_warpgroups: int
    num_q_buffers: int = 1
    keys_per_descale: int = 0
    promote_keys: int = 0
    cached: bool = False
    term: str = NO_TERM
    listed: bool = False
    spans: bool = False
    tree: bool = False
    max_seqlen_k: int | None = None
    measured: str = ""

    @property
    def name(self) -> str:
        mask = "cached" if self.cached else "masked" if self.masked else "full"
        mask = "listed" if self.listed else mask
        tile = f"{self.block_m}x{self.block_n}x{self.num_stages}"
        buffers = f"_q{self.num_q_buffers}" * (self.num_q_buffers > 1)
        kind = "_spans" * self.spans + "_tree" * self.tree
        return f"forward_{self.dtype}_{_dims(self)}_{mask}_{tile}{buffers}{_term(self)}{kind}"


class BackwardConfig(NamedTuple):
    """Kernel config of a compiled backward kernel, as in csrc/backward/config.h, for every mask
    without lists of blocks, or for those.

    dtype: of q, k, v, out and their gradients, 16 bits.
    head_dim, head_dim_v: largest supported of q and k, and of v; TMA fills smaller ones with zeros.
    num_stages: Q and dO tiles in flight; unused beyond 128 columns of V, where a cluster has two
        of Q.
    num_mma_warpgroups: consumer warpgroups of a CTA; one more warpgroup loads and writes dQ.
    term: of TERMS.
    listed: as for ForwardConfig.
    measured: as for ForwardConfig.
    """

    kind = "backward"

    dtype: str
    head_dim: int
    head_dim_v: int
    num_stages: int
    num_mma_warpgroups: int
    term: str = NO_TERM
    listed: bool = False
    measured: str = ""

    @property
    def name(self) -> str:
        mask = "_listed" * self.listed
        tile = f"{BACKWARD_BLOCK_M}x{self.block_n}x{self.num_stages}"
        return f"backward_{self.dtype}_{_dims(self)}{mask}_{tile}{_term(self)}"

    @property
    def block_n(self) -> int:
        """Keys of a tile; the two CTAs of a cluster share one tile."""
        return BACKWARD_WARPGROUP_KEYS * self.num_mma_warpgroups

    @property
    def uses_cluster2(self) -> bool:
        """Whether a 2-CTA cluster computes each n_block."""
        return self.head_dim_v > 128


class DecodeConfig(NamedTuple):
    """Kernel config of the decode kernels (cached calls), as in csrc/decode/config.h, for every
    mask, page size and length. The config also stands for a kernel of plain calls, and for the warp
    kernels of few packed rows and few sequences (csrc/decode/warp_kernel.cuh).

    dtype: of q, k, v and out, 16 bits.
    head_dim: largest supported; columns past smaller ones are zeros.
    block_n: keys of a tile.
    num_stages: K and V tiles in flight for each MMA warpgroup, a power of 2.
    num_stages_beside: of them in use where two CTAs share an SM.
    num_q_buffers: 2: the next part's Q is loaded during the current part.
    num_consumers: MMA warpgroups; two CTAs share an SM where there is one.
    spans: whether fixed spans of keys are joined in order (split_tokens). Such a config has one
        kernel, for calls of any number of rows.
    num_byte_tiles: of a cache of 8 bits: K and V tiles in flight before they are widened to fp16;
        0: the cache has q's dtype.
    tree: as for ForwardConfig; such a config has one kernel.
    prefix: whether all sequences have the same keys in front of their own (prefix_page_table); such
        a config has one kernel, and one that joins the results.
    measured: as for ForwardConfig.
    """

    kind = "decode"

    dtype: str
    head_dim: int
    block_n: int
    num_stages: int
    num_stages_beside: int
    num_q_buffers: int
    num_consumers: int
    spans: bool = False
    num_byte_tiles: int = 0
    tree: bool = False
    prefix: bool = False
    measured: str = ""

    @property
    def name(self) -> str:
        dtypes = f"{self.dtype}{'_bytes' * (self.num_byte_tiles > 0)}"
        tile = f"{self.block_n}x{self.num_stages}"
        kind = "_spans" * self.spans + "_tree" * self.tree + "_prefix" * self.prefix
        return f"decode_{dtypes}_d{self.head_dim}_{tile}{kind}"

    @property
    def warp_kernel_rows(self) -> int:
        """The most packed rows of a call that a warp kernel takes."""
        return 16 if self.head_dim <= 128 else 8

    @property
    def warp_block_n(self) -> int:
        """Keys of a KV block of a warp kernel."""
        return min(32, (4096 if self.num_byte_tiles else 2048) // self.head_dim)


def _dims(config: ForwardConfig | BackwardConfig) -> str:
    """Part of a config's name."""
    values = f"_v{config.head_dim_v}" * (config.head_dim_v != config.head_dim)
    return f"d{config.head_dim}{values}"


def _term(config: ForwardConfig | BackwardConfig) -> str:
    """Part of a config's name."""
    return f"_{config.term}" * (config.term != NO_TERM)


KernelConfig = ForwardConfig | BackwardConfig | DecodeConfig
