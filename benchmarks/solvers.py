"""Seconds of every solver against the bare product `Q @ X`, on this machine.

Each round times all of them one after the other, so that a busy moment hits them alike; printed are the
medians of the rounds as ratios, with the product's own milliseconds.
"""

import os
import statistics
import time

# Some virtual machines announce AMX but trap its tile instructions: torch's bf16 would be illegal.
os.environ.setdefault("ONEDNN_MAX_CPU_ISA", "AVX512_CORE_BF16")

import torch

from cachemuon import POLAR_EXPRESS, AutoNS, CacheGNS, GramNS, StandardNS, flops, normalize

SHAPES = {"GPT-2 Small": [(768, 768), (768, 2304), (768, 3072)], "ResNet-18": [(64, 576), (512, 4608)]}
ROUNDS = 5


def contenders(n: int, m: int, device: str) -> dict:
    M = torch.randn(n, m, device=device)
    X, Q = normalize(M), GramNS().with_transform(M)[1]
    muon = torch.optim.Muon([torch.nn.Parameter(M.clone())], lr=0.0)
    muon.param_groups[0]["params"][0].grad = M.clone()
    return {
        "Q @ X": lambda: Q @ X,
        "hit, sketched": lambda: CacheGNS()(M, Q, float("inf")),
        "hit, exact": lambda: CacheGNS(probe="exact")(M, Q, float("inf")),
        "GramNS": lambda: GramNS()(M),
        "GramNS, restart (2,)": lambda: GramNS(restarts=(2,))(M),
        "GramNS with transform": lambda: GramNS().with_transform(M),
        "StandardNS": lambda: StandardNS(POLAR_EXPRESS)(M),
        "AutoNS": lambda: AutoNS()(M),
        "torch.optim.Muon's step": muon.step,
    }


def seconds(call, device: str) -> float:
    start = time.perf_counter()
    call()
    if device == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter() - start


def main() -> None:
    device = "cuda" if torch.cuda.is_available() else "cpu"
    print(
        f"torch {torch.__version__}, {device}, {torch.get_num_threads()} threads; medians of {ROUNDS} rounds"
    )
    for model, shapes in SHAPES.items():
        for n, m in shapes:
            calls = contenders(n, m, device)
            for call in calls.values():
                call()
            rounds = [{name: seconds(call, device) for name, call in calls.items()} for _ in range(ROUNDS)]
            median = {name: statistics.median(r[name] for r in rounds) for name in calls}
            product = median["Q @ X"]
            rate = 2 * n * n * m / product / 1e9
            print(f"\n{model}, {n} x {m}: Q @ X takes {product * 1e3:.2f} ms, {rate:.0f} GFLOP/s")
            gram = flops.Executed(n, m).gram
            print(f"  (a GramNS without restart has {gram / (2 * n * n * m):.1f} times its FLOPs)")
            for name in calls:
                ratios = [r[name] / r["Q @ X"] for r in rounds]
                print(f"  {name:26}{median[name] / product:8.2f}   ({min(ratios):.2f} to {max(ratios):.2f})")


if __name__ == "__main__":
    main()
