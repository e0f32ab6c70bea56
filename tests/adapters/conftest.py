"""What the clients need that their packages do not bring."""

import importlib
import sys
from types import ModuleType

import pytest
import torch


def softmax_attention(q, k, v, dropout, bias, softmax_scale, is_causal):
    """A softmax and its lse in the place of flash-attn, without which torchscale's code does not run."""
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    scores = q @ k.transpose(-1, -2) * q.shape[-1] ** -0.5
    if is_causal:
        scores = scores.masked_fill(~torch.ones(scores.shape[-2:], dtype=torch.bool).tril(), -torch.inf)
    return (scores.softmax(-1) @ v).transpose(1, 2), scores.logsumexp(-1)


@pytest.fixture
def torchscale(monkeypatch):
    """torchscale on a CPU. Of timm, which would bring torchvision, it takes one function, for training."""
    for name in ("timm", "timm.models", "timm.models.layers"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    sys.modules["timm.models.layers"].drop_path = None  # no path is dropped here
    attention = importlib.import_module("torchscale.component.multihead_attention")
    monkeypatch.setattr(attention, "flash_attn_func", softmax_attention)
