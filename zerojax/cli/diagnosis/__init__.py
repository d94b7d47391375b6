"""What `zerojax doctor` checks, with a fix for each finding: devices, the machine, and variables of the environment."""
