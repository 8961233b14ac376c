"""CacheMuon without clipping, age limit and guard: it caches also the small matrices of tests."""

from functools import partial

from cachemuon import CacheMuon

unclipped = partial(CacheMuon, gamma=5.0, max_age=None, clip=0.0, guard=False)
