"""Train the policy: Ray actors turn training batches into optimizer steps and send the new weights to the producers."""
