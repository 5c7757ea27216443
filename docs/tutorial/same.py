import sys

import torch

one, other = (torch.load(file) for file in sys.argv[1:])
largest = max((one[part][name] - other[part][name]).abs().max() for part in ("encoder", "loss") for name in one[part])
print("same" if largest < 1e-9 else f"different by {largest:.1e}")
