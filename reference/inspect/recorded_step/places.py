"""What is known of the parts of one storage: who wrote or read them last.

A digest can be compared with another of the same part alone. So a write forgets the parts that it overlaps, and a read
of a part that nobody has noted is a read of those around it: a column of a matrix is looked at as the matrix.
"""

from typing import Generic, TypeVar

from reference.inspect.recorded_step.file import Region

Note = TypeVar("Note")


class Places(Generic[Note]):
    """Notes of regions of one storage."""

    def __init__(self) -> None:
        self._notes: dict[Region, tuple[Region, Note]] = {}  # by `Region.place`

    def saw(self, region: Region, note: Note) -> None:
        """Somebody read it."""
        self._notes[region.place()] = (region, note)

    def wrote(self, region: Region, note: Note | None) -> None:
        """Somebody wrote it; None where nobody knows what."""
        self._notes = {place: its for place, its in self._notes.items() if not place.overlaps(region)}
        if note is not None:
            self.saw(region, note)

    def get(self, region: Region) -> Note | None:
        """The note of a region."""
        found = self._notes.get(region.place())
        return None if found is None else found[1]

    def around(self, region: Region) -> list[Region]:
        """The regions to look at where an op reads this one: itself, or one around it, or itself and those in it."""
        if region.place() in self._notes:
            return [region]
        near = [one for one, _ in self._notes.values() if one.overlaps(region)]
        whole = [one for one in near if one.begin() <= region.begin() and region.end() <= one.end()]
        return whole[:1] or [region, *near]
