"""For training scripts, independent of ZeRO: losses and optimizer states that need less memory."""
