import os

# Some virtual machines announce AMX but trap its tile instructions: a bf16 product then ends in
# "Illegal instruction". oneDNN reads this when it is loaded, so it stands before torch.
os.environ.setdefault("ONEDNN_MAX_CPU_ISA", "AVX512_CORE_BF16")

# Two workers with torch's default of one thread per core fight over the cores.
if "PYTEST_XDIST_WORKER" in os.environ:
    import torch

    torch.set_num_threads(1)
