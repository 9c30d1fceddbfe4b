"""What all workers of a round have to make alike."""

from __future__ import annotations

import struct
from typing import Callable, List, NamedTuple, Sequence, Union

from ..errors import InvalidError

__all__ = ["Setting", "check_alike"]

Largest = Callable[[Sequence[int]], List[int]]
"""Returns the maximum of each value over all workers. The values have 64 bits, with a sign."""


class Setting(NamedTuple):
    """A value that is the same on all workers."""

    name: str
    """Its name in the plural, for users."""
    value: Union[int, float]
    remedy: str = "pass all of them the same"
    words: Sequence[str] = ()
    """The names of the values, if they are not numbers."""


def check_alike(largest: Largest, what: str, settings: Sequence[Setting]) -> None:
    """Checks that the workers have the same settings. All of them call it, with settings of the same names and types.

    Args:
        largest: Exchanges the values.
        what: What has the settings, for users.

    Raises:
        InvalidError: They differ; raised on all workers.
    """
    bits = [_bits(it.value) for it in settings]
    # The maximum of a complement is the complement of the minimum.
    extremes = largest([*bits, *(~it for it in bits)])
    for setting, high, low in zip(settings, extremes, extremes[len(bits) :]):
        if high != ~low:
            found = [_value(setting, it) for it in (~low, high)]
            raise InvalidError(
                f"workers have made their {what} with different {setting.name}: {' and '.join(found)}; {setting.remedy}"
            )


def _bits(value: Union[int, float]) -> int:
    """Returns a number of 64 bits, which differs if the values do."""
    if isinstance(value, float):
        (bits,) = struct.unpack("<q", struct.pack("<d", value))
        return int(bits)
    return (value + (1 << 63)) % (1 << 64) - (1 << 63)


def _value(setting: Setting, bits: int) -> str:
    if setting.words:
        return setting.words[bits]
    if isinstance(setting.value, float):
        (value,) = struct.unpack("<d", struct.pack("<q", bits))
        return f"{value:g}"
    return str(bits)
