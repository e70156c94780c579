"""Small models with layers that are awkward for second derivatives, and losses on fixed data."""

import torch
import torch.nn.functional as F
from torch import nn


class Attention(nn.Module):
    """Two heads by F.scaled_dot_product_attention, whose fused kernels have no second derivative."""

    def __init__(self, dropout=0.0):
        super().__init__()
        self.inside, self.outside, self.dropout = nn.Linear(4, 18), nn.Linear(6, 3), dropout

    def forward(self, x):
        q, k, v = self.inside(x).unflatten(-1, (3, 2, 3)).permute(2, 0, 3, 1, 4)
        seen = F.scaled_dot_product_attention(q, k, v, dropout_p=self.dropout if self.training else 0.0, is_causal=True)
        return self.outside(seen.transpose(1, 2).flatten(2)).mean(1)


class MultiHead(nn.Module):
    """nn.MultiheadAttention, which goes through the same kernels."""

    def __init__(self):
        super().__init__()
        self.attention, self.head = nn.MultiheadAttention(4, 2, batch_first=True), nn.Linear(4, 3)

    def forward(self, x):
        return self.head(self.attention(x, x, x, need_weights=False)[0].mean(1))


class Encoder(nn.Module):
    """A transformer block."""

    def __init__(self, dropout=0.0):
        super().__init__()
        self.block = nn.TransformerEncoderLayer(4, 2, 6, dropout=dropout, activation="gelu", batch_first=True)
        self.head = nn.Linear(4, 3)

    def forward(self, x):
        return self.head(self.block(x).mean(1))


class Recurrent(nn.Module):
    """A recurrent core, its last output, and a linear layer."""

    def __init__(self, core):
        super().__init__()
        self.core, self.head = core, nn.LazyLinear(3)

    def forward(self, x):
        return self.head(self.core(x)[0][:, -1])


class Tied(nn.Module):
    """An auto-encoder with one matrix for both ways."""

    def __init__(self):
        super().__init__()
        self.there, self.back = nn.Linear(4, 3), nn.Linear(3, 4)
        self.back.weight = self.middle = nn.Parameter(torch.randn(4, 3) / 2)

    def forward(self, x):
        return self.back(torch.tanh(x @ self.middle + self.there.bias))[:, :3]


def convolutional():
    return nn.Sequential(
        nn.Conv2d(2, 4, 3, padding=1),
        nn.BatchNorm2d(4),
        nn.Tanh(),
        nn.AvgPool2d(2),
        nn.Conv2d(4, 3, 3),
        nn.BatchNorm2d(3),
        nn.GELU(),
        nn.Flatten(),
        nn.LazyLinear(3),
    )


def perceptron(*between):
    return nn.Sequential(nn.Linear(4, 5), *between, nn.Tanh(), nn.Linear(5, 3))


SEQUENCE, IMAGE, VECTOR = (6, 4, 4), (8, 2, 6, 6), (8, 4)


def recurrent(kind, layers=2, **settings):
    return lambda: Recurrent(kind(4, 2, layers, batch_first=True, **settings))


# Name: how to make it, and the shape of a batch. All are smooth, so that differences of gradients are Hessians.
MODELS = {
    "convolutional": (convolutional, IMAGE),
    "attention": (Attention, SEQUENCE),
    "multi-head": (MultiHead, SEQUENCE),
    "encoder": (Encoder, SEQUENCE),
    "lstm": (recurrent(nn.LSTM), SEQUENCE),
    "lstm, both ways": (recurrent(nn.LSTM, 1, bidirectional=True), SEQUENCE),
    "lstm, projected": (recurrent(nn.LSTM, 1, proj_size=1), SEQUENCE),
    "gru": (recurrent(nn.GRU), SEQUENCE),
    "gru, both ways": (recurrent(nn.GRU, 1, bidirectional=True), SEQUENCE),
    "rnn": (recurrent(nn.RNN), SEQUENCE),
    "rnn, both ways": (recurrent(nn.RNN, 1, bidirectional=True), SEQUENCE),
    "tied": (Tied, VECTOR),
    "group and rms norm": (
        lambda: nn.Sequential(nn.GroupNorm(2, 4), nn.Linear(4, 4), nn.RMSNorm(4), nn.Tanh(), nn.Linear(4, 3)),
        VECTOR,
    ),
    "batch norm": (lambda: perceptron(nn.BatchNorm1d(5)), VECTOR),
    "dropout": (lambda: perceptron(nn.Dropout(0.4)), VECTOR),
    "attention, dropout": (lambda: Attention(dropout=0.4), SEQUENCE),
    "encoder, dropout": (lambda: Encoder(dropout=0.4), SEQUENCE),
    "spectral norm": (
        lambda: nn.Sequential(nn.utils.parametrizations.spectral_norm(nn.Linear(4, 5)), nn.Tanh(), nn.Linear(5, 3)),
        VECTOR,
    ),
    "orthogonal": (
        lambda: nn.Sequential(nn.utils.parametrizations.orthogonal(nn.Linear(4, 5)), nn.Tanh(), nn.Linear(5, 3)),
        VECTOR,
    ),
    "weight norm": (
        lambda: nn.Sequential(nn.utils.parametrizations.weight_norm(nn.Linear(4, 5)), nn.Tanh(), nn.Linear(5, 3)),
        VECTOR,
    ),
}


def batch_of(name, dtype=torch.float64):
    """Inputs and classes."""
    shape, random = MODELS[name][1], torch.Generator().manual_seed(8)
    x = torch.randn(shape, dtype=torch.float64, generator=random)
    return x.to(dtype), torch.randint(3, shape[:1], generator=random)


def made(name, dtype=torch.float64):
    """A model in train mode and the closure of its loss, both with the same numbers in whatever dtype."""
    x, y = batch_of(name)
    torch.manual_seed(7)
    model = MODELS[name][0]().double()
    with torch.no_grad():
        model(x)  # the first call of a lazy layer makes its parameters
        for p in model.parameters():  # larger ones than at the start, for curvature that is worth the name
            p.copy_(1.5 * torch.randn_like(p) / max(p.shape[-1:], default=1) ** 0.5)
    model.to(dtype)
    x = x.to(dtype)
    return model, lambda: F.cross_entropy(model(x), y)
