"""Probabilities and noise: what every verification rule stands on."""

import torch

from draftsmith.models.sampling.sampling import Noise, Sampling, Stream, probabilities, sample


def test_temperature_and_top_k_by_hand() -> None:
    logits = torch.log(torch.tensor([[0.5, 0.25, 0.15, 0.1]]))
    torch.testing.assert_close(probabilities(logits, Sampling(1.0)), logits.exp())
    squared = torch.tensor([[0.25, 0.0625, 0.0225, 0.01]])
    torch.testing.assert_close(probabilities(logits, Sampling(0.5)), squared / squared.sum())
    torch.testing.assert_close(probabilities(logits, Sampling(1.0, top_k=2)), torch.tensor([[2 / 3, 1 / 3, 0, 0]]))


def test_top_p_keeps_the_smallest_set_that_reaches_it() -> None:
    logits = torch.log(torch.tensor([[0.1, 0.5, 0.15, 0.25]]))
    torch.testing.assert_close(probabilities(logits, Sampling(1.0, top_p=0.6)), torch.tensor([[0, 2 / 3, 0, 1 / 3]]))
    torch.testing.assert_close(probabilities(logits, Sampling(1.0, top_p=0.5)), torch.tensor([[0.0, 1, 0, 0]]))
    torch.testing.assert_close(probabilities(logits, Sampling(1.0, top_p=1e-9)), torch.tensor([[0.0, 1, 0, 0]]))


def test_sample_inverts_the_distribution_function() -> None:
    p = torch.tensor([0.2, 0.0, 0.5, 0.3, 0.0])
    uniforms = torch.tensor([1e-12, 0.1999, 0.2001, 0.6999, 0.7001, 1 - 1e-12], dtype=torch.float64)
    assert sample(p.expand(6, 5), uniforms).tolist() == [0, 0, 2, 2, 3, 3]


def test_sample_never_draws_what_cannot_be() -> None:
    """Coins at both ends of the interval, zero probabilities at both ends of the vocabulary."""
    p = torch.tensor([[0.0, 0.3, 0.7, 0.0]]).expand(2, 4)
    assert sample(p, torch.tensor([2.0**-53, 1 - 2.0**-53], dtype=torch.float64)).tolist() == [1, 2]


def test_noise_is_uniform_and_streams_are_independent() -> None:
    """Kolmogorov-Smirnov: for n = 200k the 1e-6 quantile of the largest deviation is 2.63 / sqrt(n)."""
    noise = Noise(3, torch.arange(200))
    positions = torch.arange(1000).expand(200, 1000)
    drawn = {stream: noise.uniforms(positions, stream).flatten() for stream in Stream}
    n = 200_000
    for uniforms in drawn.values():
        assert uniforms.min() > 0
        assert uniforms.max() < 1
        deviation = (uniforms.sort().values - torch.arange(1, n + 1) / n).abs().max()
        assert deviation < 2.63 / n**0.5
    stacked = torch.corrcoef(torch.stack(list(drawn.values())))
    assert (stacked - torch.eye(len(Stream))).abs().max() < 5 / n**0.5


def test_noise_depends_on_the_key_alone() -> None:
    """Not on the batch that a request is in, nor on the order of drawing."""
    both = Noise(7, torch.tensor([4, 9]))
    alone = Noise(7, torch.tensor([9]))
    positions = torch.tensor([[5, 6, 7]])
    assert torch.equal(
        both.uniforms(positions.expand(2, 3), Stream.TARGET)[1:], alone.uniforms(positions, Stream.TARGET)
    )
    assert not torch.equal(
        alone.uniforms(positions, Stream.TARGET), Noise(8, torch.tensor([9])).uniforms(positions, Stream.TARGET)
    )
