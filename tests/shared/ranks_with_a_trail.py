"""Ranks that train one model on parts of a batch, each with a trail; on one of them a bit flips."""

import torch
import torch.distributed as dist

import reference as te


def train(rank: int, port: int, ranks: int, folder: str, wrong: int, step: int) -> None:
    """Eight steps; after step `step` a bit of a weight of rank `wrong` flips."""
    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=ranks)
    try:
        torch.manual_seed(1)
        model = torch.nn.Sequential(te.Linear(32, 16, params_dtype=torch.bfloat16), torch.nn.Linear(16, 4).bfloat16())
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
        with te.trail(f"{folder}/run.trail", model, optimizer):
            for number in range(1, 9):
                generator = torch.Generator().manual_seed(100 * number + rank)
                optimizer.zero_grad()
                model(torch.randn(8, 32, generator=generator).bfloat16()).float().square().mean().backward()
                for p in model.parameters():
                    dist.all_reduce(p.grad)
                if number == step and rank == wrong:
                    model[0].weight.data.view(torch.uint8)[3, 9] ^= 2
                optimizer.step()
    finally:
        dist.destroy_process_group()
