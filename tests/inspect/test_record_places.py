"""Which digests of a storage's parts can be compared: a write forgets what it overlaps, a read looks around itself."""

from reference.inspect.recorded_step.file import Region
from reference.inspect.recorded_step.places import Places

WHOLE = Region(0, 0, (4, 8), (8, 1), "float32")
FLAT = Region(0, 0, (32,), (1,), "float32")
COLUMN = Region(0, 3, (4,), (8,), "float32")
FIRST, LAST = Region(0, 0, (8,), (1,), "float32"), Region(0, 24, (8,), (1,), "float32")


def test_a_read_of_a_part_looks_at_what_is_known_around_it() -> None:
    places: Places[int] = Places()
    assert places.around(COLUMN) == [COLUMN]
    places.wrote(WHOLE, 1)
    assert places.around(COLUMN) == [WHOLE]
    assert places.around(FLAT) == [FLAT]  # the same numbers side by side, in another shape
    assert places.get(FLAT) == 1
    assert places.around(WHOLE._replace(dtype="int32")) == [WHOLE]


def test_one_of_the_parts_around_a_read_is_enough() -> None:
    places: Places[int] = Places()
    places.saw(WHOLE, 1)
    places.saw(FLAT._replace(shape=(31,)), 2)
    assert places.around(FIRST) == [WHOLE]


def test_a_write_forgets_what_it_overlaps() -> None:
    places: Places[int] = Places()
    places.saw(WHOLE, 1)
    places.saw(FIRST, 2)
    places.saw(LAST, 3)
    places.wrote(FIRST, 4)
    assert [places.get(one) for one in (WHOLE, FIRST, LAST)] == [None, 4, 3]
    assert places.around(WHOLE) == [WHOLE, LAST, FIRST]
    places.wrote(COLUMN, None)
    assert [places.get(one) for one in (FIRST, LAST)] == [None, None]  # from its first byte to its last


def test_a_part_without_numbers_overlaps_nothing() -> None:
    empty = Region(0, 5, (0,), (1,), "float32")
    assert not empty.overlaps(WHOLE)
    assert not WHOLE.overlaps(empty)
