"""The outcome of a trial, to be compared bit for bit."""

from tests.parity.exact import differences, without_seconds


def bits(result):
    """History, losses aside, and weights of a result."""
    if result.error is not None:
        raise result.error
    return without_seconds(result.history), {name: tensor.cpu() for name, tensor in result.state_dict().items()}


def assert_same_bits(found, expected):
    """Name the first difference: pytest's own comparison of so many numbers takes minutes."""
    assert len(found) == len(expected)
    for number, (one, other) in enumerate(zip(found, expected, strict=True)):
        first = next(differences(other, one), None)
        assert first is None, f"trial {number}: {first}"
