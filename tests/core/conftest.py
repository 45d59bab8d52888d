import torch

# Tensors here are small: on a busy machine, OpenMP's threads would spend the time waiting for each other.
torch.set_num_threads(1)
