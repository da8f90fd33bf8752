"""Step 2: the softmax of numbers that arrive one after another, and then block by block.

python examples/learn/step2_online_softmax.py

Online softmax: Milakov & Gimelshein 2018 (arXiv 1805.02867).
"""

import numpy as np


def log_sum_exp_online(scores) -> float:
    """log of the sum of exp(score), one score at a time, with no exponent above 0."""
    row_max, row_sum = -np.inf, 0.0
    for score in scores:
        if score == -np.inf:
            continue  # a masked score adds nothing; -inf - -inf would be NaN
        new_max = max(row_max, score)
        row_sum = row_sum * np.exp(row_max - new_max) + np.exp(score - new_max)
        row_max = new_max
    return row_max + np.log(row_sum) if row_sum else -np.inf


def attend_blocks(q, k, v, scale, block, order=None, mask=None):
    """O (sq, dv) and the log-sum-exp (sq,), from blocks of keys in any order.

    mask: (sq, sk), True where a query sees a key. Nothing of size (sq, sk) is computed.
    """
    rows, head_dim_v = q.shape[0], v.shape[1]
    row_max, row_sum = np.full(rows, -np.inf, q.dtype), np.zeros(rows, q.dtype)
    out = np.zeros((rows, head_dim_v), q.dtype)
    first_keys = range(0, len(k), block)
    for first in first_keys if order is None else [first_keys[i] for i in order]:
        keys = slice(first, min(first + block, len(k)))  # the last block may be shorter
        scores = scale * (q @ k[keys].T)
        if mask is not None:
            scores[~mask[:, keys]] = -np.inf
        new_max = np.maximum(row_max, scores.max(axis=1))
        # A row that has seen no key yet has maximum -inf: exponents relative to 0 give weights 0.
        reference = np.where(new_max == -np.inf, 0, new_max)
        weights = np.exp(scores - reference[:, None])
        decay = np.exp(row_max - reference)  # what was summed is relative to the old maximum
        row_sum = row_sum * decay + weights.sum(axis=1)
        out = out * decay[:, None] + weights @ v[keys]
        row_max = new_max
    seen = row_sum > 0
    out[seen] /= row_sum[seen, None]  # one division a row, at the end
    lse = np.full(rows, -np.inf, q.dtype)
    lse[seen] = row_max[seen] + np.log(row_sum[seen])
    return out, lse


def combine(out_a, lse_a, out_b, lse_b):
    """Attention over two sets of keys from the attention over each: O and lse are enough."""
    lse = np.logaddexp(lse_a, lse_b)
    return np.exp(lse_a - lse)[:, None] * out_a + np.exp(lse_b - lse)[:, None] * out_b, lse


def reference(q, k, v, scale, mask=None):
    """O and lse in float64, from the whole score matrix."""
    q, k, v = (x.astype(np.float64) for x in (q, k, v))
    scores = scale * (q @ k.T)
    if mask is not None:
        scores[~mask] = -np.inf
    lse = np.logaddexp.reduce(scores, axis=1)
    probabilities = np.exp(scores - np.where(lse == -np.inf, 0, lse)[:, None])
    return probabilities @ v, lse


def largest(found, expected) -> float:
    """The largest difference; equal infinities differ by 0."""
    same = found == expected
    return float(np.abs(np.where(same, 0, found) - np.where(same, 0, expected)).max())


def main() -> None:
    rng = np.random.default_rng(0)
    scores = rng.standard_normal(1000).astype(np.float32) * 100
    with np.errstate(over="ignore"):
        print(f"log(sum(exp(scores))) as written:  {np.log(np.exp(scores).sum())}")
    exact = np.logaddexp.reduce(scores.astype(np.float64))
    print(f"online, one score after another:   {log_sum_exp_online(scores):.6f}")
    print(f"in float64:                        {exact:.6f}")
    assert abs(log_sum_exp_online(scores) - exact) < 1e-4
    assert log_sum_exp_online([-np.inf, -np.inf]) == -np.inf

    q, k, v = (rng.standard_normal((n, 32), dtype=np.float32) for n in (70, 150, 150))
    scale = 32**-0.5
    exact, exact_lse = reference(q, k, v, scale)
    print("\nattention over 150 keys, largest error of out against float64")
    for block in (1, 16, 64, 150):
        out, lse = attend_blocks(q, k, v, scale, block)
        print(f"  blocks of {block:3}:         {largest(out, exact):.1e}")
        assert max(largest(out, exact), largest(lse, exact_lse)) < 1e-5
    shuffled, _ = attend_blocks(q, k, v, scale, 16, order=rng.permutation(10))
    print(f"  blocks of  16, shuffled: {largest(shuffled, exact):.1e}")
    assert largest(shuffled, exact) < 1e-5

    halves = [attend_blocks(q, k[i : i + 75], v[i : i + 75], scale, 16) for i in (0, 75)]
    out, lse = combine(*halves[0], *halves[1])
    print(f"  two halves, combined:    {largest(out, exact):.1e}")
    assert max(largest(out, exact), largest(lse, exact_lse)) < 1e-5

    # Row i sees the keys up to i - 20: the first 20 rows see none.
    mask = np.arange(150)[None, :] <= np.arange(70)[:, None] - 20
    out, lse = attend_blocks(q, k, v, scale, 16, mask=mask)
    exact, exact_lse = reference(q, k, v, scale, mask)
    print(f"  masked, 20 empty rows:   {largest(out, exact):.1e}")
    assert max(largest(out, exact), largest(lse, exact_lse)) < 1e-5
    assert (out[:20] == 0).all() and (lse[:20] == -np.inf).all()


if __name__ == "__main__":
    main()
