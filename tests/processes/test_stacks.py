"""Stacks of several processes, grouped."""

from zerojax.processes.watchdog import are_stacks_asked, gather_stacks, grouped_stacks, own_stack


def test_equal_stacks_are_shown_once_and_the_rarest_first():
    of = lambda index: "  in read\n" if index == 5 else "  in update\n"
    text = grouped_stacks({index: of(index) for index in range(8) if index != 3}, 9)
    assert text == "processes 3, 8: no answer\n\nprocess 5:\n  in read\n\nprocesses 0, 1, 2, 4, 6, 7:\n  in update\n"


def test_the_stack_of_a_process_is_that_of_its_main_thread():
    assert "in test_the_stack_of_a_process" in own_stack()
    assert list(gather_stacks(1)) == [0] and not are_stacks_asked()
