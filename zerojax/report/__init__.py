"""What a state or a step holds: where its leaves are placed, and the memory they take."""
