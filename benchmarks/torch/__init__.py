"""What the PyTorch backend costs: the same questions as beside it, one file each."""
