"""Test the ring allocator against a model of all blocks."""

from hypothesis import given
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from asymcheck.storage.allocator import Allocator

START, BLOCKS = 12, 40


class RoomMachine(RuleBasedStateMachine):
    """Model of the allocator: the set of used blocks."""

    def __init__(self) -> None:
        super().__init__()
        self.room = Allocator(START, BLOCKS)
        self.taken: dict[int, int] = {}

    @property
    def used(self) -> set[int]:
        """Return all used blocks."""
        return {block for start, length in self.taken.items() for block in range(start, start + length)}

    def gaps(self) -> list[tuple[int, int]]:
        """Return the free ranges as start and length, with neighbours merged."""
        found: list[tuple[int, int]] = []
        for block in sorted(set(range(START, START + BLOCKS)) - self.used):
            if found and sum(found[-1]) == block:
                found[-1] = (found[-1][0], found[-1][1] + 1)
            else:
                found.append((block, 1))
        return found

    @rule(length=st.integers(1, BLOCKS + 2))
    def take(self, length: int) -> None:
        """Check that the first free range that is long enough is used, and no block twice."""
        expected = next((start for start, there in self.gaps() if there >= length), None)
        start = self.room.take(length)
        assert start == expected
        if start is not None:
            assert not self.used & set(range(start, start + length))
            self.taken[start] = length

    @precondition(lambda self: self.taken)
    @rule(choice=st.integers(0, BLOCKS))
    def free_range(self, choice: int) -> None:
        """Check that ranges can be freed in any order."""
        start = sorted(self.taken)[choice % len(self.taken)]
        self.room.give_back(start, self.taken.pop(start))

    @invariant()
    def check_free_bytes(self) -> None:
        """Check that the number of free bytes is exact, and that neighbouring free ranges are one."""
        assert self.room.free_bytes == BLOCKS - len(self.used)
        assert list(zip(self.room._starts, self.room._lengths, strict=True)) == self.gaps()


TestRoom = RoomMachine.TestCase


@given(st.permutations(range(8)))
def test_all_that_was_given_back_is_one_piece_again(order: list[int]) -> None:
    """Test that freeing in any order leaves one free range."""
    room = Allocator(4096, 80)
    places = [room.take(10) for _ in order]
    assert places == list(range(4096, 4176, 10))
    assert room.take(1) is None
    for number in order:
        room.give_back(4096 + 10 * number, 10)
    assert room.free_bytes == 80
    assert room.take(80) == 4096
