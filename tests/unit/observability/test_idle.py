"""Test which share of their time members were idle."""

from coati_rl.observability.idle import IdleFraction, ProducerIdleFraction


class Clock:
    """Time that a test sets."""

    now = 100.0

    def __call__(self):
        return self.now


def test_a_member_is_what_was_last_noted():
    clock = Clock()
    share = IdleFraction(clock)
    share.note(0, is_idle=True)
    clock.now = 103.0
    share.note(0, is_idle=False)
    clock.now = 104.0
    assert share.take() == 0.75  # 3 of 4 s


def test_each_share_is_of_the_time_since_the_last_one():
    clock = Clock()
    share = IdleFraction(clock)
    share.note(0, is_idle=True)
    clock.now = 103.0
    assert share.take() == 1.0
    share.note(0, is_idle=False)
    clock.now = 107.0
    assert share.take() == 0.0
    share.note(0, is_idle=True)
    clock.now = 108.0
    assert share.take() == 1.0


def test_members_count_for_the_time_that_they_were_there():
    clock = Clock()
    share = IdleFraction(clock)
    share.note(0, is_idle=False)
    share.note(1, is_idle=True)
    clock.now = 102.0
    share.remove(1)  # 2 s, idle
    clock.now = 106.0
    assert share.take() == 0.25  # 2 of 2 + 6 s
    clock.now = 107.0
    assert share.take() == 0.0


def test_what_is_noted_again_changes_nothing():
    clock = Clock()
    share = IdleFraction(clock)
    for clock.now in (100.0, 101.0, 102.0):
        share.note(0, is_idle=True)
    share.remove(1)  # was never there
    clock.now = 104.0
    share.note(0, is_idle=False)
    clock.now = 108.0
    assert share.take() == 0.5


def test_without_members_or_time_there_is_no_share():
    share = IdleFraction(Clock())
    assert share.take() is None
    share.note(0, is_idle=True)
    assert share.take() is None


def test_a_producer_is_idle_without_prompts():
    clock = Clock()
    share = ProducerIdleFraction(clock)
    share.join(0)
    clock.now = 102.0  # 2 s idle
    share.change(0, 2)
    clock.now = 103.0
    share.change(0, -1)
    clock.now = 105.0
    share.change(0, -1)
    clock.now = 108.0  # 3 s idle
    assert share.take() == 0.625  # 5 of 8 s


def test_a_producer_that_has_left_is_not_counted_again():
    clock = Clock()
    share = ProducerIdleFraction(clock)
    share.join(0)
    share.join(1)
    share.change(1, 4)
    clock.now = 101.0
    share.leave(1)
    share.change(1, -4)  # too late
    clock.now = 102.0
    assert share.take() == 2 / 3
    share.leave(1)
    share.change(0, 1)
    clock.now = 103.0
    assert share.take() == 0.0
