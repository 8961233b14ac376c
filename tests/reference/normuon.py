"""NorMuon (arXiv 2510.05491) as microsoft/dion computes it, for one matrix, in NumPy float64; and then of
inputs after outputs. Imports nothing from the project but the reference of the solver.
"""

import numpy as np

from . import paper


class NorMuon:
    """`W <- (1 - lr decay) W - lr D`: the rows of `O = polar(U)` divided by the roots of their running mean
    squares, then the Frobenius norm of O restored.
    """

    def __init__(self, W, *, lr, momentum, decay, beta=0.95, inputs=False, nesterov=True):
        self.W, self.M = W.astype(np.float64), np.zeros(W.shape)
        self.rows, self.columns = np.zeros((W.shape[0], 1)), np.zeros((1, W.shape[1]))
        self.lr, self.momentum, self.decay = lr, momentum, decay
        self.beta, self.inputs, self.nesterov = beta, inputs, nesterov

    def step(self, G):
        self.M = self.momentum * self.M + (1 - self.momentum) * G
        U = self.momentum * self.M + (1 - self.momentum) * G if self.nesterov else self.M
        direction = paper.standard_ns(U, paper.GRAM)
        D = self.normalized(direction)
        self.W = (1 - self.lr * self.decay) * self.W - self.lr * D

    def normalized(self, O, length=None):  # noqa: E741
        """Divided by second moments that take it in; with its own norm, or another one."""
        self.rows = self.beta * self.rows + (1 - self.beta) * np.mean(O**2, axis=1, keepdims=True)
        D = O / (np.sqrt(self.rows) + 1e-8)
        if self.inputs:
            new = np.mean(D**2, axis=0, keepdims=True)
            self.columns = self.beta * self.columns + (1 - self.beta) * new
            D = D / (np.sqrt(self.columns) + 1e-8)
        return D * ((np.linalg.norm(O) if length is None else length) / np.linalg.norm(D))
