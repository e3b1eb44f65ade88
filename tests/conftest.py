"""Found by pytest before any test: its folder (the oracle, the battery, the tolerances) becomes importable."""

import os

import torch

os.environ["DEFTUNE_DATA_CACHE_GB"] = "0"  # no test finds what another one encoded; the cache's own turn it on
torch.set_num_threads(1)  # the tests are many and small, and run beside each other
