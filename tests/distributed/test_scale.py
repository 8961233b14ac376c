"""What benchmarks/scale.py counts is what ranks do and send; its tables in the pages are up to date."""

import re
from pathlib import Path

import pytest
import scale
import torch
from torch import distributed as dist
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from cachemuon import CacheMuon, GramNS, Muon
from cachemuon_lab.performance import renewed

ROOT = Path(__file__).parents[2]
SHAPES = [(24, 48), (36, 36), (24, 48), (48, 24), (48, 60)]  # rows that 2, 3 and 4 ranks divide
MAX_AGE = 3


def live(rank, world, cached, sharded, exchange):
    """One life of all transforms, after the first: FLOPs and bytes of this rank, and what it keeps."""
    params = [nn.Parameter(torch.randn(shape)) for shape in SHAPES]
    if sharded:
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.tensor import Shard, distribute_tensor

        mesh = init_device_mesh("cpu", (world,))
        params = [nn.Parameter(distribute_tensor(param.data, mesh, [Shard(0)])) for param in params]
    more = {} if sharded else {"process_group": dist.group.WORLD}
    if cached:
        more |= {"cache_all": True, "gamma": 1e9, "max_age": MAX_AGE, "exchange": exchange}
        optimizer = CacheMuon(params, **more)
    else:
        optimizer = Muon(params, solver=GramNS(), **more)

    def steps(number):
        for _ in range(number):
            for param in params:
                param.grad = torch.ones_like(param) + param.detach()
            optimizer.step()

    steps(1 + MAX_AGE)
    before = optimizer.cache_stats()["bytes_sent"]
    with FlopCounterMode(display=False) as counter:
        steps(1 + MAX_AGE)
    after = optimizer.cache_stats()["bytes_sent"]
    sent = {kind: number - before.get(kind, 0) for kind, number in after.items()}
    kept = [
        value.nbytes
        for state in optimizer.state.values()
        for key, value in state.items()
        if key.startswith("transform")
    ]
    return counter.get_total_flops(), sent, sum(kept)


SMALL = ("flags", "residuals")


@pytest.mark.parametrize("world", [1, 2, 3, 4])
@pytest.mark.parametrize(
    ("place", "case"),
    [
        (1, (False, False, None)),
        (2, (False, True, None)),
        (scale.TRANSFORMS, (True, False, "transforms")),
        (scale.CACHED_SHARDS, (True, True, None)),
        (5, (True, False, "directions")),
    ],
    ids=["muon-copies", "muon-shards", "cache-transforms", "cache-shards", "cache-directions"],
)
def test_what_is_counted_is_what_is_done(ranks, world, place, case):
    answers = ranks(live, world, *case)
    counted, life = scale.steps(SHAPES, world, MAX_AGE)[place], 1 + MAX_AGE
    assert sum(flops for flops, _, _ in answers) == pytest.approx(life * counted.flops, rel=1e-12)
    assert max(flops for flops, _, _ in answers) == pytest.approx(life * counted.busiest, rel=1e-12)
    large = sum(number for _, sent, _ in answers for kind, number in sent.items() if kind not in SMALL)
    assert large == pytest.approx(life * counted.sent, rel=1e-12)
    assert sum(kept for _, _, kept in answers) == pytest.approx(world * counted.transforms)
    for _, sent, _ in answers if world > 1 else ():
        small = sum(sent.get(kind, 0) for kind in SMALL)
        assert small == life * scale.small_bytes(len(SHAPES), cached=case[0])


def test_every_table_of_the_pages_is_the_one_that_is_made():
    made, asked = scale.tables(), set()
    for page in sorted((ROOT / "docs").rglob("*.md")):
        text = page.read_text()
        names = made.keys() & set(re.findall(r"<!-- table (\w+) -->", text))
        if names:
            assert renewed(text, made) == text, f"{page}: python benchmarks/scale.py --page {page}"
            asked |= names
    assert asked == made.keys()
