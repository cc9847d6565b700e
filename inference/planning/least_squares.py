"""Least squares with coefficients that are not negative: a cost of something is no gain."""

import numpy as np


def nonnegative_least_squares(matrix: np.ndarray, values: np.ndarray) -> np.ndarray:
    """x >= 0 [n] that minimises |matrix x - values|, matrix [m, n], values [m].

    Active sets, Lawson and Hanson, Solving Least Squares Problems (1974), chapter 23. Columns are scaled to length 1.
    """
    lengths = np.maximum(np.linalg.norm(matrix, axis=0), np.finfo(float).tiny)
    scaled = matrix / lengths
    tolerance = 1e-10 * max(1.0, float(np.abs(scaled.T @ values).max()))
    x = np.zeros(matrix.shape[1])
    free = np.zeros(len(x), dtype=bool)
    for _ in range(10 * len(x)):
        gradient = scaled.T @ (values - scaled @ x)
        gradient[free] = -np.inf
        if free.all() or gradient.max() <= tolerance:
            break
        free[int(gradient.argmax())] = True
        while True:
            candidate = np.zeros(len(x))
            candidate[free] = np.linalg.lstsq(scaled[:, free], values, rcond=None)[0]
            below = free & (candidate <= 0)
            if not below.any():
                break
            fall = np.maximum(x[below] - candidate[below], np.finfo(float).tiny)
            step = min(x[below] / fall)  # up to where the first of them reaches 0
            x = x + step * (candidate - x)
            free &= x > tolerance
            x[~free] = 0.0
        x = candidate
    return x / lengths
