"""Which process the others wait for."""

import numpy as np
import pytest

from zerojax.training.recorder import slowest


@pytest.mark.parametrize(
    ("times", "step_s", "found"),
    [
        ([0.01, 0.5, 0.02, 0.01], 1.0, (1, 0.5, 0.015)),
        ([0.01, 0.05, 0.02, 0.01], 1.0, None),  # 4% of the step
        ([0.4, 0.4, 0.4, 0.41], 1.0, None),  # all are slow
        ([0.0, 0.0, 0.0], 0.001, None),
    ],
)
def test_a_process_that_takes_a_tenth_of_the_step_longer_is_found(times, step_s, found):
    assert slowest(np.array(times), step_s) == (found and pytest.approx(found))
