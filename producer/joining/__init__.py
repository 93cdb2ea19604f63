"""Producers of machines without a share in the Ray cluster: both ends of their connection by HTTPS."""
