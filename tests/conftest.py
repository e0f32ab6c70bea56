"""Threads of the tests: small tensors gain nothing from more, and lose much where the cores are busy."""

import torch

torch.set_num_threads(1)
