"""Found by pytest before any test: its folder (the oracle, the battery, the tolerances) becomes importable."""

import torch

torch.set_num_threads(1)  # the tests are many and small, and run beside each other
