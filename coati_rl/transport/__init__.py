"""The weight wire: a trainer's tensors go in on rank 0, staged and digest-checked ones come out on every engine rank.

The manifest and the rendezvous travel beside the wire (as JSON, by remote call); the wire itself carries bytes only.
"""
