"""The weight wire: trainers' tensors go in on the senders' ranks, staged and digest-checked ones come out on every
engine rank.

The manifest and the rendezvous travel beside the wire (as JSON, by remote call); the wire itself carries bytes only.
"""
