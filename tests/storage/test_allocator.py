"""Ring allocator, byte for byte against a model of all blocks."""

from hypothesis import given
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from asymcheck.storage.allocator import Allocator

START, BLOCKS = 12, 40


class RoomMachine(RuleBasedStateMachine):
    """The model is the set of blocks that are taken."""

    def __init__(self) -> None:
        super().__init__()
        self.room = Allocator(START, BLOCKS)
        self.taken: dict[int, int] = {}

    @property
    def used(self) -> set[int]:
        """All blocks that are taken."""
        return {block for start, length in self.taken.items() for block in range(start, start + length)}

    def gaps(self) -> list[tuple[int, int]]:
        """The free pieces as start and length, neighbours joined."""
        found: list[tuple[int, int]] = []
        for block in sorted(set(range(START, START + BLOCKS)) - self.used):
            if found and sum(found[-1]) == block:
                found[-1] = (found[-1][0], found[-1][1] + 1)
            else:
                found.append((block, 1))
        return found

    @rule(length=st.integers(1, BLOCKS + 2))
    def take(self, length: int) -> None:
        """The first piece that is long enough gives its beginning; none is taken twice."""
        expected = next((start for start, there in self.gaps() if there >= length), None)
        start = self.room.take(length)
        assert start == expected
        if start is not None:
            assert not self.used & set(range(start, start + length))
            self.taken[start] = length

    @precondition(lambda self: self.taken)
    @rule(choice=st.integers(0, BLOCKS))
    def give_back(self, choice: int) -> None:
        """What was taken can be given back in any order."""
        start = sorted(self.taken)[choice % len(self.taken)]
        self.room.give_back(start, self.taken.pop(start))

    @invariant()
    def what_is_free_is_known(self) -> None:
        """The free bytes are exact, and pieces that touch are one."""
        assert self.room.free_bytes == BLOCKS - len(self.used)
        assert list(zip(self.room._starts, self.room._lengths, strict=True)) == self.gaps()


TestRoom = RoomMachine.TestCase


@given(st.permutations(range(8)))
def test_all_that_was_given_back_is_one_piece_again(order: list[int]) -> None:
    """Whatever the order: afterwards everything fits in at once."""
    room = Allocator(4096, 80)
    places = [room.take(10) for _ in order]
    assert places == list(range(4096, 4176, 10))
    assert room.take(1) is None
    for number in order:
        room.give_back(4096 + 10 * number, 10)
    assert room.free_bytes == 80
    assert room.take(80) == 4096
