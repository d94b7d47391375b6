"""What the tests share: models, the plain step to compare with, readers of traces, scripts that run as processes."""
