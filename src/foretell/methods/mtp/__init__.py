"""Multi-token prediction: the further block that some targets are trained with, in their own checkpoint."""
