"""A small suite of real, trained networks: three tasks of one ancestor."""

import copy

import torch
from torch import nn
from torch.nn.functional import cross_entropy

from epimer.evaluation.suite import Split, Suite, SuiteTask

CLASSES = 3


class Network(nn.Module):
    def __init__(self):
        super().__init__()
        self.one, self.two, self.norm = nn.Linear(8, 24), nn.Linear(24, 16), nn.LayerNorm(16)
        self.head = nn.Linear(16, CLASSES)

    def forward(self, x):
        return self.head(self.norm(self.two(self.one(x).tanh())).tanh())


def network(state, task):
    made = Network()
    made.load_state_dict({**state, "head.weight": task.head["weight"], "head.bias": task.head["bias"]})
    return made.eval()


def data(t, count, generator):
    teacher = torch.randn(8, CLASSES, generator=torch.Generator().manual_seed(t))
    x = torch.randn(count, 8, generator=generator)
    return Split(x, (x @ teacher).argmax(1))


def make_suite(folder, seed=0):
    torch.manual_seed(seed)
    generator = torch.Generator().manual_seed(1 + seed)
    base, models, tasks = Network(), [], []
    for t in range(3):
        splits = {name: data(t, count, generator) for name, count in (("train", 400), ("val", 150), ("test", 200))}
        model = copy.deepcopy(base)
        torch.nn.init.normal_(model.head.weight)
        model.head.requires_grad_(False)
        optimizer = torch.optim.Adam([p for p in model.parameters() if p.requires_grad], 1e-2)
        for _ in range(60):
            optimizer.zero_grad()
            cross_entropy(model(splits["train"].x), splits["train"].y).backward()
            optimizer.step()
        head = {"weight": model.head.weight.detach(), "bias": model.head.bias.detach()}
        tasks.append(SuiteTask(f"task{t}", ["a", "b", "c"], splits, head))
        models.append({n: W for n, W in model.state_dict().items() if not n.startswith("head.")})
    state = {n: W for n, W in base.state_dict().items() if not n.startswith("head.")}
    return Suite("small", state, models, tasks, network, folder)
