"""The paper's momentum, decay and ratio; and CacheMuon with these, without clipping, age limit and guard, so
that it caches also the small matrices of tests.
"""

from functools import partial

from cachemuon import CacheMuon

PAPERS = {"nesterov": False, "weight_decay": 1e-4, "adjust_lr_fn": "none"}
unclipped = partial(CacheMuon, gamma=5.0, max_age=None, clip=0.0, guard=False, **PAPERS)
