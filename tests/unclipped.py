"""The paper's momentum, decay and ratio; and CacheMuon with these and the paper's gate, without clipping,
normalization and age limit. It caches every matrix, also those of tests, which are too small to pay.
"""

from functools import partial

from cachemuon import CacheMuon

PAPERS = {"nesterov": False, "weight_decay": 1e-4, "adjust_lr_fn": "none"}
unclipped = partial(
    CacheMuon,
    gamma=5.0,
    gate="residual",
    max_age=None,
    clip=0.0,
    normalize=None,
    cache_all=True,
    **PAPERS,
)
