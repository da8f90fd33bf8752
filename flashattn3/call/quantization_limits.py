"""Numbers of block quantization, the same in every implementation, bit for bit.

The build writes them into a header of the Hopper kernels (build_support/units.py), so this module
imports nothing.
"""

LARGEST = {"e4m3": 448.0, "int8": 127.0}  # quantized value of a block's amax
# Lower bound of a descale: not subnormal, and its inverse is finite.
SMALLEST_DESCALE = 2.0**-126
BLOCKS = (64, 128, 256)  # tokens per descale; a descale may also cover a whole sequence
SAMPLE = 128  # tokens from which K's mean is estimated, spread evenly over the sequence
# Square of 3 standard errors. A smaller mean is noise; one outlier of the sample stays below too.
SIGNIFICANT = 9
