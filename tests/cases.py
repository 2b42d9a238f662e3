"""Small models with every sort of layer that torch itself has, and data for them."""

import torch
from torch import nn
from torch.nn import functional

import epimer
from oracle import Case

CLASSES = 3


def cross_entropy(outputs, targets):
    losses = functional.cross_entropy(outputs, targets, reduction="none")
    return losses.flatten(1).sum(1) if losses.dim() > 1 else losses


def draw(*shape):
    return torch.randn(shape, dtype=torch.float64)


def labels(*shape):
    return torch.randint(CLASSES, shape)


class Residual(nn.Module):
    def __init__(self, channels):
        super().__init__()
        self.conv = nn.Conv2d(channels, channels, 3, padding=1, bias=False)
        self.norm = nn.BatchNorm2d(channels)
        self.norm.running_mean.normal_()
        self.norm.running_var.uniform_(0.5, 2)
        nn.init.normal_(self.norm.weight)
        self.relu = nn.ReLU(inplace=True)

    def forward(self, x):
        y = self.norm(self.conv(x))
        y += x
        return self.relu(y)


class Encoder(nn.Module):
    """nn.TransformerEncoder on padded tokens, mean over the real ones."""

    def __init__(self, *, batch_first, norm_first=False, shared=False):
        super().__init__()
        self.batch_first = batch_first
        self.tokens, self.positions = nn.Embedding(9, 4, padding_idx=0), nn.Embedding(8, 4)
        layer = nn.TransformerEncoderLayer(4, 2, 6, batch_first=batch_first, norm_first=norm_first)
        self.encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        if shared:
            self.encoder.layers[1] = self.encoder.layers[0]
        self.head = nn.Linear(4, CLASSES)

    def forward(self, ids):
        padding = ids == 0
        x = self.tokens(ids) + self.positions(torch.arange(ids.shape[1])[None])
        x = x if self.batch_first else x.transpose(0, 1)
        x = self.encoder(x, src_key_padding_mask=padding)
        x = x if self.batch_first else x.transpose(0, 1)
        return self.head((x * ~padding[..., None]).sum(1) / (~padding).sum(1, keepdim=True))


class Cross(nn.Module):
    """Queries of one length that attend to keys and values of another."""

    def __init__(self, *, bias=True, **widths):
        super().__init__()
        self.attention = nn.MultiheadAttention(4, 2, batch_first=True, bias=bias, **widths)
        self.head = nn.Linear(4, CLASSES)

    def forward(self, query, memory, values):
        return self.head(self.attention(query, memory, values)[0].mean(1))


class Shared(nn.Module):
    """One layer called three times, one weight in two layers, a table that is the head."""

    def __init__(self):
        super().__init__()
        self.table, self.again, self.norm = nn.Embedding(5, 4), nn.Linear(4, 4), nn.LayerNorm(4)
        self.one, self.other = nn.Linear(4, 4), nn.Linear(4, 4, bias=False)
        self.other.weight = self.one.weight
        self.head = nn.Linear(4, 5, bias=False)
        self.head.weight = self.table.weight

    def forward(self, ids):
        x = self.table(ids)
        for _ in range(3):
            x = self.norm(self.again(x)).tanh()
        return self.head(self.other(self.one(x).tanh()).mean(1))


class Flattened(nn.Module):
    """Tokens of all samples in one dimension: a sample's beside each other, or alternating."""

    def __init__(self, *, inner):
        super().__init__()
        self.inner = inner
        self.first, self.norm, self.second = nn.Linear(3, 4), nn.LayerNorm(4), nn.Linear(4, CLASSES)

    def forward(self, x):
        x = x.transpose(0, 1) if self.inner else x
        y = self.second(self.norm(self.first(x.reshape(-1, 3)).tanh())).unflatten(0, x.shape[:2])
        return y.mean(0 if self.inner else 1)


def _mlp():
    model = nn.Sequential(
        nn.Linear(4, 5), nn.LayerNorm(5), nn.Tanh(), nn.Dropout(0.5), nn.RMSNorm(5), nn.Linear(5, CLASSES, bias=False)
    )
    return Case(model, [(draw(n, 4), labels(n)) for n in (4, 3)], cross_entropy)


def _convnet():
    model = nn.Sequential(
        nn.Conv2d(2, 4, 3, stride=2, padding=(1, 2), dilation=(1, 2)),
        nn.ReLU(inplace=True),
        Residual(4),
        nn.Conv2d(4, 4, 3, padding=1, groups=2),
        nn.GroupNorm(2, 4),
        nn.ReLU(inplace=True),
        nn.Conv2d(4, 3, (2, 3), padding="same", bias=False),
        nn.Conv2d(3, 2, 2, stride=2),
        nn.Flatten(),
        nn.Linear(8, CLASSES),
    )
    return Case(model, [(draw(n, 2, 8, 9), labels(n)) for n in (3, 2)], cross_entropy, no_factors=["3.weight"])


def _padding_modes():
    modes = ("reflect", "replicate", "circular")
    layers = [nn.Conv2d(2, 2, 3, padding=(1, 2), padding_mode=mode, stride=(1, 2)) for mode in modes]
    model = nn.Sequential(*layers, nn.Flatten(), nn.LazyLinear(CLASSES))
    batch = draw(4, 2, 5, 11), labels(4)
    model(batch[0].float())
    return Case(model, [batch], cross_entropy)


def _conv1d():
    model = nn.Sequential(
        nn.Conv1d(2, 3, 3, padding="same", dilation=2, padding_mode="circular"),
        nn.BatchNorm1d(3),
        nn.Conv1d(3, 4, 2, stride=2),
        nn.Tanh(),
        nn.Flatten(),
        nn.Linear(16, CLASSES),
    )
    model[1].running_mean.normal_()
    return Case(model, [(draw(n, 2, 9), labels(n)) for n in (3, 4)], cross_entropy)


TABLES = ("tokens.weight", "positions.weight")


def _padded_ids():
    batches = []
    for n, longest in ((4, 5), (3, 6)):
        ids = torch.randint(1, 9, (n, longest))
        for i in range(1, n):
            ids[i, longest - i :] = 0
        batches.append((ids, labels(n)))
    return batches


def _encoder(**options):
    return Case(Encoder(**options), _padded_ids(), cross_entropy, real=lambda ids: ids != 0, no_factors=TABLES)


def _cross(**widths):
    sizes = widths.get("kdim", 4), widths.get("vdim", 4)
    batches = [((draw(n, 2, 4), draw(n, 3, sizes[0]), draw(n, 3, sizes[1])), labels(n)) for n in (4, 2)]
    return Case(Cross(**widths), batches, cross_entropy)


def _shared():
    batches = [(torch.randint(5, (n, 3)), torch.randint(5, (n,))) for n in (4, 2)]
    return Case(Shared(), batches, cross_entropy, no_factors=["table.weight"])


def _flattened(inner):
    return Case(Flattened(inner=inner), [(draw(n, 4, 3), labels(n)) for n in (4, 3)], cross_entropy)


CASES = {
    "mlp": _mlp,
    "convnet": _convnet,
    "padding modes": _padding_modes,
    "conv1d": _conv1d,
    "encoder": lambda: _encoder(batch_first=True),
    "encoder, sequence first": lambda: _encoder(batch_first=False, norm_first=True),
    "encoder, one layer twice": lambda: _encoder(batch_first=True, shared=True),
    "cross attention": lambda: _cross(),
    "cross attention, own widths": lambda: _cross(kdim=3, vdim=5, bias=False),
    "shared": _shared,
    "flattened": lambda: _flattened(False),
    "flattened, alternating": lambda: _flattened(True),
}


def build(name):
    """Return a case in float64."""
    torch.manual_seed(0)
    made = CASES[name]()
    made.model.double()
    return made


def measure(case, kind, batches=None, **options):
    options = {"labels": "true", "samples": None} | options
    return epimer.estimate_curvature(case.model, batches or case.batches, case.loss, kind=kind, **options)


def matrices(case):
    """Return the weights that have a two-sided curvature."""
    return {
        name: p
        for name, p in case.model.named_parameters()
        if p.dim() > 1 and name not in (*case.no_factors, *case.left_out)
    }
