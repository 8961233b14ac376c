"""The laboratory of CacheMuon: models, data, training and the paper's experiments."""
