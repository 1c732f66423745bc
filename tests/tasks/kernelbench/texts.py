"""Problems in KernelBench's format, and kernels for them, as models write them."""

from rlcourse.tasks.kernelbench import Problem

RELU = Problem(
    "Relu",
    1,
    1,
    """
import torch
import torch.nn as nn

batch_size = 24
dim = 1000

class Model(nn.Module):
    def forward(self, x):
        return torch.relu(x)

def get_inputs():
    return [torch.rand(batch_size, dim)]

def get_init_inputs():
    return []
""",
)
