"""A small Llama-like language model, trained on the bytes of this package's own sources with
attention in 16 and in 8 bits: loss and perplexity of both, and what 8 bits change in each layer.

python examples/fp8_model.py                  (a few steps, to see that it runs)
python examples/fp8_model.py --width 768 --layers 14 --seqlen 1024 --batch 4 --steps 2000 \
    --rate 5e-4 --seeds 0,1,2 --json losses.jsonl    (100 million parameters)
"""

import argparse
import json
import time
from collections.abc import Callable
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


def batches_of(data: Tensor, args: argparse.Namespace, number: int, seed: int) -> Tensor:
    """int64 (number, batch, seqlen + 1): windows that begin anywhere, on the model's device."""
    generator = torch.Generator().manual_seed(seed)
    first = torch.randint(len(data) - args.seqlen, (number, args.batch, 1), generator=generator)
    return data[first + torch.arange(args.seqlen + 1)].to(args.device, torch.long)


def trained(
    data: Tensor, args: argparse.Namespace, eight_bits: bool, seed: int
) -> tuple[Model, Tensor]:
    """The model and its loss in each step."""
    torch.manual_seed(seed)
    model = Model(args.width, args.layers, args.seqlen).to(args.device)
    model.attend_in(eight_bits)
    rate = torch.tensor(args.rate, device=args.device)  # a captured step reads it
    optimizer = torch.optim.AdamW(
        model.parameters(), rate, (0.9, 0.95), fused=True, capturable=args.device.type == "cuda"
    )
    schedule = torch.optim.lr_scheduler.OneCycleLR(
        optimizer, args.rate, args.steps, cycle_momentum=False
    )
    batches = batches_of(data, args, args.steps, seed)
    tokens, losses = torch.empty_like(batches[0]), torch.empty(args.steps, device=args.device)

    def step() -> Tensor:
        with torch.autocast(args.device.type, torch.bfloat16):
            loss = model(tokens)
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        return loss.detach()

    step = replayed(step, args.device)
    for number, batch in enumerate(batches):
        tokens.copy_(batch)
        losses[number] = step()
        schedule.step()
        if number % max(1, args.steps // 5) == 0:
            print(f"  step {number:5}  loss {losses[number].item():.4f}", flush=True)
    return model, losses


def replayed(step: Callable[[], Tensor], device: torch.device) -> Callable[[], Tensor]:
    """The same, on a GPU from its fourth call on as the replay of a CUDA graph, whose host time is
    that of one launch."""
    if device.type != "cuda":
        return step
    stream, graph, calls = torch.cuda.Stream(), torch.cuda.CUDAGraph(), 0
    loss = None

    def run() -> Tensor:
        nonlocal calls, loss
        calls += 1
        if calls <= 3:  # the first calls compile and allocate
            stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(stream):
                loss = step()
            torch.cuda.current_stream().wait_stream(stream)
            return loss
        if calls == 4:
            torch.cuda.synchronize()
            with torch.cuda.graph(graph, stream=stream):
                loss = step()
        graph.replay()
        return loss

    return run


@torch.no_grad()
def loss_of(model: Model, data: Tensor, args: argparse.Namespace) -> float:
    """The mean loss of batches that are not trained on, the same for every model."""
    with torch.autocast(args.device.type, torch.bfloat16):
        losses = [model(batch) for batch in batches_of(data, args, args.evaluations, -1)]
    return torch.stack(losses).mean().item()


@torch.no_grad()
def errors_of_layers(model: Model, data: Tensor, args: argparse.Namespace) -> list[float]:
    """The error of the activations behind each layer in 8 bits, relative to those in 16 bits."""
    tokens = batches_of(data, args, 1, -1)[0, :, :-1]
    found = []
    for eight_bits in (False, True):
        model.attend_in(eight_bits)
        with torch.autocast(args.device.type, torch.bfloat16):
            found.append([x.float() for x in model.hidden_states(tokens)[1:]])
    return [((b - a).norm() / a.norm()).item() for a, b in zip(*found, strict=True)]


def run(data: Tensor, args: argparse.Namespace, bits: int, seed: int) -> dict[str, object]:
    """Train a model and read it in 16 and in 8 bits."""
    kept = len(data) * 9 // 10
    start = time.perf_counter()
    model, losses = trained(data[:kept], args, bits == 8, seed)
    last = losses[-max(1, args.steps // 20) :].mean().item()  # waits for the device
    seconds = time.perf_counter() - start
    print(f"  loss of the last steps {last:.4f}; {seconds:.1f} s")
    of_bits = {}
    for other in (16, 8):
        model.attend_in(other == 8)
        of_bits[other] = loss_of(model, data[kept:], args)
        perplexity = torch.tensor(of_bits[other]).exp().item()
        print(f"  read in {other:2} bits: loss {of_bits[other]:.4f}, perplexity {perplexity:.3f}")
    errors = errors_of_layers(model, data[kept:], args)
    print("  error of the layers:", " ".join(f"{x:.4f}" for x in errors), flush=True)
    return {
        "seed": seed,
        "bits": bits,
        "parameters": sum(x.numel() for x in model.parameters()),
        "steps": args.steps,
        "tokens_per_step": args.batch * args.seqlen,
        "training_loss": last,
        "loss_in_16_bits": of_bits[16],
        "loss_in_8_bits": of_bits[8],
        "error_of_layers": errors,
        "seconds": seconds,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    sizes = {"width": 128, "layers": 2, "seqlen": 64, "batch": 2, "steps": 10, "evaluations": 2}
    for name, value in sizes.items():
        parser.add_argument(f"--{name}", type=int, default=value, help=f"default: {value}")
    parser.add_argument("--rate", type=float, default=1e-3, help="learning rate; default: 0.001")
    parser.add_argument("--seeds", default="0", help="as in 0,1,2; default: 0")
    parser.add_argument("--bits", default="16,8", help="trained in; default: 16,8")
    parser.add_argument("--json", type=Path, help="file of the results, a line for each model")
    args = parser.parse_args()
    args.device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    data, results = text(), []
    for seed in map(int, args.seeds.split(",")):
        for bits in map(int, args.bits.split(",")):
            print(f"seed {seed}, attention in {bits} bits", flush=True)
            results.append(run(data, args, bits, seed))
            if args.json:
                args.json.write_text("".join(json.dumps(x) + "\n" for x in results))
    for name in "training_loss", "loss_in_16_bits", "loss_in_8_bits":
        for bits in sorted({x["bits"] for x in results}):
            found = [x[name] for x in results if x["bits"] == bits]
            print(f"trained in {bits:2} bits: {name} {min(found):.4f} to {max(found):.4f}")


if __name__ == "__main__":
    main()
