"""What a training step will need and take, before there is anything to run it on."""
