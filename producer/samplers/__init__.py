"""Sample from many policies on one base model: adapters, whole weights, and the base itself, for a server of models."""
