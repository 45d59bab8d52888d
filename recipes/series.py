"""What is made of a metric's values over steps: averages that move with it, and how far it strays from them."""

import numpy as np


def smoothing_window(count: int) -> int:
    """An odd number of steps; 1 where there are too few to smooth."""
    return 1 if count < 12 else min(51, max(7, count // 15 | 1))


def smooth(values: list[float], window: int) -> np.ndarray:
    """Centred moving average with triangular weights; near the ends over the steps that there are."""
    half = window // 2
    weights = half + 1.0 - np.abs(np.arange(-half, half + 1))
    inside = slice(half, half + len(values))
    return np.convolve(values, weights)[inside] / np.convolve(np.ones(len(values)), weights)[inside]


def fluctuation(series: dict[int, float]) -> dict[int, float]:
    """Relative standard deviation about the moving average, in % of it; empty below five steps."""
    if len(series) < 5:
        return {}
    values, window = np.array([*series.values()]), max(5, smoothing_window(len(series)))
    average = smooth(values, window)
    spread = np.sqrt(smooth((values - average) ** 2, window))
    return {step: 100 * s / abs(a) for step, s, a in zip(series, spread.tolist(), average.tolist(), strict=True) if a}


def variance(series: dict[int, float]) -> dict[int, float]:
    """Variance about the moving average; empty below five steps."""
    if len(series) < 5:
        return {}
    values, window = np.array([*series.values()]), max(5, smoothing_window(len(series)))
    return dict(zip(series, smooth((values - smooth(values, window)) ** 2, window).tolist(), strict=True))
