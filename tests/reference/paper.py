"""The paper's algorithms in NumPy float64, line by line. Imports nothing from the project.

The coefficients are those printed in the paper's tables. A restart set here is the listing's S: `k in S`
is tested at the top of iteration k. So S = {3} restarts after two completed iterations.
"""

import numpy as np

EPS = 1e-7

POLAR_EXPRESS = [
    (8.205160414, -22.901934987, 16.460724910),
    (4.066395160, -2.861154087, 0.518399523),
    (3.909594904, -2.823351735, 0.525036977),
    (3.285564017, -2.415301960, 0.485294066),
    (2.277873287, -1.619821765, 0.398480787),
]
GRAM = [
    (7.892582874, -20.383013946, 13.555306149),
    (3.911484868, -2.546463593, 0.426898832),
    (3.760657956, -2.512819018, 0.432364735),
    (3.160399674, -2.149649519, 0.399636691),
    (2.191097162, -1.441662010, 0.328146488),
]


def standard_ns(M, coefficients, eps=EPS):  # Algorithm A.1
    n, m = M.shape
    X = M / (np.linalg.norm(M) + eps)
    if n > m:
        X = X.T
    for a, b, c in coefficients:
        A = X @ X.T
        P = a * np.eye(len(A)) + b * A + c * A @ A
        X = P @ X
    return X.T if n > m else X


def fresh_gns(M, coefficients, S=(), eps=EPS):  # Algorithm A.3; its X is that of A.2
    n, m = M.shape
    X = M / (np.linalg.norm(M) + eps)
    if n > m:
        X = X.T
    has_tot, Q_tot = False, None
    R = X @ X.T
    identity = np.eye(len(R))
    Q_loc = identity
    K = len(coefficients)
    for k in range(1, K + 1):
        a, b, c = coefficients[k - 1]
        if k in S:
            X = Q_loc @ X
            Q_tot = Q_loc @ Q_tot if has_tot else Q_loc
            has_tot = True
            R = X @ X.T
            Q_loc = identity
        Z = b * R + c * R @ R
        Q_loc = Q_loc @ Z + a * Q_loc
        if k < K and k + 1 not in S:
            RZ = R @ Z + a * R
            R = Z @ RZ + a * RZ
    X = Q_loc @ X
    Q_tot = Q_loc @ Q_tot if has_tot else Q_loc
    return (X.T if n > m else X), Q_tot


def residual(C):
    n = len(C)
    return np.linalg.norm(C @ C.T - np.eye(n)) / np.linalg.norm(np.eye(n))


def cache_gns(M, Q_cache, coefficients, gamma, S=(), eps=EPS):  # Algorithm A.4, n <= m
    X = M / (np.linalg.norm(M) + eps)
    X_cand = Q_cache @ X
    err = residual(X_cand)
    if err <= gamma:
        return X_cand, Q_cache, "hit", err
    D, Q = fresh_gns(M, coefficients, S, eps)
    return D, Q, "rejected", err


def cache_muon(W, gradients, coefficients, *, lr, momentum, gamma, weight_decay=0.0, S=()):  # Algorithm A.5
    """The weights after each step, and each step's decision with its residual."""
    tall = W.shape[0] > W.shape[1]
    W = (W.T if tall else W).copy()
    M = np.zeros_like(W)
    Q, weights, decisions = None, [], []
    for g in gradients:
        M = (1 - momentum) * (g.T if tall else g) + momentum * M
        if Q is None:
            (D, Q), outcome, err = fresh_gns(M, coefficients, S), "first", float("nan")
        else:
            D, Q, outcome, err = cache_gns(M, Q, coefficients, gamma, S)
        W = (1 - lr * weight_decay) * W - lr * D
        weights.append(W.T.copy() if tall else W.copy())
        decisions.append((outcome, err))
    return weights, decisions
