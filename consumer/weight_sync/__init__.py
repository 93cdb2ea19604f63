"""Send the policy's weights to the producers, in two phases, from every rank that holds a part of them."""
