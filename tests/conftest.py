"""One thread per test process: small matrices, and threads that wait for each other on a busy machine are slow."""

import torch

torch.set_num_threads(1)
