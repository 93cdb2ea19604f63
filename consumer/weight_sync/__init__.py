"""Send the policy's weights to the producers in two phases, stage and commit, from every pipeline stage."""
