"""How TPUs store arrays, by the rule of their compiler."""

from zerojax.sharding import tpu


def test_arrays_are_stored_in_the_order_with_fewer_tiles():
    for shape, order in [
        ((), ()),
        ((5,), (0,)),
        ((50304, 192), (1, 0)),
        ((192, 50304), (0, 1)),
        ((64, 64), (0, 1)),  # as many tiles in both orders
        ((192, 400), (0, 1)),
        ((50304, 256), (0, 1)),
        ((12, 768, 192), (0, 2, 1)),
        ((12, 192, 768), (0, 1, 2)),
        ((48, 100, 4800), (1, 0, 2)),
        ((48, 768, 100), (2, 0, 1)),
    ]:
        assert tpu.stored_order(shape) == order
