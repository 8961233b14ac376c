"""CacheMuon without clipping or an age limit: it caches also the small matrices of tests, guarded or not."""

from functools import partial

from cachemuon import CacheMuon

unclipped = partial(CacheMuon, gamma=5.0, max_age=None, clip=0.0)
