"""Sizes and times as people write and read them."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hydra_tune.errors import ConfigError
from hydra_tune.quantities import format_bytes, format_bytes_up, format_seconds, format_short_seconds, parse_bytes


@pytest.mark.parametrize(
    ("text", "size"),
    [
        (4096, 4096),
        ("4096", 4096),
        ("1.5 GB", 1_500_000_000),
        (" 11GiB ", 11 * 2**30),
        ("11gib", 11 * 2**30),
        ("800 MB", 800_000_000),
        (".5KiB", 512),
        ("2.KiB", 2048),
        ("1.9B", 1),
        ("2TiB", 2 * 2**40),
        ("1.001kB", 1001),
        ("16.1MB", 16_100_000),
        ("9007199254740993", 9007199254740993),
    ],
)
def test_sizes_are_read_exactly(text, size):
    assert parse_bytes(text) == size


@pytest.mark.parametrize("text", ["", "GiB", "1.2.3GB", "-1GB", "1 GiB B", "1e9", "10 gigs", "0x10", "1,5GB", "nan"])
def test_what_is_no_size_is_refused(text):
    with pytest.raises(ConfigError, match=r"device_memory must be a size such as '11GiB', '800 MB' or '4096', not"):
        parse_bytes(text, what="device_memory")


@pytest.mark.parametrize("value", [0, -1, "0", "0.5B", "0GiB"])
def test_nothing_is_no_size(value):
    with pytest.raises(ConfigError, match="memory must be more than 0 bytes"):
        parse_bytes(value)


@pytest.mark.parametrize("value", [True, None, 1.5, b"1GB"])
def test_other_types_are_refused(value):
    with pytest.raises(ConfigError, match="or a number of bytes, not"):
        parse_bytes(value)


def test_a_number_of_any_length_is_a_size():
    assert parse_bytes("9" * 400) == int("9" * 400)


@pytest.mark.parametrize(
    ("size", "text"),
    [
        (0, "0 B"),
        (1023, "1023 B"),
        (1024, "1.0 KiB"),
        (1536, "1.5 KiB"),
        (2**30 * 9.1, "9.1 GiB"),
        (2**50, "1024.0 TiB"),
        (-2048, "-2.0 KiB"),
    ],
)
def test_sizes_are_written_for_reading(size, text):
    assert format_bytes(size) == text


@settings(deadline=None)
@given(st.integers(1, 2**60))
def test_what_is_rounded_up_reads_back_as_enough_and_not_much_more(size):
    again = parse_bytes(format_bytes_up(size))
    assert size <= again <= size * 1.01 + 1


@settings(deadline=None)
@given(st.integers(1, 2**62))
def test_a_size_has_at_most_four_digits_before_its_unit(size):
    number, unit = format_bytes(size).split()
    assert float(number) <= 1024 or unit == "TiB"


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0, "0.0s"),
        (4.2e-5, "0.042 ms"),
        (0.0312, "31.2 ms"),
        (0.05, "0.1s"),
        (0.44, "0.4s"),
        (9.94, "9.9s"),
        (12.4, "12s"),
        (59.6, "1m00s"),
        (185, "3m05s"),
        (2 * 3600 + 600, "2h10m"),
        (86399, "23h59m"),
        (3 * 86400 + 4 * 3600 + 59, "3d4h"),
    ],
)
def test_times_are_written_for_reading(seconds, text):
    assert format_seconds(seconds) == text


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0.0, "0 ms"), (4.5e-5, "0.045 ms"), (0.01234, "12.3 ms"), (0.9997, "1.00 s"), (75.5, "75.50 s")],
)
def test_seconds_of_a_step_have_digits_that_tell_steps_apart(seconds, text):
    assert format_short_seconds(seconds) == text
