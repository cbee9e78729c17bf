"""The model that the tests of `convert` convert."""

import torch

BF16 = torch.bfloat16


class ZeroCentered(torch.nn.Module):
    """As Gemma's: γ is the weight plus 1."""

    def __init__(self, hidden: int, eps: float = 1e-6) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(hidden))
        self.eps = eps

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        wide = x.float()
        wide = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + self.eps)
        return (wide * (1 + self.weight.float())).type_as(x)


class Block(torch.nn.Module):
    """A little of everything; `head` and `embedding` share their weight."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = torch.nn.Embedding(48, 32)
        self.norm = torch.nn.LayerNorm(32, eps=1e-12)
        self.layers = torch.nn.ModuleList(torch.nn.Linear(32, 32, bias=i == 0) for i in range(3))
        self.rms = ZeroCentered(32)
        self.small = torch.nn.Linear(32, 10)
        self.head = torch.nn.Linear(32, 48, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, ids: torch.Tensor, scale: float = 1.0) -> torch.Tensor:
        x = self.norm(self.embedding(ids))
        for layer in self.layers:
            x = x + layer(x)
        return self.head(self.rms(x) * scale)


def block(dtype: torch.dtype = BF16) -> Block:
    torch.manual_seed(0)
    model = Block().to(dtype)
    with torch.no_grad():
        model.rms.weight.add_(0.25)
    return model
