"""Which backend runs a call and why, and how to require a backend.

python examples/dispatch.py
"""

import torch

import flashattn3


def main() -> None:
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    q = torch.randn(1, 1024, 8, 128, device=device, dtype=torch.bfloat16)

    print("available here:", ", ".join(flashattn3.available_backends()))
    print(flashattn3.explain(q, q, q, causal=True))

    # A named backend runs the call or says why not; it never falls back to another.
    for name in ("triton", "reference"):
        try:
            out = flashattn3.flash_attn_func(q, q, q, causal=True, backend=name)
        except flashattn3.UnsupportedError as error:
            print(f"{name} refused: {error}")
        else:
            print(f"{name} ran: {tuple(out.shape)}")

    with flashattn3.use_backend("reference"):
        print("within use_backend:", flashattn3.explain(q, q, q).backend)


if __name__ == "__main__":
    main()
