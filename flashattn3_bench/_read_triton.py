"""The Triton half of read_kernel.py, which is imported where there is a GPU."""

import triton
import triton.language as tl


@triton.jit(do_not_specialize=["programs"])
def read_kernel(buffer, found, num_words, programs, BLOCK: tl.constexpr):
    """found[program] = the sum of its blocks, so that no load can be left out."""
    program = tl.program_id(0)
    offsets = tl.arange(0, BLOCK)
    total = tl.zeros((BLOCK,), dtype=tl.int32)
    for block in range(program, tl.cdiv(num_words, BLOCK), programs):
        places = block.to(tl.int64) * BLOCK + offsets
        total += tl.load(buffer + places, mask=places < num_words, other=0)
    tl.store(found + program, tl.sum(total, 0))
