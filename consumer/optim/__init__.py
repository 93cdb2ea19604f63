"""Turn summed gradients into an optimizer step: clipping, learning rate, the optimizer's state by parameter name."""
