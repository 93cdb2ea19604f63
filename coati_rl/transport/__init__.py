"""Transfer weights from the trainers' sender ranks to every engine rank, where they are staged and digest-checked.

The manifest and the rendezvous are sent separately, as JSON by remote call; the transports move bytes only.
"""
