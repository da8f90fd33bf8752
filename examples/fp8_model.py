"""A small Llama-like language model, trained on the bytes of this package's own sources with
attention in 16 and in 8 bits: loss and perplexity of both, and what 8 bits change in each layer.

python examples/fp8_model.py                  (a few steps, to see that it runs)
python examples/fp8_model.py --width 512 --layers 8 --seqlen 1024 --batch 4 --steps 2000
"""

import argparse
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import flashattn3
from flashattn3 import flash_attn_func, rotate_and_quantize
from flashattn3.integrations.rotary import apply_rotary_emb

HEAD_DIM = 64


def text() -> Tensor:
    """The bytes of the package's sources, one file after the other."""
    files = sorted(Path(flashattn3.__file__).parent.rglob("*.py"))
    return torch.frombuffer(bytearray(b"".join(x.read_bytes() for x in files)), dtype=torch.uint8)


class Attention(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.heads, self.eight_bits = width // HEAD_DIM, False
        self.qkv = nn.Linear(width, 3 * width, bias=False)
        self.out = nn.Linear(width, width, bias=False)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        qkv = self.qkv(x).unflatten(-1, (3 * self.heads, HEAD_DIM))
        if self.eight_bits:  # from the projection to attention in one pass
            q, k, v = rotate_and_quantize(qkv, None, None, cos, sin, num_heads_q=self.heads)
            found = flash_attn_func(q, k, v, causal=True, out_dtype=qkv.dtype)
        else:
            q, k, v = qkv.split(self.heads, 2)
            q, k = (apply_rotary_emb(x, cos, sin) for x in (q, k))
            found = flash_attn_func(q, k, v, causal=True)
        return self.out(found.flatten(-2))


class Layer(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.attention, self.hidden = Attention(width), 8 * width // 3
        self.norms = nn.ModuleList(nn.RMSNorm(width) for _ in range(2))
        self.up = nn.Linear(width, 2 * self.hidden, bias=False)
        self.down = nn.Linear(self.hidden, width, bias=False)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        x = x + self.attention(self.norms[0](x), cos, sin)
        gate, up = self.up(self.norms[1](x)).chunk(2, -1)
        return x + self.down(F.silu(gate) * up)


class Model(nn.Module):
    def __init__(self, width: int, layers: int, seqlen: int) -> None:
        super().__init__()
        self.embed = nn.Embedding(256, width)
        self.layers = nn.ModuleList(Layer(width) for _ in range(layers))
        self.norm, self.head = nn.RMSNorm(width), nn.Linear(width, 256, bias=False)
        angles = torch.outer(torch.arange(seqlen), 10000 ** -(torch.arange(0, 1, 2 / HEAD_DIM)))
        self.register_buffer("cos", angles.cos())
        self.register_buffer("sin", angles.sin())

    def hidden_states(self, tokens: Tensor) -> list[Tensor]:
        states = [self.embed(tokens)]
        for layer in self.layers:
            states.append(layer(states[-1], self.cos, self.sin))
        return states

    def forward(self, tokens: Tensor) -> Tensor:
        """The loss of the next byte. tokens: (batch, seqlen + 1)."""
        x, wanted = self.norm(self.hidden_states(tokens[:, :-1])[-1]), tokens[:, 1:]
        return F.cross_entropy(self.head(x).float().flatten(0, 1), wanted.flatten())

    def attend_in(self, eight_bits: bool) -> None:
        for layer in self.layers:
            layer.attention.eight_bits = eight_bits


def batch_of(data: Tensor, args: argparse.Namespace, generator: torch.Generator) -> Tensor:
    first = torch.randint(len(data) - args.seqlen, (args.batch,), generator=generator)
    rows = torch.stack([data[i : i + args.seqlen + 1] for i in first.tolist()])
    return rows.to(args.device, torch.long)


def trained(data: Tensor, args: argparse.Namespace, eight_bits: bool, seed: int) -> Model:
    torch.manual_seed(seed)
    model = Model(args.width, args.layers, args.seqlen).to(args.device)
    model.attend_in(eight_bits)
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.rate, betas=(0.9, 0.95))
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, args.rate, args.steps)
    generator = torch.Generator().manual_seed(seed)
    for step in range(args.steps):
        with torch.autocast(args.device.type, torch.bfloat16):
            loss = model(batch_of(data, args, generator))
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        if step % max(1, args.steps // 5) == 0:
            print(f"  step {step:5}  loss {loss.item():.4f}", flush=True)
    return model


@torch.no_grad()
def loss_of(model: Model, data: Tensor, args: argparse.Namespace) -> float:
    """The mean loss of batches that are not trained on, the same for every model."""
    generator = torch.Generator().manual_seed(-1)
    with torch.autocast(args.device.type, torch.bfloat16):
        losses = [model(batch_of(data, args, generator)) for _ in range(args.evaluations)]
    return torch.stack(losses).mean().item()


@torch.no_grad()
def errors_of_layers(model: Model, data: Tensor, args: argparse.Namespace) -> list[float]:
    """The error of the activations behind each layer in 8 bits, relative to those in 16 bits."""
    tokens = batch_of(data, args, torch.Generator().manual_seed(-1))[:, :-1]
    found = []
    for eight_bits in (False, True):
        model.attend_in(eight_bits)
        with torch.autocast(args.device.type, torch.bfloat16):
            found.append([x.float() for x in model.hidden_states(tokens)[1:]])
    return [((b - a).norm() / a.norm()).item() for a, b in zip(*found, strict=True)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    sizes = {"width": 128, "layers": 2, "seqlen": 64, "batch": 2, "steps": 10, "evaluations": 2}
    for name, value in sizes.items():
        parser.add_argument(f"--{name}", type=int, default=value, help=f"default: {value}")
    parser.add_argument("--rate", type=float, default=1e-3, help="learning rate; default: 0.001")
    parser.add_argument("--seeds", default="0", help="as in 0,1,2; default: 0")
    parser.add_argument("--bits", default="16,8", help="trained in; default: 16,8")
    args = parser.parse_args()
    args.device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    data = text()
    kept = len(data) * 9 // 10
    for seed in map(int, args.seeds.split(",")):
        for bits in args.bits.split(","):
            print(f"seed {seed}, attention in {bits} bits", flush=True)
            model = trained(data[:kept], args, bits == "8", seed)
            for other in (16, 8):
                model.attend_in(other == 8)
                loss = loss_of(model, data[kept:], args)
                perplexity = torch.tensor(loss).exp().item()
                print(f"  read in {other:2} bits: loss {loss:.4f}, perplexity {perplexity:.3f}")
            errors = errors_of_layers(model, data[kept:], args)
            print("  error of the layers:", " ".join(f"{x:.4f}" for x in errors), flush=True)


if __name__ == "__main__":
    main()
