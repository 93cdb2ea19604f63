"""Scale and clip gradients, set the learning rate, and save and load the optimizer's state by parameter name."""
