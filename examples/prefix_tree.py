"""Eight answers to one prompt in one row: the prompt is computed once, forward and backward.

Each token sees the prompt and its own answer up to itself, by one mask for all layers. The loss
weights the answers by their advantages, as policy gradients do. It and its gradients are compared
with those of eight rows that repeat the prompt.

python examples/prefix_tree.py
"""

import torch
from torch import nn

from flashattn3 import flash_attn_func, masks

PROMPT, ANSWER, ANSWERS = 192, 48, 8
VOCABULARY, WIDTH, HEADS, LAYERS = 64, 128, 2, 2


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.Embedding(VOCABULARY, WIDTH)
        self.positions = nn.Embedding(PROMPT + ANSWER, WIDTH)
        self.qkv = nn.ModuleList(nn.Linear(WIDTH, 3 * WIDTH) for _ in range(LAYERS))
        self.project = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS))
        self.logits = nn.Linear(WIDTH, VOCABULARY)

    def forward(self, tokens: torch.Tensor, position: torch.Tensor, **visible) -> torch.Tensor:
        """Log-probabilities of the next token. visible: options of flash_attn_func."""
        x = self.tokens(tokens) + self.positions(position)
        for qkv, project in zip(self.qkv, self.project, strict=True):
            q, k, v = qkv(x).unflatten(-1, (3, HEADS, -1)).unbind(2)
            x = x + project(flash_attn_func(q, k, v, **visible).flatten(-2))
        return self.logits(x).log_softmax(-1)


def loss_of_tree(model: Model, prompt, answers, advantages, mask: masks.Mask) -> torch.Tensor:
    """One row: the prompt, then all answers."""
    tokens = torch.cat([prompt, answers.flatten()])[None]
    depth = torch.arange(ANSWER, device=prompt.device).repeat(ANSWERS) + PROMPT
    position = torch.cat([torch.arange(PROMPT, device=prompt.device), depth])[None]
    found = model(tokens, position, mask=mask)[0]
    # The prompt's last token predicts the first token of every answer.
    first = found[PROMPT - 1].expand(ANSWERS, 1, -1)
    rest = found[PROMPT:].view(ANSWERS, ANSWER, -1)[:, :-1]
    return weighted(torch.cat([first, rest], 1), answers, advantages)


def loss_of_rows(model: Model, prompt, answers, advantages) -> torch.Tensor:
    """A row for each answer, with a prompt of its own."""
    tokens = torch.cat([prompt.expand(ANSWERS, -1), answers], 1)
    position = torch.arange(PROMPT + ANSWER, device=prompt.device)
    found = model(tokens, position, causal=True)[:, PROMPT - 1 : -1]
    return weighted(found, answers, advantages)


def weighted(found: torch.Tensor, answers, advantages) -> torch.Tensor:
    chosen = found.gather(-1, answers.unsqueeze(-1)).squeeze(-1)
    return -(advantages * chosen.sum(-1)).mean()


def main() -> None:
    torch.manual_seed(0)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    prompt = torch.randint(VOCABULARY, (PROMPT,), device=device)
    answers = torch.randint(VOCABULARY, (ANSWERS, ANSWER), device=device)
    advantages = torch.randn(ANSWERS, device=device)
    model = Model().to(device)

    total = PROMPT + ANSWERS * ANSWER
    parents = torch.arange(total, device=device) - 1
    parents[PROMPT::ANSWER] = PROMPT - 1  # every answer follows the prompt
    mask = masks.tree(parents)
    print(mask)

    parameters = list(model.parameters())
    with torch.autocast(device.type, torch.bfloat16, enabled=device.type == "cuda"):
        losses = (
            loss_of_tree(model, prompt, answers, advantages, mask),
            loss_of_rows(model, prompt, answers, advantages),
        )
    found, wanted = (torch.autograd.grad(loss, parameters) for loss in losses)
    difference = max(((x - y).norm() / y.norm()).item() for x, y in zip(found, wanted, strict=True))
    assert difference < (0.05 if device.type == "cuda" else 1e-4), difference
    rows = ANSWERS * (PROMPT + ANSWER)
    print(f"{total} tokens instead of {rows}: largest difference of a gradient {difference:.1e}")


if __name__ == "__main__":
    main()
