"""What every test of the torch backend runs under."""

import torch

# The problems are small and the tests run side by side: more threads would only be in each other's way.
torch.set_num_threads(1)
